//! Dropout: which weights are dropped, decided by hashes of their positions.
//!
//! The words of a plane (a query head of a sequence) come from the seed once, those of a query once for all its keys, and
//! a weight costs two multiplications and a comparison. No random numbers are kept for gradients, whose kernels divide
//! the work differently and drop the same weights. [`flashcore_core::DropoutWords`] defines the hash.

use flashcore_core::{DROPOUT_FACTORS, DROPOUT_STEP, Problem};
use flashcore_tile::{Acc, Builder, Expr, F32, MMA_M, Params, Pred, Reg, S32, U32, U64};

use super::{
    mask::thread_column,
    schedule::{Schedule, Side, Tile},
};
use crate::slots;

/// Lanes of a warp.
const LANES: u32 = 32;

/// The two words that hashes of a plane or of a query begin with.
type Words = [Reg<U32>; 2];

/// Arguments of a launch, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropoutArgument {
    seed: Reg<U64>,
    /// Weights whose hash is below this are dropped.
    threshold: Reg<U32>,
    /// What weights that stay are multiplied by.
    factor: Reg<F32>,
}

impl DropoutArgument {
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem>>(
        b: &mut Builder,
        params: &mut Params<A>,
        dropout: bool,
    ) -> Option<Self> {
        let threshold = |p: &Problem| p.dropout().map_or(0, |dropout| dropout.threshold());
        let factor = |p: &Problem| p.dropout().map_or(1.0, |dropout| dropout.factor());
        dropout.then(|| Self {
            seed: params.buffer(b, "seed", slots::SEED),
            threshold: params.u32(b, "drop_threshold", move |p| threshold(p.as_ref())),
            factor: params.f32(b, "drop_factor", move |p| factor(p.as_ref())),
        })
    }

    /// What weights that stay are multiplied by.
    pub(crate) const fn factor(&self) -> Reg<F32> {
        self.factor
    }

    /// For the tile's query head, or for the first of those that share its keys.
    #[track_caller]
    pub(crate) fn of_tile(&self, b: &mut Builder, schedule: &Schedule, tile: &Tile) -> HeadDropout {
        let heads = schedule.query_heads(b);
        let plane = b.var(tile.sequence * heads + tile.head);
        let words = self.words_of_plane(b, plane).map(|word| b.var(word));
        HeadDropout { argument: *self, plane, words }
    }

    /// The words of a plane; the seed is read where they are made, as nobody has registers to keep it.
    #[track_caller]
    fn words_of_plane(&self, b: &mut Builder, plane: Reg<U32>) -> Words {
        let [low, high] = b.load_global::<U32, 2>(self.seed);
        let first = mix(b, plane + DROPOUT_STEP);
        let first = mix(b, low ^ first);
        let second = mix(b, first + DROPOUT_STEP);
        [first, mix(b, high ^ second)]
    }
}

/// Which weights of one query head of a sequence are dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadDropout {
    argument: DropoutArgument,
    plane: Reg<U32>,
    words: Words,
}

impl HeadDropout {
    /// Goes on to the next head.
    #[track_caller]
    pub(crate) fn next_head(&self, b: &mut Builder) {
        b.add_to(self.plane, 1);
        let words = self.argument.words_of_plane(b, self.plane);
        self.words.into_iter().zip(words).for_each(|(word, next)| b.set(word, next));
    }

    /// For the two rows of each block of a warp that a thread keeps, the first of them `first`; `side` says what rows are.
    #[track_caller]
    pub(crate) fn of_rows(self, b: &mut Builder, side: Side, first: Reg<S32>, blocks: u32) -> WarpDropout {
        let rows = match side {
            Side::Queries => {
                let mut words = |row: u32| words_of_row(b, self.words, first.unsigned() + row);
                let mut block = |n: u32| [0, 1].map(|row| words(row_of_block(n, row)));
                KeptRows::Queries((0..blocks).map(&mut block).collect())
            }
            Side::Keys => KeptRows::Keys(term_of_key(b, first)),
        };
        WarpDropout { head: self, rows }
    }
}

/// The same for the rows that a warp keeps.
#[derive(Clone, Debug)]
pub(crate) struct WarpDropout {
    head: HeadDropout,
    rows: KeptRows,
}

/// What a thread knows about its rows.
#[derive(Clone, Debug)]
enum KeptRows {
    /// The words of queries: those of two rows for each block.
    Queries(Vec<[Words; 2]>),
    /// The term of the first key.
    Keys(Reg<U32>),
}

impl WarpDropout {
    /// The head whose weights they are.
    pub(crate) const fn head(&self) -> &HeadDropout {
        &self.head
    }

    /// For `count` columns from column `first` on: keys, or queries where rows are keys.
    #[track_caller]
    pub(crate) fn step(&self, b: &mut Builder, first: Reg<S32>, count: u32) -> StepDropout<'_> {
        let lane = b.lane();
        let column = thread_column(b, lane);
        let columns = match &self.rows {
            KeptRows::Queries(blocks) => {
                let key = b.let_(first + column);
                let term = term_of_key(b, key);
                let mut start = |words: Words| with_term(b, words, term);
                Columns::Keys(blocks.iter().map(|rows| rows.map(&mut start)).collect())
            }
            &KeptRows::Keys(term) => {
                let words = (0..count.div_ceil(LANES)).map(|part| {
                    let row = b.let_(first.unsigned() + lane + part * LANES);
                    words_of_row(b, self.head.words, row)
                });
                Columns::Queries { words: words.collect(), column: column.unsigned(), term }
            }
        };
        StepDropout { warp: self, columns }
    }
}

