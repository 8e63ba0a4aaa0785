//! What a slice is reduced to: the sums of its features, or its largest magnitude, or that of each feature.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{Builder, F32, Params, Pred, Reg, Scope, Shared, U32, U64, Val};

use super::{
    Arguments, BYTES, Config, IN_FLIGHT, SHRUNK, Stage, THREADS, floats,
    fold::Fold,
    slice::{Line, Slice},
    slots, word,
};
use crate::parts::tensor::TensorArgument;

/// Warps of a CTA.
const WARPS: u32 = THREADS / 32;

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let means = cfg.centred.then(|| params.buffer(b, "means", slots::MEANS));
    let end = if cfg.stage == Stage::Sum { slots::MEANS } else { slots::FACTORS };
    let end = params.buffer(b, "to", end);
    let fold = (!cfg.whole).then(|| Fold::declare(b, params, cfg, end));
    let to = fold.as_ref().map_or(end, |fold| fold.partial);
    let memory = b.shared(THREADS * cfg.shape.width * BYTES, 16);
    let memory = b.shared_at(memory);
    let slice = Slice::of_cta(b, cfg, args);
    if cfg.by_column() {
        slice.each_step(b, cfg, args, |b, base, column| {
            let found = columns(b, cfg, args, (&x, means), &slice, column);
            exchange(b, cfg, args, memory, (&slice, base), (found, to));
        });
    } else {
        let top = b.var_in::<F32>(Scope::Lane, 0.0);
        slice.each_step(b, cfg, args, |b, _, column| {
            let found = columns(b, cfg, args, (&x, means), &slice, column);
            found.into_iter().for_each(|found| b.set(top, top.max(found)));
        });
        let all = over_cta(b, memory, top);
        let answer = if cfg.whole { args.factor(b, all) } else { all };
        let (at, thread) = (b.let_(to + slice.index.mul_wide(BYTES)), b.thread());
        b.predicated(thread.eq(0), |b| b.store_global(at, &[answer.into()]));
    }
    if let Some(fold) = fold {
        fold.run(b, cfg, args, &slice, memory);
    }
}

/// What this thread's columns come to over the rows of its group.
fn columns(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    (x, means): (&TensorArgument, Option<Reg<U64>>),
    slice: &Slice,
    column: Reg<U32>,
) -> Vec<Reg<F32>> {
    let width = cfg.shape.width;
    let found: Vec<_> = (0..width).map(|_| b.var_in::<F32>(Scope::Lane, 0.0)).collect();
    let there = b.let_(column.lt(args.dim));
    b.if_(there, |b| {
        let first = b.let_(slice.plane * args.dim + column);
        let means = means.map(|means| floats(b, means, first, width));
        let means = means.as_deref();
        scan(b, cfg, (x, means), (slice, column), (&found, Care::None));
        // Not every number was finite, which is rare enough to look at all of them again.
        let broken = is_broken(b, &found);
        b.if_(broken, |b| {
            found.iter().for_each(|&found| b.set(found, 0.0));
            scan(b, cfg, (x, means), (slice, column), (&found, Care::Finite));
        });
    });
    found
}

/// Which numbers count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Care {
    /// All; an infinity shows, a NaN in sums too.
    None,
    /// Those that are finite.
    Finite,
}

/// Adds the rows of this thread's group to what was found.
fn scan(
    b: &mut Builder,
    cfg: &Config,
    (x, means): (&TensorArgument, Option<&[Reg<F32>]>),
    (slice, column): (&Slice, Reg<U32>),
    (found, care): (&[Reg<F32>], Care),
) {
    let from = slice.start(b, cfg, x, column, cfg.from.bytes());
    let row = b.var_in(Scope::Lane, slice.first);
    let end = b.let_(slice.end.min(slice.used));
    b.while_(
        |_| row.lt(end),
        |b| {
            for line in Line::ask(b, cfg, from, (row, end), IN_FLIGHT) {
                for (&found, value) in found.iter().zip(line.values(b, means)) {
                    let value = counted(b, cfg.stage, value, care);
                    // What was not read is zero as it is, but for a mean.
                    let value = if cfg.centred { b.select(line.there, value, 0.0) } else { value };
                    let joined = join(b, cfg.stage, found, value);
                    b.set(found, joined);
                }
            }
            b.add_to(row, IN_FLIGHT * cfg.shape.groups());
        },
    );
}

