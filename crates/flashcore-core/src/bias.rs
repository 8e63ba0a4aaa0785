//! Biases added to scores before the softmax: a number for each query and key, or ALiBi's, which falls with distance.
//!
//! The kind is part of a problem, a call binds the numbers, as with lengths and sinks. Softcaps are applied before, masks
//! after. A bias of −∞ hides a key; gradients of biases are not computed.

use crate::{
    dtype::DType,
    error::Axis,
    layout::{Dims, Layout},
    lengths::Sequences,
};

/// A bias without its numbers: the part in a [`crate::Problem`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bias {
    /// A number for each query and key: batch × heads × queries × keys, where the first three may be 1 or have a stride of
    /// 0, for numbers that entries, heads or queries share.
    Pairs {
        /// Element type in device memory; on the host it is f32.
        dtype: DType,
        /// Where the numbers lie.
        layout: Layout,
    },
    /// ALiBi: minus a slope of the query head times the distance between a key and the query's diagonal, which ends at the
    /// last key.
    Slopes {
        /// Whether every sequence has slopes of its own: sequences × heads f32 numbers, not heads.
        per_sequence: bool,
    },
}

/// A bias that does not fit its problem.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BiasError {
    /// An extent that is neither that of the scores nor 1.
    #[error(
        "the bias has {axis} {got} but {expected} or 1 is needed: it is {dims}, batch x heads x queries x keys"
    )]
    Extent {
        /// The extent; `Axis::Sequence` counts queries, `Axis::Dim` keys.
        axis: Axis,
        /// Its value.
        got: usize,
        /// What it should be.
        expected: usize,
        /// Extents of the bias.
        dims: Dims,
    },
    /// Numbers of keys, which have to be there.
    #[error("the bias has {got} keys but {expected} are needed; expand and copy it along the keys")]
    Keys {
        /// Keys it has.
        got: usize,
        /// Keys there are.
        expected: usize,
    },
    /// Pairs of packed sequences or of keys in pages.
    #[error(
        "a bias per query and key needs one sequence per batch entry; pass slopes, or unpack the sequences"
    )]
    Packed,
    /// A call with a bias that the problem lacks, or without one that it has.
    #[error("the call passes {given} biases but the problem expects {asked}; bind that many")]
    Count {
        /// Numbers given.
        given: usize,
        /// Numbers needed.
        asked: usize,
    },
}

impl Bias {
    /// Checks the bias of a problem with these queries and this many keys; extents of 1 become strides of 0.
    pub(crate) fn parse(
        self,
        q: Dims,
        keys: usize,
        sequences: Sequences,
        paged: bool,
    ) -> Result<Self, BiasError> {
        let Self::Pairs { dtype, layout } = self else { return Ok(self) };
        if paged || !matches!(sequences, Sequences::Uniform | Sequences::Used { .. }) {
            return Err(BiasError::Packed);
        }
        let (dims, mut strides) = (layout.dims(), layout.strides());
        if dims.dim != keys {
            return Err(BiasError::Keys { got: dims.dim, expected: keys });
        }
        let wanted = [q.batch, q.heads, q.seq];
        for (n, axis) in [Axis::Batch, Axis::Heads, Axis::Sequence].into_iter().enumerate() {
            let (got, expected) = (dims.array()[n], wanted[n]);
            if got == 1 {
                strides[n] = 0;
            } else if got != expected {
                return Err(BiasError::Extent { axis, got, expected, dims });
            }
        }
        let whole = Dims { dim: keys, ..q };
        // Strides of 0 reach nothing beyond what was checked before.
        let layout = Layout::strided(whole, strides).unwrap_or(layout);
        Ok(Self::Pairs { dtype, layout })
    }

    /// Numbers that a call binds, for so many sequences and query heads.
    pub fn numbers(&self, sequences: usize, heads: usize) -> usize {
        match self {
            Self::Pairs { layout, .. } => layout.span(),
            Self::Slopes { per_sequence: true } => sequences * heads,
            Self::Slopes { per_sequence: false } => heads,
        }
    }

    /// Bytes of one number in device memory.
    pub const fn bytes(&self) -> usize {
        match self {
            Self::Pairs { dtype, .. } => dtype.bytes(),
            Self::Slopes { .. } => DType::F32.bytes(),
        }
    }
}

/// The bias of one query head of a sequence, on the host.
#[derive(Clone, Copy, Debug)]
pub enum HeadBias<'a> {
    /// A number for each query and key.
    Pairs {
        /// The numbers from the first query's on.
        numbers: &'a [f32],
        /// Numbers from one query's to the next one's.
        stride: usize,
    },
    /// Minus a slope for every step of distance.
    Slope {
        /// The slope.
        slope: f32,
        /// The key at the position of query 0.
        diagonal: i64,
    },
}

impl HeadBias<'_> {
    /// What is added to the score of a query and a key.
    #[inline]
    pub fn at(&self, query: usize, key: usize) -> f64 {
        match *self {
            Self::Pairs { numbers, stride } => f64::from(numbers[query * stride + key]),
            Self::Slope { slope, diagonal } => {
                let distance = (query as i64 + diagonal - key as i64).unsigned_abs();
                -f64::from(slope) * distance as f64
            }
        }
    }
}
