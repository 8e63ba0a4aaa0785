//! Which backend computes: the name on the command line becomes a [`Backend`]; every command that computes calls this.

use clap::ValueEnum;
use flashcore_core::{Backend, BackendError};
use flashcore_cpu::Cpu;

/// `--backend NAME`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug, Default)]
pub enum BackendName {
    /// The fastest one found
    #[default]
    Auto,
    /// This machine's processor
    Cpu,
}

/// Opens a backend; `threads` is a matter of the CPU alone.
pub fn open(name: BackendName, threads: Option<usize>) -> Result<Box<dyn Backend>, BackendError> {
    match name {
        BackendName::Auto | BackendName::Cpu => {
            let cpu = threads.map_or_else(|| Ok(Cpu::new()), Cpu::with_threads)?;
            Ok(Box::new(cpu))
        }
    }
}
