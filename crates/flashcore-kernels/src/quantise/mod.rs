//! Tensors rounded to 8 bits, from sm_80 on: kernels that sum, find largest magnitudes, round, or do the last two in one
//! pass over the data; `plan/quantise.rs` says which of them a problem needs.
//!
//! A CTA has a slice: neighbouring rows of one head. Its threads form groups of lanes, one group per row at a time,
//! and a lane keeps its columns over all rows, so that sums and maxima of features need only one exchange. The CTA
//! that finishes last merges partial results of slices, in the order of slices, so that bits do not depend on
//! timing.
//!
//! These kernels are memory bound. Each thread therefore has several rows in flight before it uses the first, and a kernel
//! that reads what the previous one has read starts at its end, which is still in L2.

mod block;
mod fold;
mod gather;
mod round;
mod slice;
mod turned;

use flashcore_core::{DType, Dims, Granularity, Layout, QuantiseProblem, SMALLEST_FACTOR, TURNED_KEYS};
use flashcore_ptx::{ident::Ident, launch::Workspace, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Program, Reg, Shared, U32, U64};

use crate::{
    parts::{elements::WIDEST, overlaps},
    slots::quantise as slots,
};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Most lanes of a row.
const MOST_LANES: u32 = 32;
/// Fewest rows of a slice, where blocks do not decide.
const SLICE: usize = 64;
/// Most slices of a head, where blocks do not decide.
const MOST_SLICES: usize = 32;
/// Bytes of a factor, a mean or a partial result.
const BYTES: u32 = size_of::<f32>() as u32;
/// What sums have of their numbers, 2⁻³²: those of all rows that there can be are finite, and means keep their bits.
const SHRUNK: f32 = f32::from_bits((127 - 32) << 23);
/// Rows that a thread loads at a time.
const IN_FLIGHT: u32 = 4;
/// Most registers of a thread for the numbers of a block in flight.
const MOST_HELD: u32 = 32;

/// What a kernel does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// Sums of the features of each slice become means.
    Sum,
    /// Largest magnitudes of each slice become factors.
    Largest,
    /// Numbers become floats.
    Round,
    /// Numbers become factors and floats: those of a block, which are read once.
    Block,
    /// Rounds values to transposed floats.
    Turn,
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
    /// Whether the result of a slice is the whole result.
    pub whole: bool,
    /// Whether a row's heads lie next to each other, so that neighbouring CTAs take the heads of the same rows: memory is
    /// fastest where what is read at a time is one piece.
    pub by_token: bool,
    /// Rows of its block that a thread has; 0 where there are no blocks, or they are read twice.
    pub held: u32,
    /// Features of a row, where the result is turned; 0 elsewhere.
    pub turned: u32,
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
        let spec = problem.spec();
        let gathers = matches!(stage, Stage::Sum | Stage::Largest);
        Self {
            stage,
            target,
            from: spec.dtype,
            to: if gathers { DType::E4M3 } else { spec.to },
            channels: spec.per == Granularity::PerChannel && stage != Stage::Sum,
            centred: spec.centred && stage != Stage::Sum,
            used: spec.used.is_some() && planes(problem) > 0,
            whole: gathers && Cut::of_stage(problem, stage).share == 1,
            by_token: problem.x().strides()[1] < problem.x().strides()[2],
            held: if stage == Stage::Block { held(problem, alignment).unwrap_or_default() } else { 0 },
            turned: if stage == Stage::Turn { problem.dims().dim as u32 } else { 0 },
            shape: Shape::widest(problem, alignment),
        }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let stage = match self.stage {
            Stage::Sum => "sum",
            Stage::Largest => "largest",
            Stage::Round => "round",
            Stage::Block => "block",
            Stage::Turn => "turn",
        };
        let options = [
            (self.channels, "_channels"),
            (self.centred, "_centred"),
            (self.used, "_used"),
            (self.whole, "_whole"),
            (self.by_token, "_tokens"),
        ];
        let options: String = options.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect();
        let Shape { width, lanes } = self.shape;
        let (from, to, target, held) = (self.from, self.to, self.target, self.held);
        let held = match (held, self.turned) {
            (0, 0) => String::new(),
            (0, turned) => format!("d{turned}"),
            (held, _) => format!("h{held}"),
        };
        Ident::new(format!("fc_quantise_{stage}_{target}_{from}_{to}_w{width}l{lanes}{held}{options}"))
            .expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (self.ctas_per_sm() * THREADS) / 8 * 8
    }

    /// CTAs that share an SM: as many as have registers. Fewer with larger blocks have as many bytes on their way.
    const fn ctas_per_sm(&self) -> u32 {
        match self.stage {
            Stage::Block if self.held > IN_FLIGHT => 3,
            Stage::Round | Stage::Turn => 4,
            _ => 5,
        }
    }

    /// Whether features are summed or checked one by one.
    fn by_column(&self) -> bool {
        self.channels || self.stage == Stage::Sum
    }

    /// Whether the kernel before has read the same rows, the last of them last.
    fn follows(&self) -> bool {
        self.stage == Stage::Round || self.stage == Stage::Block && self.centred
    }
}

