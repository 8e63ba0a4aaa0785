//! What can go wrong while a program is built, with the Rust line that did it.

use std::{fmt, panic::Location};

use crate::scope::Scope;

/// One fault of a kernel's author, and the line that made it.
#[derive(Clone, PartialEq, Debug)]
pub struct Fault {
    /// The Rust line that built the instruction.
    pub at: &'static Location<'static>,
    /// What is wrong with it.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.at.file(), self.at.line(), self.kind)
    }
}

/// What is wrong with a line of a kernel.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// The instruction table knows no such form.
    #[error("{0}")]
    Form(String),
    /// An instruction that threads must execute together stands where they may have parted.
    #[error("{what} must be executed by a whole {needed}, but control is only {here}-uniform here")]
    Divergent {
        /// The instruction.
        what: &'static str,
        /// Who must execute it together.
        needed: Scope,
        /// How far threads are known to be together.
        here: Scope,
    },
    /// A condition is not as uniform as its type claims.
    #[error("a {needed}-uniform condition is needed, but this one is only {actual}-uniform")]
    NotUniform {
        /// What the type claims.
        needed: Scope,
        /// What is known.
        actual: Scope,
    },
    /// A variable is set to a value, or in a place, less uniform than the variable.
    #[error("a {var}-uniform variable is set to a {value}-uniform value in {here}-uniform control flow")]
    Variable {
        /// Scope of the variable.
        var: Scope,
        /// Scope of the value.
        value: Scope,
        /// Scope of the control flow.
        here: Scope,
    },
    /// Matrix groups in flight differ between two ways to the same place.
    #[error("{before} wgmma groups are in flight at the start of this block but {after} at its end")]
    Unbalanced {
        /// Groups at the start.
        before: usize,
        /// Groups at the end.
        after: usize,
    },
    /// A token that came round a loop differs from the one that entered it.
    #[error("the value carried round this loop does not come back in the registers it entered with")]
    Carried,
    /// More shared memory than an SM has.
    #[error("the kernel needs {bytes} bytes of shared memory but a CTA has at most {most}")]
    SharedMemory {
        /// Bytes needed.
        bytes: u32,
        /// Bytes there.
        most: u32,
    },
    /// A shared-memory tile whose base or extent the hardware cannot take.
    #[error("{0}")]
    Tile(String),
    /// More than sixteen named barriers.
    #[error("a CTA has 16 named barriers and all are taken")]
    NamedBarriers,
    /// A thread count that barriers cannot take.
    #[error("a barrier for {threads} threads: the count must be a multiple of 32, at most {block}")]
    BarrierCount {
        /// Threads asked for.
        threads: u32,
        /// Threads of the CTA.
        block: u32,
    },
    /// Register budgets of the roles exceed what the CTA was launched with.
    #[error("the roles ask for {asked} registers but {threads} threads at {entry} each have {pool}")]
    RegisterBudget {
        /// Registers asked for by all warpgroups.
        asked: u32,
        /// Threads of the CTA.
        threads: u32,
        /// Registers of a thread at entry.
        entry: u32,
        /// Registers there.
        pool: u32,
    },
    /// A name that PTX cannot carry.
    #[error(transparent)]
    Name(#[from] flashcore_ptx::ident::BadIdent),
}

/// A program that was refused: every fault, each with its line.
#[derive(Clone, PartialEq, Debug)]
pub struct BuildError {
    /// The kernel.
    pub kernel: String,
    /// What is wrong.
    pub faults: Vec<String>,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}` was refused:", self.kernel)?;
        self.faults.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for BuildError {}
