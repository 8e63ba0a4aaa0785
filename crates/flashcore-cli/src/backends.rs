//! Which backend computes: the name on the command line becomes a [`Backend`]; every command that computes calls this.

use std::sync::Arc;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use flashcore::{Backend, BackendKind};
use flashcore_cpu::Cpu;

use crate::error::CliError;

/// The values of `--backend`.
pub fn names() -> impl TypedValueParser<Value = BackendKind> {
    PossibleValuesParser::new(BackendKind::ALL.map(BackendKind::name)).try_map(|name| name.parse())
}

/// Opens a backend; asking for a number of threads asks for the CPU.
pub fn open(kind: BackendKind, threads: Option<usize>) -> Result<Arc<dyn Backend>, CliError> {
    match (kind, threads) {
        (_, None) => Ok(flashcore::backend(kind)?),
        (BackendKind::Auto | BackendKind::Cpu, Some(threads)) => Ok(Arc::new(Cpu::with_threads(threads)?)),
        _ => Err(CliError::Threads),
    }
}
