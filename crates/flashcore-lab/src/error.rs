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
    /// The arguments do not form a problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The description is not a task.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A backend did not compute.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A result file is not one.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// There is nothing to report, or too much.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// A search could not begin, resume or be kept.
    #[error(transparent)]
    Tune(#[from] TuneError),
    /// A file is not a bundle of `repro`.
    #[error("{path}: {reason}", path = path.display())]
    Bundle { path: PathBuf, reason: String },
    /// The element type is not known here.
    #[error("tensors of type {dtype} cannot be measured; use f16, bf16 or f32")]
    DType { dtype: DType },
    /// There is no memory for a tensor.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A competitor does not take the problem.
    #[error("{competitor} does not support {what}; omit it or change the problem")]
    Unsupported { competitor: String, what: String },
    /// A competitor is not there.
    #[error("{competitor} cannot be used here: {reason}")]
    Unavailable { competitor: String, reason: String },
    /// A competitor broke down.
    #[error("{competitor} failed: {reason}")]
    Failed { competitor: String, reason: String },
    /// What is compared with is wrong itself.
    #[error("{competitor} is wrong on {task}: {reason}; nothing can be concluded from a comparison with it")]
    Oracle { competitor: String, task: String, reason: String },
    /// A baseline does not fit what is measured.
    #[error("the baseline does not fit: {0}")]
    Baseline(String),
    /// There are not enough samples for a decision.
    #[error("{got} independent times of {task}, but {needed} are needed; raise --seconds or --rounds")]
    TooFew { task: String, got: usize, needed: usize },
    /// The user stopped it.
    #[error("stopped before there was a result")]
    Stopped,
    /// The operating system refused something.
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
