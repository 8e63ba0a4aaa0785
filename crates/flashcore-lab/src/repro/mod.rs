//! Everything about one state of the project in one file, and whether another machine or day gives the same.
//!
//! [`manifest`] says what was run and where; [`bundle`] packs it with the answers of `doctor`, `verify`, `bench` and
//! `profile`, and unpacks such files without trusting them; [`compare`] holds two of them against each other. The
//! `repro` command runs the parts.

pub mod bundle;
pub mod compare;
pub mod manifest;

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
    /// There is no checksum.
    #[error("no checksum: {0} is not there or holds none; fetch it together with the bundle")]
    NoChecksum(PathBuf),
    /// The checksum is another.
    #[error("its checksum is {found}, but {expected} was promised; fetch it again")]
    Checksum {
        /// What was promised.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Too much.
    #[error("more than {most} {what}, which no bundle has")]
    TooMuch {
        /// Of what.
        what: &'static str,
        /// How much there may be.
        most: u64,
    },
    /// A name that leads out of the archive, or is unknown.
    #[error("an entry is called {0:?}; entries are plain names of a bundle's parts")]
    Name(String),
    /// A link, a device or the like.
    #[error("the entry {0:?} is not a plain file")]
    Kind(String),
    /// The same name again.
    #[error("the entry {0:?} is there twice")]
    Twice(String),
    /// A part is not there.
    #[error("the part {0} is missing")]
    Missing(&'static str),
    /// A part is not what the manifest says.
    #[error("the part {0} is not the one that the manifest names")]
    Changed(String),
    /// The manifest, or another part, cannot be.
    #[error("{part} is damaged: {reason}")]
    Part {
        /// Which.
        part: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Another version.
    #[error("version {got} of the format; this program reads version {}", manifest::VERSION)]
    Version {
        /// The file's version.
        got: u32,
    },
}
