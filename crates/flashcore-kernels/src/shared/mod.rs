//! Ideas that kernels share.

pub(crate) mod epilogue;
pub mod load;
pub mod mask;
pub(crate) mod scale;
pub mod schedule;
pub mod softmax;
