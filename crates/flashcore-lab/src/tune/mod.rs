//! Which tile is fastest for a problem: searched for, judged, measured, and kept with the evidence.
//!
//! [`space`] says what candidates there are and [`strategy`] which come next; [`stand`] builds, judges and times them;
//! [`race`] stops those that are behind; [`search`] puts it together and ends with a final between the best and the
//! plan's choice; `row` makes a row of a table of it. Everything measured goes to a [`journal`] first.

pub mod journal;
pub mod race;
mod row;
pub mod search;
pub mod space;
pub mod stand;
pub mod strategy;
mod table;

use std::path::PathBuf;

use flashcore_kernels::tuned::TableError;

pub use table::{TunedCpu, check_table, extend_table, load_table};

/// Why a search could not begin, go on or be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// A journal of something else.
    #[error(
        "{} belongs to another search: the {what} was {then} and is {now}; name another file or pass --fresh to throw it away",
        path.display()
    )]
    Mismatch {
        /// The journal.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What it was.
        then: String,
        /// What it is.
        now: String,
    },
    /// A journal that cannot be read.
    #[error("{}, line {line}: damaged ({reason}); name another file or pass --fresh to throw it away", path.display())]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// The line, from 1; 0 for the whole.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A journal that somebody else writes.
    #[error("{} is in use by another `flashcore tune`; wait for it or name another file", path.display())]
    Busy {
        /// The journal.
        path: PathBuf,
    },
    /// A problem without work.
    #[error("{task} has no rows or no keys, so that there is nothing to tune; name a larger shape")]
    Nothing {
        /// The problem.
        task: String,
    },
    /// A table that is none.
    #[error("{}: {source}", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: TableError,
    },
}
