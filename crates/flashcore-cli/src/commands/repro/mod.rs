//! `flashcore repro`: environment, signature, verify, bench and profile in one bundle, and whether it comes out the same.
//!
//! The parts are this program's own commands, each in a process of its own ([`steps`]). What a bundle says decides
//! nothing but the settings of such a run, which are checked; nothing of it is ever executed.

mod report;
mod steps;

use std::path::PathBuf;

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore_cuda::Driver;
use flashcore_lab::{
    LabError,
    repro::{
        BundleError,
        bundle::{self, Parts},
        compare::compare,
        manifest::{Manifest, Settings},
    },
    suites::Suite,
};

use self::{
    report::{CheckReport, ReproReport},
    steps::Steps,
};
use crate::{
    error::{CliError, Verdict},
    interrupt,
    lab_flags::{seconds, suite_tasks},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore repro
  flashcore repro --suite forward --full --seconds 0.6
  flashcore repro --check artifacts/flashcore_0123456789ab_20260131T120000Z.tar.gz

A bundle is artifacts/flashcore_COMMIT_TIME.tar.gz with its checksum beside it.
--check runs what the bundle says was run and compares: the same kernels, the same verdicts, times not worse.
Another machine is said plainly; its times are not compared.
Exit codes: 0 packed, or the same; 1 something failed, or differs; 2 could not run, or a file is no bundle.";

/// Verify, measure and pack everything into one file, or check such a file against this machine
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Run what this bundle says was run, and compare
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// How much slower than in the bundle is tolerated
    #[arg(long, value_name = "X", default_value_t = 0.05, requires = "check", value_parser = margin)]
    margin: f64,
    /// Folder of the bundle
    #[arg(long, value_name = "FOLDER", default_value = "artifacts", conflicts_with = "check")]
    out: PathBuf,
    #[command(flatten)]
    what: WhatFlags,
}

/// What is verified and measured.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What is run")]
pub struct WhatFlags {
    /// What computes
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = PossibleValuesParser::new(Settings::BACKENDS), conflicts_with = "check")]
    backend: String,
    /// Verify everything, not only what is quick
    #[arg(long, conflicts_with = "check")]
    full: bool,
    /// Only checks whose group and name contain this
    #[arg(long, value_name = "TEXT", conflicts_with = "check")]
    checks: Option<String>,
    /// The problems that are measured [default: cpu, or small where there is a GPU]
    #[arg(long, value_name = "NAME", value_parser = suites(), conflicts_with = "check")]
    suite: Option<String>,
    /// Only problems whose name contains this
    #[arg(long, value_name = "TEXT", conflicts_with = "check")]
    filter: Option<String>,
    /// Seconds of timing per problem
    #[arg(long, value_name = "S", default_value = "0.2", value_parser = seconds, conflicts_with = "check")]
    seconds: f64,
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "check")]
    seed: u64,
}

fn suites() -> impl TypedValueParser<Value = String> {
    PossibleValuesParser::new(Suite::ALL.map(Suite::name))
}

fn margin(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1000.0).contains(&number) => Ok(number),
        _ => Err("write a share up to 1000, as in 0.05".to_owned()),
    }
}

/// How often times that are worse are measured again: a machine that was busy for a moment is slow once.
const SECOND_LOOKS: usize = 2;

/// Packs a bundle, or checks one.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    match &flags.check {
        Some(path) => check(path.clone(), flags.margin, output),
        None => make(&flags, output),
    }
}

fn make(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let settings = flags.what.settings();
    check_problems(&settings)?;
    bundle::check_folder(&flags.out)?;
    let (manifest, parts, steps) = run(settings, output)?;
    let path = flags.out.join(manifest.file_name());
    if interrupt::stopped() {
        return Ok(Verdict::Stopped);
    }
    bundle::pack(&parts, &path)?;
    let report = ReproReport::new(&path, manifest, steps);
    output.show(&report)?;
    Ok(Verdict::from_bool(report.pass()))
}

/// Whether there is anything to measure; asked before anything is verified.
fn check_problems(settings: &Settings) -> Result<(), CliError> {
    let suite = Suite::ALL.into_iter().find(|suite| suite.name() == settings.suite);
    let filter = settings.filter.as_deref().unwrap_or_default();
    suite.map_or(Ok(()), |suite| suite_tasks(suite, suite.usual_dtype(), filter).map(drop))
}

fn check(path: PathBuf, margin: f64, output: &Output) -> Result<Verdict, CliError> {
    let refused = |fault| LabError::from(BundleError { path: path.clone(), fault });
    let then = bundle::unpack(&path)?;
    let settings = Manifest::read(&then).map_err(refused)?.settings;
    let (manifest, mut now, mut steps) = run(settings, output)?;
    let mut comparison = compare(&then, &now, margin).map_err(refused)?;
    for _ in 0..SECOND_LOOKS {
        if !comparison.is_slower() || interrupt::stopped() {
            break;
        }
        (_, now) = manifest.clone().seal(steps.bench_again(&manifest.settings, now)?)?;
        comparison = compare(&then, &now, margin).map_err(refused)?;
    }
    if interrupt::stopped() {
        return Ok(Verdict::Stopped);
    }
    let report = CheckReport::new(&path, comparison, steps);
    output.show(&report)?;
    Ok(Verdict::from_bool(report.pass()))
}

/// Runs everything; what it gave, sealed.
fn run(settings: Settings, output: &Output) -> Result<(Manifest, Parts, Steps), CliError> {
    let manifest = Manifest::new(settings)?;
    let mut steps = Steps::new(output);
    let parts = steps.run(&manifest.settings)?;
    let (manifest, parts) = manifest.seal(parts)?;
    Ok((manifest, parts, steps))
}

impl WhatFlags {
    fn settings(&self) -> Settings {
        let on_gpu = self.backend != "cpu" && Driver::get().is_ok_and(|driver| driver.device(0).is_ok());
        let usual = if on_gpu { Suite::Small } else { Suite::Cpu };
        Settings {
            backend: self.backend.clone(),
            quick: !self.full,
            checks: self.checks.clone(),
            suite: self.suite.clone().unwrap_or_else(|| usual.name().to_owned()),
            filter: self.filter.clone(),
            seconds: self.seconds,
            seed: self.seed,
        }
    }
}
