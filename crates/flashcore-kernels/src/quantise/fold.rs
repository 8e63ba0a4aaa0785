//! Merges partial results of slices into means or factors: in the CTA whose slice finished last, always in the order of
//! slices.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{Builder, Cta, F32, Params, Reg, Scope, Shared, U32, U64, Uniform, Val};

use super::{
    Arguments, BYTES, Config, Stage, THREADS,
    gather::{join, over_cta},
    slice::Slice,
    slots,
};

/// Partial results that a thread loads at a time.
const ASKED: u32 = 8;

/// Where slices leave what they came to.
pub(super) struct Fold {
    pub(super) partial: Reg<U64>,
    /// How many slices of each share are done; all zeros before and after a launch.
    done: Reg<U64>,
    end: Reg<U64>,
    /// Room for what thread 0 found.
    found: Shared,
}

impl Fold {
    pub(super) fn declare(
        b: &mut Builder,
        params: &mut Params<QuantiseProblem>,
        cfg: &Config,
        end: Reg<U64>,
    ) -> Self {
        let partial = if cfg.stage == Stage::Sum { slots::SUMS } else { slots::LARGEST };
        let partial = params.buffer(b, "partial", partial);
        let done = params.buffer(b, "done", slots::DONE);
        let found = b.shared(BYTES, 16);
        Self { partial, done, end, found: b.shared_at(found) }
    }

    /// Merges the results of a share, if this slice was the last of it.
    pub(super) fn run(&self, b: &mut Builder, cfg: &Config, args: &Arguments, slice: &Slice, memory: Shared) {
        let share = b.let_(slice.index / args.share);
        let last = self.is_last(b, args, share);
        b.if_uniform(last, |b| {
            if cfg.by_column() {
                self.columns(b, cfg, args, slice);
            } else {
                self.whole(b, cfg, args, share, memory);
            }
        });
    }

    /// Counts this slice done, and says whether all others were. What it came to was written by thread 0, or by any before a
    /// barrier.
    fn is_last(&self, b: &mut Builder, args: &Arguments, share: Reg<U32>) -> Uniform<Cta> {
        let counter = b.let_(self.done + share.mul_wide(BYTES));
        let (thread, last) = (b.thread(), b.let_(args.share - 1));
        b.if_(thread.eq(0), |b| {
            let before = b.atomic_add_ordered(counter, 1);
            b.store_shared(self.found, &[before.into()]);
            b.predicated(before.eq(last), |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
        });
        b.sync_cta();
        let [before] = b.load_shared::<U32, 1>(self.found);
        b.uniform(before.eq(last))
    }

    /// A head: its features over all of its slices, some for each thread.
    fn columns(&self, b: &mut Builder, cfg: &Config, args: &Arguments, slice: &Slice) {
        let thread = b.thread();
        let column = b.var_in(Scope::Lane, thread);
        b.while_(
            |_| column.lt(args.dim),
            |b| {
                let first = b.let_(slice.plane * args.parts * args.dim + column);
                let at = b.let_(self.partial + first.mul_wide(BYTES));
                let step = b.let_(args.dim.mul_wide(BYTES));
                let all = joined(b, cfg, (at, step), args.parts);
                let answer = cfg.answer(b, args, all, slice.used);
                let index = b.let_(slice.plane * args.dim + column);
                let at = b.let_(self.end + index.mul_wide(BYTES));
                b.store_global(at, &[answer.into()]);
                b.add_to(column, THREADS);
            },
        );
    }

    /// A factor: all slices that share it.
    fn whole(&self, b: &mut Builder, cfg: &Config, args: &Arguments, share: Reg<U32>, memory: Shared) {
        let thread = b.thread();
        let first = b.let_(share * args.share + thread);
        let at = b.let_(self.partial + first.mul_wide(BYTES));
        let step = b.var(u64::from(THREADS * BYTES));
        // As many as there are from this thread's first, one for each turn of all threads.
        let behind = b.let_(args.share.max(thread) - thread);
        let count = b.div_ceil(behind, THREADS);
        let top = joined(b, cfg, (at, step), count);
        let all = over_cta(b, memory, top);
        let answer = args.factor(b, all);
        let at = b.let_(self.end + share.mul_wide(BYTES));
        b.predicated(thread.eq(0), |b| b.store_global(at, &[answer.into()]));
    }
}

/// So many results, `step` bytes apart, as one.
fn joined(b: &mut Builder, cfg: &Config, (at, step): (Reg<U64>, Reg<U64>), count: Reg<U32>) -> Reg<F32> {
    let all = b.var_in::<F32>(Scope::Lane, 0.0);
    let (at, left) = (b.var_in(Scope::Lane, at), b.var_in(Scope::Lane, count.signed()));
    b.while_(
        |_| left.gt(0),
        |b| {
            let ask = |n: u32| {
                let value = b.var_in::<F32>(Scope::Lane, 0.0);
                b.predicated(left.gt(n as i32), |b| b.load_global_into([value], at));
                b.add_to(at, step);
                value
            };
            let asked: Vec<_> = (0..ASKED).map(ask).collect();
            for next in asked {
                let together = join(b, cfg.stage, all, next);
                b.set(all, together);
            }
            b.set(left, left - ASKED as i32);
        },
    );
    all
}
