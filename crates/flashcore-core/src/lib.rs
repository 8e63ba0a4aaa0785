//! The attention operation as data: tensors, masks, lengths, and a [`Problem`] that cannot be wrong.
//!
//! Untrusted arguments become a [`Problem`] once, in [`Spec::parse`]; every backend may then rely on it. A problem
//! holds shapes and options but no memory: [`HostCall`] binds it to host tensors, and a GPU backend binds it to
//! device pointers.
//!
//! | type | what it says |
//! | --- | --- |
//! | [`Layout`] | where the elements of a batch × heads × sequence × dim tensor lie |
//! | [`TensorView`], [`TensorViewMut`], [`Tensor`] | host memory with a layout |
//! | [`Mask`] | which keys a query may see |
//! | [`Sequences`] | whether batch entries use only part of their sequence, or sequences are packed |
//! | [`Bias`] | what is added to scores: numbers per query and key, or ALiBi |
//! | [`Dropout`] | which weights are dropped at random |
//! | [`Pages`] | that keys and values are in pages, found through a page table |
//! | [`E4M3`], [`E5M2`], [`Scales`] | 8-bit floats and their scale factors |
//! | [`Problem`] | all of it together, checked: what a plan is made from |
//! | [`Lengths`], [`PageTable`], [`Values`] | the numbers that a call binds to a problem |
//! | [`Instance`] | a problem with its numbers |
//! | [`MergeSpec`], [`MergeProblem`], [`MergeCall`] | the same for merging partial results |
//! | [`BackwardSpec`], [`BackwardProblem`], [`BackwardCall`] | the same for gradients |
//! | [`AppendSpec`], [`AppendProblem`], [`AppendCall`] | the same for new rows of a cache |
//! | [`QuantiseSpec`], [`QuantiseProblem`], [`QuantiseCall`] | the same for rounding tensors to 8 bits |
//! | [`MoeSpec`], [`MoeProblem`], [`MoeCall`] | the same for mixtures of experts; [`MoeGradientCall`] for their gradients |
//! | [`GroupedSpec`], [`GroupedProblem`], [`GroupedCall`] | the same for grouped products |
//! | [`Backend`] | something that computes a problem |
#![forbid(unsafe_code)]

mod append;
mod backend;
mod backward;
mod bias;
mod call;
mod dropout;
mod dtype;
mod error;
mod float8;
mod grouped;
mod layout;
mod lengths;
mod mask;
mod merge;
mod moe;
mod operand;
mod pages;
mod problem;
mod quantise;
mod quantised;
mod scales;
mod tensor;
#[cfg(test)]
mod tests;
mod turned;
mod values;

pub use append::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendSpec, AppendValues, Rotary, Slots,
};
pub use backend::{Backend, BackendError, Ran};
pub use backward::{
    BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, GradientsMut, RowSums, RowTerms,
};
pub use bias::{Bias, BiasError, HeadBias};
pub use call::{Data, DataMut, HostCall};
pub use dropout::{DROPOUT_FACTORS, DROPOUT_STEP, Dropout, DropoutWords, HeadDropout};
pub use dtype::{DType, Element};
pub use error::{Axis, Operand, ProblemError};
pub use float8::{E4M3, E5M2};
pub use grouped::{GroupedCall, GroupedError, GroupedInputs, GroupedProblem, GroupedSpec, Grouping};
pub use layout::{Dims, Layout};
pub use lengths::{Index, Lengths, Sequence, Sequences};
pub use mask::{Align, Mask};
pub use merge::{MAX_LISTED, MergeCall, MergeProblem, MergeSpec, PartError, Parts};
pub use moe::{
    Activation, ExpertLayout, ExpertView, GateUp, Groups, Ids, MAX_EXPERTS, MAX_TOP_K, MoeCall, MoeError,
    MoeGradientCall, MoeGradientsMut, MoeInputs, MoeProblem, MoeSpec, Routed, Routing, Score, Shard, Shared,
    Sigmoid,
};
pub use pages::{Keys, PageTable, Pages};
pub use problem::{MAX_EXTENT, Problem, Spec};
pub use quantise::{
    Granularity, QuantiseCall, QuantiseProblem, QuantiseSpec, QuantisedMut, SMALLEST_FACTOR, ScaleError,
};
pub use quantised::{BLOCK_ROWS, forward_quantised};
pub use scales::{Factors, Scales};
pub use tensor::{Tensor, TensorView, TensorViewMut};
pub use turned::{COUNT_ROWS, COUNTS, TURNED_KEYS, turn_values, turned_dims, turned_place, unturned_values};
pub use values::{Instance, Values};
