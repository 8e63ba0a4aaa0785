//! A kernel decoded once into micro-operations: operands are register slots, labels are program counters. Functions it
//! may call come before it in the code, callees before their callers: so the lowest program counter is the deepest call,
//! and lanes that wait for others reconverge with them after it.
//!
//! Made by [`Program::decode`] for each launch; executed by `step/`.

mod call;
mod carry;
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
mod parts;
mod routine;
mod sync;
pub(crate) mod uop;
mod video;
mod wmma;

pub(crate) use operand::{Layout, RESERVED_BYTES, SHARED_BASE};
pub(crate) use routine::{Routine, function_at};
pub(crate) use uop::*;

use flashcore_ptx::{provenance::Unit, table::Class};

/// Where instruction `pc` came from and how it counts.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// The body it stands in.
    pub(crate) unit: Unit,
    /// Index of the statement in that body.
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
    /// Where the kernel begins.
    pub(crate) entry: u32,
    /// The functions that it may call.
    pub(crate) routines: Vec<Routine>,
    /// Where variables and parameters lie.
    pub(crate) layout: Layout,
    /// Whether it asks for the barrier of its grid, for which all CTAs must be resident.
    pub(crate) cooperative: bool,
}

/// Register slots of a warp.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct RegisterCounts {
    pub(crate) narrow: u32,
    pub(crate) wide: u32,
    pub(crate) predicates: u32,
}
