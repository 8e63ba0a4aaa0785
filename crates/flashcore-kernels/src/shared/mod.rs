//! Ideas that kernels share.

pub mod softmax;
