//! Tensors rounded to 8 bits, from sm_80 on: kernels that sum, find largest magnitudes, put partial answers together, and
//! round; `plan/quantise.rs` says which of them a problem needs.
//!
//! A CTA has a slice: neighbouring rows of one head. Its threads stand in groups of lanes, a group for each row at a time,
//! and a lane keeps its columns over all rows, so that sums and maxima of features need no more than one exchange. Partial
//! answers of slices are put together in their order, so that bits do not depend on who was first.

mod fold;
mod gather;
mod round;

use flashcore_core::{DType, Dims, Granularity, Layout, QuantiseProblem, SMALLEST_FACTOR};
use flashcore_ptx::{ident::Ident, launch::Workspace, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Program, Reg, Shared, U32, U64};

use crate::{
    parts::{elements::WIDEST, tensor::TensorArgument},
    slots::quantise as slots,
};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// CTAs that share an SM.
const CTAS_PER_SM: u32 = 4;
/// Most lanes of a row.
const MOST_LANES: u32 = 32;
/// Fewest rows of a slice, where blocks do not decide.
const SLICE: usize = 64;
/// Most slices of a head, where blocks do not decide.
const MOST_SLICES: usize = 32;
/// Bytes of a factor, a mean or a partial answer.
const BYTES: u32 = size_of::<f32>() as u32;
/// The bits of infinity; a magnitude with larger ones is NaN.
const INFINITY: u32 = 0x7f80_0000;
/// All bits but the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// What a kernel does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// Sums of the features of each slice.
    Sum,
    /// Largest magnitudes of each slice.
    Largest,
    /// Sums of slices become means.
    FoldSum,
    /// Largest magnitudes of slices become factors.
    FoldLargest,
    /// Numbers become floats.
    Round,
}

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// What it does.
    pub stage: Stage,
    /// The architecture it is built for; sm_90a converts by an instruction.
    pub target: Target,
    /// Element type of the numbers; f32 where none are read.
    pub from: DType,
    /// Element type of the result; E4M3 where none is written.
    pub to: DType,
    /// Whether every feature has a factor of its own.
    pub channels: bool,
    /// Whether means are subtracted.
    pub centred: bool,
    /// Whether batch entries use a part of their rows.
    pub used: bool,
    /// Whether what a slice comes to is the whole answer.
    pub whole: bool,
    /// How rows are shared.
    pub shape: Shape,
}

/// How rows are shared among threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// Neighbouring elements that a lane moves at a time: 1, 4 or 8.
    pub width: u32,
    /// Lanes of a row: a power of two up to 32.
    pub lanes: u32,
}

impl Shape {
    /// That of kernels which read no rows.
    const NONE: Self = Self { width: 1, lanes: MOST_LANES };

    /// Rows that are in hand at a time.
    const fn groups(self) -> u32 {
        THREADS / self.lanes
    }

    /// Columns that are in hand at a time.
    const fn columns(self) -> u32 {
        self.width * self.lanes
    }

    /// The widest loads and stores that the problem's layouts and the addresses' `alignment` in bytes allow.
    pub fn widest(problem: &QuantiseProblem, alignment: u64) -> Self {
        let (dim, element) = (problem.dims().dim as u32, problem.spec().dtype.bytes() as u32);
        let fits = |layout: &Layout, element: usize, bytes: u32| {
            let steps = layout.dims().array().into_iter().zip(layout.strides()).take(3);
            let used = steps.filter(|&(extent, _)| extent > 1);
            let all = used.fold(alignment, |bits, (_, stride)| bits | (stride * element) as u64);
            all.is_multiple_of(bytes.into())
        };
        let serves = |width: &u32| {
            width * element <= WIDEST
                && dim.is_multiple_of(*width)
                && fits(problem.x(), element as usize, width * element)
                && fits(problem.out(), 1, *width)
        };
        let width = [8, 4].into_iter().find(serves).unwrap_or(1);
        Self { width, lanes: (dim / width).next_power_of_two().min(MOST_LANES) }
    }
}

