//! Tests written as PTX files: the program, with its launch and expected results in comments.
//!
//! One file serves the simulator and a GPU alike: a [`Case`] is a module, a launch and buffers, all plain data.
//!
//! ```text
//! // run: add grid=1 block=4            a launch; arguments follow in the order of the parameters
//! // arg: in u32 1 2 3 4                a buffer that is read
//! // arg: out u32 2 4 6 8               a buffer that is written, with what must be in it
//! // arg: inout u32 0 -> 10             both
//! // and: 11 12                         more numbers of the argument before
//! // arg: u32 7 8                       two numbers (u32, u64 or f32)
//! // arg: map 0 bf16 dims=64,8 strides=128 box=64,8 swizzle=128     a tensor map over the buffer of argument 0
//! ```
//!
//! Further words of `run:` are `cluster=`, `smem=`, and `within=N`: results may differ by N units in the last place.
//! `// finding: Kind …` says that a checker must report that kind, and that the others named may follow from it: such a
//! launch has no defined result and is not run on a GPU. `// apart: Kind …` says that one of these kinds must be
//! reported if lanes diverge. `// note: Kind` says that a note must be reported, which is not a failure.
//! Numbers are decimal, hexadecimal bit patterns (`0x3f800000`), floats for float types, ranges (`0..32`),
//! repetitions (`7*32`), and for outputs `_`, anything.

mod read;
mod values;

pub use read::{LoadError, load, read};
pub use values::Expected;

use flashcore_ptx::{
    launch::{LaunchSpec, Slot},
    parse::Parsed,
};
use std::sync::Arc;

/// One launch with what must come of it.
#[derive(Clone, Debug)]
pub struct Case {
    /// File name and entry, for reports.
    pub name: String,
    pub parsed: Arc<Parsed>,
    pub spec: LaunchSpec,
    pub buffers: Vec<Bound>,
    /// The kind of finding that must be reported, then kinds that may follow from it, as their `Debug` text; a case
    /// with findings is not for a GPU.
    pub findings: Vec<String>,
    /// Whether one of them must be reported where lanes run apart, and elsewhere need not.
    pub apart: bool,
    /// Kinds of notes that must be reported; they say nothing against the result.
    pub notes: Vec<String>,
}

/// One buffer of a case.
#[derive(Clone, PartialEq, Debug)]
pub struct Bound {
    pub slot: Slot,
    /// Its bytes before the launch; `None` for memory that the kernel must write before it reads.
    pub input: Option<Vec<u8>>,
    /// What must be in it afterwards.
    pub expected: Option<Expected>,
}

impl Bound {
    /// Its size.
    pub fn len(&self) -> usize {
        let written = self.expected.as_ref().map_or(0, Expected::bytes);
        self.input.as_ref().map_or(written, Vec::len)
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Case {
    /// Compares results with what must come out; `bytes_of` gives the bytes of a slot after the launch.
    pub fn check<'b>(&self, bytes_of: impl Fn(Slot) -> Option<&'b [u8]>) -> Result<(), String> {
        for bound in &self.buffers {
            let Some(expected) = &bound.expected else { continue };
            let bytes = bytes_of(bound.slot).ok_or_else(|| format!("no bytes for slot {}", bound.slot.0))?;
            expected.check(bytes).map_err(|e| format!("{}, slot {}: {e}", self.name, bound.slot.0))?;
        }
        Ok(())
    }
}
