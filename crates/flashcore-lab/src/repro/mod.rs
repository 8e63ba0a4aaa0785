//! Everything about one state of the project in one file, and whether another machine or day gives the same.
//!
//! A [`bundle`] is a manifest (what was run, and where) with the answers of `doctor`, `verify` and `bench`; [`compare`]
//! holds two of them against each other. The `repro` command runs the parts.

pub mod bundle;
pub mod compare;

use std::path::PathBuf;

/// Why a bundle is not taken.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", path.display())]
pub struct BundleError {
    /// The bundle.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Fault,
}

/// What is wrong with a bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// Too large, packed or unpacked.
    #[error("more than {} MiB, which no bundle has", bundle::MOST_BYTES >> 20)]
    Size,
    /// An entry that no bundle has.
    #[error("the entry {0:?} is not a plain file of a bundle, or is there twice")]
    Entry(String),
    /// A file is not there, or not the one that was packed.
    #[error("{0} is missing or is not the file that the manifest names")]
    File(&'static str),
    /// A file says what cannot be.
    #[error("{name} is damaged: {reason}")]
    Content {
        /// The file.
        name: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl Fault {
    fn content(name: &'static str, reason: impl ToString) -> Self {
        Self::Content { name, reason: reason.to_string() }
    }
}
