//! Why a call failed, and which Python exception says so.

use flashcore::{BackendError, DType, Operand, ProblemError, cuda};
use pyo3::{
    exceptions::{
        PyBufferError, PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError,
    },
    prelude::*,
};

use crate::array::Place;

/// Why attention was not computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(
        "{operand} is a {kind}, which does not speak DLPack; pass a tensor of torch, JAX, CuPy, NumPy or the like"
    )]
    NotATensor { operand: Operand, kind: String },
    #[error(
        "{operand} has {rank} dimensions but 4 are needed: batch, heads, sequence, dim in the order of `layout`"
    )]
    Rank { operand: Operand, rank: usize },
    #[error(
        "{operand} has elements of DLPack type code {code}, {bits} bits, {lanes} lanes; \
         convert it to float16, bfloat16 or float32"
    )]
    Elements { operand: Operand, code: u8, bits: u8, lanes: u16 },
    #[error("{operand} has strides {strides:?}; copy it, strides must not be negative")]
    NegativeStride { operand: Operand, strides: Vec<i64> },
    #[error("{operand} is on a device of DLPack type {kind}; move it to the CPU or an NVIDIA GPU")]
    DeviceKind { operand: Operand, kind: i32 },
    #[error("{operand} is on {place} but q is on {first}; move them to one device")]
    Places { operand: Operand, place: Place, first: Place },
    #[error("{operand} is read-only; pass a tensor that may be written")]
    ReadOnly { operand: Operand },
    #[error("{operand} shares memory with out; pass an `out` of its own memory, or none")]
    Shared { operand: Operand },
    #[error("{operand} lies at {address:#x}, which is no multiple of its {bytes}-byte elements; copy it")]
    Unaligned { operand: Operand, address: usize, bytes: usize },
    #[error("lse must be float32, dense, {extents:?}")]
    Lse { extents: [usize; 3] },
    #[error("{given} key ranges for a batch of {batch}; give one per batch entry")]
    RangeCount { given: usize, batch: usize },
    #[error("batch entry {entry} uses the keys from {start} to {end}, of {seq}")]
    Range { entry: usize, start: u32, end: u32, seq: usize },
    #[error("CUDA was in use before this process was forked and is lost in it; start processes with `spawn`")]
    Forked,
    #[error(transparent)]
    Problem(#[from] ProblemError),
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
}

impl From<cuda::driver::Error> for CallError {
    fn from(error: cuda::driver::Error) -> Self {
        cuda::Error::from(error).into()
    }
}

impl From<CallError> for PyErr {
    fn from(error: CallError) -> Self {
        let text = error.to_string();
        match error {
            CallError::Python(error) => error,
            CallError::NotATensor { .. } | CallError::Elements { .. } => PyTypeError::new_err(text),
            CallError::Problem(ProblemError::DType { .. }) => PyTypeError::new_err(text),
            CallError::Problem(ProblemError::OutOfMemory { .. }) => PyMemoryError::new_err(text),
            CallError::Cuda(cuda::Error::Driver(cuda::driver::Error::OutOfMemory { .. })) => {
                PyMemoryError::new_err(text)
            }
            CallError::ReadOnly { .. } => PyBufferError::new_err(text),
            CallError::Backend(BackendError::Unsupported { .. }) | CallError::Cuda(cuda::Error::Plan(_)) => {
                PyNotImplementedError::new_err(text)
            }
            CallError::Backend(_) | CallError::Cuda(_) | CallError::Forked => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
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
