//! A kernel decoded once into micro-operations: operands are register slots, labels are program counters.
//!
//! Made by [`Program::decode`] for each launch; executed by `step/`.

mod control;
mod convert;
mod copy;
mod decode;
mod float;
mod half;
mod integer;
mod logic;
mod matrix;
mod memory;
mod operand;
mod sync;
pub(crate) mod uop;

pub(crate) use operand::{Layout, SHARED_BASE};
pub(crate) use uop::*;

use flashcore_ptx::table::Class;

/// Where instruction `pc` came from and how it counts.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// Index of the statement in the kernel's body.
    pub(crate) statement: usize,
    /// The kind of work, for the counters.
    pub(crate) class: Class,
    /// The instruction as text.
    pub(crate) text: String,
}

/// One decoded instruction.
pub(crate) struct Code {
    /// The predicate slot it executes under, and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    /// What it does.
    pub(crate) uop: Uop,
}

/// A decoded kernel.
pub(crate) struct Program {
    /// The kernel's name.
    pub(crate) kernel: String,
    /// The instructions; the program counter is an index into this.
    pub(crate) code: Vec<Code>,
    /// For each instruction, where it came from.
    pub(crate) origins: Vec<Origin>,
    /// How many register slots of each kind a warp needs.
    pub(crate) registers: RegisterCounts,
    /// Where variables and parameters lie.
    pub(crate) layout: Layout,
}

/// Register slots of a warp.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct RegisterCounts {
    pub(crate) narrow: u32,
    pub(crate) wide: u32,
    pub(crate) predicates: u32,
}