/// How a problem is split into slices.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Rows of a slice.
    rows: usize,
    /// Slices of a head.
    parts: usize,
    /// Neighbouring slices that share a result.
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
            // A tensor without elements has a factor, too.
            Granularity::PerTensor => (planes(problem) * cut.parts).max(1),
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
            Stage::Sum => Self::of_means(problem),
            _ => Self::of(problem),
        }
    }
}

/// Batch entries times heads.
const fn planes(problem: &QuantiseProblem) -> usize {
    let Dims { batch, heads, .. } = problem.dims();
    batch * heads
}

/// How many rows of its block each thread has; `None` where there are no blocks or they are too large.
pub(crate) fn held(problem: &QuantiseProblem, alignment: u64) -> Option<u32> {
    let Granularity::PerBlock(rows) = problem.spec().per else { return None };
    let (dims, shape) = (problem.dims(), Shape::widest(problem, alignment));
    let rows = u32::try_from(rows.min(dims.seq.max(1))).ok()?;
    let held = rows.div_ceil(shape.groups()).next_power_of_two();
    let words = (shape.width * problem.spec().dtype.bytes() as u32).div_ceil(BYTES);
    (dims.dim as u32 <= shape.columns() && held * words <= MOST_HELD).then_some(held)
}

/// CTAs of a stage: one for each slice, and one for the factor of a tensor that has none.
pub(crate) fn ctas(problem: &QuantiseProblem, stage: Stage) -> u64 {
    if stage == Stage::Turn {
        return (planes(problem) * (problem.out().dims().dim / TURNED_KEYS)) as u64;
    }
    let least = usize::from(stage == Stage::Largest && problem.factors() > 0);
    (planes(problem) * Cut::of_stage(problem, stage).parts).max(least) as u64
}

/// The workspace of all stages: partial sums, partial maxima, and how many slices of each share are done.
fn workspace(problem: &QuantiseProblem) -> Vec<Workspace> {
    let dim = problem.dims().dim as u64;
    let columns = if problem.spec().per == Granularity::PerChannel { dim } else { 1 };
    let stages = [
        (Stage::Sum, slots::SUMS, dim, problem.spec().centred),
        (Stage::Largest, slots::LARGEST, columns, true),
    ];
    let shares = |stage| Cut::of_stage(problem, stage).share as u64;
    let partial: Vec<_> =
        stages.into_iter().filter(|&(stage, _, _, needed)| needed && shares(stage) > 1).collect();
    let counters = partial.iter().map(|&(stage, ..)| ctas(problem, stage).div_ceil(shares(stage))).max();
    let bytes = |count: u64| count.max(1) * u64::from(BYTES);
    let counters = counters.map(|count| Workspace { slot: slots::DONE, bytes: bytes(count), zeroed: true });
    let answers = partial.into_iter().map(|(stage, slot, each, _)| Workspace {
        slot,
        bytes: bytes(ctas(problem, stage) * each),
        zeroed: false,
    });
    answers.chain(counters).collect()
}

/// The launch of a stage; `None` where there is nothing to compute.
pub(crate) fn extent(problem: &QuantiseProblem, stage: Stage, target: Target) -> Option<Extent> {
    let (grid, dependent) = ([ctas(problem, stage) as u32, 1, 1], overlaps(target));
    (grid[0] > 0).then(|| Extent { grid, workspace: workspace(problem), dependent })
}

/// Builds the kernel.
pub fn quantise(cfg: &Config) -> Result<Program<QuantiseProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, THREADS, cfg.ctas_per_sm());
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    match cfg.stage {
        Stage::Sum | Stage::Largest => gather::build(&mut b, &mut params, cfg, &args),
        Stage::Round => round::build(&mut b, &mut params, cfg, &args),
        Stage::Block => block::build(&mut b, &mut params, cfg, &args),
        Stage::Turn => turned::build(&mut b, &mut params, cfg, &args),
    }
    b.finish(&name, params)
}

/// What every stage needs, as registers.
struct Arguments {
    heads: Reg<U32>,
    seq: Reg<U32>,
    dim: Reg<U32>,
    /// Rows of a slice, slices of a head, slices that share a result.
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
            seq: params.u32(b, "seq", |p| if planes(p) > 0 { p.dims().seq as u32 } else { 0 }),
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

    /// The factor of a share with this largest magnitude.
    fn factor(&self, b: &mut Builder, largest: Reg<F32>) -> Reg<F32> {
        b.let_((largest * self.inverse_largest).max(SMALLEST_FACTOR))
    }

    /// The mean of so many rows, of which the sum is shrunk.
    fn mean(&self, b: &mut Builder, sum: Reg<F32>, rows: Reg<U32>) -> Reg<F32> {
        let rows = b.let_(rows.max(1));
        let rows = b.to_f32(rows);
        let inverse = b.rcp(rows);
        let mean = b.let_(sum * inverse * (1.0 / SHRUNK));
        // Rounding may bring the mean of the largest numbers beyond them.
        b.let_(mean.min(f32::MAX).max(-f32::MAX))
    }
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
