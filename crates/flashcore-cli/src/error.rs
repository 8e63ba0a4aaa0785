//! How a command ends: a verdict, or an error that says what to do; both become exit codes.

use std::{io, time::Duration};

use flashcore::{BackendError, ProblemError};
use flashcore_cuda::cache::CacheError;
use flashcore_lab::{LabError, memory::MemoryError};

use crate::{
    commands::{inspect::InspectFailure, sim::SimFailure},
    files::FileError,
};

/// What a command that ran to its end found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All is as it should be: exit code 0.
    Pass,
    /// It ran, and the result is not good: exit code 1.
    Fail,
    /// The user stopped it; what there is was shown: exit code 2.
    Stopped,
}

impl Verdict {
    /// `Pass` if `good`.
    pub const fn from_bool(good: bool) -> Self {
        if good { Self::Pass } else { Self::Fail }
    }

    /// The exit code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::Stopped => CliError::EXIT,
        }
    }
}

/// Why a command could not run: exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error(transparent)]
    Attention(Box<flashcore::Error>),
    #[error("no check has a group or name containing `{filter}`; the groups are {groups}")]
    NothingToCheck { filter: String, groups: String },
    #[error("no problem has a name containing `{filter}`; the names are {names}")]
    NothingToMeasure { filter: String, names: String },
    #[error(
        "the folder {folder} does not exist here; name result files of `flashcore bench --out`, or pass --dir FOLDER"
    )]
    NoRuns { folder: &'static str },
    #[error("--threads is for the cpu backend; omit it or pass --backend cpu")]
    Threads,
    #[error("{flag} is for the cuda backend and the simulator; omit it or pass --backend cuda")]
    KernelOnCpu { flag: &'static str },
    #[error("--gpu is for the simulator; omit it or pass --backend sim")]
    Gpu,
    #[error(
        "the simulator cannot be timed; use `flashcore run --backend sim`, or `flashcore profile` for its counters"
    )]
    NotTimed,
    #[error("the simulator would take about {} for this problem, more than the limit of {}; make the shape smaller",
        minutes(*estimate), minutes(*most))]
    TooLong { estimate: Duration, most: Duration },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Lab(Box<LabError>),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Inspect(#[from] InspectFailure),
    #[error(transparent)]
    Sim(#[from] SimFailure),
    #[error("cannot print the result: {0}; redirect the output somewhere writable")]
    Print(#[source] io::Error),
    #[error("cannot encode the result: {0}")]
    Encode(#[from] serde_json::Error),
}

impl CliError {
    /// A filter that none of these names contains.
    pub fn nothing_to_measure(filter: &str, names: &[String]) -> Self {
        const SHOWN: usize = 8;
        let shown = names[..names.len().min(SHOWN)].join(", ");
        let more = names.len().saturating_sub(SHOWN);
        let names = if more > 0 { format!("{shown} and {more} more") } else { shown };
        Self::NothingToMeasure { filter: filter.to_owned(), names }
    }
}

fn minutes(time: Duration) -> String {
    format!("{:.0} minutes", time.as_secs_f64() / 60.0)
}

impl From<LabError> for CliError {
    fn from(error: LabError) -> Self {
        Self::Lab(Box::new(error))
    }
}

impl From<flashcore::Error> for CliError {
    fn from(error: flashcore::Error) -> Self {
        Self::Attention(Box::new(error))
    }
}

impl From<ProblemError> for CliError {
    fn from(error: ProblemError) -> Self {
        flashcore::Error::from(error).into()
    }
}

impl From<BackendError> for CliError {
    fn from(error: BackendError) -> Self {
        flashcore::Error::from(error).into()
    }
}

impl CliError {
    /// The exit code of every error.
    pub const EXIT: u8 = 2;

    /// The message with all its causes, outermost first.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let more = error.to_string();
            if !text.contains(&more) {
                text = format!("{text}: {more}");
            }
            cause = error.source();
        }
        text
    }
}
