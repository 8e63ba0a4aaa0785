//! Which backends there are, in order of preference, and how one is picked.
//!
//! A new backend is one row of [`CANDIDATES`]. [`crate::Attention`], [`crate::AttentionGrad`], [`crate::Merge`] and
//! [`crate::Moe`] call
//! [`Choice::run`].

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, OnceLock},
};

use flashcore_core::{Backend, BackendError, Ran};

/// The backend to compute on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum BackendKind {
    /// The best backend found that supports the problem.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl BackendKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Cpu, Self::Cuda];

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not a backend's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown backend `{name}`; use auto, cpu or cuda")]
pub struct ParseBackendError {
    name: String,
}

impl FromStr for BackendKind {
    type Err = ParseBackendError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or_else(|| ParseBackendError { name: name.to_owned() })
    }
}

/// A backend that this build knows; opened at most once per process.
struct Candidate {
    kind: BackendKind,
    open: fn() -> Result<Arc<dyn Backend>, BackendError>,
    opened: OnceLock<Arc<dyn Backend>>,
}

/// The backends of this build, best first.
static CANDIDATES: &[&Candidate] = &[
    #[cfg(feature = "cuda")]
    &CUDA,
    #[cfg(feature = "cpu")]
    &CPU,
];

#[cfg(feature = "cuda")]
static CUDA: Candidate = Candidate {
    kind: BackendKind::Cuda,
    open: || match crate::cuda::Cuda::shared(0) {
        Ok(cuda) => Ok(Arc::new(cuda)),
        Err(error) => Err(error.on_opening()),
    },
    opened: OnceLock::new(),
};

#[cfg(feature = "cpu")]
static CPU: Candidate = Candidate {
    kind: BackendKind::Cpu,
    open: || Ok(Arc::new(flashcore_cpu::Cpu::from_environment()?)),
    opened: OnceLock::new(),
};

impl Candidate {
    fn get(&self) -> Result<Arc<dyn Backend>, BackendError> {
        if let Some(backend) = self.opened.get() {
            return Ok(backend.clone());
        }
        let backend = (self.open)()?;
        Ok(self.opened.get_or_init(|| backend).clone())
    }

    fn is(&self, kind: BackendKind) -> bool {
        kind == BackendKind::Auto || kind == self.kind
    }
}

/// Opens a backend; for [`BackendKind::Auto`] the best that this machine has.
pub fn backend(kind: BackendKind) -> Result<Arc<dyn Backend>, crate::Error> {
    let mut refusal = not_built(kind);
    for candidate in CANDIDATES.iter().filter(|candidate| candidate.is(kind)) {
        match candidate.get() {
            Err(error @ BackendError::Unavailable { .. }) => refusal = error,
            opened => return Ok(opened?),
        }
    }
    Err(refusal.into())
}

/// A backend of this build.
pub struct Found {
    /// Which.
    pub kind: BackendKind,
    /// The backend, or why it cannot be used on this machine.
    pub backend: Result<Arc<dyn Backend>, crate::Error>,
}

/// The backends of this build, best first.
pub fn available() -> Vec<Found> {
    let found = |c: &&Candidate| Found { kind: c.kind, backend: c.get().map_err(Into::into) };
    CANDIDATES.iter().map(found).collect()
}

fn not_built(kind: BackendKind) -> BackendError {
    let reason = match kind {
        BackendKind::Auto => "this build of flashcore contains none; enable the cargo feature cpu or cuda",
        _ => "this build of flashcore does not contain it; enable the cargo feature of that name",
    };
    BackendError::Unavailable { backend: kind.name(), reason: reason.to_owned() }
}

/// What a caller wants to compute with.
#[derive(Clone, Copy)]
pub(crate) enum Choice<'a> {
    Kind(BackendKind),
    This(&'a dyn Backend),
}

impl Choice<'_> {
    /// Computes something; with [`BackendKind::Auto`] a backend that does not support it passes it to the next.
    pub(crate) fn run(
        &self,
        mut compute: impl FnMut(&dyn Backend) -> Result<Ran, BackendError>,
    ) -> Result<Ran, BackendError> {
        let kind = match *self {
            Self::This(backend) => return compute(backend),
            Self::Kind(kind) => kind,
        };
        let mut refusal = not_built(kind);
        for candidate in CANDIDATES.iter().filter(|candidate| candidate.is(kind)) {
            match candidate.get().and_then(|backend| compute(&*backend)) {
                Err(error @ (BackendError::Unsupported { .. } | BackendError::Unavailable { .. })) => {
                    refusal = error
                }
                done => return done,
            }
        }
        Err(refusal)
    }
}