/// The same for the columns of one step.
#[derive(Clone, Debug)]
pub(crate) struct StepDropout<'a> {
    warp: &'a WarpDropout,
    columns: Columns,
}

#[derive(Clone, Debug)]
enum Columns {
    /// The words of each block's rows, with the term of the thread's first key.
    Keys(Vec<[Words; 2]>),
    /// The words of every 32nd column, which a lane computes for those that have values of it; the first of the columns whose
    /// values the thread has; the term of its first key.
    Queries { words: Vec<Words>, column: Reg<U32>, term: Reg<U32> },
}

impl StepDropout<'_> {
    /// What weights that stay are multiplied by.
    pub(crate) const fn factor(&self) -> Reg<F32> {
        self.warp.head.argument.factor
    }

    /// For some values of the blocks' accumulators, from value `first` on, a multiple of four: all lanes must ask.
    #[track_caller]
    pub(crate) fn values(&self, b: &mut Builder, first: usize, count: usize) -> ValuesDropout<'_> {
        let Columns::Queries { words, column, term } = &self.columns else {
            return ValuesDropout { step: self, first, words: Vec::new() };
        };
        let of_column = |i: usize| {
            let at = Acc::col(i) as u32;
            let lane = b.let_(*column + at % LANES);
            let words = words[(at / LANES) as usize].map(|word| b.shuffle(word, lane));
            with_term(b, words, *term)
        };
        let one_row = (first..first + count).filter(|&i| Acc::row(i) == 0);
        ValuesDropout { step: self, first, words: one_row.map(of_column).collect() }
    }
}

/// The same for some values of a step.
#[derive(Clone, Debug)]
pub(crate) struct ValuesDropout<'a> {
    step: &'a StepDropout<'a>,
    first: usize,
    /// The words of their columns, where these are queries, with the term of the thread's first key.
    words: Vec<Words>,
}

impl ValuesDropout<'_> {
    /// Whether the weight stays that is number `n` of the values in the accumulator of a block.
    #[track_caller]
    pub(crate) fn keeps(&self, b: &mut Builder, block: usize, n: usize) -> Pred {
        let row = Acc::row(n);
        // How many keys after the thread's first.
        let ([start, second], key) = match &self.step.columns {
            Columns::Keys(rows) => (rows[block][row], Acc::col(self.first + n) as u32),
            Columns::Queries { .. } => {
                (self.words[n / 4 * 2 + n % 2], row_of_block(block as u32, row as u32))
            }
        };
        let word = b.let_(start + DROPOUT_STEP.wrapping_mul(key));
        let word = b.let_((word ^ (word >> 16)) * DROPOUT_FACTORS[0]);
        let hash = b.let_((word ^ (word >> 15) ^ second) * DROPOUT_FACTORS[1]);
        b.let_(hash.ge(self.step.warp.head.argument.threshold))
    }

    /// Weights of a block with zeros for dropped ones, in other registers: sums may still read the original
    /// ones.
    #[track_caller]
    pub(crate) fn kept(&self, b: &mut Builder, block: usize, weights: &[Reg<F32>]) -> Vec<Reg<F32>> {
        let kept = |(n, &weight): (usize, &Reg<F32>)| {
            let stays = self.keeps(b, block, n);
            b.select(stays, weight, 0.0)
        };
        weights.iter().enumerate().map(kept).collect()
    }
}

/// What a key adds to the first word of a query.
#[track_caller]
fn term_of_key(b: &mut Builder, key: Reg<S32>) -> Reg<U32> {
    b.let_(key.unsigned() * DROPOUT_STEP)
}

/// Words of a query with the term of a key.
#[track_caller]
fn with_term(b: &mut Builder, [first, second]: Words, term: Reg<U32>) -> Words {
    [b.let_(first + term), second]
}

/// Which of a warp's rows a thread's row `row` of a block is, counted from the thread's first.
const fn row_of_block(block: u32, row: u32) -> u32 {
    block * MMA_M + row * (MMA_M / 2)
}

#[track_caller]
fn words_of_row(b: &mut Builder, [first, second]: Words, row: impl Into<Expr<U32>>) -> Words {
    let first = mix(b, first + row.into());
    [first, mix(b, second ^ first)]
}

/// Mixes the bits of a word.
#[track_caller]
fn mix(b: &mut Builder, word: impl Into<Expr<U32>>) -> Reg<U32> {
    let word = b.let_(word.into());
    let word = b.let_((word ^ (word >> 16)) * DROPOUT_FACTORS[0]);
    let word = b.let_((word ^ (word >> 15)) * DROPOUT_FACTORS[1]);
    b.let_(word ^ (word >> 16))
}
