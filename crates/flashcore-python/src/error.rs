//! Why a call failed, and which Python exception says so.

use flashcore::{BackendError, DType, Dims, MoeError, Operand, ProblemError, cuda};
use pyo3::{
    exceptions::{
        PyBufferError, PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError,
    },
    prelude::*,
};

use crate::array::{Order, Place};

/// Why attention was not computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(
        "{operand} is a {kind}, which does not support DLPack; pass a tensor of torch, JAX, CuPy, NumPy or the like"
    )]
    NotATensor { operand: Operand, kind: String },
    #[error(
        "{operand} is {dtype}; convert it to float16, bfloat16 or float32, for example by {operand}.astype(\"float32\") \
         or, in torch, {operand}.float()"
    )]
    Elements { operand: Operand, dtype: String },
    #[error("{operand} could not be exported by DLPack: {reason}")]
    NotShared { operand: Operand, reason: String },
    #[error("{operand} has {rank} dimensions but {} are needed: {order}", order.ranks())]
    Rank { operand: Operand, rank: usize, order: Order },
    #[error("q has {first} dimensions but {operand} has {other}; give both the same: {order}")]
    Ranks { operand: Operand, other: usize, first: usize, order: Order },
    #[error("{operand} has {rank} dimensions but 2 or 3 are needed: rows, columns, or groups before them")]
    FactorRank { operand: Operand, rank: usize },
    #[error("{operand} has {rank} dimensions but 3 are needed: experts, rows, columns")]
    ExpertRank { operand: Operand, rank: usize },
    #[error("{operand} has strides {strides:?}; copy it, strides must not be negative")]
    NegativeStride { operand: Operand, strides: Vec<i64> },
    #[error("{operand} is on a device of DLPack type {kind}; move it to the CPU or an NVIDIA GPU")]
    DeviceKind { operand: Operand, kind: i32 },
    #[error("{operand} is on {place} but q is on {first}; move them to one device")]
    Places { operand: Operand, place: Place, first: Place },
    #[error("{operand} is on {place} but {because} is on {first}; move them to one device")]
    OtherPlace { operand: Operand, place: Place, because: Operand, first: Place },
    #[error("{operand} is {got} but {because} is {expected}; convert them to one element type")]
    OtherDType { operand: Operand, got: DType, because: Operand, expected: DType },
    #[error(
        "{operand} has torch's negative bit, whose memory holds other numbers than it; pass {operand}.resolve_neg()"
    )]
    Negated { operand: Operand },
    #[error("{operand} is read-only; pass a writable tensor")]
    ReadOnly { operand: Operand },
    #[error("{operand} shares memory with out; pass an `out` with memory of its own, or omit it")]
    Shared { operand: Operand },
    #[error("{operand} shares memory with {cache}; copy one of them")]
    SharedCache { operand: Operand, cache: Operand },
    #[error("cosines and sines must be positions x half of the rotated features, both alike and contiguous")]
    RotaryShape,
    #[error(
        "slots are 32 bits wide; convert them to int64, for example by x.astype(\"int64\") or, in torch, x.long()"
    )]
    NarrowSlots,
    #[error("{operand} shares memory with {grad}; give each gradient memory of its own")]
    SharedGradient { operand: Operand, grad: Operand },
    #[error("{operand} is at address {address:#x}, not aligned to its {bytes}-byte elements; copy it")]
    Unaligned { operand: Operand, address: usize, bytes: usize },
    #[error("lse must be float32, dense, {extents:?}")]
    Lse { extents: Vec<usize> },
    #[error(
        "{given} sinks for {heads} query heads; give one logit per query head, of shape ({heads},) and contiguous"
    )]
    Sinks { given: usize, heads: usize },
    #[error(
        "slopes must be float32, dense, {heads} (one for each query head) or {sequences} x {heads}; convert or copy them"
    )]
    Slopes { sequences: usize, heads: usize },
    #[error(
        "{operand} are {dtype}; convert them to int32, for example by x.astype(\"int32\") or, in torch, x.int()"
    )]
    NotIntegers { operand: Operand, dtype: String },
    #[error(
        "page_table is {dtype}; convert it to int32, for example by x.astype(\"int32\") or, in torch, x.int()"
    )]
    TableElements { dtype: String },
    #[error("page_table must be sequences x pages with contiguous rows; copy it, in torch by x.contiguous()")]
    TableShape,
    #[error("page_table has {given} rows but {needed} are needed: one for each sequence")]
    TableRows { given: usize, needed: usize },
    #[error("{operand} has {rank} dimensions but with a page table 4 are needed: {dimensions}")]
    PageRank { operand: Operand, rank: usize, dimensions: &'static str },
    #[error(
        "the seed is {dtype}; convert it to int64, for example by x.astype(\"int64\") or, in torch, x.long()"
    )]
    SeedElements { dtype: String },
    #[error("the seed must be one 64-bit or two 32-bit numbers; pass an int64 tensor with one element")]
    SeedShape,
    #[error("dropout cannot be combined with key ranges; pass the mask as bias")]
    RangesAndDropout,
    #[error("{operand} must have one dimension and no gaps; copy them, in torch by x.contiguous()")]
    NotAList { operand: Operand },
    #[error("{operand} have {given} entries but {needed} are needed: {what}")]
    Count { operand: Operand, given: usize, needed: usize, what: &'static str },
    #[error("{operand}[{at}] is {value} but must be from 0 to 4294967295")]
    Negative { operand: Operand, at: usize, value: i64 },
    #[error("{operand} have {other} bytes each but the lengths of q {first}; give both the same type")]
    Widths { operand: Operand, other: u32, first: u32 },
    #[error(
        "{given} factors of {operand} for a batch of {batch} with {heads} key heads; give one float32 number, or one for each"
    )]
    Factors { operand: Operand, given: usize, batch: usize, heads: usize },
    #[error("{given} factors are given; pass {}", if *cached { "two: those of k and of v" } else { "three factors: those of q, of k and of v" })]
    FactorTensors { given: usize, cached: bool },
    #[error(
        "factors cannot be combined with a mask whose batch entries use different keys; pass key_lengths instead"
    )]
    RangesAndFactors,
    #[error("per is `{given}`; use \"tensor\", \"head\", \"block\" or \"channel\"")]
    Granularity { given: String },
    #[error("there is nothing to merge; give at least one part")]
    NoParts,
    #[error("{parts} parts but {lses} log-sum-exps; give one for each part")]
    PartLses { parts: usize, lses: usize },
    #[error("all parts must have the same shape and memory order; copy them, in torch by x.contiguous()")]
    OtherPart,
    #[error("packed sequences need offsets of queries and of keys; pass both")]
    Offsets,
    #[error("key ranges cannot be combined with lengths; pass one of them")]
    RangesAndLengths,
    #[error("{given} key ranges for a batch of {batch}; give one per batch entry")]
    RangeCount { given: usize, batch: usize },
    #[error("batch entry {entry} uses the keys from {start} to {end}, of {seq}")]
    Range { entry: usize, start: u32, end: u32, seq: usize },
    #[error(
        "CUDA was initialised before the fork and cannot be used in a forked process; start processes with `spawn`"
    )]
    Forked,
    #[error("{0}; update jaxlib and flashcore to compatible versions")]
    Xla(&'static str),
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// For callers whose experts' matrices are transposed.
    #[error("{}", of_transposed(.0))]
    Transposed(MoeError),
    /// For callers whose tensors are batch x sequence x heads x dim.
    #[error("{}", .0.to_string().replace("heads x sequence", "sequence x heads"))]
    Turned(ProblemError),
    #[error("{}", chain(.0))]
    Backend(#[from] BackendError),
    #[error("{}", chain(.0))]
    Cuda(#[from] cuda::Error),
    #[error(transparent)]
    Python(#[from] PyErr),
}

impl CallError {
    pub(crate) fn dtypes(operand: Operand, got: DType, expected: DType) -> Self {
        ProblemError::DType { operand, got, expected }.into()
    }

    /// The error in the words of a caller whose tensors have that order; the core knows batch x heads x sequence x dim.
    pub(crate) fn in_order(self, order: Order) -> Self {
        match (self, order) {
            (Self::Problem(error), Order::Bshd) => turned(error),
            (error, _) => error,
        }
    }
}

impl From<cuda::driver::Error> for CallError {
    fn from(error: cuda::driver::Error) -> Self {
        cuda::Error::from(error).into()
    }
}

/// What kind of mistake an error tells, by the exception that stands for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    Type,
    Value,
    NotImplemented,
    Memory,
    Buffer,
    Runtime,
}

impl CallError {
    pub(crate) fn class(&self) -> Class {
        match self {
            Self::NotATensor { .. }
            | Self::Elements { .. }
            | Self::NotIntegers { .. }
            | Self::SeedElements { .. }
            | Self::OtherDType { .. }
            | Self::TableElements { .. }
            | Self::Problem(
                ProblemError::DType { .. }
                | ProblemError::KeyDType { .. }
                | ProblemError::OutDType { .. }
                | ProblemError::AccumulateDType { .. },
            ) => Class::Type,
            Self::Problem(ProblemError::PagedGradients) => Class::NotImplemented,
            Self::Problem(ProblemError::OutOfMemory { .. })
            | Self::Cuda(cuda::Error::Driver(cuda::driver::Error::OutOfMemory { .. })) => Class::Memory,
            Self::ReadOnly { .. } | Self::NotShared { .. } => Class::Buffer,
            Self::Backend(BackendError::Unsupported { .. }) | Self::Cuda(cuda::Error::Plan(_)) => {
                Class::NotImplemented
            }
            Self::Backend(_) | Self::Cuda(_) | Self::Forked | Self::Xla(_) | Self::Python(_) => {
                Class::Runtime
            }
            _ => Class::Value,
        }
    }
}

impl From<CallError> for PyErr {
    fn from(error: CallError) -> Self {
        let text = error.to_string();
        if let CallError::Python(error) = error {
            return error;
        }
        match error.class() {
            Class::Type => PyTypeError::new_err(text),
            Class::Value => PyValueError::new_err(text),
            Class::NotImplemented => PyNotImplementedError::new_err(text),
            Class::Memory => PyMemoryError::new_err(text),
            Class::Buffer => PyBufferError::new_err(text),
            Class::Runtime => PyRuntimeError::new_err(text),
        }
    }
}

/// The error with heads and sequence of all extents exchanged, where it tells any.
fn turned(mut error: ProblemError) -> CallError {
    let turn = |dims: &mut Dims| std::mem::swap(&mut dims.heads, &mut dims.seq);
    match &mut error {
        ProblemError::Mismatch { other, dims, .. } => [other, dims].into_iter().for_each(turn),
        ProblemError::Empty { dims, .. } | ProblemError::Extent { dims, .. } => turn(dims),
        _ => return error.into(),
    }
    CallError::Turned(error)
}

/// What is wrong with experts' matrices, in the words of a caller who has their rows as columns.
fn of_transposed(error: &MoeError) -> String {
    match error {
        MoeError::Mismatch { operand, what, got, expected, because } => {
            let what = match *what {
                "rows" => "columns",
                "columns" => "rows",
                other => other,
            };
            format!(
                "{operand} has {got} {what} but {expected} are needed to match {because}; with transposed gate_up is experts x \
                 hidden x 2*intermediate and down experts x intermediate x hidden, those of a shared expert too"
            )
        }
        MoeError::GateUpRows { operand, dims } => format!(
            "{operand} is {}x{}x{}: with transposed it needs at least one expert and an even number of columns, half gate and \
             half up",
            dims.batch, dims.dim, dims.seq
        ),
        other => other.to_string(),
    }
}

/// The message with all its causes, outermost first.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
