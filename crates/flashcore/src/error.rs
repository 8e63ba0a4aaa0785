//! The one error of this crate.

use flashcore_core::{BackendError, ProblemError};

/// Why attention was not computed; the contents of outputs are unspecified then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments do not form a problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No backend computed it.
    #[error(transparent)]
    Backend(BackendError),
}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Problem(problem) => Self::Problem(problem),
            other => Self::Backend(other),
        }
    }
}
