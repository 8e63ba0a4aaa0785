//! How sequences lie in the tensors: the kind, which a plan knows, and the numbers, which a call binds.

use std::sync::Arc;

use crate::{
    error::{Operand, ProblemError},
    layout::Dims,
};

/// How sequences lie in the tensors, without the numbers: what a [`crate::Problem`] knows of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Sequences {
    /// Every batch entry uses its whole sequence.
    #[default]
    Uniform,
    /// Batch entries use their first rows; a call says how many.
    Used {
        /// Whether the call gives a number of queries for each batch entry.
        q: bool,
        /// Whether it gives a number of keys.
        kv: bool,
    },
    /// Sequences packed one after another in tensors of batch 1; a call gives their offsets.
    Ragged {
        /// How many there are.
        count: usize,
        /// No sequence has more queries than this.
        longest_q: usize,
        /// No sequence has more keys than this.
        longest_kv: usize,
    },
    /// Queries packed one after another in tensors of batch 1, over keys in [pages](crate::Pages): prompts, parts of
    /// prompts and single queries in one call. A call gives offsets of the queries and the number of keys of each
    /// sequence.
    PackedQueries {
        /// How many there are.
        count: usize,
        /// No sequence has more queries than this.
        longest_q: usize,
    },
}

/// Element type of lengths and offsets in device memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Index {
    /// 32-bit integers.
    #[default]
    I32,
    /// 64-bit integers, whose values fit in 31 bits.
    I64,
}

impl Index {
    /// Bytes of one number.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

impl Sequences {
    /// Number of sequences in tensors of the given batch.
    pub(crate) fn count(self, batch: usize) -> usize {
        match self {
            Self::Uniform | Self::Used { .. } => batch,
            Self::Ragged { count, .. } | Self::PackedQueries { count, .. } => count,
        }
    }

    /// Whether a call gives numbers for the queries, and for the keys.
    pub const fn numbers(self) -> [bool; 2] {
        match self {
            Self::Uniform => [false, false],
            Self::Used { q, kv } => [q, kv],
            Self::Ragged { .. } | Self::PackedQueries { .. } => [true, true],
        }
    }

    pub(crate) fn check(self, q: Dims, kv: Dims, paged: bool) -> Result<(), ProblemError> {
        let packed = |operand, dims: Dims| match dims.batch {
            1 => Ok(()),
            batch => Err(ProblemError::RaggedBatch { operand, batch }),
        };
        match self {
            Self::Uniform | Self::Used { .. } => Ok(()),
            Self::Ragged { .. } => packed(Operand::Q, q).and_then(|()| packed(Operand::K, kv)),
            Self::PackedQueries { .. } if !paged => Err(ProblemError::QueriesWithoutPages),
            Self::PackedQueries { .. } => packed(Operand::Q, q),
        }
    }
}

/// The numbers behind [`Sequences`], on the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Lengths {
    /// Every batch entry uses its whole sequence.
    #[default]
    Uniform,
    /// Batch entry `b` uses its first `q[b]` queries and `kv[b]` keys; `None` means all.
    ///
    /// What lies beyond is never read into a result; output rows beyond are written as zeros with LSE −∞.
    Used {
        /// Used queries per batch entry.
        q: Option<Arc<[u32]>>,
        /// Used keys per batch entry.
        kv: Option<Arc<[u32]>>,
    },
    /// Sequences of any length packed one after another in tensors of batch 1.
    ///
    /// Sequence `n` is rows `offsets[n]..offsets[n + 1]`; offsets start at 0, do not decrease and end at the number
    /// of rows.
    Ragged {
        /// Row offsets of the sequences in Q and the output.
        q: Arc<[u32]>,
        /// Row offsets of the sequences in K and V.
        kv: Arc<[u32]>,
    },
    /// Packed queries over keys in pages.
    PackedQueries {
        /// Row offsets of the sequences in Q and the output, as in `Ragged`.
        q: Arc<[u32]>,
        /// Keys of each sequence.
        kv: Arc<[u32]>,
    },
}

impl Lengths {
    /// Used keys per batch entry: key padding.
    pub fn keys(kv: impl Into<Arc<[u32]>>) -> Self {
        Self::Used { q: None, kv: Some(kv.into()) }
    }

    /// Used queries and keys per batch entry.
    pub fn used(q: impl Into<Arc<[u32]>>, kv: impl Into<Arc<[u32]>>) -> Self {
        Self::Used { q: Some(q.into()), kv: Some(kv.into()) }
    }

    /// Packed sequences by their offsets.
    pub fn ragged(q: impl Into<Arc<[u32]>>, kv: impl Into<Arc<[u32]>>) -> Self {
        Self::Ragged { q: q.into(), kv: kv.into() }
    }

    /// Packed queries by their offsets, and the number of keys of each sequence, which lie in pages.
    pub fn packed_queries(q: impl Into<Arc<[u32]>>, kv: impl Into<Arc<[u32]>>) -> Self {
        Self::PackedQueries { q: q.into(), kv: kv.into() }
    }

