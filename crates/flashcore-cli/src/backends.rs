//! Which backend computes: the name on the command line becomes a [`Backend`]; every command that computes calls this.
//!
//! The simulator has a name too, but is no [`BackendKind`]: users of the library link no test tools.

use std::sync::Arc;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use flashcore::{Backend, BackendError, BackendKind};

/// What `--backend` names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Named {
    /// A backend of the library.
    Kind(BackendKind),
    /// The kernels of a GPU, run on the CPU with every check on.
    Simulator,
}

/// The values of `--backend`.
pub fn names() -> impl TypedValueParser<Value = Named> {
    const SIMULATOR: &str = "sim";
    let known = BackendKind::ALL.map(BackendKind::name).into_iter().chain([SIMULATOR]);
    PossibleValuesParser::new(known).try_map(|name| match name.as_str() {
        SIMULATOR => Ok(Named::Simulator),
        name => name.parse().map(Named::Kind),
    })
}

/// Tries `work` on each backend until one takes the problem; the last refusal is the error.
pub fn first_to_take<T>(
    candidates: &[Arc<dyn Backend>],
    mut work: impl FnMut(&dyn Backend) -> Result<T, BackendError>,
) -> Result<(&dyn Backend, T), BackendError> {
    let (last, others) = candidates.split_last().ok_or_else(none_left)?;
    for backend in others {
        match work(&**backend) {
            Err(BackendError::Unsupported { .. } | BackendError::Unavailable { .. }) => {}
            done => return done.map(|value| (&**backend, value)),
        }
    }
    work(&**last).map(|value| (&**last, value))
}

fn none_left() -> BackendError {
    BackendError::Unavailable { backend: "auto", reason: "this build contains no backend".to_owned() }
}

#[cfg(test)]
mod tests {
    use flashcore_cpu::Cpu;

    use super::*;

    fn refusal() -> BackendError {
        BackendError::Unsupported { backend: "x", what: "this".to_owned(), instead: "do that".to_owned() }
    }

    #[test]
    fn a_refusal_leaves_the_problem_to_the_next() {
        let two: Vec<Arc<dyn Backend>> = vec![Arc::new(Cpu::new()), Arc::new(Cpu::new())];
        let mut calls = 0;
        let taken = first_to_take(&two, |_| {
            calls += 1;
            if calls == 1 { Err(refusal()) } else { Ok(calls) }
        });
        assert_eq!(taken.map(|(_, value)| value).ok(), Some(2));
        assert!(first_to_take::<()>(&two, |_| Err(refusal())).is_err(), "all refused");
        assert!(first_to_take::<()>(&[], |_| Ok(())).is_err(), "none there");
    }

    #[test]
    fn a_failure_is_not_hidden_by_the_next() {
        let two: Vec<Arc<dyn Backend>> = vec![Arc::new(Cpu::new()), Arc::new(Cpu::new())];
        let mut calls = 0;
        let failed = first_to_take::<()>(&two, |_| {
            calls += 1;
            Err(BackendError::Failed { backend: "x", source: "broken".into() })
        });
        assert!(failed.is_err() && calls == 1, "{calls} calls");
    }
}
