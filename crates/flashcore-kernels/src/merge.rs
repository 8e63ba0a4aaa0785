//! Merges partial results by their LSE, for every GPU from sm_80 on.
//!
//! Neighbouring lanes share a row, each with as many neighbouring features as one load brings; for longer rows, they
//! loop. A lane reads the LSE of all parts for their maximum, then the parts in their order, and keeps weighted sums in
//! f32, so a row's bits depend only on its parts. Slots are those of [`crate::slots::merge`].

use std::f32::consts::{LN_2, LOG2_E};

use flashcore_core::{DType, Layout, MergeProblem, Parts};
use flashcore_ptx::{
    ident::Ident,
    launch::Slot,
    sm::{REGISTERS, THREAD_REGISTERS},
    target::Target,
};
use flashcore_tile::{BuildError, Builder, Cmp, Extent, F32, Params, Program, Reg, U32, U64};
use serde::{Deserialize, Serialize};

use crate::{
    parts::elements::{WIDEST, load, store},
    slots::merge as slots,
};

/// Threads of a CTA.
const THREADS: u32 = 128;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of the parts.
    pub part: DType,
    /// Element type of the result.
    pub out: DType,
    /// Where the parts lie.
    pub source: Source,
    /// How the work is split.
    pub shape: Shape,
}

/// Where the parts lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// In one tensor, any number of them.
    Stacked,
    /// This many at separate addresses.
    Listed(u32),
}

/// How rows are cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Features that a lane reads at once: a power of two that divides the features of a row.
    pub width: u32,
    /// Lanes that share a row: a power of two up to 32.
    pub lanes: u32,
}

impl Shape {
    /// Rows of a CTA.
    pub const fn rows(&self) -> u32 {
        THREADS / self.lanes
    }

    /// The widest loads and stores that the problem's layouts and the addresses' `alignment` in bytes allow.
    pub fn widest(problem: &MergeProblem, alignment: u64) -> Self {
        let dim = problem.dims().dim as u32;
        let serves = |width: &u32| {
            let [part, out] =
                [problem.dtype(), problem.out_dtype()].map(|dtype| width * dtype.bytes() as u32);
            part <= WIDEST
                && dim.is_multiple_of(*width)
                && alignment_of(problem, alignment, true).is_multiple_of(part.into())
                && alignment_of(problem, alignment, false).is_multiple_of(out.min(WIDEST).into())
        };
        let width = [8, 4, 2].into_iter().find(serves).unwrap_or(1);
        Self { width, lanes: (dim / width).next_power_of_two().min(32) }
    }
}

/// A number of which every row's address, of the parts or of the output, is a multiple where it is a power of two.
fn alignment_of(problem: &MergeProblem, alignment: u64, parts: bool) -> u64 {
    let (layout, dtype) =
        if parts { (problem.part(), problem.dtype()) } else { (problem.out(), problem.out_dtype()) };
    let steps = layout.dims().array().into_iter().zip(layout.strides()).take(3);
    let between = parts.then(|| (problem.parts().count(), problem.stride()));
    let used = steps.chain(between).filter(|&(extent, _)| extent > 1);
    used.fold(alignment, |bits, (_, stride)| bits | (stride * dtype.bytes()) as u64)
}

impl Config {
    /// The kernel for a problem whose addresses are multiples of `alignment` bytes.
    pub fn of(problem: &MergeProblem, alignment: u64) -> Self {
        let source = match problem.parts() {
            Parts::Stacked { .. } => Source::Stacked,
            Parts::Listed(count) => Source::Listed(count as u32),
        };
        let shape = Shape::widest(problem, alignment);
        Self { part: problem.dtype(), out: problem.out_dtype(), source, shape }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let source = match self.source {
            Source::Stacked => "stacked".to_owned(),
            Source::Listed(count) => format!("listed{count}"),
        };
        let Shape { width, lanes } = self.shape;
        let name = format!("fc_merge_{}_{}_{source}_w{width}l{lanes}", self.part, self.out);
        Ident::new(name).expect("made of legal parts")
    }

    /// CTAs that share an SM: leaves a thread the registers for addresses and LSE of all listed parts.
    const fn ctas_per_sm(&self) -> u32 {
        match self.source {
            Source::Stacked => 8,
            Source::Listed(_) => 4,
        }
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        let share = REGISTERS / (self.ctas_per_sm() * THREADS) / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }
}

/// The launch that computes `problem`; `None` where there is nothing to compute.
pub fn extent(cfg: &Config, problem: &MergeProblem) -> Option<Extent> {
    let ctas = problem.rows().div_ceil(cfg.shape.rows() as usize) as u32;
    (ctas > 0).then(|| Extent { grid: [ctas, 1, 1], workspace: Vec::new(), dependent: false })
}

