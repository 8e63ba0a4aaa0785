//! Where keys are split if bits must not depend on the batch: at places that depend only on the numbers of keys.
//!
//! A *span* is 128 keys. A row is split into pieces of one width, which depends on its own number of keys: one span up to
//! 1,024 keys, two up to 4,096, four up to 16,384 and so on, at multiples of the width. Pieces are about as wide as there are
//! many: short rows have enough of them for a cluster, and long ones few enough that merging at their ends does not stall.
//! What lies between two cuts is computed by itself, from scratch, and results are merged one by one in the order of their
//! keys: the same bits, whichever CTAs compute how many of them. Where a window bounds the keys of a query, its width takes
//! the place of their number.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Reg, U32};

use super::{Config, cost::visible_keys, unit::Sequence};
use crate::parts::lengths::LengthsKind;

/// Keys of a span: a multiple of what CTAs take in one turn.
pub(crate) const SPAN: u32 = 128;
/// The octave of windows that have no end.
const ALL: u32 = 31;

/// The octave of spans from which on pieces are of one width.
fn last_octave(problem: &Problem) -> u32 {
    let mask = problem.mask();
    match (mask.left(), mask.right()) {
        (Some(left), Some(right)) => spans((left as usize).saturating_add(right as usize).saturating_add(1))
            .next_power_of_two()
            .ilog2(),
        _ => ALL,
    }
}

/// Spans of so many keys: at least one, which writes rows even if they see none.
pub(super) fn spans(keys: usize) -> u32 {
    keys.div_ceil(SPAN as usize).clamp(1, MOST_SPANS) as u32
}

/// Spans at most: what rows are numbered by fits in 31 bits.
const MOST_SPANS: usize = 1 << 24;

/// The binary logarithm of the spans of a piece, where a row has up to two to the `octave` of them.
const fn shift(octave: u32) -> u32 {
    (octave / 2).saturating_sub(1)
}

/// The same for a row of so many spans.
fn shift_of(spans: u32, last: u32) -> u32 {
    shift(spans.next_power_of_two().ilog2().min(last))
}

/// Pieces of a row at most.
pub(super) fn most_pieces(problem: &Problem) -> u32 {
    let (all, last) = (spans(problem.longest_kv()).next_power_of_two(), last_octave(problem));
    let (octave, seen) = (all.ilog2().min(last), spans(visible_keys(problem)));
    let whole = 1 << (octave - shift(octave));
    // A window begins and ends in the middle of pieces.
    if last < ALL { whole.max((seen >> shift(octave)) + 2) } else { whole }
}

/// Spans of the busiest of so many CTAs that share a row, about: they take whole pieces.
pub(super) fn busiest(problem: &Problem, ctas: u32) -> u32 {
    let all = spans(visible_keys(problem));
    let (each, width) = (all.div_ceil(ctas), 1 << shift_of(all, last_octave(problem)));
    let border = |n: u32| (n * each).next_multiple_of(width).min(all);
    (0..ctas.min(all)).map(|n| border(n + 1) - border(n)).max().unwrap_or(all)
}

/// Parts of a row at most that a cluster of so many CTAs exchanges: one of the first CTA, and every piece of the others.
pub(crate) fn most_messages(problem: &Problem, ctas: u32) -> u32 {
    let pieces = most_pieces(problem);
    // The first CTA has its share of the pieces, or at least one where a window begins in the middle of it.
    let kept = if last_octave(problem) < ALL { 1 } else { pieces.div_ceil(ctas) };
    1 + pieces - kept
}

/// The rule, as a register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cuts {
    last: Reg<U32>,
    /// Parts of a row that there is room for.
    pub(super) room: Reg<U32>,
    /// Keys of a packed sequence at most, which its offsets may exceed.
    pub(super) keys: Option<Reg<U32>>,
}

impl Cuts {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Option<Self> {
        cfg.invariant.then(|| Self {
            last: params.u32(b, "last_octave", last_octave),
            room: params.u32(b, "row_parts", most_pieces),
            keys: (cfg.lengths == LengthsKind::Ragged)
                .then(|| params.u32(b, "most_keys", |p| p.longest_kv() as u32)),
        })
    }

    /// The binary logarithm of the spans of a piece, in a row that ends with so many.
    fn shift(self, b: &mut Builder, spans: Reg<U32>) -> Reg<U32> {
        let zeros = b.leading_zeros(spans - 1);
        let all = b.var(32);
        let octave = b.let_((all - zeros).min(self.last));
        b.let_((octave >> 1).max(1) - 1)
    }
}

