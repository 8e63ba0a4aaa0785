//! The factors that keep a fused kernel's gradients of scores in the range of f16, on their way to the mover.
//!
//! A warp chooses its own factor (`parts/range.rs`), but dQ is summed over the keys of all warps. An instruction of that
//! product multiplies 16 keys, which are those of one warp. So each warp passes its factor along with dS, and if any is not 1
//! the mover multiplies the keys warp by warp and rescales the sums from one range to the next in between. Factors are powers
//! of two: sums are as if nothing had been scaled.

use flashcore_tile::{Acc, Builder, F32, MatrixOperand, Reg, Shared, Start, U32, Uniform, Val, Warpgroup};

use super::{Config, HANDED, ROWS_PER_WARP, WARPS_PER_GROUP, consumer::Consumer};
use crate::parts::range::{Range, inverse};

/// Bytes of a factor.
const FACTOR_BYTES: u32 = 4;
/// Factors that are read at once.
const AT_ONCE: usize = 4;
/// The bits of a factor of 1, all of which no smaller power of two has.
const ONE: u32 = 0x3f80_0000;

/// Where factors lie: one of each consumer's warp for each tile of dS in flight to the mover.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranges {
    offset: u32,
    warps: u32,
}

impl Ranges {
    /// The factors of a kernel that has several ranges for a sum.
    pub(super) fn of(b: &mut Builder, cfg: Config) -> Option<Self> {
        let warps = cfg.shape.consumers * WARPS_PER_GROUP;
        let several = cfg.fused() && cfg.keeps_range();
        several.then(|| Self { offset: b.shared(HANDED * warps * FACTOR_BYTES, 16), warps })
    }

    /// The factors of the tile in stage number `slot`.
    pub(super) fn at(self, b: &mut Builder, slot: Reg<U32>) -> Factors {
        let skip = b.let_(slot * (self.warps * FACTOR_BYTES));
        Factors { first: b.shared_at(self.offset).plus(b, skip), warps: self.warps }
    }
}

/// The factors of a tile of dS.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    first: Shared,
    warps: u32,
}

impl Factors {
    /// Whether one of them is not 1.
    pub(super) fn differ(&self, b: &mut Builder) -> Uniform<Warpgroup> {
        let vectors = (0..self.warps).step_by(AT_ONCE);
        let all: Vec<_> = vectors
            .flat_map(|warp| b.load_shared::<U32, AT_ONCE>(self.first.at(warp * FACTOR_BYTES)))
            .collect();
        let common = all.into_iter().reduce(|x, y| b.let_(x & y)).expect("there are warps");
        let common = b.uniform_register(common);
        b.uniform(common.ne(ONE))
    }

    /// dS times K, of which each warp has as many keys as one instruction multiplies, `key_bytes` apart in both.
    pub(super) fn product(
        &self,
        b: &mut Builder,
        sums: Acc,
        operands: [&MatrixOperand; 2],
        key_bytes: u32,
    ) -> Acc {
        sums.fill(b, 0.0);
        let (warp, before) = (b.var(0), b.var(1.0));
        let sums = b.do_while_carrying(sums, |b, sums| {
            let skip = b.let_(warp * FACTOR_BYTES);
            let at = self.first.plus(b, skip);
            let [factor] = b.load_shared::<F32, 1>(at);
            move_range(b, &sums, before, factor);
            let skip = b.let_(warp * (ROWS_PER_WARP * key_bytes));
            let [left, right] = operands.map(|operand| operand.plus(b, skip));
            let sums = b.wgmma_ss(sums, Start::Accumulate, [&left, &right], ROWS_PER_WARP).wait(b);
            b.set(before, factor);
            b.add_to(warp, 1);
            (b.uniform::<Warpgroup>(warp.lt(self.warps)), sums)
        });
        let one = b.var(1.0);
        move_range(b, &sums, before, one);
        sums
    }
}

/// Rescales sums from one range to another.
fn move_range(b: &mut Builder, sums: &Acc, from: Reg<F32>, to: Reg<F32>) {
    let back = inverse(b, from);
    let change = b.let_(to * back);
    sums.regs().iter().for_each(|&sum| b.mul_into(sum, sum, change));
}

impl Consumer<'_> {
    /// Passes the factor of this warp to the mover, together with the dS that were multiplied by it.
    pub(super) fn hand_range(&self, b: &mut Builder, range: Option<Range>) {
        let Some(((ranges, range), handed)) = self.layout.ranges.zip(range).zip(self.layout.handed) else {
            return;
        };
        let number = self.streamed_number(b, self.count);
        let slot = handed.slot(b, number);
        let own = b.let_((self.group * WARPS_PER_GROUP + self.warp) * FACTOR_BYTES);
        let to = ranges.at(b, slot).first.plus(b, own);
        b.predicated(self.leader, |b| b.store_shared(to, &[Val::from(range.factor())]));
    }
}