impl Config {
    /// A stage for a problem whose addresses are multiples of `alignment` bytes.
    pub(crate) fn of(stage: Stage, problem: &QuantiseProblem, target: Target, alignment: u64) -> Self {
        let (spec, rounds) = (problem.spec(), stage == Stage::Round);
        let reads = !matches!(stage, Stage::FoldSum | Stage::FoldLargest);
        let slices = if stage == Stage::Sum { Cut::of_means(problem).share } else { Cut::of(problem).share };
        Self {
            stage,
            target: if rounds { target } else { Target::Sm80 },
            from: if reads { spec.dtype } else { DType::F32 },
            to: if rounds { spec.to } else { DType::E4M3 },
            channels: spec.per == Granularity::PerChannel && !matches!(stage, Stage::Sum | Stage::FoldSum),
            centred: spec.centred && matches!(stage, Stage::Largest | Stage::Round),
            used: spec.used.is_some() && stage != Stage::FoldLargest,
            whole: slices == 1 && matches!(stage, Stage::Sum | Stage::Largest),
            shape: if reads { Shape::widest(problem, alignment) } else { Shape::NONE },
        }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let stage = match self.stage {
            Stage::Sum => "sum",
            Stage::Largest => "largest",
            Stage::FoldSum => "fold_sum",
            Stage::FoldLargest => "fold_largest",
            Stage::Round => "round",
        };
        let options = [
            (self.channels, "_channels"),
            (self.centred, "_centred"),
            (self.used, "_used"),
            (self.whole, "_whole"),
        ];
        let options: String = options.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect();
        let Shape { width, lanes } = self.shape;
        let (from, to, target) = (self.from, self.to, self.target);
        Ident::new(format!("fc_quantise_{stage}_{target}_{from}_{to}_w{width}l{lanes}{options}"))
            .expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (CTAS_PER_SM * THREADS) / 8 * 8
    }

    /// Whether features are summed or looked at one by one.
    const fn by_column(&self) -> bool {
        self.channels || matches!(self.stage, Stage::Sum | Stage::FoldSum)
    }
}

/// How a problem is cut into slices.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Rows of a slice.
    rows: usize,
    /// Slices of a head.
    parts: usize,
    /// Neighbouring slices that share an answer.
    share: usize,
}

impl Cut {
    /// For factors.
    fn of(problem: &QuantiseProblem) -> Self {
        let (dims, spec) = (problem.dims(), problem.spec());
        if let Granularity::PerBlock(rows) = spec.per {
            return Self { rows, parts: dims.seq.div_ceil(rows), share: 1 };
        }
        let cut = Self::of_means(problem);
        let share = match spec.per {
            Granularity::PerTensor => planes(problem) * cut.parts,
            Granularity::PerHead => spec.group * cut.parts,
            _ => cut.parts,
        };
        Self { share, ..cut }
    }

    /// For means.
    fn of_means(problem: &QuantiseProblem) -> Self {
        let seq = problem.dims().seq;
        let rows = seq.div_ceil(MOST_SLICES).max(SLICE);
        let parts = seq.div_ceil(rows).max(1);
        Self { rows, parts, share: parts }
    }

    fn of_stage(problem: &QuantiseProblem, stage: Stage) -> Self {
        match stage {
            Stage::Sum | Stage::FoldSum => Self::of_means(problem),
            _ => Self::of(problem),
        }
    }
}

/// Batch entries times heads.
const fn planes(problem: &QuantiseProblem) -> usize {
    let Dims { batch, heads, .. } = problem.dims();
    batch * heads
}

/// Whether slices share an answer that somebody has to put together.
pub(crate) fn folds(problem: &QuantiseProblem, stage: Stage) -> bool {
    Cut::of_stage(problem, stage).share != 1
}