/// The spans of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) first: Reg<U32>,
    pub(super) end: Reg<U32>,
    /// The binary logarithm of the spans of a piece.
    shift: Reg<U32>,
}

impl Row {
    pub(super) fn of(b: &mut Builder, cfg: &Config, cuts: Cuts, sequence: &Sequence) -> Self {
        let tiles = SPAN / cfg.shape.tile_n;
        let first = b.let_(sequence.first.max(0).unsigned() / tiles);
        let end = b.let_(sequence.tiles.end.max(0).unsigned().div_ceil(tiles).max(first + 1));
        Self { first, end, shift: cuts.shift(b, end) }
    }

    /// How many there are.
    pub(super) fn spans(&self, b: &mut Builder) -> Reg<U32> {
        b.let_(self.end - self.first)
    }

    /// Whole pieces up to a span, counted from the first key of the sequence.
    fn pieces_to(&self, b: &mut Builder, span: Reg<U32>) -> Reg<U32> {
        let width = b.shl(1, self.shift);
        b.let_((span + width - 1) >> self.shift)
    }

    /// Pieces of the row before a cut.
    fn number(&self, b: &mut Builder, cut: Reg<U32>) -> Reg<U32> {
        let (before, skipped) = (self.pieces_to(b, cut), b.shr(self.first, self.shift));
        b.select(cut.gt(self.first), before - skipped, 0)
    }

    /// The first cut from so many spans of the row on.
    fn cut(&self, b: &mut Builder, spans: Reg<U32>) -> Reg<U32> {
        let at = b.let_((self.first + spans).min(self.end));
        let next = self.pieces_to(b, at);
        let next = b.shl(next, self.shift);
        b.select(spans.eq(0), self.first, next.min(self.end))
    }

    /// The pieces of CTA `number`, where each has so many spans.
    pub(super) fn shares(&self, b: &mut Builder, number: Reg<U32>, each: Reg<U32>) -> Pieces {
        let from = b.let_(number * each);
        let to = b.let_(from + each);
        self.pieces(b, [from, to], each)
    }

    /// The pieces that start in spans `from..to` of the row; `own` are the spans of the row's first CTA.
    pub(super) fn pieces(&self, b: &mut Builder, [from, to]: [Reg<U32>; 2], own: Reg<U32>) -> Pieces {
        let [from, to, kept] = [from, to, own].map(|spans| self.cut(b, spans));
        let [before, behind, kept, all] = [from, to, kept, self.end].map(|cut| self.number(b, cut));
        Pieces { row: *self, from, to, before, count: b.let_(behind - before), kept, all }
    }
}

/// Pieces of a row that one CTA computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    row: Row,
    /// Their spans.
    pub(super) from: Reg<U32>,
    pub(super) to: Reg<U32>,
    /// Pieces before them, and how many they are.
    pub(super) before: Reg<U32>,
    pub(super) count: Reg<U32>,
    /// Pieces of the first CTA, which folds them, and of the row.
    pub(super) kept: Reg<U32>,
    pub(super) all: Reg<U32>,
}

impl Pieces {
    /// Where the piece at a cut ends.
    pub(super) fn end(&self, b: &mut Builder, cut: Reg<U32>) -> Reg<U32> {
        let next = b.let_((cut >> self.row.shift) + 1);
        let next = b.shl(next, self.row.shift);
        b.let_(next.min(self.to))
    }

    /// Parts that the row's CTAs make: one of the first, and one of every piece of the others.
    pub(super) fn parts(&self, b: &mut Builder) -> Reg<U32> {
        b.let_(self.all - self.kept + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, SPAN, shift, shift_of};

    #[test]
    fn pieces_are_as_wide_as_the_rule_says() {
        let keys = |keys: u32| SPAN << shift_of(keys.div_ceil(SPAN), ALL);
        let rows = [1, 1_024, 1_025, 4_096, 4_097, 16_384, 16_385, 131_072, 1 << 20];
        assert_eq!(rows.map(keys), [128, 128, 256, 256, 512, 512, 1_024, 2_048, 4_096]);
        // The most pieces are those of the longest rows.
        assert!((0..24).all(|octave| octave - shift(octave) <= octave + 1 - shift(octave + 1)));
        // A window of 2,048 keys.
        assert_eq!(shift_of(1 << 20, 4), 1);
    }
}
