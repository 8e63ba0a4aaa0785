//! `flashcore repro`: environment, verify and bench in one bundle, and whether it comes out the same.
//!
//! The parts are this program's own commands, each in a process of its own ([`Steps`]). What a bundle says decides
//! nothing but the settings of such a run, which are checked; nothing of it is ever executed.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Instant,
};

use clap::{Args, builder::PossibleValuesParser};
use flashcore_cuda::Driver;
use flashcore_kernels::untrusted::check_text;
use flashcore_lab::{
    LabError,
    record::Record,
    repro::{self, Bundle, Comparison, Manifest, compare},
    suites::Suite,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    error::{CliError, Verdict},
    interrupt,
    lab_flags::{seconds, suite_tasks},
    output::{Output, Page, Text, bad, faint, good},
    program,
    progress::Progress,
    simulation::merged,
};

const EXAMPLES: &str = "\
Examples:
  flashcore repro
  flashcore repro --suite forward --full --seconds 0.6
  flashcore repro --check artifacts/flashcore_0123456789ab_20260131T120000Z.json.gz

A bundle is one file, artifacts/flashcore_COMMIT_TIME.json.gz.
--check reruns what the bundle recorded and compares: same kernels, same verdicts, no slower.
On a different machine it says so and does not compare times.
Exit codes: 0 packed, or the same; 1 something failed or differs; 2 could not run, or not a bundle.";

/// Verify, measure and pack the results into one file, or check such a file on this machine
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Rerun what this bundle recorded, and compare
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Tolerated slowdown against the bundle
    #[arg(long, value_name = "X", default_value_t = 0.05, requires = "check", value_parser = margin)]
    margin: f64,
    /// Folder to write the bundle to
    #[arg(long, value_name = "FOLDER", default_value = "artifacts", conflicts_with = "check")]
    out: PathBuf,
    #[command(flatten)]
    settings: Settings,
}

/// What is verified and measured; bundles keep it, and nothing else of a bundle decides what runs.
#[derive(Args, Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
#[command(next_help_heading = "What to run")]
#[group(multiple = true, conflicts_with = "check")]
pub struct Settings {
    /// Backend to run on
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = PossibleValuesParser::new(BACKENDS))]
    backend: String,
    /// Run the full verification, not only the quick checks
    #[arg(long)]
    full: bool,
    /// Only checks whose group and name contain this
    #[arg(long, value_name = "TEXT")]
    checks: Option<String>,
    /// Suite to measure [default: cpu, or small if there is a GPU]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Suite::ALL.map(|suite| suite.name)))]
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
    number.ok_or_else(|| "give a fraction from 0 to 1000, as in 0.05".to_owned())
}

/// What can compute.
const BACKENDS: [&str; 3] = ["auto", "cpu", "cuda"];
/// Longest filter in a bundle.
const LONGEST_TEXT: usize = 300;
/// Differences and remarks that a page shows.
const SHOWN: usize = 20;
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
        suite_tasks(suite, suite.dtype, settings.filter.as_slice())?;
    }
    repro::check_folder(folder)?;
    let mut steps = Steps::new(output);
    let bundle = steps.run(&settings)?;
    let path = folder.join(bundle.manifest.file_name());
    bundle.save(&path)?;
    let pass = steps.done.iter().all(|step| step.exit_code == 0);
    let facts = bundle.manifest.environment.iter().map(|(name, text)| [faint(name), text.into()].into());
    steps.show(pass, &path, json!({ "manifest": bundle.manifest }), facts.collect(), output)
}

fn check(path: &Path, margin: f64, output: &Output) -> Result<Verdict, CliError> {
    let refused = |reason| LabError::Bundle { path: path.to_owned(), reason };
    let then = Bundle::load(path)?;
    let settings = Settings::parse(&then).map_err(refused)?;
    let mut steps = Steps::new(output);
    let mut now = steps.run(&settings)?;
    let mut comparison = compare(&then, &now, margin).map_err(refused)?;
    for _ in 0..SECOND_LOOKS {
        if comparison.is_slower() {
            now.bench = steps.bench(&settings)?;
            comparison = compare(&then, &now, margin).map_err(refused)?;
        }
    }
    steps.show(comparison.pass(), path, json!(comparison), compared(&comparison), output)
}

fn compared(Comparison { differences, remarks, kernels, groups, rulings }: &Comparison) -> Vec<Vec<Text>> {
    let same = [
        ("kernels", format!("{kernels} with the same PTX").into()),
        ("checks", format!("{groups} groups with the same verdict").into()),
        ("times", format!("{} compared", rulings.len()).into()),
    ];
    let remarks = remarks.iter().take(SHOWN).map(|text| ("note", faint(text)));
    let differences = differences.iter().take(SHOWN).map(|text| ("differs", bad(text)));
    let rows = same.into_iter().chain(remarks).chain(differences);
    rows.map(|(name, text)| vec![faint(name), text]).collect()
}