/// Builds the kernel.
pub fn merge(cfg: &Config) -> Result<Program<MergeProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, THREADS, cfg.ctas_per_sm());
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg.source);
    let (thread, cta) = (b.thread(), b.cta());
    let within = b.shr(thread, cfg.shape.lanes.trailing_zeros());
    let row = b.mad(cta, cfg.shape.rows(), within);
    let lane = b.and(thread, cfg.shape.lanes - 1);
    let there = b.test(Cmp::Lt, row, args.rows);
    b.if_(there, |b| args.merge_row(b, cfg, row, lane));
    b.finish(&name, params)
}

/// What the host passes, as registers.
struct Arguments {
    /// Addresses of each tensor of parts and of its LSE.
    tensors: Vec<[Reg<U64>; 2]>,
    /// Number of parts in a tensor, and bytes from one and its LSE to the next, where they are stacked.
    stack: Option<(Reg<U32>, [Reg<U64>; 2])>,
    part_strides: [Reg<U64>; 3],
    out: Reg<U64>,
    out_strides: [Reg<U64>; 3],
    lse: Reg<U64>,
    rows: Reg<U32>,
    heads: Reg<U32>,
    seq: Reg<U32>,
    dim: Reg<U32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<MergeProblem>, source: Source) -> Self {
        let count = if let Source::Listed(count) = source { count as u8 } else { 1 };
        let mut buffer = |b: &mut Builder, name: String, slot: Slot| params.buffer(b, &name, slot);
        let tensors = (0..count)
            .map(|n| {
                let part = buffer(b, format!("part{n}"), slots::part(n));
                [part, buffer(b, format!("part{n}_lse"), slots::part_lse(n))]
            })
            .collect();
        let stack = (source == Source::Stacked).then(|| {
            let count = params.u32(b, "count", |p| p.parts().count() as u32);
            let part = params.u64(b, "part_stride", |p| (p.stride() * p.dtype().bytes()) as u64);
            (count, [part, params.u64(b, "lse_stride", |p| (p.rows() * size_of::<f32>()) as u64)])
        });
        let part_strides = strides(b, params, "part", |p| (p.part(), p.dtype()));
        Self {
            tensors,
            stack,
            part_strides,
            out: params.buffer(b, "out", slots::OUT),
            out_strides: strides(b, params, "out", |p| (p.out(), p.out_dtype())),
            lse: params.buffer(b, "lse", slots::LSE),
            rows: params.u32(b, "rows", |p| p.rows() as u32),
            heads: params.u32(b, "heads", |p| p.dims().heads as u32),
            seq: params.u32(b, "seq", |p| p.dims().seq as u32),
            dim: params.u32(b, "dim", |p| p.dims().dim as u32),
        }
    }

    /// Merges what one lane has of a row.
    fn merge_row(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>, lane: Reg<U32>) {
        let place = self.place(b, row);
        let from = offset(b, place, self.part_strides);
        let to = offset(b, place, self.out_strides);
        let to = b.add(to, self.out);
        let lse_bytes = b.mul_wide(row, size_of::<f32>() as u32);
        let parts = Rows::new(b, self, from, lse_bytes);
        let top = parts.top(b);
        let column = b.mul(lane, cfg.shape.width);
        let column = b.var(column);
        b.while_(
            |b| b.test(Cmp::Lt, column, self.dim),
            |b| {
                let merged = parts.sum(b, cfg, top, column);
                merged.write(b, cfg.out, (to, column), (self.lse, lse_bytes));
                b.add_to(column, cfg.shape.width * cfg.shape.lanes);
            },
        );
    }

    /// Batch entry, head and position of a row.
    fn place(&self, b: &mut Builder, row: Reg<U32>) -> [Reg<U32>; 3] {
        let (plane, seq) = (b.div(row, self.seq), b.rem(row, self.seq));
        [b.div(plane, self.heads), b.rem(plane, self.heads), seq]
    }
}

/// Bytes from one batch entry, head and position to the next.
fn strides(
    b: &mut Builder,
    params: &mut Params<MergeProblem>,
    name: &str,
    of: fn(&MergeProblem) -> (&Layout, DType),
) -> [Reg<U64>; 3] {
    [("batch", 0), ("head", 1), ("row", 2)].map(|(axis, n)| {
        params.u64(b, &format!("{name}_{axis}"), move |p| {
            let (layout, dtype) = of(p);
            (layout.strides()[n] * dtype.bytes()) as u64
        })
    })
}

/// Bytes from the start of a tensor to a row.
fn offset(b: &mut Builder, place: [Reg<U32>; 3], strides: [Reg<U64>; 3]) -> Reg<U64> {
    let zero = b.var(0);
    place.into_iter().zip(strides).fold(zero, |sum, (index, stride)| {
        let index = b.widen(index);
        b.mad(index, stride, sum)
    })
}

