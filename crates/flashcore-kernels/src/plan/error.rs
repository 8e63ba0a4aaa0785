//! Why no kernel takes a problem.

use flashcore_core::DType;

use super::{Family, MOST_FEATURES, MOST_KEY_FEATURES};

/// A problem that no kernel takes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The GPU is too old.
    #[error(
        "kernels need compute capability {}.{} or later, but the GPU has {}.{}; use the CPU backend",
        .needed.0, .needed.1, .given.0, .given.1
    )]
    Capability {
        /// What the GPU has, major and minor.
        given: (u32, u32),
        /// What the operation's kernels need at least.
        needed: (u32, u32),
    },
    /// The tensor cores of an old GPU do not know the element type.
    #[error(
        "a GPU of compute capability 7.5 supports f16, not {0}; convert the tensors or use the CPU backend"
    )]
    Turing(DType),
    /// The element type has no kernel.
    #[error(
        "GPU kernels support f16, bf16, f32 and e4m3, not {0}; convert the tensors or use the CPU backend"
    )]
    DType(DType),
    /// 8-bit tensors that the one kernel for them does not take.
    #[error(
        "GPU kernels do not support these 8-bit tensors: {reason}; convert them to f16 or use the CPU backend"
    )]
    Narrow {
        /// Why not.
        reason: String,
    },
    /// The features of a head do not fit the kernels.
    #[error(
        "GPU kernels support head dims up to {MOST_KEY_FEATURES} (q, k) and {MOST_FEATURES} (v), not {qk} and {v}; \
         use the CPU backend"
    )]
    HeadDim {
        /// Features of queries and keys.
        qk: usize,
        /// Features of values.
        v: usize,
    },
    /// A sequence is too long.
    #[error(
        "GPU kernels support sequences of up to {max} rows, not {given}; split the problem or use the CPU backend"
    )]
    Sequence {
        /// Rows of the longest tensor.
        given: usize,
        /// Most rows.
        max: usize,
    },
    /// Grouped products that kernels do not take.
    #[error("grouped products on a GPU do not support {0}, or use the cpu backend")]
    Grouped(&'static str),
    /// Experts that kernels do not take.
    #[error("GPU kernels do not support experts with {0}; use the CPU backend")]
    Experts(&'static str),
    /// Too many tiles for one launch.
    #[error("the problem has more row tiles than one launch can index; split it along the batch")]
    Tiles,
    /// Gradients of f32 tensors.
    #[error(
        "GPU kernels compute gradients of f16 and bf16 tensors, not {0}; convert them or use the CPU backend"
    )]
    GradientsOf(DType),
    /// Gradients from an output of another type than the tensors'.
    #[error(
        "GPU kernels compute gradients from an output of the tensors' type, {dtype}, not {out}; \
         compute forward in {dtype} or use the CPU backend"
    )]
    GradientsFrom {
        /// The type of the output.
        out: DType,
        /// The type of Q, K and V.
        dtype: DType,
    },
    /// A kind of lengths that kernels do not know.
    #[error("GPU kernels do not support this kind of sequence lengths; use the CPU backend")]
    Lengths,
    /// The kernel that was asked for does not take the problem.
    #[error("{reason}; the kernels are {names}: name another, or omit the name to let the plan choose", names = Family::names())]
    Kernel {
        /// The kernel, and why.
        reason: String,
    },
    /// Shared memory that no shape of tile fits in.
    #[error(
        "no tile for head dims {qk} and {v} fits in {shared_bytes} bytes of shared memory; use the CPU backend"
    )]
    SharedMemory {
        /// Features of queries and keys.
        qk: usize,
        /// Features of values.
        v: usize,
        /// Shared memory of a CTA.
        shared_bytes: u32,
    },
}
