//! Lengths and offsets that a call binds: read by the kernel, from device memory, in every launch.
//!
//! These numbers are unchecked, so they are clamped here: a length of −1 counts as 0, and nothing lies beyond the
//! tensors.

use flashcore_core::{Problem, Sequences};
use flashcore_ptx::launch::Slot;
use flashcore_tile::{Builder, Params, Reg, U32, U64};

use crate::slots;

/// How the rows of sequences are told.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LengthsKind {
    /// Every batch entry uses all rows.
    Uniform,
    /// Batch entries use their first rows.
    Used {
        /// Of the queries.
        q: bool,
        /// Of keys and values.
        kv: bool,
    },
    /// Sequences are packed.
    Ragged,
    /// Queries are packed; sequences use the first of their keys, which lie in pages.
    PackedQueries,
}

impl LengthsKind {
    /// The kind of a problem's lengths, if kernels know it.
    pub fn of(problem: &Problem) -> Option<Self> {
        match problem.sequences_kind() {
            Sequences::Uniform => Some(Self::Uniform),
            Sequences::Used { q, kv } => Some(Self::Used { q, kv }),
            Sequences::Ragged { .. } => Some(Self::Ragged),
            Sequences::PackedQueries { .. } => Some(Self::PackedQueries),
            _ => None,
        }
    }

    /// The name in a kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform | Self::Used { q: false, kv: false } => "uniform",
            Self::Used { q: true, kv: true } => "used",
            Self::Used { q: true, kv: false } => "used_q",
            Self::Used { q: false, kv: true } => "used_kv",
            Self::Ragged => "ragged",
            Self::PackedQueries => "packed_q",
        }
    }

    /// Whether some queries of a batch entry may not be used.
    pub const fn cuts_queries(self) -> bool {
        matches!(self, Self::Used { q: true, .. })
    }

    /// Whether queries of several sequences lie one after another.
    pub const fn packs_queries(self) -> bool {
        matches!(self, Self::Ragged | Self::PackedQueries)
    }

    /// Whether keys end somewhere inside their tensor.
    pub const fn has_keys(self) -> bool {
        matches!(self, Self::Used { kv: true, .. } | Self::Ragged | Self::PackedQueries)
    }

    /// Whether some keys of a batch entry may not be used.
    pub const fn cuts_keys(self) -> bool {
        matches!(self, Self::Used { kv: true, .. } | Self::PackedQueries)
    }
}

/// The numbers of one tensor, as registers.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    base: Reg<U64>,
    /// Bytes of one number.
    bytes: Reg<U32>,
    /// Rows of the tensor.
    rows: Reg<U32>,
}

impl Numbers {
    #[track_caller]
    fn declare<A: AsRef<Problem>>(
        b: &mut Builder,
        params: &mut Params<A>,
        name: &str,
        slot: Slot,
        rows: Reg<U32>,
    ) -> Self {
        let base = params.buffer(b, name, slot);
        Self { base, bytes: params.u32(b, &format!("{name}_bytes"), |p| p.as_ref().index().bytes()), rows }
    }

    /// Number `index`, brought between 0 and the rows of the tensor. Wide numbers are read by their lower half.
    #[track_caller]
    fn at(&self, b: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        let at = b.let_(self.base + index.mul_wide(self.bytes));
        let [number] = b.load_global::<U32, 1>(at);
        b.let_(number.signed().max(0).min(self.rows.signed()).unsigned())
    }

    /// First row and number of rows of a packed sequence.
    #[track_caller]
    fn range(&self, b: &mut Builder, index: Reg<U32>) -> Span {
        let next = b.let_(index + 1);
        let (start, end) = (self.at(b, index), self.at(b, next));
        Span { start, len: b.let_(end.max(start) - start) }
    }
}

/// Where the rows of a sequence lie, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: Reg<U32>,
    pub(crate) len: Reg<U32>,
}

impl Span {
    /// The same where each row is `group` rows.
    #[track_caller]
    pub(crate) fn times(self, b: &mut Builder, group: Reg<U32>) -> Self {
        Self { start: b.let_(self.start * group), len: b.let_(self.len * group) }
    }

    /// The same in registers that all threads of a warp share; a whole warp must ask.
    #[track_caller]
    pub(crate) fn uniform(self, b: &mut Builder) -> Self {
        Self { start: b.uniform_register(self.start), len: b.uniform_register(self.len) }
    }
}

/// What a kernel needs to find the rows of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LengthArguments {
    kind: LengthsKind,
    pub(crate) seq_q: Reg<U32>,
    pub(crate) seq_kv: Reg<U32>,
    q: Option<Numbers>,
    kv: Option<Numbers>,
}

impl LengthArguments {
    /// Declares the arrays that a kernel of that kind reads; `seq_q` and `seq_kv` are the rows of the tensors.
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem>>(
        b: &mut Builder,
        params: &mut Params<A>,
        kind: LengthsKind,
        [seq_q, seq_kv]: [Reg<U32>; 2],
    ) -> Self {
        let (q, kv) = match kind {
            LengthsKind::Uniform => (false, false),
            LengthsKind::Used { q, kv } => (q, kv),
            LengthsKind::Ragged | LengthsKind::PackedQueries => (true, true),
        };
        Self {
            kind,
            seq_q,
            seq_kv,
            q: q.then(|| Numbers::declare(b, params, "lengths_q", slots::LENGTHS_Q, seq_q)),
            kv: kv.then(|| Numbers::declare(b, params, "lengths_kv", slots::LENGTHS_KV, seq_kv)),
        }
    }

    /// Queries of packed sequence `index`.
    #[track_caller]
    pub(crate) fn packed_queries(&self, b: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        self.q.map_or(self.seq_q, |q| q.range(b, index).len)
    }

    /// Keys of packed sequence `index`.
    #[track_caller]
    pub(crate) fn packed_keys(&self, b: &mut Builder, index: Reg<U32>) -> Reg<U32> {
        self.kv.map_or(self.seq_kv, |kv| kv.range(b, index).len)
    }

    /// Where the first of so many packed sequences starts and the last one ends, of queries and of keys.
    #[track_caller]
    pub(crate) fn ends(&self, b: &mut Builder, sequences: Reg<U32>) -> [[Reg<U32>; 2]; 2] {
        let first = b.var(0);
        [(self.q, self.seq_q), (self.kv, self.seq_kv)].map(|(numbers, all)| match numbers {
            Some(offsets) => [offsets.at(b, first), offsets.at(b, sequences)],
            None => [first, all],
        })
    }

    /// Queries and keys that a batch entry uses.
    #[track_caller]
    pub(crate) fn used(&self, b: &mut Builder, batch: Reg<U32>) -> [Reg<U32>; 2] {
        let sides = [(self.q, self.seq_q), (self.kv, self.seq_kv)];
        sides.map(|(numbers, all)| numbers.map_or(all, |numbers| numbers.at(b, batch)))
    }

    /// Queries and keys of sequence `index`.
    #[track_caller]
    pub(crate) fn sequence(&self, b: &mut Builder, index: Reg<U32>) -> [Span; 2] {
        match (self.kind, self.q, self.kv) {
            (LengthsKind::Ragged, Some(q), Some(kv)) => [q, kv].map(|offsets| offsets.range(b, index)),
            (LengthsKind::PackedQueries, Some(q), Some(kv)) => {
                let (q, len, start) = (q.range(b, index), kv.at(b, index), b.var(0));
                [q, Span { start, len }]
            }
            _ => {
                let start = b.var(0);
                self.used(b, index).map(|len| Span { start, len })
            }
        }
    }
}
