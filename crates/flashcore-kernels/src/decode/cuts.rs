//! Where keys are cut if bits must not depend on the batch: at places that follow from the numbers of keys alone.
//!
//! A *span* is 128 keys. The first 1,024 keys are cut at every span, those up to 4,096 at every second one, and from there on
//! the keys from each power of two to the next into eight. What lies between two cuts is computed by itself, from nothing, and
//! results are folded one by one in the order of their keys: the same bits, whichever CTAs compute how many of them. A
//! longer row has the cuts of a shorter one, and more behind them, so that a query has its bits whether it comes alone or
//! with others. Where a window bounds the keys of a query, its width takes the place of their number.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Reg, U32};

use super::{Config, cost::visible_keys, unit::Sequence};

/// Keys of a span: a multiple of what CTAs take in one turn.
pub(crate) const SPAN: u32 = 128;
/// The first octave of spans with wider pieces, and pieces of the octaves behind it.
const WIDE: u32 = 3;
const PIECES: u32 = 8;
/// The octave of windows that have no end.
const ALL: u32 = 31;

/// The last octave of spans after which pieces are of one width.
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

/// Where an octave of spans starts, how many cuts lie before it, and the binary logarithm of its pieces.
const fn octave(span: u32, last: u32) -> [u32; 3] {
    let number = (if span == 0 { 1 } else { span }).ilog2();
    let number = if number < last { number } else { last };
    match number {
        0..WIDE => [0, 0, 0],
        WIDE => [1 << WIDE, PIECES, 1],
        _ => [1 << number, PIECES * number + PIECES / 2 - PIECES * WIDE, number - WIDE],
    }
}

/// Cuts before a span.
fn before(span: u32, last: u32) -> u32 {
    let [start, cuts, shift] = octave(span, last);
    cuts + (span - start).div_ceil(1 << shift)
}

/// The first cut from a span on.
fn next(span: u32, last: u32) -> u32 {
    let [start, _, shift] = octave(span, last);
    start + ((span - start).div_ceil(1 << shift) << shift)
}

/// Pieces of a row at most.
pub(super) fn most_pieces(problem: &Problem) -> u32 {
    let (all, seen) = (spans(problem.longest_kv()), spans(visible_keys(problem)));
    before(all, last_octave(problem)).min(seen + 1)
}

/// Spans of the busiest of so many CTAs that share a row, about: they take whole pieces.
pub(super) fn busiest(problem: &Problem, ctas: u32) -> u32 {
    let (all, last) = (spans(visible_keys(problem)), last_octave(problem));
    let each = all.div_ceil(ctas);
    let border = |n: u32| next((n * each).min(all), last).min(all);
    (0..ctas.min(all)).map(|n| border(n + 1) - border(n)).max().unwrap_or(all)
}

/// Parts of a row at most that a cluster of so many CTAs exchanges: one of the first CTA, and every piece of the others.
pub(crate) fn most_messages(problem: &Problem, ctas: u32) -> u32 {
    let last = last_octave(problem);
    if last < ALL {
        return most_pieces(problem).next_multiple_of(PIECES);
    }
    let messages = |all: u32| 1 + before(all, last) - before(next(all.div_ceil(ctas), last).min(all), last);
    let most = (1..=spans(problem.longest_kv())).map(messages).max();
    most.unwrap_or(1).next_multiple_of(PIECES)
}

/// The rule, as a register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cuts {
    last: Reg<U32>,
    /// Parts of a row that there is room for.
    pub(super) room: Reg<U32>,
}

impl Cuts {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Option<Self> {
        cfg.invariant.then(|| Self {
            last: params.u32(b, "last_octave", last_octave),
            room: params.u32(b, "row_parts", most_pieces),
        })
    }

    /// As the function of this name.
    fn octave(self, b: &mut Builder, span: Reg<U32>) -> [Reg<U32>; 3] {
        let zeros = b.leading_zeros(span.max(1));
        let highest = b.var(31);
        let number = b.let_((highest - zeros).min(self.last));
        let wide = b.let_(number.ge(WIDE));
        let start = b.shl(1, number);
        let cuts = b.let_((number * PIECES - (PIECES * WIDE - PIECES / 2)).max(PIECES));
        let shift = b.let_((number - WIDE).max(1));
        [start, cuts, shift].map(|value| b.select(wide, value, 0))
    }

    /// Cuts before a span.
    fn before(self, b: &mut Builder, span: Reg<U32>) -> Reg<U32> {
        let [start, cuts, shift] = self.octave(b, span);
        let round = b.shl(1, shift);
        b.let_(((span - start + round - 1) >> shift) + cuts)
    }

    /// The first cut from a span on.
    pub(super) fn next(self, b: &mut Builder, span: Reg<U32>) -> Reg<U32> {
        let [start, _, shift] = self.octave(b, span);
        let round = b.shl(1, shift);
        b.let_((((span - start + round - 1) >> shift) << shift) + start)
    }
}

/// The spans of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    cuts: Cuts,
    pub(super) first: Reg<U32>,
    pub(super) end: Reg<U32>,
    /// Cuts up to the first span.
    skipped: Reg<U32>,
}

impl Row {
    pub(super) fn of(b: &mut Builder, cfg: &Config, cuts: Cuts, sequence: &Sequence) -> Self {
        let tiles = SPAN / cfg.shape.tile_n;
        let first = b.let_(sequence.first.max(0).unsigned() / tiles);
        let behind = b.let_(first + 1);
        let end = b.let_(sequence.tiles.end.max(0).unsigned().div_ceil(tiles).max(behind));
        Self { cuts, first, end, skipped: cuts.before(b, behind) }
    }

    /// How many there are.
    pub(super) fn spans(&self, b: &mut Builder) -> Reg<U32> {
        b.let_(self.end - self.first)
    }

    /// Pieces of the row before a cut.
    fn number(&self, b: &mut Builder, cut: Reg<U32>) -> Reg<U32> {
        let before = self.cuts.before(b, cut);
        b.select(cut.gt(self.first), before - self.skipped + 1, 0)
    }

    /// The first cut from so many spans of the row on.
    fn cut(&self, b: &mut Builder, spans: Reg<U32>) -> Reg<U32> {
        let at = b.let_((self.first + spans).min(self.end));
        let next = self.cuts.next(b, at);
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
        let behind = b.let_(cut + 1);
        let next = self.row.cuts.next(b, behind);
        b.let_(next.min(self.to))
    }

    /// Parts that the row's CTAs make: one of the first, and one of every piece of the others.
    pub(super) fn parts(&self, b: &mut Builder) -> Reg<U32> {
        b.let_(self.all - self.kept + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, before, next};

    #[test]
    fn cuts_are_where_the_rule_says() {
        let cuts = |end: u32, last: u32| {
            let all: Vec<u32> = (0..end).filter(|&span| next(span, last) == span).collect();
            assert!(
                (0..end).all(|span| before(span, last) as usize == all.partition_point(|&cut| cut < span))
            );
            all
        };
        let all = cuts(1 << 10, ALL);
        assert_eq!(all[..16], [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22]);
        assert_eq!(all.iter().filter(|&&cut| cut >= 512).count(), 8);
        // A window of 2,048 keys: pieces of 256.
        assert!(cuts(1 << 10, 4)[8..].windows(2).all(|pair| pair[1] - pair[0] == 2));
        // A window of few keys.
        assert_eq!(cuts(100, 1).len(), 100);
    }
}
