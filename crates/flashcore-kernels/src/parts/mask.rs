//! Masks: which keys a row sees, which key tiles a row tile needs, and masking the others.
//!
//! Every mask is a band (see [`flashcore_core::Mask`]): its two bounds are values at run time, and a kernel only knows
//! which of them exist. Rows and keys are signed, because a diagonal may start before the first key.

use flashcore_core::{Align, Problem};
use flashcore_tile::{Acc, Builder, Params, Pred, ROWS_PER_THREAD, Reg, S32, U32, Val};

use super::softmax::Rows;

/// Longest sequence: with a diagonal and a bound added, positions still fit in 32 bits.
pub const MAX_SEQUENCE: usize = 1 << 29;
/// Largest bound, in either direction; no two positions are further apart.
const MAX_BOUND: u32 = 1 << 30;

/// Which bounds a mask has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sides {
    /// Keys far before a row's own position are masked.
    pub left: bool,
    /// Keys far after a row's own position are masked.
    pub right: bool,
}

impl Sides {
    /// The bounds of a problem's mask.
    pub fn of(problem: &Problem) -> Self {
        let mask = problem.mask();
        Self { left: mask.left().is_some(), right: mask.right().is_some() }
    }

    /// The name in a kernel's name.
    pub const fn name(self) -> &'static str {
        match (self.left, self.right) {
            (false, false) => "full",
            (false, true) => "right",
            (true, false) => "left",
            (true, true) => "band",
        }
    }
}

/// A mask's bounds, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    left: Option<Reg<U32>>,
    right: Option<Reg<U32>>,
    /// 1 where the diagonal ends in the bottom right corner, 0 where it starts in the top left one.
    bottom_right: Option<Reg<U32>>,
}

impl Mask {
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem>>(b: &mut Builder, params: &mut Params<A>, sides: Sides) -> Self {
        // A shift of the diagonal moves both bounds, so that kernels need not know of it.
        let bound = |bound: Option<u32>, shift: i64| {
            let far = i64::from(MAX_BOUND);
            (i64::from(bound.unwrap_or(MAX_BOUND)) + shift).clamp(-far, far) as u32
        };
        let left = move |p: &A| {
            let mask = p.as_ref().mask();
            bound(mask.left(), -i64::from(mask.shift()))
        };
        let right = move |p: &A| {
            let mask = p.as_ref().mask();
            bound(mask.right(), i64::from(mask.shift()))
        };
        let align = |p: &A| u32::from(p.as_ref().mask().align() == Align::BottomRight);
        Self {
            left: sides.left.then(|| params.u32(b, "mask_left", left)),
            right: sides.right.then(|| params.u32(b, "mask_right", right)),
            bottom_right: (sides.left || sides.right).then(|| params.u32(b, "mask_bottom_right", align)),
        }
    }

    /// The mask over a sequence.
    #[track_caller]
    pub(crate) fn over(self, b: &mut Builder, queries: Reg<U32>, keys: Reg<U32>) -> Visibility {
        let diagonal = self.bottom_right.map(|weight| b.let_((keys - queries) * weight));
        let first = self.left.zip(diagonal).map(|(reach, diagonal)| b.let_((diagonal - reach).signed()));
        let last = self.right.zip(diagonal).map(|(reach, diagonal)| b.let_((diagonal + reach).signed()));
        Visibility { keys: keys.signed(), first, last }
    }
}

/// Which keys of a sequence a row sees: those from `row + first` to `row + last`, and none beyond `keys`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visibility {
    keys: Reg<S32>,
    first: Option<Reg<S32>>,
    last: Option<Reg<S32>>,
}

impl Visibility {
    /// The same seen from the keys: which of `queries` queries a key is seen by.
    #[track_caller]
    pub(crate) fn transposed(&self, b: &mut Builder, queries: Reg<U32>) -> Self {
        let mut mirrored = |bound: Reg<S32>| b.let_(Val::<S32>::Const(0) - bound);
        Self {
            keys: queries.signed(),
            first: self.last.map(&mut mirrored),
            last: self.first.map(&mut mirrored),
        }
    }

    /// The first key that a row sees, if it does not see them from the start; may be negative.
    #[track_caller]
    fn begin(&self, b: &mut Builder, row: Reg<S32>) -> Option<Reg<S32>> {
        self.first.map(|first| b.let_(row + first))
    }

    /// One more than the last key that a row sees; may be negative.
    #[track_caller]
    fn end(&self, b: &mut Builder, row: Reg<S32>) -> Reg<S32> {
        let Some(last) = self.last else { return self.keys };
        b.let_((row + last + 1).min(self.keys))
    }

    /// Key tiles of `tile_n` keys that rows `first_row..=last_row` need.
    #[track_caller]
    pub(crate) fn key_tiles(
        &self,
        b: &mut Builder,
        [first_row, last_row]: [Reg<S32>; 2],
        tile_n: u32,
    ) -> KeyTiles {
        let all = self.end(b, last_row);
        let clean = self.end(b, first_row);
        let begin = self.begin(b, first_row);
        let clean_begin = self.begin(b, last_row);
        let down = |b: &mut Builder, keys: Reg<S32>| b.let_((keys.max(0).unsigned() / tile_n).signed());
        let up = |b: &mut Builder, keys: Reg<S32>| b.let_(keys.max(0).unsigned().div_ceil(tile_n).signed());
        KeyTiles {
            end: up(b, all),
            clean_end: down(b, clean),
            begin: begin.map(|begin| down(b, begin)),
            clean_begin: clean_begin.map(|begin| up(b, begin)),
        }
    }

