//! Dropout: weights that are left out, found by hashes of where they stand.
//!
//! The words of a plane (a query head of a sequence) come from the seed once, those of a query once for all its keys, and
//! a weight costs two multiplications and a comparison. No random numbers are kept for gradients, whose kernels cut the
//! work in other ways and leave out the same weights. [`flashcore_core::DropoutWords`] says what is computed.

use flashcore_core::{DROPOUT_FACTORS, DROPOUT_STEP, Problem};
use flashcore_tile::{Acc, Builder, Expr, F32, Params, Pred, Reg, S32, U32, U64};

use super::{
    mask::thread_column,
    schedule::{Schedule, Side, Tile},
    softmax::Rows,
};
use crate::slots;

/// Lanes of a warp.
const LANES: u32 = 32;

/// The two words that hashes of a plane or of a query begin with.
type Words = [Reg<U32>; 2];

/// What a launch brings, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropoutArgument {
    seed: Reg<U64>,
    /// Weights are left out whose hash is below this.
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
        let seed = b.load_global::<U32, 2>(self.seed);
        let plane = b.var(tile.sequence * heads + tile.head);
        let words = words_of_plane(b, seed, plane).map(|word| b.var(word));
        HeadDropout { argument: *self, seed, plane, words }
    }
}

/// What is left out of the weights of one query head of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadDropout {
    argument: DropoutArgument,
    seed: [Reg<U32>; 2],
    plane: Reg<U32>,
    words: Words,
}

impl HeadDropout {
    /// Goes on to the next head.
    #[track_caller]
    pub(crate) fn next_head(&self, b: &mut Builder) {
        b.add_to(self.plane, 1);
        let words = words_of_plane(b, self.seed, self.plane);
        self.words.into_iter().zip(words).for_each(|(word, next)| b.set(word, next));
    }

    /// For the two rows that a thread keeps of each block; `side` says what rows are.
    #[track_caller]
    pub(crate) fn of_rows(
        self,
        b: &mut Builder,
        side: Side,
        blocks: impl IntoIterator<Item = Rows<S32>>,
    ) -> WarpDropout {
        let blocks = blocks.into_iter();
        let blocks = match side {
            Side::Queries => Blocks::Queries(
                blocks.map(|rows| rows.map(|row| words_of_row(b, self.words, row.unsigned()))).collect(),
            ),
            Side::Keys => Blocks::Keys(blocks.map(|rows| rows.map(|row| term_of_key(b, row))).collect()),
        };
        WarpDropout { head: self, blocks }
    }
}

/// The same for the rows that a warp keeps.
#[derive(Clone, Debug)]
pub(crate) struct WarpDropout {
    head: HeadDropout,
    blocks: Blocks,
}

/// What a thread knows of its two rows of each block.
#[derive(Clone, Debug)]
enum Blocks {
    /// The words of queries.
    Queries(Vec<[Words; 2]>),
    /// What keys add to the first words of queries.
    Keys(Vec<Rows<U32>>),
}

impl WarpDropout {
    /// The head whose weights they are.
    pub(crate) const fn head(&self) -> &HeadDropout {
        &self.head
    }

    /// What weights that stay are multiplied by.
    pub(crate) const fn factor(&self) -> Reg<F32> {
        self.head.argument.factor
    }

    /// For `count` columns from column `first` on: keys, or queries where rows are keys.
    #[track_caller]
    pub(crate) fn step(&self, b: &mut Builder, first: Reg<S32>, count: u32) -> StepDropout<'_> {
        let lane = b.lane();
        let column = thread_column(b, lane);
        let columns = match &self.blocks {
            Blocks::Queries(blocks) => {
                let key = b.let_(first + column);
                let term = term_of_key(b, key);
                let mut start = |[first, second]: Words| [b.let_(first + term), second];
                Columns::Keys(blocks.iter().map(|rows| rows.map(&mut start)).collect())
            }
            Blocks::Keys(terms) => {
                let words = (0..count.div_ceil(LANES)).map(|part| {
                    let row = b.let_(first.unsigned() + lane + part * LANES);
                    words_of_row(b, self.head.words, row)
                });
                Columns::Queries { terms, words: words.collect(), column: column.unsigned() }
            }
        };
        StepDropout { warp: self, columns }
    }
}

