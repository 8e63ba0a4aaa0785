//! Parts that kernels are made of; what only one kernel uses lives with it.

pub mod lengths;
pub(crate) mod maps;
pub mod mask;
pub(crate) mod row_end;
pub(crate) mod scale;
pub(crate) mod sections;
pub(crate) mod sinks;
pub mod softmax;
pub(crate) mod tensor;
pub(crate) mod wide;
