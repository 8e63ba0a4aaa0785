//! The covering set of gradients: small problems whose kernels together contain every pair of options.

use flashcore_core::{
    BackwardProblem, BackwardSpec, DType, Dims, Layout, ProblemError, RowSums, Spec, Values,
};

use crate::{
    covering::{DTYPES, FLAGS, KEYS, Kind, MASKS, QUERIES, SINKS, mask_of, padded, rows},
    covering_bias,
    plan::Gpu,
};

/// A problem, and the GPU that it runs on.
#[derive(Clone, PartialEq, Debug)]
pub struct BackwardMember {
    /// A small problem.
    pub problem: BackwardProblem,
    /// Its lengths and sinks.
    pub values: Values,
    /// Where it would run.
    pub gpu: Gpu,
}

/// GPUs with much, less and little shared memory.
const GPUS: [Gpu; 3] = [Gpu::BLACKWELL, Gpu::AMPERE, Gpu::CONSUMER];
/// Features of queries and keys, and of values: every row of the tables, rows that end inside a chunk, columns that warps
/// share.
const DIMS: [(usize, usize); 8] =
    [(64, 64), (128, 128), (256, 256), (24, 40), (63, 39), (128, 64), (100, 192), (40, 300)];
/// Elements by which rows are longer than their features.
const PADDING: [usize; 3] = [0, 2, 1];
const LENGTHS: [Kind; 4] = [Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged];

/// What becomes of gradients, and where row sums come from.
#[derive(Clone, Copy)]
enum Wish {
    Same,
    Wide,
    Accumulated,
    GivenSums,
}

const WISHES: [Wish; 4] = [Wish::Same, Wish::Wide, Wish::Accumulated, Wish::GivenSums];

/// The set; addresses of its tensors are multiples of 16 bytes.
pub fn covering_backward() -> Result<Vec<BackwardMember>, ProblemError> {
    let [dims, padding, lengths] = [DIMS.len(), PADDING.len(), LENGTHS.len()];
    let [gpus, dtypes, wishes] = [GPUS.len(), DTYPES.len(), WISHES.len()];
    rows(&[dims, MASKS, lengths, wishes, padding, gpus, SINKS.len(), dtypes, FLAGS.len()])
        .into_iter()
        .map(member)
        .chain(covering_bias::backward())
        .collect()
}

fn member(row: [usize; 9]) -> Result<BackwardMember, ProblemError> {
    let [dims, mask, lengths, wish, padding, gpu, sinks, dtype, cap] = row;
    let ((dim_qk, dim_v), kind) = (DIMS[dims], LENGTHS[lengths]);
    let (queries, batch) = (QUERIES[dims % QUERIES.len()], if kind == Kind::Ragged { 1 } else { 2 });
    let layout = |heads, seq, dim| -> Result<Layout, _> {
        padded(Dims::new(batch, heads, seq, dim), PADDING[padding])
    };
    let (q, k, v) = (layout(2, queries, dim_qk)?, layout(1, KEYS, dim_qk)?, layout(1, KEYS, dim_v)?);
    let out = layout(2, queries, dim_v)?;
    let numbers = SINKS[sinks].map(|_| [0.5, -1.0].into());
    let values = Values { lengths: kind.lengths(queries), sinks: numbers, ..Values::default() };
    let forward = Spec {
        out: Some(out),
        mask: mask_of(mask),
        softcap: FLAGS[cap].then_some(20.0),
        ..Spec::new(DTYPES[dtype], q, k, v).with(&values)
    };
    let spec = BackwardSpec {
        d_out: Some(out),
        dq: Some(q),
        dk: Some(k),
        dv: Some(v),
        ..BackwardSpec::new(Spec { sinks: SINKS[sinks], ..forward })
    };
    Ok(BackwardMember { problem: WISHES[wish].of(spec).parse()?, values, gpu: GPUS[gpu] })
}

impl Wish {
    fn of(self, spec: BackwardSpec) -> BackwardSpec {
        match self {
            Self::Same => spec,
            Self::Wide => BackwardSpec { grad_dtype: Some(DType::F32), ..spec },
            Self::Accumulated => BackwardSpec { grad_dtype: Some(DType::F32), accumulate: true, ..spec },
            Self::GivenSums => BackwardSpec { row_sums: RowSums::Given, ..spec },
        }
    }
}
