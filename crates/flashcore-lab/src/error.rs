//! Why something could not be measured; the command line turns every one of these into exit code 2.

use std::{io, path::PathBuf};

use flashcore_core::{BackendError, DType, ProblemError};

use crate::{
    memory::MemoryError, record::RecordError, report::ReportError, repro::BundleError, task::TaskError,
    tune::TuneError,
};

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The arguments do not form a problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The description is no task.
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
    /// A search could not begin, go on or be kept.
    #[error(transparent)]
    Tune(#[from] TuneError),
    /// A bundle is not one.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The element type is not known here.
    #[error("tensors of type {dtype} cannot be measured; use f16, bf16 or f32")]
    DType {
        /// The type.
        dtype: DType,
    },
    /// There is no memory for a tensor.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A competitor does not take the problem.
    #[error("{arm} does not support {what}; leave it out or change the problem")]
    Unsupported {
        /// The competitor.
        arm: String,
        /// What it does not support.
        what: String,
    },
    /// A competitor is not there.
    #[error("{arm} cannot be used here: {reason}")]
    Unavailable {
        /// The competitor.
        arm: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A competitor broke down.
    #[error("{arm} failed: {reason}")]
    Failed {
        /// The competitor.
        arm: String,
        /// What happened.
        reason: String,
    },
    /// What is compared with is wrong itself.
    #[error("{arm} is wrong on {task}: {reason}; nothing can be concluded from a comparison with it")]
    Oracle {
        /// The competitor.
        arm: String,
        /// The problem.
        task: String,
        /// What is wrong.
        reason: String,
    },
    /// A baseline does not fit what is measured.
    #[error("the baseline does not fit: {0}")]
    Baseline(String),
    /// There are not enough samples for a decision.
    #[error("{got} independent times of {task}, but {needed} are needed; raise --seconds or --rounds")]
    TooFew {
        /// The problem.
        task: String,
        /// Figures there are.
        got: usize,
        /// Figures needed.
        needed: usize,
    },
    /// The user stopped it.
    #[error("stopped before there was a result")]
    Stopped,
    /// The operating system refused something.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
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
