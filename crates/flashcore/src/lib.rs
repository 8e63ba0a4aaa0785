//! FlashAttention in Rust: exact attention in memory linear in the sequence length.
//!
//! [`attention`] takes views of Q, K and V, options by method, and runs on the best backend that the machine has:
//!
//! ```
//! use flashcore::{Mask, Tensor, attention};
//!
//! # fn main() -> Result<(), flashcore::Error> {
//! let dims = [1, 8, 128, 64]; // batch, heads, sequence, dim
//! let q = Tensor::bhsd(vec![0.5_f32; 8 * 128 * 64], dims)?;
//! let result = attention(q.view(), q.view(), q.view()).mask(Mask::CAUSAL).run()?;
//! assert_eq!(result.out.data().len(), 8 * 128 * 64);
//! assert!(result.lse.at(0, 7, 127) > result.lse.at(0, 7, 0)); // later rows see more keys
//! # Ok(())
//! # }
//! ```
//!
//! [`merge`] combines attention over parts of the keys, for contexts that are split over machines or over time.
//!
//! [`moe()`] computes a mixture of experts: each token passes through a few of many small networks.
//!
//! [`grouped_mm`] multiplies matrices group by group: dense, or divided by offsets.
//!
//! [`Attention::run_for_grad`] keeps what gradients need, [`Differentiable::grad`] computes them; [`Attention::grad`] is the
//! same for callers who keep output and LSE themselves. GPUs compute gradients of f16 and bf16 tensors: with
//! [`BackendKind::Auto`] those of f32 run on the CPU, with [`BackendKind::Cuda`] they are an error that says so.
//!
//! # What is computed
//!
//! `O = softmax(scale · QKᵀ + mask) · V` for each head, and with it the natural logarithm of each row's
//! softmax denominator (LSE). Sums are accumulated in f32, whatever the tensors hold: `f32`, [`struct@f16`] or [`bf16`].
//!
//! * Tensors are batch × heads × sequence × dim; any strides will do as long as the features of a head are
//!   contiguous ([`TensorView::bhsd`], [`TensorView::bshd`], [`TensorView::strided`]).
//! * Q may have a multiple of the heads of K and V (GQA, MQA); V may have a different dim from Q and K.
//! * Masks align to the bottom right where queries and keys differ in number; [`Mask::top_left`] changes that.
//! * A row that sees no key is zero with an LSE of −∞. Sequences of length 0 are allowed.
//! * Memory beyond used lengths ([`Lengths`]) or between strides never affects a result, NaN included. NaN and Inf
//!   in keys and values that are in use but hidden by a mask may affect one.
//! * The same call gives the same bits every time; with [`Attention::batch_invariant`] a row's bits do not depend on
//!   what else is in its batch either.
//!
//! # Features
//!
//! `cpu` (default): the CPU backend. `cuda` (default): NVIDIA GPUs, whose driver is loaded at run time; a machine
//! without one simply has no such backend. Without any backend every call is an error.
#![deny(unsafe_code)]

mod attention;
mod backend;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod gradient;
mod grouped;
mod merge;
mod moe;
mod output;
mod quantise;

pub use attention::{Attention, attention};
pub use backend::{BackendKind, Found, ParseBackendError, available, backend};
pub use error::Error;
pub use flashcore_core::{
    Activation, Align, AppendProblem, AppendSpec, Axis, BLOCK_ROWS, Backend, BackendError, BackwardProblem,
    BackwardSpec, DType, Dims, Dropout, DropoutWords, E4M3, E5M2, Element, ExpertLayout, ExpertView, Factors,
    GateUp, Granularity, GroupedError, GroupedProblem, GroupedSpec, Grouping, Groups, HeadDropout, Ids,
    Index, Instance, Layout, Lengths, Mask, MergeProblem, MergeSpec, MoeError, MoeProblem, MoeSpec, Operand,
    PageTable, Pages, Parts, Problem, ProblemError, QuantiseProblem, QuantiseSpec, Ran, Rotary, Routing,
    RowSums, Scales, Score, Sequences, Shard, Shared, Sigmoid, Slots, Spec, Tensor, TensorView,
    TensorViewMut, Values,
};
pub use gradient::{AttentionGrad, Differentiable, Gradients};
pub use grouped::{GroupedMm, GroupedOutput, grouped_mm};
pub use half::{bf16, f16};
pub use merge::{Merge, merge, merge_stacked};
pub use moe::{Moe, MoeGradients, MoeOutput, moe};
pub use output::{Lse, Output};
pub use quantise::{Quantise, Quantised, quantise};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
