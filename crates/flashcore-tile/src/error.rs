//! Errors while a program is built, with the Rust line at fault.

use std::{fmt, panic::Location};

use flashcore_ptx::verify::Group;

use crate::{element::Element, scope::Scope};

/// One fault of a kernel's author, and the line that made it.
#[derive(Clone, PartialEq, Debug)]
pub struct Fault {
    /// The Rust line that built the instruction.
    pub at: &'static Location<'static>,
    /// What is wrong with it.
    pub kind: FaultKind,
}

impl Fault {
    /// Its line and its message.
    pub(crate) fn said(&self) -> (Option<String>, String) {
        (Some(format!("{}:{}", self.at.file(), self.at.line())), self.kind.to_string())
    }
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
    /// An instruction that threads must execute together is where they may have diverged.
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
    #[error("the value carried around this loop does not return in the registers it entered with")]
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
    /// Two values of an element do not fill a register.
    #[error("two values are packed as 16-bit floats, not as {}", element.name())]
    Pack {
        /// What they should become.
        element: Element,
    },
    /// More than sixteen named barriers.
    #[error("a CTA has 16 named barriers and all are taken")]
    NamedBarriers,
    /// A thread count that barriers cannot take.
    #[error("a barrier for {threads} threads: the count must be a multiple of 32, at most {block}")]
    BarrierCount {
        /// Requested threads.
        threads: u32,
        /// Threads that execute it.
        block: u32,
    },
    /// Register budgets of the roles exceed what the CTA was launched with, or go the wrong way.
    #[error(
        "a producer with {producer} and consumers with {consumer} registers ask for {asked}, but {threads} threads \
         have {pool}, {entry} each: a producer can give some away, consumers can take them"
    )]
    RegisterBudget {
        /// Registers of a producer thread.
        producer: u32,
        /// Registers of a consumer thread.
        consumer: u32,
        /// Registers asked for by all warpgroups.
        asked: u32,
        /// Threads of the CTA.
        threads: u32,
        /// Registers of a thread at entry.
        entry: u32,
        /// Registers there.
        pool: u32,
    },
    /// Roles that are not the threads of the CTA.
    #[error("the roles have {threads} threads but the CTA has {block}")]
    Roles {
        /// Threads of all roles.
        threads: u32,
        /// Threads of the CTA.
        block: u32,
    },
    /// A thread count that no CTA has.
    #[error("a CTA has from 1 to 1024 threads, not {threads}")]
    Threads {
        /// Requested threads.
        threads: u32,
    },
    /// An instruction for whole warps or warpgroups in a CTA that has a part of one.
    #[error("{what} is executed by whole {needed}s, but {threads} threads come here")]
    PartialGroup {
        /// The instruction.
        what: &'static str,
        /// Who executes it.
        needed: Scope,
        /// Threads of the CTA.
        threads: u32,
    },
    /// A cluster that the target cannot have.
    #[error("a cluster of {ctas} CTAs for {target}: sm_90 and later have clusters of 1 to 16")]
    Cluster {
        /// Requested CTAs.
        ctas: u32,
        /// The target.
        target: flashcore_ptx::target::Target,
    },
    /// An mbarrier count that the hardware cannot hold.
    #[error("an mbarrier counts 1 to {most} {what}, not {count}")]
    MbarrierCount {
        /// What is counted.
        what: &'static str,
        /// How many.
        count: u32,
        /// The largest count.
        most: u32,
    },
    /// Shared memory that was not reserved.
    #[error("byte {offset} of shared memory is used, but only {reserved} are reserved before this line")]
    NotReserved {
        /// The byte.
        offset: u32,
        /// How many are reserved.
        reserved: u32,
    },
    /// An alignment that shared memory does not have.
    #[error("an alignment must be a power of two, at most {most}, not {align}")]
    Align {
        /// What was requested.
        align: u32,
        /// The largest there is.
        most: u32,
    },
    /// A matrix product whose operands do not fit each other.
    #[error("{0}")]
    Product(String),
    /// A division whose result is undefined.
    #[error("division by the constant zero")]
    DivisionByZero,
    /// Two parameters of one name.
    #[error("parameter `{0}` is already declared")]
    ParameterTwice(String),
    /// A program whose name or parameters are not those of its kernel.
    #[error(
        "the kernel `{built}` with {declared} parameters is finished as `{name}` with {values} arguments"
    )]
    Interface {
        /// The name the kernel was started with.
        built: String,
        /// Its parameters.
        declared: usize,
        /// The name given at the end.
        name: String,
        /// The arguments given at the end.
        values: usize,
    },
    /// A name that PTX cannot carry.
    #[error(transparent)]
    Name(#[from] flashcore_ptx::ident::BadIdent),
}

/// A program that was refused: every cause once, with its first line and how often it came up.
#[derive(Clone, PartialEq, Debug)]
pub struct BuildError {
    /// The kernel.
    pub kernel: String,
    /// What is wrong.
    pub faults: Vec<Group>,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}` was refused:", self.kernel)?;
        self.faults.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for BuildError {}
