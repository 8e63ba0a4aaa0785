//! The covering set of few queries by the general kernel: every pair of its options, over keys that CTAs share.

use flashcore_core::{DType, Dims, Factors, Layout, ProblemError, Scales, Spec, Values};

use crate::{
    covering::{Member, mask_of, rows},
    covering_decode::KINDS,
    plan::Gpu,
};

/// Features and types that the kernel for few queries does not take: rows of latents, wide ones, f32, and such as do not come
/// in eights. Then the elements from a row to the next, where they are more: parts of rows lie closer than rows then, and what
/// one is aligned to the other need not be.
const TENSORS: [(usize, usize, DType, usize); 6] = [
    (576, 512, DType::BF16, 0),
    (512, 512, DType::F16, 0),
    (64, 64, DType::F32, 0),
    (60, 59, DType::F16, 0),
    (60, 59, DType::F16, 64),
    (20, 20, DType::F32, 22),
];
/// Queries of the longest sequence, heads that share a key head, and key heads.
const QUERIES: [(usize, usize, usize); 4] = [(1, 16, 1), (1, 70, 1), (4, 5, 1), (3, 1, 2)];
const GPUS: [Gpu; 3] = [Gpu::HOPPER, Gpu::AMPERE, Gpu::CONSUMER];
const MASKS: usize = 4;
const FLAGS: [bool; 2] = [false, true];

/// The set.
pub fn covering_split() -> Result<Vec<Member>, ProblemError> {
    let flags = FLAGS.len();
    let axes = [TENSORS.len(), KINDS.len(), QUERIES.len(), GPUS.len(), MASKS, flags, flags, flags];
    rows(&axes).iter().map(member).collect()
}

fn member(row: &[usize; 8]) -> Result<Member, ProblemError> {
    let [tensors, kind, queries, gpu, mask, cap, wide, narrow] = *row;
    let ((dim_qk, dim_v, dtype, step), kind) = (TENSORS[tensors], KINDS[kind]);
    let (queries, group, heads_kv) = QUERIES[queries];
    let layout = |[batch, rows]: [usize; 2], heads, dim: usize| {
        let (dims, row) = (Dims::new(batch, heads, rows, dim), dim.max(step));
        Layout::strided(dims, [rows * heads * row, row, heads * row, 1])
    };
    let (rows, keys, heads) = (kind.queries(queries), kind.keys(), group * heads_kv);
    let q = layout(rows, heads, dim_qk)?;
    let spec = Spec {
        mask: mask_of(mask),
        softcap: FLAGS[cap].then_some(20.0),
        out_dtype: FLAGS[wide].then_some(DType::F32),
        out: Some(layout(rows, heads, dim_v)?),
        ..Spec::new(dtype, q, layout(keys, heads_kv, dim_qk)?, layout(keys, heads_kv, dim_v)?)
    };
    let values = Values { lengths: kind.lengths(queries), table: kind.table(), ..Values::default() };
    let problem = spec.with(&values).parse()?;
    let member = Member { problem, values, gpu: GPUS[gpu], like: None };
    let narrow = FLAGS[narrow] && dim_v.is_multiple_of(16) && dtype != DType::F32;
    if narrow { over_cache(member) } else { Ok(member) }
}

/// The same over a cache of 8 bits.
fn over_cache(member: Member) -> Result<Member, ProblemError> {
    let count = member.problem.sequences() * member.problem.heads_kv();
    let numbers = |first: f32| (0..count).map(|n| first + n as f32 / 1000.0).collect();
    let factors = Factors::of_cache(Scales::PerHead, [numbers(0.011), numbers(0.009)]);
    let spec = Spec { scales: Some(factors.kind()), ..member.problem.spec().clone() }.over(DType::E4M3);
    Ok(Member {
        problem: spec.parse()?,
        values: Values { factors: Some(factors), ..member.values },
        ..member
    })
}
