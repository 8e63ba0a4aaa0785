//! The parts of a bundle: this program again, once for each, with `--json`.

use std::{fs, process::Stdio, time::Instant};

use flashcore_lab::{
    LabError,
    repro::bundle::{BENCH, Bundle, DOCTOR, VERIFY},
};
use serde::Serialize;
use serde_json::Value;

use super::Settings;
use crate::{error::CliError, interrupt, output::Output, program, progress::Progress};

/// What was run.
#[derive(Serialize, Debug)]
pub struct Step {
    /// The command.
    pub name: &'static str,
    /// Its exit code: 0 or 1.
    pub exit_code: i32,
    /// How long it took.
    pub seconds: f64,
}

/// What was run so far.
pub struct Steps {
    pub done: Vec<Step>,
    progress: Progress,
}

impl Steps {
    /// Nothing yet.
    pub fn new(output: &Output) -> Self {
        Self { done: Vec::new(), progress: Progress::stoppable(3, output) }
    }

    /// Runs everything.
    pub fn run(&mut self, settings: &Settings) -> Result<Bundle, CliError> {
        let doctor = self.step("doctor", &[])?;
        let verify = self.step("verify", &verify(settings))?;
        let bench = self.bench(settings)?;
        let files = [(DOCTOR, doctor), (VERIFY, verify), (BENCH, bench)];
        Ok(Bundle::new(serde_json::to_value(settings)?, files.into())?)
    }

    /// The result file of `bench`.
    pub fn bench(&mut self, settings: &Settings) -> Result<Vec<u8>, CliError> {
        let folder = tempfile::tempdir().map_err(LabError::io("make a folder in", std::env::temp_dir()))?;
        let path = folder.path().join(BENCH);
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
        Ok(fs::read(&path).map_err(LabError::io("read", path))?)
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
            let reason = answer["error"].as_str().unwrap_or("it ended without an answer").to_owned();
            return Err(LabError::Failed { competitor: format!("flashcore {name}"), reason }.into());
        };
        self.done.push(Step { name, exit_code, seconds: begin.elapsed().as_secs_f64() });
        self.progress.step();
        Ok(ended.stdout)
    }
}

fn verify(settings: &Settings) -> Vec<String> {
    let backend = if settings.backend == "auto" { "all" } else { &settings.backend };
    let mut args = vec![format!("--backend={backend}")];
    args.extend((!settings.full).then(|| "--quick".to_owned()));
    args.extend(settings.checks.iter().map(|text| format!("--filter={text}")));
    args
}