/// What a value adds to a result; to a sum, its small part.
pub(super) fn counted(b: &mut Builder, stage: Stage, value: Reg<F32>, care: Care) -> Reg<F32> {
    let size = b.abs(value);
    let value = if stage == Stage::Sum { b.let_(value * SHRUNK) } else { size };
    match care {
        Care::None => value,
        Care::Finite => b.select(size.lt(f32::INFINITY), value, 0.0),
    }
}

/// Whether something is not finite: nothing else times zero is anything but zero.
pub(super) fn is_broken(b: &mut Builder, found: &[Reg<F32>]) -> Pred {
    let zero = found.iter().fold(b.var_in::<F32>(Scope::Lane, 0.0), |zero, &found| b.fma(found, 0.0, zero));
    !b.let_(zero.eq(0.0))
}

/// Puts together what groups of rows have found, a column for each thread, and writes it.
fn exchange(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    memory: Shared,
    (slice, base): (&Slice, Reg<U32>),
    (found, to): (Vec<Reg<F32>>, Reg<U64>),
) {
    let columns = cfg.shape.columns();
    let own = b.let_(slice.group * columns + slice.column);
    let at = word(b, memory, own);
    for (n, &found) in (0..).zip(&found) {
        b.store_shared(at.at(n * BYTES), &[Val::from(found)]);
    }
    b.sync_cta();
    let thread = b.thread();
    let column = b.let_(base + thread);
    let there = b.let_(column.lt(args.dim) & thread.lt(columns));
    b.if_(there, |b| {
        let from = word(b, memory, thread);
        let parts: Vec<Reg<F32>> = (0..cfg.shape.groups())
            .map(|n| b.load_shared::<F32, 1>(from.at(n * columns * BYTES))[0])
            .collect();
        let all = parts.into_iter().reduce(|all, next| join(b, cfg.stage, all, next));
        let all = all.expect("a CTA has groups");
        let answer = if cfg.whole { cfg.answer(b, args, all, slice.used) } else { all };
        // Slices that are a whole head are numbered as heads are.
        let index = b.let_(slice.index * args.dim + column);
        let at = b.let_(to + index.mul_wide(BYTES));
        b.store_global(at, &[answer.into()]);
    });
    b.sync_cta();
}

impl Config {
    /// What all slices together come to.
    pub(super) fn answer(
        &self,
        b: &mut Builder,
        args: &Arguments,
        all: Reg<F32>,
        used: Reg<U32>,
    ) -> Reg<F32> {
        if self.stage == Stage::Sum { args.mean(b, all, used) } else { args.factor(b, all) }
    }
}

/// Combines two results.
pub(super) fn join(b: &mut Builder, stage: Stage, all: Reg<F32>, next: Reg<F32>) -> Reg<F32> {
    if stage == Stage::Sum { b.add(all, next) } else { b.max(all, next) }
}

/// The largest of all threads.
pub(super) fn over_cta(b: &mut Builder, memory: Shared, top: Reg<F32>) -> Reg<F32> {
    let top = [16, 8, 4, 2, 1].into_iter().fold(top, |top, distance| {
        let other = b.shuffle_xor(top, distance);
        b.max(top, other)
    });
    let (thread, lane) = (b.thread(), b.lane());
    let warp = b.let_(thread / 32);
    let at = word(b, memory, warp);
    b.predicated(lane.eq(0), |b| b.store_shared(at, &[Val::from(top)]));
    b.sync_cta();
    let warps: Vec<_> = (0..WARPS).map(|n| b.load_shared::<F32, 1>(memory.at(n * BYTES))[0]).collect();
    warps.into_iter().reduce(|x, y| b.max(x, y)).expect("a CTA has warps")
}
