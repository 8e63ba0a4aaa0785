//! Which result files a report is made of: those named, and those of a folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

use flashcore_lab::{
    LabError,
    record::{Record, RecordError},
    report::run::Run,
};

use crate::error::CliError;

/// Where runs are kept unless another folder is named.
const FOLDER: &str = "bench/runs";

/// Runs, and files of a folder that are none.
pub struct Sources {
    pub runs: Vec<Run>,
    /// Each with the reason.
    pub left_out: Vec<String>,
    /// All that were looked at.
    pub files: Vec<PathBuf>,
}

impl Sources {
    /// Reads `files`, and the results in `folder`; its usual place where nothing is named.
    pub fn read(files: &[PathBuf], folder: Option<&Path>) -> Result<Self, CliError> {
        let folder = match folder {
            None if files.is_empty() => Some(usual_folder()?),
            named => named,
        };
        let mut sources = Self { runs: Vec::new(), left_out: Vec::new(), files: files.to_vec() };
        for path in folder.map(results_in).transpose()?.unwrap_or_default() {
            sources.files.push(path.clone());
            match Record::load(&path) {
                Ok(record) => sources.add(&path, record)?,
                Err(RecordError::Content { path, fault }) => {
                    sources.left_out.push(format!("{}: {fault}", path.display()));
                }
                Err(error) => return Err(LabError::from(error).into()),
            }
        }
        for path in files {
            sources.add(path, Record::load(path).map_err(LabError::from)?)?;
        }
        Ok(sources)
    }

    fn add(&mut self, path: &Path, record: Record) -> Result<(), CliError> {
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        self.runs.push(Run::new(name, record).map_err(LabError::from)?);
        Ok(())
    }
}

fn usual_folder() -> Result<&'static Path, CliError> {
    let folder = Path::new(FOLDER);
    if folder.exists() { Ok(folder) } else { Err(CliError::NoRuns { folder: FOLDER }) }
}

/// JSON files of a folder, by name.
fn results_in(folder: &Path) -> Result<Vec<PathBuf>, CliError> {
    let failed = || LabError::io("read the folder", folder);
    let entries = fs::read_dir(folder).map_err(failed())?;
    let mut paths = entries
        .map(|entry| Ok(entry.map_err(failed())?.path()))
        .filter(|path: &Result<PathBuf, LabError>| {
            path.as_ref().map_or(true, |path| path.extension().is_some_and(|ending| ending == "json"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}
