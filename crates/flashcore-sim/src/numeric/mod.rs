//! Numbers as the GPU computes them: small float formats, rounding modes, flushing, approximations.
//!
//! Called by the decoders in `program/` (which build lane functions from these) and by the tensor-core steps.

pub(crate) mod approx;
pub(crate) mod double;
pub(crate) mod format;
pub(crate) mod single;
pub(crate) mod small;

pub(crate) use format::{BF16, E4M3, E5M2, F16, F32, Format, Rounding};