/// The same for the columns of one step.
#[derive(Clone, Debug)]
pub(crate) struct StepDropout<'a> {
    warp: &'a WarpDropout,
    columns: Columns<'a>,
}

#[derive(Clone, Debug)]
enum Columns<'a> {
    /// The words of each block's rows, the first with what the thread's first key adds.
    Keys(Vec<[Words; 2]>),
    /// What each block's rows add to the words of columns; the words of every 32nd column, which a lane computes for those
    /// that have values of it; the first of the columns whose values the thread has.
    Queries { terms: &'a [Rows<U32>], words: Vec<Words>, column: Reg<U32> },
}

impl StepDropout<'_> {
    /// What weights that stay are multiplied by.
    pub(crate) const fn factor(&self) -> Reg<F32> {
        self.warp.factor()
    }

    /// For some values of the blocks' accumulators, from value `first` on, a multiple of four: all lanes must ask.
    #[track_caller]
    pub(crate) fn values(&self, b: &mut Builder, first: usize, count: usize) -> ValuesDropout<'_> {
        let Columns::Queries { words, column, .. } = &self.columns else {
            return ValuesDropout { step: self, first, words: Vec::new() };
        };
        let of_column = |i: usize| {
            let at = Acc::col(i) as u32;
            let lane = b.let_(*column + at % LANES);
            words[(at / LANES) as usize].map(|word| b.shuffle(word, lane))
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
    /// The words of their columns, where these are queries.
    words: Vec<Words>,
}

impl ValuesDropout<'_> {
    /// Whether the weight stays that is number `n` of the values in the accumulator of a block.
    #[track_caller]
    pub(crate) fn keeps(&self, b: &mut Builder, block: usize, n: usize) -> Pred {
        let (row, col) = (Acc::row(n), Acc::col(self.first + n) as u32);
        let threshold = self.step.warp.head.argument.threshold;
        match &self.step.columns {
            Columns::Keys(rows) => {
                let [start, second] = rows[block][row];
                keeps(b, start + DROPOUT_STEP.wrapping_mul(col), second, threshold)
            }
            Columns::Queries { terms, .. } => {
                let [word, second] = self.words[n / 4 * 2 + n % 2];
                keeps(b, word + terms[block][row], second, threshold)
            }
        }
    }

    /// Weights of a block with zeros for those that are left out, in other registers: sums may still read the ones they
    /// were in.
    #[track_caller]
    pub(crate) fn kept(&self, b: &mut Builder, block: usize, weights: &[Reg<F32>]) -> Vec<Reg<F32>> {
        let kept = |(n, &weight): (usize, &Reg<F32>)| {
            let stays = self.keeps(b, block, n);
            b.select(stays, weight, 0.0)
        };
        weights.iter().enumerate().map(kept).collect()
    }
}

/// What a hash adds for a key.
#[track_caller]
fn term_of_key(b: &mut Builder, key: Reg<S32>) -> Reg<U32> {
    b.let_(key.unsigned() * DROPOUT_STEP)
}

/// Whether a weight stays, given the first word with the key's term, and the second.
#[track_caller]
fn keeps(b: &mut Builder, word: impl Into<Expr<U32>>, second: Reg<U32>, threshold: Reg<U32>) -> Pred {
    let word = b.let_(word.into());
    let word = b.let_((word ^ (word >> 16)) * DROPOUT_FACTORS[0]);
    let hash = b.let_((word ^ (word >> 15) ^ second) * DROPOUT_FACTORS[1]);
    b.let_(hash.ge(threshold))
}

#[track_caller]
fn words_of_plane(b: &mut Builder, [low, high]: [Reg<U32>; 2], plane: Reg<U32>) -> Words {
    let first = mix(b, plane + DROPOUT_STEP);
    let first = mix(b, low ^ first);
    let second = mix(b, first + DROPOUT_STEP);
    [first, mix(b, high ^ second)]
}

#[track_caller]
fn words_of_row(b: &mut Builder, [first, second]: Words, row: Reg<U32>) -> Words {
    let first = mix(b, first + row);
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
