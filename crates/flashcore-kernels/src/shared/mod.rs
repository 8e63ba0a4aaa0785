//! Ideas that kernels share.

pub(crate) mod epilogue;
pub mod lengths;
pub mod load;
pub mod mask;
pub(crate) mod scale;
pub mod schedule;
pub(crate) mod sinks;
pub mod softmax;