    /// What a plan has to know of these numbers.
    pub fn kind(&self) -> Sequences {
        match self {
            Self::Uniform => Sequences::Uniform,
            Self::Used { q, kv } => Sequences::Used { q: q.is_some(), kv: kv.is_some() },
            Self::Ragged { q, kv } => Sequences::Ragged {
                count: q.len().saturating_sub(1),
                longest_q: longest(q),
                longest_kv: longest(kv),
            },
            Self::PackedQueries { q, .. } => {
                Sequences::PackedQueries { count: q.len().saturating_sub(1), longest_q: longest(q) }
            }
        }
    }

    /// Whether these are the numbers that a problem of that kind asks for.
    pub(crate) fn serve(&self, kind: Sequences) -> bool {
        match (self.kind(), kind) {
            (
                Sequences::Ragged { count, longest_q, longest_kv },
                Sequences::Ragged { count: of, longest_q: most_q, longest_kv: most_kv },
            ) => count == of && longest_q <= most_q && longest_kv <= most_kv,
            (
                Sequences::PackedQueries { count, longest_q },
                Sequences::PackedQueries { count: of, longest_q: most },
            ) => count == of && longest_q <= most,
            (given, asked) => given == asked,
        }
    }

    pub(crate) fn check(&self, q: Dims, kv: Dims) -> Result<(), ProblemError> {
        match self {
            Self::Uniform => Ok(()),
            Self::Used { q: used_q, kv: used_kv } => {
                check_used(Operand::Q, used_q.as_deref(), q)?;
                check_used(Operand::K, used_kv.as_deref(), kv)
            }
            Self::Ragged { q: offsets_q, kv: offsets_kv } => {
                check_offsets(Operand::Q, offsets_q, q)?;
                check_offsets(Operand::K, offsets_kv, kv)?;
                let (q, kv) = (offsets_q.len(), offsets_kv.len());
                if q == kv { Ok(()) } else { Err(ProblemError::RaggedCount { q, kv }) }
            }
            Self::PackedQueries { q: offsets, kv: used } => {
                check_offsets(Operand::Q, offsets, q)?;
                check_used(Operand::K, Some(used), kv)
            }
        }
    }

    /// Where sequence `n` lies.
    pub(crate) fn sequence(&self, n: usize, q: Dims, kv: Dims) -> Sequence {
        match self {
            Self::Uniform => Sequence::whole(n, q.seq, kv.seq),
            Self::Used { q: used_q, kv: used_kv } => {
                let used =
                    |lens: &Option<Arc<[u32]>>, all: usize| lens.as_ref().map_or(all, |l| l[n] as usize);
                Sequence::whole(n, used(used_q, q.seq), used(used_kv, kv.seq))
            }
            Self::Ragged { q, kv } => {
                let range = |o: &[u32]| (o[n] as usize, (o[n + 1] - o[n]) as usize);
                let ((q_start, q_len), (kv_start, kv_len)) = (range(q), range(kv));
                Sequence { batch: 0, q_start, q_len, kv_start, kv_len }
            }
            Self::PackedQueries { q, kv } => {
                let (q_start, q_len) = (q[n] as usize, (q[n + 1] - q[n]) as usize);
                Sequence { batch: 0, q_start, q_len, kv_start: 0, kv_len: kv[n] as usize }
            }
        }
    }
}

/// Where one sequence's rows lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sequence {
    /// Index along the batch dimension of Q and the output; [`Keys`](crate::Keys) says where keys lie in pages.
    pub batch: usize,
    /// First row in Q and the output.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First row in K and V.
    pub kv_start: usize,
    /// Number of keys.
    pub kv_len: usize,
}

impl Sequence {
    const fn whole(batch: usize, q_len: usize, kv_len: usize) -> Self {
        Self { batch, q_start: 0, q_len, kv_start: 0, kv_len }
    }
}

fn longest(offsets: &[u32]) -> usize {
    offsets.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as usize).max().unwrap_or(0)
}

pub(crate) fn check_used(operand: Operand, used: Option<&[u32]>, dims: Dims) -> Result<(), ProblemError> {
    let Some(used) = used else { return Ok(()) };
    if used.len() != dims.batch {
        return Err(ProblemError::LengthCount { operand, given: used.len(), batch: dims.batch });
    }
    match used.iter().position(|&len| len as usize > dims.seq) {
        Some(entry) => Err(ProblemError::LengthTooLong { operand, entry, len: used[entry], seq: dims.seq }),
        None => Ok(()),
    }
}

fn check_offsets(operand: Operand, offsets: &[u32], dims: Dims) -> Result<(), ProblemError> {
    if dims.batch != 1 {
        return Err(ProblemError::RaggedBatch { operand, batch: dims.batch });
    }
    let last = offsets.len().saturating_sub(1);
    let starts_late = (offsets.first() != Some(&0)).then_some(0);
    let falls = || offsets.windows(2).position(|pair| pair[1] < pair[0]).map(|before| before + 1);
    let ends_elsewhere = || (offsets[last] as usize != dims.seq).then_some(last);
    match starts_late.or_else(falls).or_else(ends_elsewhere) {
        None => Ok(()),
        Some(at) => Err(ProblemError::RaggedOffsets { operand, at, seq: dims.seq }),
    }
}
