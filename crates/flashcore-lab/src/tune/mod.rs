//! Which tile is fastest for a problem: searched for, checked against f64, measured, and kept in a table.
//!
//! [`candidates`] says which tiles there are and which come next; [`runner`] builds, checks and measures them on a GPU
//! or in the simulator; [`search`] puts it together and ends with a race between the best and what the rules choose.
//! Everything that was tried is a line of a [`log`].

pub mod candidates;
pub mod log;
pub mod runner;
pub mod search;

use std::{io::ErrorKind, path::Path, path::PathBuf};

use flashcore_kernels::tuned::{Row, Table, TableError};

use crate::{error::LabError, save};

/// Why a search could not begin, or its result could not be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// There is nothing to tune for.
    #[error("tuning needs an NVIDIA GPU; `--backend sim` searches for the fewest instructions without one")]
    NoGpu,
    #[error("{0} has no rows or no keys, so there is nothing to tune; name a larger shape")]
    Nothing(String),
    #[error("{} is not a log of `flashcore tune`, or is too large; name another table with --out", .0.display())]
    Log(PathBuf),
    #[error("{path}: {1}", path = .0.display())]
    Table(PathBuf, #[source] TableError),
}

/// Reads a table.
pub fn load_table(path: &Path) -> Result<Table, LabError> {
    Ok(Table::load(path).map_err(refused(path))?)
}

/// Whether [`extend_table`] can add to `path`; asked before anything is measured.
pub fn check_table(path: &Path) -> Result<(), LabError> {
    present_table(path)?;
    save::temporary(path).map(drop).map_err(LabError::io("write", path))
}

/// Adds a row to the table at `path`, which need not be there yet; readers see the old table or the new one, whole.
pub fn extend_table(path: &Path, key: String, row: Row) -> Result<(), LabError> {
    let mut table = present_table(path)?;
    table.insert(key, row).map_err(refused(path))?;
    let text = table.to_json().map_err(refused(path))?;
    save::replace(path, &[text.as_bytes()]).map_err(LabError::io("write", path))
}

fn present_table(path: &Path) -> Result<Table, LabError> {
    match Table::load(path) {
        Err(TableError::Io(error)) if error.kind() == ErrorKind::NotFound => Ok(Table::default()),
        table => Ok(table.map_err(refused(path))?),
    }
}

fn refused(path: &Path) -> impl Fn(TableError) -> TuneError + '_ {
    |error| TuneError::Table(path.to_owned(), error)
}
