//! What a slice comes to: the sums of its features, or its largest magnitude, or that of each feature.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{Builder, F32, Params, Reg, Scope, U32, U64, Val};

use super::{Arguments, BYTES, Config, INFINITY, Slice, Stage, THREADS, floats, magnitude, slots, word};
use crate::parts::{elements::load, tensor::TensorArgument};

/// Warps of a CTA.
const WARPS: u32 = THREADS / 32;

/// What is gathered, as bits: of sums, or of magnitudes, whose bits grow with them.
type Bits = Reg<U32>;

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let means = cfg.centred.then(|| params.buffer(b, "means", slots::MEANS));
    let (partial, end) = match cfg.stage {
        Stage::Sum => (slots::SUMS, slots::MEANS),
        _ => (slots::LARGEST, slots::FACTORS),
    };
    let to = params.buffer(b, "to", if cfg.whole { end } else { partial });
    let memory = b.shared(THREADS * cfg.shape.width * BYTES, 16);
    let memory = b.shared_at(memory);
    let slice = Slice::of_cta(b, cfg, args);
    if cfg.by_column() {
        return slice.each_step(b, cfg, args, |b, base, column| {
            let found = columns(b, cfg, args, (&x, means), &slice, column);
            exchange(b, cfg, args, memory, (&slice, base), (found, to));
        });
    }
    let top = b.var_in::<U32>(Scope::Lane, 0);
    slice.each_step(b, cfg, args, |b, _, column| {
        let found = columns(b, cfg, args, (&x, means), &slice, column);
        found.into_iter().for_each(|found| b.set(top, top.max(found)));
    });
    let all = over_cta(b, memory, top);
    let (cta, thread) = (b.cta(), b.thread());
    let answer = if cfg.whole { args.factor(b, all) } else { b.float_of_bits(all.signed()) };
    let at = b.let_(to + cta.mul_wide(BYTES));
    b.predicated(thread.eq(0), |b| b.store_global(at, &[answer.into()]));
}

/// What this thread's columns come to over the rows of its group.
fn columns(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    (x, means): (&TensorArgument, Option<Reg<U64>>),
    slice: &Slice,
    column: Reg<U32>,
) -> Vec<Bits> {
    let width = cfg.shape.width;
    let found: Vec<Bits> = (0..width).map(|_| b.var_in::<U32>(Scope::Lane, 0)).collect();
    let there = b.let_(column.lt(args.dim));
    b.if_(there, |b| {
        let first = b.let_(slice.plane * args.dim + column);
        let means = means.map(|means| floats(b, means, first, width));
        let [start, step] = slice.start(b, cfg, x, column, cfg.from.bytes());
        let (at, row) = (b.var_in(Scope::Lane, start), b.var_in(Scope::Lane, slice.first));
        let end = b.let_(slice.end.min(slice.used));
        b.while_(
            |_| row.lt(end),
            |b| {
                let values = load(b, cfg.from, width, at);
                for (n, value) in values.into_iter().enumerate() {
                    let value = means.as_ref().map_or(value, |means| b.let_(value - means[n]));
                    take(b, cfg, found[n], value);
                }
                b.add_to(at, step);
                b.add_to(row, cfg.shape.groups());
            },
        );
    });
    found
}

/// Adds a number to what was found; what is not finite counts for nothing.
fn take(b: &mut Builder, cfg: &Config, found: Bits, value: Reg<F32>) {
    let bits = magnitude(b, value);
    let finite = b.let_(bits.lt(INFINITY));
    if cfg.stage == Stage::Sum {
        let value = b.select(finite, value, 0.0);
        let sum = b.float_of_bits(found.signed());
        let sum = b.let_(sum + value);
        let bits = b.float_bits(sum).unsigned();
        return b.set(found, bits);
    }
    let bits = b.select(finite, bits, 0);
    b.set(found, found.max(bits));
}

/// Puts together what groups of rows have found, a column for each thread, and writes it.
fn exchange(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    memory: flashcore_tile::Shared,
    (slice, base): (&Slice, Reg<U32>),
    (found, to): (Vec<Bits>, Reg<U64>),
) {
    let columns = cfg.shape.columns();
    let own = b.let_(slice.group * columns + slice.column);
    let at = word(b, memory, own);
    for (n, &found) in (0..).zip(&found) {
        b.store_shared(at.at(n * BYTES), &[Val::from(found)]);
    }
    b.sync_cta();
    let (thread, cta) = (b.thread(), b.cta());
    let column = b.let_(base + thread);
    let there = b.let_(column.lt(args.dim) & thread.lt(columns));
    b.if_(there, |b| {
        let all = b.var_in::<U32>(Scope::Lane, 0);
        let (at, left) = (b.var_in(Scope::Lane, thread), b.var(cfg.shape.groups()));
        b.while_(
            |_| left.gt(0),
            |b| {
                let from = word(b, memory, at);
                let [next] = b.load_shared::<U32, 1>(from);
                join(b, cfg.stage, all, next);
                b.add_to(at, columns);
                b.set(left, left - 1);
            },
        );
        let answer = match (cfg.whole, cfg.stage) {
            (false, _) => b.float_of_bits(all.signed()),
            (true, Stage::Sum) => {
                let sum = b.float_of_bits(all.signed());
                args.mean(b, sum, slice.used)
            }
            (true, _) => args.factor(b, all),
        };
        // Slices that are a whole head are numbered as heads are.
        let index = b.let_(cta * args.dim + column);
        let at = b.let_(to + index.mul_wide(BYTES));
        b.store_global(at, &[answer.into()]);
    });
    b.sync_cta();
}

/// Adds one answer to another.
pub(super) fn join(b: &mut Builder, stage: Stage, all: Bits, next: Bits) {
    if matches!(stage, Stage::Largest | Stage::FoldLargest) {
        return b.set(all, all.max(next));
    }
    let [sum, next] = [all, next].map(|bits| b.float_of_bits(bits.signed()));
    let sum = b.let_(sum + next);
    let bits = b.float_bits(sum).unsigned();
    b.set(all, bits);
}

/// The largest of all threads; thread 0 knows it.
pub(super) fn over_cta(b: &mut Builder, memory: flashcore_tile::Shared, top: Bits) -> Bits {
    let top = [16, 8, 4, 2, 1].into_iter().fold(top, |top, distance| {
        let own = b.float_of_bits(top.signed());
        let other = b.shuffle_xor(own, distance);
        let other = b.float_bits(other).unsigned();
        b.let_(top.max(other))
    });
    let (thread, lane) = (b.thread(), b.lane());
    let warp = b.let_(thread / 32);
    let at = word(b, memory, warp);
    b.predicated(lane.eq(0), |b| b.store_shared(at, &[Val::from(top)]));
    b.sync_cta();
    let warps: Vec<Bits> = (0..WARPS).map(|n| b.load_shared::<U32, 1>(memory.at(n * BYTES))[0]).collect();
    warps.into_iter().reduce(|x, y| b.let_(x.max(y))).expect("a CTA has warps")
}