/// One row of every part, for one lane.
pub(crate) enum Rows {
    /// Each with its address and its LSE.
    Listed(Vec<(Reg<U64>, Reg<F32>)>),
    /// The first one's address and that of its LSE, the number of parts, and bytes to the next of both.
    Stacked { first: [Reg<U64>; 2], count: Reg<U32>, steps: [Reg<U64>; 2] },
}

/// What one lane has of a merged row.
pub(crate) struct Merged {
    values: Vec<Reg<F32>>,
    lse: Reg<F32>,
}

impl Merged {
    /// Writes the values to the features from `column` on of the row at `row`, and the lane of the first feature the row's LSE,
    /// `bytes` behind the first of all, unless that is at address 0.
    pub(crate) fn write(
        &self,
        b: &mut Builder,
        out: DType,
        (row, column): (Reg<U64>, Reg<U32>),
        (lse, bytes): (Reg<U64>, Reg<U64>),
    ) {
        let skipped = b.mul_wide(column, out.bytes() as u32);
        let to = b.add(row, skipped);
        store(b, out, to, &self.values);
        let (wanted, first) = (b.test(Cmp::Ne, lse, 0), b.test(Cmp::Eq, column, 0));
        let writes = b.both(wanted, first);
        let at = b.add(lse, bytes);
        b.predicated(writes, |b| b.store_global(at, &[self.lse.into()]));
    }
}

impl Rows {
    fn new(b: &mut Builder, args: &Arguments, row: Reg<U64>, lse: Reg<U64>) -> Self {
        let mut places = args.tensors.iter().map(|&[part, lses]| [b.add(part, row), b.add(lses, lse)]);
        let Some((count, steps)) = args.stack else {
            let places: Vec<_> = places.collect();
            let read = |[part, lse]: [Reg<U64>; 2]| (part, b.load_global::<F32, 1>(lse)[0]);
            return Self::Listed(places.into_iter().map(read).collect());
        };
        let first = places.next().expect("a stack is one tensor");
        Self::Stacked { first, count, steps }
    }

    /// Builds `visit` for every part in order, with its address and its LSE.
    fn each(&self, b: &mut Builder, mut visit: impl FnMut(&mut Builder, Reg<U64>, Reg<F32>)) {
        match self {
            Self::Listed(parts) => parts.iter().for_each(|&(part, lse)| visit(b, part, lse)),
            Self::Stacked { first, count, steps } => {
                let [part, lse] = first.map(|at| b.var(at));
                let left = b.var(*count);
                b.while_(
                    |b| b.test(Cmp::Gt, left, 0),
                    |b| {
                        let [value] = b.load_global(lse);
                        visit(b, part, value);
                        b.add_to(part, steps[0]);
                        b.add_to(lse, steps[1]);
                        let fewer = b.sub(left, 1);
                        b.set(left, fewer);
                    },
                );
            }
        }
    }

    /// The largest LSE; 0 where all are −∞, so that differences to it stay −∞.
    pub(crate) fn top(&self, b: &mut Builder) -> Reg<F32> {
        let top = b.var(f32::NEG_INFINITY);
        self.each(b, |b, _, lse| {
            let larger = b.max(top, lse);
            b.set(top, larger);
        });
        let nothing = b.test(Cmp::Eq, top, f32::NEG_INFINITY);
        b.select(nothing, 0.0, top)
    }

    /// The weighted sums of the features from `column` on.
    pub(crate) fn sum(&self, b: &mut Builder, cfg: &Config, top: Reg<F32>, column: Reg<U32>) -> Merged {
        let sums: Vec<Reg<F32>> = (0..cfg.shape.width).map(|_| b.var(0.0)).collect();
        let total = b.var(0.0);
        let skipped = b.mul_wide(column, cfg.part.bytes() as u32);
        self.each(b, |b, part, lse| {
            let at = b.add(part, skipped);
            let values = load(b, cfg.part, cfg.shape.width, at);
            let below = b.sub(lse, top);
            let below = b.mul(below, LOG2_E);
            let weight = b.exp2(below);
            b.add_to(total, weight);
            // A part without weight may hold anything.
            let dead = b.test(Cmp::Eq, lse, f32::NEG_INFINITY);
            for (&sum, value) in sums.iter().zip(values) {
                let value = b.select(dead, 0.0, value);
                b.fma_into(sum, value, weight, sum);
            }
        });
        let nothing = b.test(Cmp::Eq, total, 0.0);
        let inverse = b.rcp(total);
        let factor = b.select(nothing, 0.0, inverse);
        let values = sums.into_iter().map(|sum| b.mul(sum, factor)).collect();
        let log = b.log2(total);
        Merged { values, lse: b.fma(log, LN_2, top) }
    }
}