    /// Whether any of the rows `first_row..=last_row` sees any of `keys` keys from `key` on.
    #[track_caller]
    pub(crate) fn any(
        &self,
        b: &mut Builder,
        [first_row, last_row]: [Reg<S32>; 2],
        key: Reg<S32>,
        keys: u32,
    ) -> Pred {
        let end = self.end(b, last_row);
        let before_end = b.let_(key.lt(end));
        let Some(begin) = self.begin(b, first_row) else { return before_end };
        b.let_(before_end & (key + (keys as i32 - 1)).ge(begin))
    }

    /// What a thread with these rows sees.
    #[track_caller]
    pub(crate) fn of_thread(&self, b: &mut Builder, rows: Rows<S32>) -> ThreadVisibility {
        ThreadVisibility {
            begin: self.first.map(|first| rows.map(|row| b.let_(row + first))),
            end: rows.map(|row| self.end(b, row)),
        }
    }
}

/// The key tiles of a row tile, `begin..end`; those in `clean_begin..clean_end` mask nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyTiles {
    pub(crate) end: Reg<S32>,
    pub(crate) clean_end: Reg<S32>,
    /// The first, where it is not 0.
    pub(crate) begin: Option<Reg<S32>>,
    /// The first that masks nothing on its left, where that is not 0.
    pub(crate) clean_begin: Option<Reg<S32>>,
}

impl KeyTiles {
    /// Whether key tile `tile` has masked keys for some rows.
    #[track_caller]
    pub(crate) fn hides(&self, b: &mut Builder, tile: Reg<S32>) -> Pred {
        let right = tile.ge(self.clean_end);
        match self.clean_begin {
            Some(begin) => b.let_(right | tile.lt(begin)),
            None => b.let_(right),
        }
    }

    /// The first of them.
    pub(crate) fn first(&self) -> Val<S32> {
        self.begin.map_or(Val::Const(0), Val::from)
    }
}

/// The keys that a thread's two rows see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadVisibility {
    begin: Option<Rows<S32>>,
    end: Rows<S32>,
}

/// The first column of an accumulator of which a thread has values.
#[track_caller]
pub(crate) fn thread_column(b: &mut Builder, lane: Reg<U32>) -> Reg<S32> {
    b.let_(((lane & 3) << 1).signed())
}

impl ThreadVisibility {
    /// The same with nothing to be seen by the rows for which `beyond` holds.
    #[track_caller]
    pub(crate) fn without(self, b: &mut Builder, beyond: [Pred; ROWS_PER_THREAD]) -> Self {
        let end = std::array::from_fn(|row| b.select(beyond[row], 0, self.end[row]));
        Self { end, ..self }
    }

    /// Sets the scores of masked keys to −∞; `first_key` is the key of this thread's first column.
    #[track_caller]
    pub(crate) fn hide(&self, b: &mut Builder, scores: &Acc, first_key: Reg<S32>) {
        let end = self.end.map(|end| b.let_(end - first_key));
        match self.begin.map(|begin| begin.map(|begin| b.let_(begin - first_key))) {
            Some(begin) => hide_outside(b, scores, begin, end),
            None => hide_beyond(b, scores, end),
        }
    }
}

/// Masks the columns from `end` on: a comparison and a selection for each score.
#[track_caller]
fn hide_beyond(b: &mut Builder, scores: &Acc, end: Rows<S32>) {
    for (i, &score) in scores.regs().iter().enumerate() {
        b.select_into(score, end[Acc::row(i)].le(Acc::col(i) as i32), f32::NEG_INFINITY, score);
    }
}

/// Masks the columns before `begin` and from `end` on. Two comparisons per score would be expensive; bits of one word
/// become several predicates at once.
#[track_caller]
fn hide_outside(b: &mut Builder, scores: &Acc, begin: Rows<S32>, end: Rows<S32>) {
    for (word, scores) in (0..).zip(scores.regs().chunks(ROWS_PER_THREAD * WORD)) {
        let hidden: Rows<U32> = std::array::from_fn(|row| {
            let beyond = from_column(b, end[row], word * WORD_COLS);
            let inside = from_column(b, begin[row], word * WORD_COLS);
            b.let_(beyond | (inside ^ u32::MAX))
        });
        for (i, &score) in scores.iter().enumerate() {
            let bit = hidden[Acc::row(i)] & (1u32 << value_of_row(i));
            b.select_into(score, bit.ne(0), f32::NEG_INFINITY, score);
        }
    }
}

/// A thread's values of a row that the bits of a word stand for.
const WORD: usize = u32::BITS as usize;
/// Columns over which they are spread: two of every eight.
const WORD_COLS: i32 = 4 * WORD as i32;

/// Number of value `i` among the thread's values of its row.
const fn value_of_row(i: usize) -> usize {
    2 * (i / 4) + i % 2
}

/// One bit for each of a thread's values of a row, from `skipped` columns on: set from column `column` on.
#[track_caller]
fn from_column(b: &mut Builder, column: Reg<S32>, skipped: i32) -> Reg<U32> {
    let column = b.let_((column - skipped).max(0).min(WORD_COLS).unsigned());
    let values = b.let_((column / 8) * 2 + (column % 8).min(2));
    b.let_(Val::<U32>::Const(u32::MAX) << values)
}
