//! The covering set of the kernel for few queries: every pair of its options, on small problems whose keys several CTAs share.

use flashcore_core::{DType, Dims, Layout, Lengths, ProblemError, Spec, Values};

use crate::{
    covering::{Member, mask_of, rows},
    plan::Gpu,
};

/// Features of queries and keys, and of values: every row of the table, whole and padded.
const DIMS: [(usize, usize); 7] = [(128, 128), (64, 64), (256, 256), (96, 40), (8, 16), (192, 128), (80, 200)];
/// Queries of the longest sequence, and heads that share a key head.
const QUERIES: [(usize, usize); 5] = [(1, 4), (1, 1), (3, 5), (4, 8), (16, 1)];
const GPUS: [Gpu; 4] = [Gpu::HOPPER, Gpu::AMPERE, Gpu::CONSUMER, Gpu { sms: 2, ..Gpu::HOPPER }];
const DTYPES: [DType; 2] = [DType::BF16, DType::F16];
const SINKS: [Option<DType>; 2] = [None, Some(DType::F32)];
const FLAGS: [bool; 2] = [false, true];
/// Keys of the longest sequence: several turns of a CTA, and a ragged end.
const KEYS: usize = 300;
const MASKS: usize = 4;
const HEADS_KV: usize = 2;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Uniform,
    Used,
    UsedKeys,
    Ragged,
}

const KINDS: [Kind; 4] = [Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged];

impl Kind {
    /// Lengths of two sequences of at most `queries` queries, or of four where they are packed: one without queries, one
    /// without keys.
    fn lengths(self, queries: usize) -> Lengths {
        let queries = queries as u32;
        match self {
            Self::Uniform => Lengths::Uniform,
            Self::Used => Lengths::used([queries, queries - 1], [77, KEYS as u32]),
            Self::UsedKeys => Lengths::keys([KEYS as u32, 0]),
            Self::Ragged => {
                Lengths::ragged([0, 1, 1, 2, 2 + queries], [0, 100, 130, 130, 130 + KEYS as u32])
            }
        }
    }

    /// Batch, and rows of Q and K.
    fn extents(self, queries: usize) -> (usize, usize, usize) {
        match self {
            Self::Ragged => (1, 2 + queries, 130 + KEYS),
            _ => (2, queries, KEYS),
        }
    }
}

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
    let (batch, rows, keys) = kind.extents(queries);
    let layout = |heads, rows, dim| Layout::bshd(Dims::new(batch, heads, rows, dim));
    let heads = HEADS_KV * group;
    let spec = Spec {
        out: Some(layout(heads, rows, dim_v)?),
        mask: mask_of(mask),
        softcap: FLAGS[cap].then_some(20.0),
        out_dtype: FLAGS[wide].then_some(DType::F32),
        batch_invariant: FLAGS[invariant],
        ..Spec::new(
            DTYPES[dtype],
            layout(heads, rows, dim_qk)?,
            layout(HEADS_KV, keys, dim_qk)?,
            layout(HEADS_KV, keys, dim_v)?,
        )
    };
    let logits = (0..heads).map(|head| 0.5 - head as f32 / 4.0).collect();
    let values = Values { lengths: kind.lengths(queries), sinks: SINKS[sinks].map(|_| logits) };
    let spec = Spec { sinks: SINKS[sinks], ..spec.with(&values) };
    Ok(Member { problem: spec.parse()?, values, gpu: GPUS[gpu], like: None })
}