/// CTAs of a stage.
pub(crate) fn ctas(problem: &QuantiseProblem, stage: Stage) -> u64 {
    let channels = problem.spec().per == Granularity::PerChannel;
    let count = match stage {
        Stage::FoldSum => planes(problem),
        Stage::FoldLargest if channels => planes(problem),
        Stage::FoldLargest => problem.factors(),
        _ => planes(problem) * Cut::of_stage(problem, stage).parts,
    };
    count as u64
}

/// The workspace of all stages: partial sums and partial maxima.
fn workspace(problem: &QuantiseProblem) -> Vec<Workspace> {
    let dim = problem.dims().dim as u64;
    let columns = if problem.spec().per == Granularity::PerChannel { dim } else { 1 };
    let stages = [
        (Stage::Sum, slots::SUMS, dim, problem.spec().centred),
        (Stage::Largest, slots::LARGEST, columns, true),
    ];
    let partial = stages.into_iter().filter(|&(stage, _, _, needed)| needed && folds(problem, stage));
    let bytes = |stage, each: u64| ctas(problem, stage).max(1) * each * u64::from(BYTES);
    partial
        .map(|(stage, slot, each, _)| Workspace { slot, bytes: bytes(stage, each), zeroed: false })
        .collect()
}

/// The launch of a stage; `None` where there is nothing to compute.
pub(crate) fn extent(problem: &QuantiseProblem, stage: Stage) -> Option<Extent> {
    let ctas = ctas(problem, stage) as u32;
    (ctas > 0).then(|| Extent { grid: [ctas, 1, 1], workspace: workspace(problem), dependent: false })
}

/// Builds the kernel.
pub fn quantise(cfg: &Config) -> Result<Program<QuantiseProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, THREADS, CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    match cfg.stage {
        Stage::Sum | Stage::Largest => gather::build(&mut b, &mut params, cfg, &args),
        Stage::FoldSum | Stage::FoldLargest => fold::build(&mut b, &mut params, cfg, &args),
        Stage::Round => round::build(&mut b, &mut params, cfg, &args),
    }
    b.finish(&name, params)
}

/// What every stage needs, as registers.
struct Arguments {
    heads: Reg<U32>,
    seq: Reg<U32>,
    dim: Reg<U32>,
    /// Rows of a slice, slices of a head, slices that share an answer.
    rows: Reg<U32>,
    parts: Reg<U32>,
    share: Reg<U32>,
    /// Where the used rows of batch entries are told, and the bytes of such a number.
    used: Option<(Reg<U64>, Reg<U32>)>,
    inverse_largest: Reg<F32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config) -> Self {
        let stage = cfg.stage;
        Self {
            heads: params.u32(b, "heads", |p| p.dims().heads as u32),
            seq: params.u32(b, "seq", |p| p.dims().seq as u32),
            dim: params.u32(b, "dim", |p| p.dims().dim as u32),
            rows: params
                .u32(b, "rows", move |p| Cut::of_stage(p, stage).rows.min(p.dims().seq.max(1)) as u32),
            parts: params.u32(b, "parts", move |p| Cut::of_stage(p, stage).parts as u32),
            share: params.u32(b, "share", move |p| Cut::of_stage(p, stage).share as u32),
            used: cfg.used.then(|| {
                let base = params.buffer(b, "lengths", slots::LENGTHS);
                (base, params.u32(b, "lengths_bytes", |p| p.spec().used.map_or(0, |index| index.bytes())))
            }),
            inverse_largest: params.f32(b, "inverse_largest", QuantiseProblem::inverse_largest),
        }
    }

    /// Rows that a batch entry uses, brought between 0 and those there are. Wide numbers are read by their lower half.
    fn used(&self, b: &mut Builder, batch: Reg<U32>) -> Reg<U32> {
        let Some((base, bytes)) = self.used else { return self.seq };
        let at = b.let_(base + batch.mul_wide(bytes));
        let [number] = b.load_global::<U32, 1>(at);
        b.let_(number.signed().max(0).min(self.seq.signed()).unsigned())
    }

    /// The factor of a share whose largest magnitude has these bits.
    fn factor(&self, b: &mut Builder, bits: Reg<U32>) -> Reg<F32> {
        let largest = b.float_of_bits(bits.signed());
        b.let_((largest * self.inverse_largest).max(SMALLEST_FACTOR))
    }

    /// The mean of so many rows.
    fn mean(&self, b: &mut Builder, sum: Reg<F32>, rows: Reg<U32>) -> Reg<F32> {
        let rows = b.let_(rows.max(1));
        let rows = b.to_f32(rows);
        let inverse = b.rcp(rows);
        b.let_(sum * inverse)
    }
}

