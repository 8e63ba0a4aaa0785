//! The parts of a bundle: this program again, once for each, with `--json`.

use std::{
    fs,
    process::{Command, Stdio},
    time::Instant,
};

use flashcore_lab::{
    LabError,
    repro::{
        bundle::{BENCH, DOCTOR, MANIFEST, PROFILE, Parts, VERIFY},
        manifest::Settings,
    },
};
use serde::Serialize;
use tempfile::TempDir;

use crate::{error::CliError, interrupt, output::Output, program, progress::Progress};

/// The problem whose kernel is profiled.
const PROFILED: [&str; 4] = ["--shape", "1x8x512x64", "--dtype", "bf16"];
/// Steps in all.
const COUNT: usize = 4;

/// What was run.
#[derive(Serialize, Debug)]
pub struct Step {
    /// The command.
    pub name: &'static str,
    /// Its exit code.
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
        Self { done: Vec::new(), progress: Progress::stoppable(COUNT, output) }
    }

    /// Runs everything; the parts of a bundle but for its manifest.
    pub fn run(&mut self, settings: &Settings) -> Result<Parts, CliError> {
        let folder = scratch()?;
        let mut parts = Parts::new();
        parts.insert(DOCTOR.to_owned(), self.demand("doctor", &[])?);
        parts.insert(VERIFY.to_owned(), self.demand("verify", &verify(settings))?);
        parts.insert(BENCH.to_owned(), self.bench(settings, &folder)?);
        let mut args = words(&PROFILED);
        args.push(format!("--backend={}", settings.backend));
        args.push(format!("--out={}", folder.path().display()));
        let (code, profile) = self.step("profile", &args)?;
        if code == 0 {
            parts.insert(PROFILE.to_owned(), profile);
        }
        Ok(parts)
    }

    /// The parts with other times.
    pub fn bench_again(&mut self, settings: &Settings, mut parts: Parts) -> Result<Parts, CliError> {
        parts.remove(MANIFEST);
        parts.insert(BENCH.to_owned(), self.bench(settings, &scratch()?)?);
        Ok(parts)
    }

    fn bench(&mut self, settings: &Settings, folder: &TempDir) -> Result<Vec<u8>, CliError> {
        let path = folder.path().join(BENCH);
        let mut args = words(&["--peers", "none", "--no-roofline"]);
        args.extend([
            format!("--suite={}", settings.suite),
            format!("--seconds={}", settings.seconds),
            format!("--seed={}", settings.seed),
            format!("--backend={}", settings.backend),
            format!("--out={}", path.display()),
        ]);
        args.extend(settings.filter.iter().map(|text| format!("--filter={text}")));
        self.demand("bench", &args)?;
        Ok(fs::read(&path).map_err(LabError::io("read", path))?)
    }

    /// A step that must have an answer, be it good or bad.
    fn demand(&mut self, name: &'static str, args: &[String]) -> Result<Vec<u8>, CliError> {
        match self.step(name, args)? {
            (0 | 1, answer) => Ok(answer),
            _ if interrupt::stopped() => Err(LabError::Stopped.into()),
            (_, answer) => {
                let told: Option<serde_json::Value> = serde_json::from_slice(&answer).ok();
                let reason = told.and_then(|told| Some(told.get("error")?.as_str()?.to_owned()));
                let reason = reason.unwrap_or_else(|| "it ended without an answer".to_owned());
                Err(LabError::Failed { arm: format!("flashcore {name}"), reason }.into())
            }
        }
    }

    fn step(&mut self, name: &'static str, args: &[String]) -> Result<(i32, Vec<u8>), CliError> {
        if interrupt::stopped() {
            return Err(LabError::Stopped.into());
        }
        self.progress.say(name.to_owned());
        let begin = Instant::now();
        let mut child: Command = program::again()?;
        child.arg(name).args(args).arg("--json").stdin(Stdio::null()).stderr(Stdio::null());
        let ended = child.output().map_err(LabError::io("start", child.get_program().to_owned()))?;
        let exit_code = ended.status.code().unwrap_or(-1);
        self.done.push(Step { name, exit_code, seconds: begin.elapsed().as_secs_f64() });
        self.progress.step();
        Ok((exit_code, ended.stdout))
    }
}

fn scratch() -> Result<TempDir, LabError> {
    tempfile::tempdir().map_err(LabError::io("make a folder in", std::env::temp_dir()))
}

fn verify(settings: &Settings) -> Vec<String> {
    let backend = if settings.backend == "auto" { "all" } else { &settings.backend };
    let mut args = vec![format!("--backend={backend}")];
    args.extend(settings.quick.then(|| "--quick".to_owned()));
    args.extend(settings.checks.iter().map(|text| format!("--filter={text}")));
    args
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
