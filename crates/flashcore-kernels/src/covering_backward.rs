//! The covering set of gradients: small problems whose kernels together contain every pair of options.

use flashcore_core::{
    BackwardProblem, BackwardSpec, DType, Dims, Layout, ProblemError, RowSums, Spec, Values,
};

use crate::{
    covering::{BUSY_HOPPER, DTYPES, FLAGS, KEYS, Kind, MASKS, QUERIES, SINKS, mask_of, padded, rows},
    covering_bias, covering_dropout,
    plan::{Choice, Family, Form, Gpu, Plan, PlanError},
};

/// A problem, and the GPU that it runs on.
#[derive(Clone, Debug)]
pub struct BackwardMember {
    /// A small problem.
    pub problem: BackwardProblem,
    /// Its lengths and sinks.
    pub values: Values,
    /// Where it would run.
    pub gpu: Gpu,
    /// What decides about kernels.
    pub choice: Choice,
}

impl BackwardMember {
    /// Its plan.
    pub fn plan(&self) -> Result<Plan, PlanError> {
        self.choice.plan_backward(&self.problem, &self.gpu, ALIGNMENT)
    }
}

/// Addresses of a member's tensors are multiples of this many bytes.
const ALIGNMENT: u64 = 16;

/// Options of a family of kernels.
struct Axes {
    /// Where kernels run, and what chooses them.
    gpus: &'static [(Gpu, Choice)],
    dtypes: &'static [DType],
    /// Features of queries and keys, and of values.
    dims: &'static [(usize, usize)],
    /// Elements by which rows are longer than their features.
    padding: &'static [usize],
    lengths: &'static [Kind],
    /// Whether scores are capped.
    caps: &'static [bool],
}

const GENERAL: Choice = Choice::Kernel(Family::Sm80);
const RULES: Choice = Choice::Rules;

/// The general kernels: GPUs with much, less and little shared memory; every row of the tables, rows that end inside a
/// chunk, columns that warps share.
const ON_ALL: Axes = Axes {
    gpus: &[(Gpu::BLACKWELL, GENERAL), (Gpu::AMPERE, GENERAL), (Gpu::CONSUMER, GENERAL)],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (256, 256), (24, 40), (63, 39), (128, 64), (100, 192), (40, 300)],
    padding: &[0, 2, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged],
    caps: &FLAGS,
};

/// The same for f32: every row of tables of their own.
const SINGLES: Axes = Axes {
    gpus: &[
        (Gpu::BLACKWELL, GENERAL),
        (Gpu::AMPERE, GENERAL),
        (Gpu::CONSUMER, GENERAL),
        (Gpu::HOPPER, RULES),
    ],
    dtypes: &[DType::F32],
    dims: &[(64, 64), (128, 128), (256, 256), (23, 41), (63, 39), (128, 64), (100, 192), (8, 8)],
    padding: &[0, 2, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged],
    caps: &FLAGS,
};

/// A Hopper's kernels in both forms, for tiles of which there are several and one that is cut.
const ON_HOPPER: Axes = Axes {
    gpus: &[(Gpu::HOPPER, Choice::Gradients(Form::Split)), (Gpu::HOPPER, Choice::Gradients(Form::Fused))],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (24, 40), (128, 64)],
    padding: &[0, 8],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys],
    caps: &FLAGS,
};

/// The same for wide heads, which have one form.
const ON_HOPPER_WIDE: Axes = Axes {
    gpus: &[(Gpu::HOPPER, Choice::Gradients(Form::Split))],
    dtypes: &DTYPES,
    dims: &[(256, 256), (192, 128), (160, 192), (72, 248)],
    padding: &[0, 8],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys],
    caps: &FLAGS,
};

/// Packed sequences on a Hopper, in both forms, and so few SMs that CTAs have several tiles each.
const PACKED_ON_HOPPER: Axes = Axes {
    gpus: &[(BUSY_HOPPER, Choice::Gradients(Form::Split)), (BUSY_HOPPER, Choice::Gradients(Form::Fused))],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (24, 40), (128, 64)],
    padding: &[0, 8],
    lengths: &[Kind::Ragged],
    caps: &FLAGS,
};

/// What one kernel takes, so that most of its options meet there too.
const FUSED_ON_HOPPER: Axes = Axes {
    gpus: &[(Gpu::HOPPER, Choice::Gradients(Form::Fused))],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (24, 40), (128, 64)],
    padding: &[0, 8],
    lengths: &[Kind::Uniform],
    caps: &[false],
};

/// The same of packed sequences.
const FUSED_PACKED_ON_HOPPER: Axes = Axes {
    gpus: &[(BUSY_HOPPER, Choice::Gradients(Form::Fused))],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (128, 64)],
    padding: &[0, 8],
    lengths: &[Kind::Ragged],
    caps: &[false],
};

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
    [ON_ALL, SINGLES, ON_HOPPER, ON_HOPPER_WIDE, PACKED_ON_HOPPER, FUSED_ON_HOPPER, FUSED_PACKED_ON_HOPPER]
        .iter()
        .flat_map(Axes::members)
        .chain(covering_bias::backward())
        .chain(covering_dropout::backward())
        .collect()
}

impl Axes {
    fn members(&self) -> impl Iterator<Item = Result<BackwardMember, ProblemError>> {
        let [dims, padding, lengths] = [self.dims.len(), self.padding.len(), self.lengths.len()];
        let [gpus, dtypes, wishes] = [self.gpus.len(), self.dtypes.len(), WISHES.len()];
        rows(&[dims, MASKS, lengths, wishes, padding, gpus, SINKS.len(), dtypes, self.caps.len()])
            .into_iter()
            .map(|row| self.member(row))
    }

    fn member(&self, row: [usize; 9]) -> Result<BackwardMember, ProblemError> {
        let [dims, mask, lengths, wish, padding, gpu, sinks, dtype, cap] = row;
        let ((dim_qk, dim_v), kind) = (self.dims[dims], self.lengths[lengths]);
        let (queries, batch) = (QUERIES[dims % QUERIES.len()], if kind == Kind::Ragged { 1 } else { 2 });
        let layout = |heads, seq, dim| -> Result<Layout, _> {
            padded(Dims::new(batch, heads, seq, dim), self.padding[padding])
        };
        let (q, k, v) = (layout(2, queries, dim_qk)?, layout(1, KEYS, dim_qk)?, layout(1, KEYS, dim_v)?);
        let out = layout(2, queries, dim_v)?;
        let numbers = SINKS[sinks].map(|_| [0.5, -1.0].into());
        let values = Values { lengths: kind.lengths(queries), sinks: numbers, ..Values::default() };
        let forward = Spec {
            out: Some(out),
            mask: mask_of(mask),
            softcap: self.caps[cap].then_some(20.0),
            ..Spec::new(self.dtypes[dtype], q, k, v).with(&values)
        };
        let spec = BackwardSpec {
            d_out: Some(out),
            dq: Some(q),
            dk: Some(k),
            dv: Some(v),
            ..BackwardSpec::new(Spec { sinks: SINKS[sinks], ..forward })
        };
        let (gpu, ref choice) = self.gpus[gpu];
        let problem = WISHES[wish].of(spec).parse()?;
        Ok(BackwardMember { problem, values, gpu, choice: choice.clone() })
    }
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
