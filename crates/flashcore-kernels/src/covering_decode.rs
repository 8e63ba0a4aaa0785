//! The covering set of the kernel for few queries: every pair of its options, on small problems whose keys several CTAs share.

use flashcore_core::{DType, Dims, Layout, Lengths, PageTable, ProblemError, Spec, Values};

use crate::{
    covering::{Member, mask_of, rows},
    plan::Gpu,
};

/// Features of queries and keys, and of values: every row of the table, whole and padded.
const DIMS: [(usize, usize); 5] = [(128, 128), (64, 64), (256, 256), (96, 40), (8, 200)];
/// Queries of the longest sequence, and heads that share a key head.
const QUERIES: [(usize, usize); 5] = [(1, 4), (1, 1), (3, 5), (4, 8), (16, 1)];
const GPUS: [Gpu; 3] = [Gpu::HOPPER, Gpu::AMPERE, Gpu::CONSUMER];
const DTYPES: [DType; 2] = [DType::BF16, DType::F16];
const SINKS: [Option<DType>; 2] = [None, Some(DType::F32)];
const FLAGS: [bool; 2] = [false, true];
/// Keys of the longest sequence: several turns of a CTA, and a ragged end.
const KEYS: usize = 300;
const MASKS: usize = 4;
const HEADS_KV: usize = 2;

/// How sequences lie in the tensors.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Uniform,
    Used,
    UsedKeys,
    Ragged,
    /// Keys in pages of so many.
    Pages(usize),
    /// The same, with packed queries.
    PackedPages(usize),
}

pub(crate) const KINDS: [Kind; 6] =
    [Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged, Kind::Pages(3), Kind::PackedPages(32)];

impl Kind {
    /// Lengths of two sequences of at most `queries` queries, or of more where they are packed: one without queries, one
    /// without keys.
    pub(crate) fn lengths(self, queries: usize) -> Lengths {
        let (queries, keys) = (queries as u32, KEYS as u32);
        match self {
            Self::Uniform => Lengths::Uniform,
            Self::Used => Lengths::used([queries, queries - 1], [77, keys]),
            Self::UsedKeys => Lengths::keys([keys, 0]),
            Self::Ragged => Lengths::ragged([0, 1, 1, 2, 2 + queries], [0, 100, 130, 130, 130 + keys]),
            Self::Pages(_) => Lengths::keys([keys, 77]),
            Self::PackedPages(_) => Lengths::packed_queries([0, 1, 1, 2, 2 + queries], [100, 30, 0, keys]),
        }
    }

    /// Batch and rows of Q.
    pub(crate) fn queries(self, queries: usize) -> [usize; 2] {
        match self {
            Self::Ragged | Self::PackedPages(_) => [1, 2 + queries],
            _ => [2, queries],
        }
    }

    /// Batch and rows of K and V.
    pub(crate) fn keys(self) -> [usize; 2] {
        match self {
            Self::Ragged => [1, 130 + KEYS],
            Self::Pages(size) | Self::PackedPages(size) => [SEQUENCES * KEYS.div_ceil(size), size],
            _ => [2, KEYS],
        }
    }

    /// Pages from the last to the first, the sequences' in turn; nothing where nobody may look.
    pub(crate) fn table(self) -> Option<PageTable> {
        let (Self::Pages(size) | Self::PackedPages(size)) = self else { return None };
        let keys: &[usize] = if self == Self::Pages(size) { &[KEYS, 77] } else { &[100, 30, 0, KEYS] };
        let (columns, pages) = (KEYS.div_ceil(size), self.keys()[0]);
        let number = |sequence: usize, column: usize| match column * size < keys[sequence] {
            true => (pages - 1 - column * SEQUENCES - sequence) as i32,
            false => -1,
        };
        let numbers: Vec<i32> = (0..keys.len())
            .flat_map(|sequence| (0..columns).map(move |column| number(sequence, column)))
            .collect();
        Some(PageTable::new(numbers, columns))
    }
}

/// Sequences at most, where keys lie in pages.
const SEQUENCES: usize = 4;

/// The set.
pub fn covering_decode() -> Result<Vec<Member>, ProblemError> {
    let axes = [
        DIMS.len(),
        MASKS,
        KINDS.len(),
        QUERIES.len(),
        GPUS.len(),
        DTYPES.len(),
        SINKS.len(),
        FLAGS.len(),
        FLAGS.len(),
        FLAGS.len(),
    ];
    rows(&axes).iter().map(member).collect()
}

fn member(row: &[usize; 10]) -> Result<Member, ProblemError> {
    let [dims, mask, kind, queries, gpu, dtype, sinks, cap, wide, invariant] = *row;
    let ((dim_qk, dim_v), kind, (queries, group)) = (DIMS[dims], KINDS[kind], QUERIES[queries]);
    // Two blocks of rows are for narrow outputs.
    let group = if dim_v > 128 { group.min(16 / queries) } else { group };
    let layout = |[batch, rows]: [usize; 2], heads, dim| Layout::bshd(Dims::new(batch, heads, rows, dim));
    let (rows, keys) = (kind.queries(queries), kind.keys());
    let heads = HEADS_KV * group;
    let spec = Spec {
        out: Some(layout(rows, heads, dim_v)?),
        mask: mask_of(mask),
        softcap: FLAGS[cap].then_some(20.0),
        out_dtype: FLAGS[wide].then_some(DType::F32),
        batch_invariant: FLAGS[invariant],
        ..Spec::new(
            DTYPES[dtype],
            layout(rows, heads, dim_qk)?,
            layout(keys, HEADS_KV, dim_qk)?,
            layout(keys, HEADS_KV, dim_v)?,
        )
    };
    let logits = (0..heads).map(|head| 0.5 - head as f32 / 4.0).collect();
    let values = Values {
        lengths: kind.lengths(queries),
        sinks: SINKS[sinks].map(|_| logits),
        table: kind.table(),
        ..Values::default()
    };
    let spec = Spec { sinks: SINKS[sinks], ..spec.with(&values) };
    Ok(Member { problem: spec.parse()?, values, gpu: GPUS[gpu], like: None })
}