/// What a CTA has of a tensor.
struct Slice {
    /// Batch entry times heads plus head.
    plane: Reg<U32>,
    /// First row of this thread's group.
    first: Reg<U32>,
    /// Rows that the batch entry uses.
    used: Reg<U32>,
    /// Where the slice ends, used or not.
    end: Reg<U32>,
    batch: Reg<U32>,
    head: Reg<U32>,
    /// This thread's first column among those in hand.
    column: Reg<U32>,
    group: Reg<U32>,
}

impl Slice {
    fn of_cta(b: &mut Builder, cfg: &Config, args: &Arguments) -> Self {
        let (cta, thread) = (b.cta(), b.thread());
        let (plane, part) = (b.let_(cta / args.parts), b.let_(cta % args.parts));
        let (batch, head) = (b.let_(plane / args.heads), b.let_(plane % args.heads));
        let start = b.let_(part * args.rows);
        let left = b.let_(args.seq - start);
        let group = b.let_(thread / cfg.shape.lanes);
        Self {
            plane,
            first: b.let_(start + group),
            used: args.used(b, batch),
            end: b.let_(start + left.min(args.rows)),
            batch,
            head,
            column: b.let_((thread % cfg.shape.lanes) * cfg.shape.width),
            group,
        }
    }

    /// Builds `body` for every step of columns, with the first of this thread's; threads stay together.
    fn each_step(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        body: impl FnOnce(&mut Builder, Reg<U32>, Reg<U32>),
    ) {
        let base = b.var(0);
        b.while_(
            |_| base.lt(args.dim),
            |b| {
                let column = b.let_(base + self.column);
                body(b, base, column);
                b.add_to(base, cfg.shape.columns());
            },
        );
    }

    /// Address of this thread's columns in the first row of its group, and bytes from there to its next row.
    fn start(
        &self,
        b: &mut Builder,
        cfg: &Config,
        tensor: &TensorArgument,
        column: Reg<U32>,
        bytes: usize,
    ) -> [Reg<U64>; 2] {
        let row = tensor.at(b, self.batch, self.head, self.first);
        let at = b.let_(row + column.mul_wide(bytes as u32));
        let groups = b.var(cfg.shape.groups());
        [at, b.let_(groups.widen() * tensor.row)]
    }
}

/// The bits of a number's magnitude, which grow with it.
fn magnitude(b: &mut Builder, value: Reg<F32>) -> Reg<U32> {
    let bits = b.float_bits(value).unsigned();
    b.let_(bits & MAGNITUDE)
}

/// `width` neighbouring f32, which begin anywhere.
fn floats(b: &mut Builder, base: Reg<U64>, first: Reg<U32>, width: u32) -> Vec<Reg<F32>> {
    let at = b.let_(base + first.mul_wide(BYTES));
    (0..width)
        .map(|n| b.load_global::<F32, 1>(flashcore_tile::Global::from(at).at((n * BYTES) as i32))[0])
        .collect()
}

/// Address of number `index` in shared memory.
fn word(b: &mut Builder, memory: Shared, index: Reg<U32>) -> Shared {
    let bytes = b.let_(index * BYTES);
    memory.plus(b, bytes)
}
