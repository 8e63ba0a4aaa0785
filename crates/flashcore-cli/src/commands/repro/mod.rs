//! `flashcore repro`: environment, verify and bench in one bundle, and whether it comes out the same.
//!
//! The parts are this program's own commands, each in a process of its own ([`steps`]). What a bundle says decides
//! nothing but the settings of such a run, which are checked; nothing of it is ever executed.

mod report;
mod steps;

use std::path::{Path, PathBuf};

use clap::{Args, builder::PossibleValuesParser};
use flashcore_cuda::Driver;
use flashcore_kernels::untrusted::check_text;
use flashcore_lab::{
    LabError,
    repro::{
        BundleError, Fault,
        bundle::{self, Bundle},
        compare::compare,
    },
    suites::Suite,
};
use serde::{Deserialize, Serialize};

use self::{
    report::{ReproReport, Told},
    steps::Steps,
};
use crate::{
    error::{CliError, Verdict},
    lab_flags::{seconds, suite_tasks},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore repro
  flashcore repro --suite forward --full --seconds 0.6
  flashcore repro --check artifacts/flashcore_0123456789ab_20260131T120000Z.tar.gz

A bundle is one file, artifacts/flashcore_COMMIT_TIME.tar.gz.
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
    settings: Settings,
}

/// What is verified and measured; bundles keep it, and nothing else of a bundle decides what runs.
#[derive(Args, Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "What is run")]
#[group(multiple = true, conflicts_with = "check")]
pub struct Settings {
    /// What computes
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = PossibleValuesParser::new(BACKENDS))]
    backend: String,
    /// Verify everything, not only what is quick
    #[arg(long)]
    full: bool,
    /// Only checks whose group and name contain this
    #[arg(long, value_name = "TEXT")]
    checks: Option<String>,
    /// The problems that are measured [default: cpu, or small where there is a GPU]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Suite::ALL.map(Suite::name)))]
    suite: Option<String>,
    /// Only problems whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Seconds of timing per problem
    #[arg(long, value_name = "S", default_value = "0.2", value_parser = seconds)]
    seconds: f64,
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

fn margin(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1000.0).contains(number));
    number.ok_or_else(|| "write a share up to 1000, as in 0.05".to_owned())
}

/// What can compute.
const BACKENDS: [&str; 3] = ["auto", "cpu", "cuda"];
/// Longest filter in a bundle.
const LONGEST_TEXT: usize = 300;
/// How often times that are worse are measured again: a machine that was busy for a moment is slow once.
const SECOND_LOOKS: usize = 2;

/// Packs a bundle, or checks one.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    match &flags.check {
        Some(path) => check(path, flags.margin, output),
        None => make(flags.settings.resolved(), &flags.out, output),
    }
}

fn make(settings: Settings, folder: &Path, output: &Output) -> Result<Verdict, CliError> {
    // Whether there is anything to measure, and a place to keep it, before anything is verified.
    if let Some(suite) = settings.suite() {
        suite_tasks(suite, suite.usual_dtype(), settings.filter.as_deref().unwrap_or_default())?;
    }
    bundle::check_folder(folder)?;
    let mut steps = Steps::new(output);
    let bundle = steps.run(&settings)?;
    let path = folder.join(bundle.manifest.file_name());
    bundle.save(&path)?;
    let pass = steps.done.iter().all(|step| step.exit_code == 0);
    output.show(&ReproReport::new(pass, &path, steps.done, Told::Packed { manifest: bundle.manifest }))?;
    Ok(Verdict::from_bool(pass))
}

fn check(path: &Path, margin: f64, output: &Output) -> Result<Verdict, CliError> {
    let refused = |fault| LabError::from(BundleError { path: path.to_owned(), fault });
    let then = Bundle::load(path)?;
    let settings = Settings::parse(&then).map_err(refused)?;
    let mut steps = Steps::new(output);
    let mut now = steps.run(&settings)?;
    let mut comparison = compare(&then, &now, margin).map_err(refused)?;
    for _ in 0..SECOND_LOOKS {
        if comparison.is_slower() {
            now.files.insert(bundle::BENCH, steps.bench(&settings)?);
            comparison = compare(&then, &now, margin).map_err(refused)?;
        }
    }
    let pass = comparison.pass();
    output.show(&ReproReport::new(pass, path, steps.done, Told::Compared(comparison)))?;
    Ok(Verdict::from_bool(pass))
}

impl Settings {
    /// With the suite that is usual here where none was named.
    fn resolved(mut self) -> Self {
        let on_gpu = self.backend != "cpu" && Driver::get().is_ok_and(|driver| driver.device(0).is_ok());
        let usual = if on_gpu { Suite::Small } else { Suite::Cpu };
        self.suite.get_or_insert_with(|| usual.name().to_owned());
        self
    }

    fn suite(&self) -> Option<Suite> {
        Suite::ALL.into_iter().find(|suite| self.suite.as_deref() == Some(suite.name()))
    }

    /// Those of a bundle, if they could have been given on the command line.
    fn parse(bundle: &Bundle) -> Result<Self, Fault> {
        let damaged = |reason: String| Fault::Content { name: "manifest.json", reason };
        let settings = Self::deserialize(&bundle.manifest.settings).map_err(|e| damaged(e.to_string()))?;
        let texts = [&settings.checks, &settings.filter];
        let checked = texts.into_iter().flatten().try_for_each(|text| check_text(text, LONGEST_TEXT));
        checked.and(seconds(&settings.seconds.to_string()).map(drop)).map_err(damaged)?;
        match BACKENDS.contains(&settings.backend.as_str()) && settings.suite().is_some() {
            true => Ok(settings),
            false => Err(damaged("there is no such backend or suite".to_owned())),
        }
    }
}
