//! Why something could not be measured; the command line turns every one of these into exit code 2.

use std::{io, path::PathBuf};

use flashcore_core::{BackendError, DType, ProblemError};

use crate::{
    memory::MemoryError, record::RecordError, report::ReportError, task::TaskError, tune::TuneError,
};

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Task(#[from] TaskError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    Tune(#[from] TuneError),
    #[error("{path}: {reason}", path = path.display())]
    Bundle { path: PathBuf, reason: String },
    #[error("tensors of type {dtype} cannot be measured; use f16, bf16 or f32")]
    DType { dtype: DType },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{competitor} does not support {what}; omit it or change the problem")]
    Unsupported { competitor: String, what: String },
    #[error("{competitor} cannot be used here: {reason}")]
    Unavailable { competitor: String, reason: String },
    #[error("{competitor} failed: {reason}")]
    Failed { competitor: String, reason: String },
    /// What is compared with is wrong itself.
    #[error("{competitor} is wrong on {task}: {reason}; nothing can be concluded from a comparison with it")]
    Oracle { competitor: String, task: String, reason: String },
    #[error("the baseline does not fit: {0}")]
    Baseline(String),
    #[error("{got} independent times of {task}, but {needed} are needed; raise --seconds or --rounds")]
    TooFew { task: String, got: usize, needed: usize },
    #[error("stopped before there was a result")]
    Stopped,
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl LabError {
    /// An I/O error that says what was tried.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// Whether another problem might still work: the competitor is not there or does not take this one.
    pub const fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Unsupported { .. }
                | Self::Unavailable { .. }
                | Self::Backend(BackendError::Unsupported { .. } | BackendError::Unavailable { .. })
        )
    }
}
