//! `flashcore report`: saved runs as a page for people, and their plots as pictures.
//!
//! Everything is read and laid out before anything is written, so that a bad run leaves no file behind.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use flashcore_lab::{
    LabError,
    record::{Record, RecordError},
    report::{
        Report,
        data::{Lead, Run},
    },
    save,
};
use serde_json::json;

use crate::{
    error::{CliError, Verdict},
    files::{FileError, Place},
    output::{Output, Page, Text, bad, faint, good},
};

const EXAMPLES: &str = "\
Examples:
  flashcore report --out report.html
  flashcore report run.json older.json --out report.html
  flashcore report bench/runs/2026-11-15-h200-forward.json --svg docs/figures --markdown tables.md --force

The page is one self-contained HTML file. Runs of the same problems on the same device form a
history. In a folder, files that are not results are skipped and listed; a RUN.json must be one.
Exit codes: 0 written, 2 could not be written.";

/// Where runs are kept unless another folder is named.
const FOLDER: &str = "bench/runs";

/// Turn saved runs into a page with plots and tables
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Result files of `bench --out` or `gate --out` [default: those in --dir]
    #[arg(value_name = "RUN.json")]
    runs: Vec<PathBuf>,
    /// Folder of result files; those named as RUN.json are added
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    wanted: WantedFlags,
    /// Overwrite existing files
    #[arg(long, help_heading = "What to write")]
    force: bool,
}

/// What is written; at least one of them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What to write")]
#[group(required = true, multiple = true)]
pub struct WantedFlags {
    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write the main tables to this Markdown file, for a README
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write each plot as an SVG file to this folder
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
}

/// Reads runs, writes the page and the pictures.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let place =
        |path: &Option<PathBuf>| path.as_deref().map(|path| Place::checked(path, flags.force)).transpose();
    let (page, markdown) = (place(&flags.wanted.out)?, place(&flags.wanted.markdown)?);
    let (runs, left_out) = flags.read()?;
    let report = Report::new(runs).map_err(LabError::from)?;
    let mut files: Vec<(Place, String)> = page.map(|place| (place, report.html())).into_iter().collect();
    files.extend(markdown.map(|place| (place, report.markdown())));
    if let Some(folder) = &flags.wanted.svg {
        fs::create_dir_all(folder).map_err(LabError::io("make", folder))?;
        for (name, svg) in report.pictures() {
            files.push((Place::checked(&folder.join(name), flags.force)?, svg));
        }
    }
    for (place, text) in &files {
        place.write(text.as_bytes(), b"")?;
    }
    let wrote: Vec<_> = files.iter().map(|(place, _)| place.path().display().to_string()).collect();
    let series: Vec<_> = report.series().iter().map(|series| summary(series)).collect();
    output.answer(&json!({ "series": series, "left_out": left_out, "wrote": wrote }), || {
        let page = report.series().iter().fold(Page::default(), |page, series| tables(page, series));
        let left_out = left_out.iter().map(|file| ("skipped", faint(file)));
        page.facts(left_out.chain(wrote.iter().map(|path| ("wrote", path.as_str().into()))))
    })?;
    Ok(Verdict::Pass)
}

impl Flags {
    /// The runs, and why some files of the folder were left out.
    fn read(&self) -> Result<(Vec<Run>, Vec<String>), CliError> {
        let usual = Path::new(FOLDER);
        let folder = match &self.dir {
            None if self.runs.is_empty() && !usual.exists() => {
                return Err(CliError::NoRuns { folder: FOLDER });
            }
            None if self.runs.is_empty() => Some(usual),
            named => named.as_deref(),
        };
        let in_folder = folder.map(results_in).transpose()?.unwrap_or_default();
        let (mut runs, mut left_out) = (Vec::new(), Vec::new());
        for (n, path) in in_folder.iter().chain(&self.runs).enumerate() {
            if [&self.wanted.out, &self.wanted.markdown]
                .into_iter()
                .flatten()
                .any(|out| save::same(path, out))
            {
                return Err(FileError::ReplacesInput { path: path.clone() }.into());
            }
            match Record::load(path) {
                Ok(record) => {
                    let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
                    runs.push(Run::new(name, record).map_err(LabError::from)?);
                }
                Err(RecordError::Content { path, fault }) if n < in_folder.len() => {
                    left_out.push(format!("{}: {fault}", path.display()));
                }
                Err(error) => return Err(LabError::from(error).into()),
            }
        }
        Ok((runs, left_out))
    }
}

/// JSON files of a folder, by name.
fn results_in(folder: &Path) -> Result<Vec<PathBuf>, LabError> {
    let failed = || LabError::io("read the folder", folder);
    let entries = fs::read_dir(folder).map_err(failed())?;
    let mut paths =
        entries.map(|entry| Ok(entry.map_err(failed())?.path())).collect::<Result<Vec<_>, LabError>>()?;
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    paths.sort();
    Ok(paths)
}

/// Runs of the same problems on the same device, oldest first, with the newest run's figures.
fn summary(series: &[Run]) -> serde_json::Value {
    let run = &series[series.len() - 1];
    json!({
        "title": run.subject(),
        "device": run.device(),
        "runs": series.iter().map(|run| &run.name).collect::<Vec<_>>(),
        "commit": run.record.commit,
        "created": run.record.created,
        "problems": run.problems.len(),
        "leads": run.leads(),
    })
}

fn tables(page: Page, series: &[Run]) -> Page {
    let run = &series[series.len() - 1];
    let runs = if series.len() == 1 { "run" } else { "runs" };
    let count = format!("{} ({} {runs}, {} problems)", run.device(), series.len(), run.problems.len());
    let row = |lead: Lead| -> Vec<Text> {
        let mean = format!("{:.2}x", lead.mean);
        let count = format!("faster on {} of {}, slower on {}", lead.faster, lead.problems, lead.slower);
        vec![lead.peer.into(), if lead.slower > 0 { bad(mean) } else { good(mean) }, count.into()]
    };
    page.table([vec![run.subject().into(), faint(count)]]).table(run.leads().into_iter().map(row))
}
