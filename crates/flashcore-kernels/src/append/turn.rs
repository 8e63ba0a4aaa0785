//! Rotary embedding of a row that is appended: pairs of features are rotated by angles of the row's position. Called
//! by `append`.

use flashcore_core::{AppendProblem, DType};
use flashcore_tile::{Builder, F32, Params, Pred, Reg, U32, U64};

use super::Config;
use crate::{parts::elements::load, slots::append as slots};

/// Rotary embedding, as registers.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) cos: Reg<U64>,
    pub(super) sin: Reg<U64>,
    /// Pairs that are rotated.
    pub(super) pairs: Reg<U32>,
    pub(super) last_position: Reg<U32>,
    /// How far the positions of neighbouring queries are apart: 1, or 0 if they share one.
    pub(super) query_step: Reg<U32>,
}

/// Elements of one type.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) dtype: DType,
    pub(super) bytes: u32,
}

impl Place {
    /// An element, 0 where `who` does not hold.
    pub(super) fn read(
        self,
        b: &mut Builder,
        from: Reg<U64>,
        index: Reg<U32>,
        who: Option<Pred>,
    ) -> Reg<F32> {
        // What is not there is read at the start of the row instead.
        let index = who.map_or(index, |who| b.select(who, index, 0));
        let at = b.let_(from + index.mul_wide(self.bytes));
        load(b, self.dtype, 1, at)[0]
    }
}

impl Turn {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<AppendProblem>) -> Self {
        let rotary = |p: &AppendProblem| p.spec().rotary;
        Self {
            cos: params.buffer(b, "cos", slots::COS),
            sin: params.buffer(b, "sin", slots::SIN),
            pairs: params.u32(b, "pairs", move |p| rotary(p).map_or(0, |r| r.dim as u32 / 2)),
            last_position: params.u32(b, "last_position", move |p| {
                rotary(p).map_or(0, |r| r.positions.saturating_sub(1) as u32)
            }),
            query_step: params.u32(b, "query_step", move |p| rotary(p).map_or(0, |r| u32::from(!r.together))),
        }
    }

    /// Where the cosines and sines of a position start.
    pub(super) fn angles(&self, b: &mut Builder, cfg: &Config, position: Reg<U32>) -> [Reg<U64>; 2] {
        let position = b.let_(position.min(self.last_position));
        let first = b.let_(position.mul_wide(self.pairs));
        let bytes = b.let_(first * cfg.dtype.bytes() as u64);
        [b.let_(self.cos + bytes), b.let_(self.sin + bytes)]
    }

    /// A pair, rotated if it is one of those.
    pub(super) fn turned(
        b: &mut Builder,
        place: Place,
        turned: Pred,
        [cos, sin]: [Reg<U64>; 2],
        pair: Reg<U32>,
        [x, y]: [Reg<F32>; 2],
    ) -> [Reg<F32>; 2] {
        let [cos, sin] = [cos, sin].map(|table| place.read(b, table, pair, Some(turned)));
        let (from_y, from_x) = (b.let_(y * sin), b.let_(x * sin));
        let minus = b.neg(from_y);
        let [new_x, new_y] = [b.fma(x, cos, minus), b.fma(y, cos, from_x)];
        [b.select(turned, new_x, x), b.select(turned, new_y, y)]
    }
}
