//! `flashcore report`: saved runs as a page for people, and their plots as pictures.
//!
//! Everything is read and laid out before anything is written, so that a bad run leaves no file behind.

mod answer;
mod sources;

use std::{fs, path::PathBuf};

use clap::Args;
use flashcore_lab::{
    LabError,
    report::{Report, checks::Checks},
    save,
};

use self::{answer::Answer, sources::Sources};
use crate::{
    error::{CliError, Verdict},
    files::{FileError, Place},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore report --out report.html
  flashcore report run.json older.json --out report.html
  flashcore report bench/runs/2026-11-15-h200-forward.json --svg docs/figures --force
  flashcore verify --json > checks.json; flashcore report --verify checks.json --out report.html

The page is one file that needs nothing but a browser. Runs of the same problems on the same device make a history.
Files of a folder that are not results are left out and named; a file that is named must be one.
Exit codes: 0 written, 2 could not be made.";

/// Turn saved runs into a page with plots and tables
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Result files of `bench --out` or `gate --out` [default: those of --dir]
    #[arg(value_name = "RUN.json")]
    runs: Vec<PathBuf>,
    /// Folder of result files; with RUN.json, those are added to it
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// What `verify --json` printed, for a table of checks
    #[arg(long, value_name = "FILE")]
    verify: Option<PathBuf>,
    #[command(flatten)]
    wanted: WantedFlags,
    /// Replace files that exist
    #[arg(long, help_heading = "What to write")]
    force: bool,
}

/// What is written; at least one of them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What to write")]
#[group(required = true, multiple = true)]
pub struct WantedFlags {
    /// The page
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Folder for each plot as an SVG file
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
}

/// Reads runs, writes the page and the pictures.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let page = flags.wanted.out.as_deref().map(|path| Place::checked(path, flags.force)).transpose()?;
    let Sources { runs, left_out, files } = Sources::read(&flags.runs, flags.dir.as_deref())?;
    flags.keep_inputs(&files)?;
    let checks = flags.verify.as_deref().map(Checks::load).transpose().map_err(LabError::from)?;
    let report = Report::new(runs, checks).map_err(LabError::from)?;
    let mut files: Vec<(Place, String)> = page.map(|place| (place, report.html())).into_iter().collect();
    files.extend(flags.pictures(&report)?);
    for (place, text) in &files {
        place.write(text.as_bytes(), b"")?;
    }
    let wrote = files.iter().map(|(place, _)| place.path().display().to_string()).collect();
    output.show(&Answer::new(&report, left_out, wrote))?;
    Ok(Verdict::Pass)
}

impl Flags {
    /// Refuses to write the page over something that it is made of.
    fn keep_inputs(&self, runs: &[PathBuf]) -> Result<(), FileError> {
        let Some(page) = &self.wanted.out else { return Ok(()) };
        let replaced = runs.iter().chain(&self.verify).find(|path| save::same(path, page));
        replaced.map_or(Ok(()), |path| Err(FileError::ReplacesInput { path: path.clone() }))
    }

    fn pictures(&self, report: &Report) -> Result<Vec<(Place, String)>, CliError> {
        let Some(folder) = &self.wanted.svg else { return Ok(Vec::new()) };
        fs::create_dir_all(folder).map_err(LabError::io("make", folder))?;
        let picture = |picture: flashcore_lab::report::Picture| {
            Ok((Place::checked(&folder.join(picture.file), self.force)?, picture.svg))
        };
        report.pictures().into_iter().map(picture).collect()
    }
}