impl Settings {
    /// With the suite that is usual here where none was named.
    fn resolved(mut self) -> Self {
        let on_gpu = self.backend != "cpu" && Driver::get().is_ok_and(|driver| driver.device(0).is_ok());
        let usual = if on_gpu { Suite::SMALL } else { Suite::CPU };
        self.suite.get_or_insert_with(|| usual.name.to_owned());
        self
    }

    fn suite(&self) -> Option<Suite> {
        self.suite.as_deref().and_then(Suite::named)
    }

    /// Those of a bundle, if they could have been given on the command line.
    fn parse(bundle: &Bundle) -> Result<Self, String> {
        let settings = Self::deserialize(&bundle.manifest.settings).map_err(|e| e.to_string())?;
        let texts = [&settings.checks, &settings.filter];
        let checked = texts.into_iter().flatten().try_for_each(|text| check_text(text, LONGEST_TEXT));
        checked.and(seconds(&settings.seconds.to_string()).map(drop))?;
        match BACKENDS.contains(&settings.backend.as_str()) && settings.suite().is_some() {
            true => Ok(settings),
            false => Err("unknown backend or suite".to_owned()),
        }
    }
}

/// One of our commands that was run.
#[derive(Serialize, Debug)]
struct Step {
    name: &'static str,
    /// Its exit code: 0 or 1.
    exit_code: i32,
    seconds: f64,
}

/// What was run so far.
struct Steps {
    done: Vec<Step>,
    progress: Progress,
}

impl Steps {
    /// Nothing yet.
    fn new(output: &Output) -> Self {
        Self { done: Vec::new(), progress: Progress::stoppable(3, output) }
    }

    /// Runs everything.
    fn run(&mut self, settings: &Settings) -> Result<Bundle, CliError> {
        let doctor = serde_json::from_slice(&self.step("doctor", &[])?)?;
        let verify = serde_json::from_slice(&self.step("verify", &verify(settings))?)?;
        let bench = self.bench(settings)?;
        Ok(Bundle { manifest: Manifest::new(serde_json::to_value(settings)?)?, doctor, verify, bench })
    }

    /// The result file of `bench`.
    fn bench(&mut self, settings: &Settings) -> Result<Record, CliError> {
        let folder = tempfile::tempdir().map_err(LabError::io("make a folder in", std::env::temp_dir()))?;
        let path = folder.path().join("bench.json");
        let mut args = vec![
            "--peers=none".to_owned(),
            "--no-roofline".to_owned(),
            format!("--seconds={}", settings.seconds),
            format!("--seed={}", settings.seed),
            format!("--backend={}", settings.backend),
            format!("--out={}", path.display()),
        ];
        args.extend(settings.suite.iter().map(|name| format!("--suite={name}")));
        args.extend(settings.filter.iter().map(|text| format!("--filter={text}")));
        self.step("bench", &args)?;
        Ok(Record::load(&path).map_err(LabError::from)?)
    }

    /// What a command answers, be it good or bad.
    fn step(&mut self, name: &'static str, args: &[String]) -> Result<Vec<u8>, CliError> {
        self.progress.say(name.to_owned());
        let begin = Instant::now();
        let mut child = program::again()?;
        child.arg(name).args(args).arg("--json").stdin(Stdio::null()).stderr(Stdio::null());
        let ended = child.output().map_err(LabError::io("start", child.get_program().to_owned()))?;
        if interrupt::stopped() {
            return Err(LabError::Stopped.into());
        }
        let Some(exit_code @ (0 | 1)) = ended.status.code() else {
            let answer: Value = serde_json::from_slice(&ended.stdout).unwrap_or_default();
            let reason = answer["error"].as_str().unwrap_or("it ended without printing a result").to_owned();
            return Err(LabError::Failed { competitor: format!("flashcore {name}"), reason }.into());
        };
        self.done.push(Step { name, exit_code, seconds: begin.elapsed().as_secs_f64() });
        self.progress.step();
        Ok(ended.stdout)
    }

    /// Shows what was run and what came of it.
    fn show(
        &self,
        pass: bool,
        bundle: &Path,
        more: Value,
        facts: Vec<Vec<Text>>,
        output: &Output,
    ) -> Result<Verdict, CliError> {
        let bundle = bundle.display().to_string();
        let json = json!({ "pass": pass, "bundle": bundle, "steps": self.done });
        output.answer(&merged(json, more), || {
            let word = |good_news| if good_news { good("PASS") } else { bad("FAIL") };
            let row = |step: &Step| {
                vec![step.name.into(), word(step.exit_code == 0), format!("{:.1} s", step.seconds).into()]
            };
            let ending = [vec![faint("bundle"), bundle.into()], vec![faint("result"), word(pass)]];
            Page::default().table(self.done.iter().map(row)).table(facts.into_iter().chain(ending))
        })?;
        Ok(Verdict::from_bool(pass))
    }
}

fn verify(settings: &Settings) -> Vec<String> {
    let backend = if settings.backend == "auto" { "all" } else { &settings.backend };
    let mut args = vec![format!("--backend={backend}")];
    args.extend((!settings.full).then(|| "--quick".to_owned()));
    args.extend(settings.checks.iter().map(|text| format!("--filter={text}")));
    args
}
