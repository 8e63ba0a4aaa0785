//! Partial answers of slices become means or factors, always in the order of slices.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{Builder, Params, Reg, Scope, U32, U64};

use super::{
    Arguments, BYTES, Config, Stage, THREADS,
    gather::{join, over_cta},
    slots,
};

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let (partial, end) = match cfg.stage {
        Stage::FoldSum => (slots::SUMS, slots::MEANS),
        _ => (slots::LARGEST, slots::FACTORS),
    };
    let (from, to) = (params.buffer(b, "from", partial), params.buffer(b, "to", end));
    if cfg.by_column() { columns(b, cfg, args, [from, to]) } else { whole(b, cfg, args, [from, to]) }
}

/// A head: its features over all of its slices, some for each thread.
fn columns(b: &mut Builder, cfg: &Config, args: &Arguments, [from, to]: [Reg<U64>; 2]) {
    let (plane, thread) = (b.cta(), b.thread());
    let batch = b.let_(plane / args.heads);
    let used = args.used(b, batch);
    let column = b.var_in(Scope::Lane, thread);
    b.while_(
        |_| column.lt(args.dim),
        |b| {
            let all = b.var_in::<U32>(Scope::Lane, 0);
            let first = b.let_(plane * args.parts * args.dim + column);
            let (at, left) = (b.var_in(Scope::Lane, from + first.mul_wide(BYTES)), b.var(args.parts));
            let step = b.let_(args.dim.mul_wide(BYTES));
            b.while_(
                |_| left.gt(0),
                |b| {
                    let [next] = b.load_global::<U32, 1>(at);
                    join(b, cfg.stage, all, next);
                    b.add_to(at, step);
                    b.set(left, left - 1);
                },
            );
            let answer = if cfg.stage == Stage::FoldSum {
                let sum = b.float_of_bits(all.signed());
                args.mean(b, sum, used)
            } else {
                args.factor(b, all)
            };
            let index = b.let_(plane * args.dim + column);
            let at = b.let_(to + index.mul_wide(BYTES));
            b.store_global(at, &[answer.into()]);
            b.add_to(column, THREADS);
        },
    );
}

/// A factor: all slices that share it.
fn whole(b: &mut Builder, cfg: &Config, args: &Arguments, [from, to]: [Reg<U64>; 2]) {
    let memory = b.shared(THREADS / 32 * BYTES, 16);
    let memory = b.shared_at(memory);
    let (cta, thread) = (b.cta(), b.thread());
    let first = b.let_(from + (cta * args.share).mul_wide(BYTES));
    let top = b.var_in::<U32>(Scope::Lane, 0);
    let index = b.var_in(Scope::Lane, thread);
    b.while_(
        |_| index.lt(args.share),
        |b| {
            let at = b.let_(first + index.mul_wide(BYTES));
            let [next] = b.load_global::<U32, 1>(at);
            join(b, cfg.stage, top, next);
            b.add_to(index, THREADS);
        },
    );
    let all = over_cta(b, memory, top);
    let answer = args.factor(b, all);
    let at = b.let_(to + cta.mul_wide(BYTES));
    b.predicated(thread.eq(0), |b| b.store_global(at, &[answer.into()]));
}
