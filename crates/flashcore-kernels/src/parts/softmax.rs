//! Online softmax over accumulator tiles, in base 2; used by every forward kernel.
//!
//! A thread keeps, for each of its two rows, where the row's probabilities are measured from, its reference, and its own
//! part of the running sum. Scores stay in the units in which they come out of the matrix product; the scale is folded
//! into the one FMA before `exp2`.
//!
//! A reference is not a running maximum. It lies near the maximum of the first scores that the row saw, and moves only
//! when probabilities outgrow what 16-bit floats hold, so that most steps leave the output tile alone. There are two
//! ways to notice. [`Softmax::raise`] compares the maximum of new scores before it takes exponentials.
//! [`Softmax::step`] takes them at once and looks at their sum, which is needed anyway; where that is too large, the
//! tile is done again. Whether a row moves is decided for that row alone and a vote only skips the work, so that a
//! row's bits do not depend on its neighbours.

use flashcore_tile::{Acc, Builder, Element, F32, Fragment, Half, Pred, ROWS_PER_THREAD, Reg, Scope};

/// How far apart, in powers of two, probabilities of a row may be.
struct Room {
    /// The largest score seen when a row's reference moves has this probability: the lower, the longer it may stay.
    top: f32,
    /// Where the output is rescaled at the latest.
    limit: f32,
}

impl Room {
    /// An f16 ends at 2^16, and loses bits below 2^-14. A bf16 reaches further than sums of large values in f32 should.
    /// Probabilities that stay f32 lie near 1, where their logarithms have the most bits behind the point.
    const fn of(element: Element) -> Self {
        match element.half() {
            Some(Half::F16) => Self { top: -5.0, limit: 15.0 },
            Some(Half::Bf16) => Self { top: -24.0, limit: 40.0 },
            None => Self { top: 0.0, limit: 4.0 },
        }
    }
}

/// Minus the reference of a row that has seen no key: whatever it sees first is infinitely far above.
const UNSEEN: f32 = 1.0e38;
/// Independent chains of a row's maximum: the latency of `max` is hidden four deep.
const CHAINS: usize = 4;
const LN_2: f32 = std::f32::consts::LN_2;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The values of a thread's two rows.
pub type Rows<T> = [Reg<T>; ROWS_PER_THREAD];

/// Reference and running sum of a thread's rows.
#[derive(Debug)]
pub struct Softmax {
    scale: Reg<F32>,
    negated_scale: Reg<F32>,
    /// What is added to a scaled score: minus the reference, in powers of two.
    offset: Rows<F32>,
    sum: Rows<F32>,
    /// What probabilities become.
    element: Element,
}

/// What the epilogue needs of a finished softmax.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// What the output rows must be multiplied by.
    pub factor: Rows<F32>,
    /// Natural logarithm of the sum of exponentials; −∞ for a row without keys.
    pub lse: Rows<F32>,
}

/// Rows that were computed in parts.
#[derive(Clone, Debug)]
pub struct Merged {
    /// What the output of each part must be multiplied by.
    pub weights: Vec<Rows<F32>>,
    /// The rows as a whole.
    pub finished: Finished,
}

impl Softmax {
    /// Registers for the rows of one tile; `scale` turns scores into powers of two, probabilities become `element`s.
    #[track_caller]
    pub fn new(b: &mut Builder, scale: Reg<F32>, element: impl Into<Element>) -> Self {
        let row = |b: &mut Builder, value: f32| std::array::from_fn(|_| b.var_in(Scope::Lane, value));
        let element = element.into();
        Self { scale, negated_scale: b.neg(scale), offset: row(b, UNSEEN), sum: row(b, 0.0), element }
    }

    /// Turns the scores of a row's first tile into probabilities.
    #[track_caller]
    pub fn first(&self, b: &mut Builder, scores: &Acc, probs: &Fragment) {
        for (offset, top) in self.offset.into_iter().zip(row_maxima(b, scores)) {
            let from_top = self.offset_from(b, top);
            b.set(offset, from_top);
        }
        let sums = self.weigh(b, scores, probs);
        for (sum, tile) in self.sum.into_iter().zip(sums) {
            b.set(sum, tile);
        }
    }

    /// Turns the scores of a further tile into probabilities, and brings the output tile along where rows grew.
    #[track_caller]
    pub fn step(&self, b: &mut Builder, scores: &Acc, probs: &Fragment, output: &Acc) {
        let sums = self.weigh(b, scores, probs).map(|sum| b.var_in(Scope::Lane, sum));
        let large = sums.map(|sum| self.is_large(b, sum));
        let either = b.either(large[0], large[1]);
        let any = b.any(either);
        b.if_uniform(any, |b| {
            let factors = self.catch_up(b, scores, sums);
            output.scale_rows(b, factors);
            let again = self.weigh(b, scores, probs);
            for (sum, again) in sums.into_iter().zip(again) {
                b.set(sum, again);
            }
        });
        for (sum, tile) in self.sum.into_iter().zip(sums) {
            b.add_to(sum, tile);
        }
    }

    /// Whether one of the probabilities in a sum may be too large.
    #[track_caller]
    fn is_large(&self, b: &mut Builder, sum: Reg<F32>) -> Pred {
        b.let_(sum.ge(Room::of(self.element).limit.exp2()))
    }

    /// Moves the references of the rows of which any thread found its sum too large.
    #[track_caller]
    fn catch_up(&self, b: &mut Builder, scores: &Acc, sums: Rows<F32>) -> Rows<F32> {
        let grew = sums.map(|sum| {
            let largest = over_quad(b, sum, |b, x, y| b.max(x, y));
            self.is_large(b, largest)
        });
        let top = row_maxima(b, scores);
        std::array::from_fn(|row| self.move_reference(b, row, top[row], grew[row]))
    }

    /// Probabilities of a tile, measured from the references as they are; returns this thread's sums.
    #[track_caller]
    fn weigh(&self, b: &mut Builder, scores: &Acc, probs: &Fragment) -> Rows<F32> {
        let mut sums = Sums::default();
        for (i, (pair, &packed)) in scores.regs().chunks_exact(2).zip(probs.regs()).enumerate() {
            let row = Acc::row(2 * i);
            let pair: [_; 2] = std::array::from_fn(|col| {
                let power = b.fma(pair[col], self.scale, self.offset[row]);
                let prob = b.exp2(power);
                sums.add(b, row, col, prob);
                prob
            });
            b.pack_into(packed, self.element, pair[0], pair[1]);
        }
        sums.total(b)
    }

    /// Ends the rows: sums over the quad that shares them, and adds the sink's exponential if there is one.
    #[track_caller]
    pub fn finish(&self, b: &mut Builder, sinks: Option<Rows<F32>>) -> Finished {
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let sum = over_quad(b, self.sum[row], |b, x, y| b.add(x, y));
            let top = b.neg(self.offset[row]);
            match sinks {
                Some(sinks) => close_with_sink(b, top, sum, sinks[row]),
                None => close(b, top, sum),
            }
        });
        Finished { factor: rows.map(|r| r.0), lse: rows.map(|r| r.1) }
    }

    /// What other parts of the same rows need to know: references in powers of two, then sums over the quad.
    #[track_caller]
    pub fn part(&self, b: &mut Builder) -> [Reg<F32>; 2 * ROWS_PER_THREAD] {
        let [top0, top1] = self.offset.map(|offset| b.neg(offset));
        let [sum0, sum1] = self.sum.map(|sum| over_quad(b, sum, |b, x, y| b.add(x, y)));
        [top0, top1, sum0, sum1]
    }

    /// Ends rows that were computed in parts, given what [`part`](Self::part) said of each.
    #[track_caller]
    pub fn merge_parts(
        b: &mut Builder,
        parts: &[[Reg<F32>; 2 * ROWS_PER_THREAD]],
        sinks: Option<Rows<F32>>,
    ) -> Merged {
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let top = parts.iter().map(|part| part[row]).reduce(|x, y| b.max(x, y)).expect("there is a part");
            let weights: Vec<_> = parts.iter().map(|part| b.exp2(part[row] - top)).collect();
            let terms = parts.iter().zip(&weights);
            let start = b.var_in(Scope::Lane, 0.0);
            let sum =
                terms.fold(start, |sum, (part, &weight)| b.fma(part[ROWS_PER_THREAD + row], weight, sum));
            let (factor, lse) = match sinks {
                Some(sinks) => close_with_sink(b, top, sum, sinks[row]),
                None => close(b, top, sum),
            };
            let weights: Vec<_> = weights.into_iter().map(|weight| b.mul(weight, factor)).collect();
            (weights, factor, lse)
        });
        let weights = (0..parts.len()).map(|part| [rows[0].0[part], rows[1].0[part]]).collect();
        Merged { weights, finished: Finished { factor: [rows[0].1, rows[1].1], lse: [rows[0].2, rows[1].2] } }
    }

    /// Moves the references of several tiles of rows to the maxima of new scores where these grew much, and brings
    /// their outputs along, under one vote; [`Exponentials`] turn the scores into probabilities.
    #[track_caller]
    pub fn raise(b: &mut Builder, tiles: &[RowTile<'_>]) {
        let tops: Vec<_> = tiles.iter().map(|tile| row_maxima(b, tile.scores)).collect();
        let grew: Vec<_> = tiles.iter().zip(&tops).map(|(tile, top)| tile.softmax.grew(b, *top)).collect();
        let either = grew.iter().flatten().copied().reduce(|x, y| b.either(x, y)).expect("a tile has rows");
        let any = b.any(either);
        b.if_uniform(any, |b| {
            for ((tile, top), grew) in tiles.iter().zip(tops).zip(grew) {
                let factors: Rows<F32> =
                    std::array::from_fn(|row| tile.softmax.move_reference(b, row, top[row], grew[row]));
                tile.output.scale_rows(b, factors);
            }
        });
    }

    /// Which rows grew beyond what may be left unscaled.
    #[track_caller]
    fn grew(&self, b: &mut Builder, top: Rows<F32>) -> [Pred; ROWS_PER_THREAD] {
        std::array::from_fn(|row| {
            let growth = b.fma(top[row], self.scale, self.offset[row]);
            b.let_(growth.gt(Room::of(self.element).limit))
        })
    }

    /// Measures a row from `top` if it grew, its sum with it; returns what its output must be multiplied by.
    #[track_caller]
    fn move_reference(&self, b: &mut Builder, row: usize, top: Reg<F32>, grew: Pred) -> Reg<F32> {
        let offset = self.offset_from(b, top);
        let offset = b.select(grew, offset, self.offset[row]);
        let factor = b.exp2(offset - self.offset[row]);
        b.set(self.offset[row], offset);
        b.mul_into(self.sum[row], self.sum[row], factor);
        factor
    }

    /// The offset that measures from a maximum; −∞ is that of a row without keys.
    #[track_caller]
    fn offset_from(&self, b: &mut Builder, top: Reg<F32>) -> Reg<F32> {
        let offset = b.fma(top, self.negated_scale, Room::of(self.element).top);
        b.let_(offset.min(UNSEEN))
    }
}

/// Scores of a tile of rows, and the softmax and output they belong to.
#[derive(Clone, Copy, Debug)]
pub struct RowTile<'a> {
    /// The rows' softmax.
    pub softmax: &'a Softmax,
    /// Their new scores.
    pub scores: &'a Acc,
    /// Their output so far.
    pub output: &'a Acc,
}

/// Exponentials of a tile's scores, taken part by part so that other work fits between.
#[derive(Debug)]
pub struct Exponentials<'a> {
    softmax: &'a Softmax,
    sums: Sums,
}

impl<'a> Exponentials<'a> {
    /// Measures from the references as they are now.
    pub fn new(softmax: &'a Softmax) -> Self {
        Self { softmax, sums: Sums::default() }
    }

    /// Turns scores, in the order of an accumulator's registers from a multiple of four on, into probabilities.
    #[track_caller]
    pub fn take(&mut self, b: &mut Builder, scores: &[Reg<F32>]) {
        for (i, &score) in scores.iter().enumerate() {
            let row = Acc::row(i);
            b.fma_into(score, score, self.softmax.scale, self.softmax.offset[row]);
            b.exp2_into(score, score);
            self.sums.add(b, row, i & 1, score);
        }
    }

    /// Adds what was taken to the rows' sums.
    #[track_caller]
    pub fn finish(self, b: &mut Builder) {
        let sums = self.sums.total(b);
        for (sum, tile) in self.softmax.sum.into_iter().zip(sums) {
            b.add_to(sum, tile);
        }
    }
}

/// Sums of a thread's probabilities, for each row those of even and of odd columns: that hides the latency of the
/// additions.
#[derive(Debug, Default)]
struct Sums([[Option<Reg<F32>>; 2]; ROWS_PER_THREAD]);

impl Sums {
    #[track_caller]
    fn add(&mut self, b: &mut Builder, row: usize, col: usize, prob: Reg<F32>) {
        let sum = &mut self.0[row][col];
        *sum = Some(sum.map_or(prob, |sum| b.add(sum, prob)));
    }

    #[track_caller]
    fn total(self, b: &mut Builder) -> Rows<F32> {
        self.0.map(|[even, odd]| match (even, odd) {
            (Some(even), Some(odd)) => b.add(even, odd),
            _ => unreachable!("a tile has at least two columns"),
        })
    }
}

/// The largest score of each row, over the quad that shares it.
#[track_caller]
fn row_maxima(b: &mut Builder, scores: &Acc) -> Rows<F32> {
    let values: [Vec<_>; ROWS_PER_THREAD] = std::array::from_fn(|row| scores.row_values(row).collect());
    // The chains of both rows advance together, so that the latency of one `max` hides behind the others.
    let count = CHAINS.min(values[0].len());
    let mut chains = values.each_ref().map(|row| row[..count].to_vec());
    for i in count..values[0].len() {
        for (chain, row) in chains.iter_mut().zip(&values) {
            chain[i % count] = b.max(chain[i % count], row[i]);
        }
    }
    chains.map(|chains| {
        let own = chains.into_iter().reduce(|x, y| b.max(x, y)).expect("a row has scores");
        over_quad(b, own, |b, x, y| b.max(x, y))
    })
}

/// Combines a value over the four lanes that share a row.
#[track_caller]
fn over_quad(
    b: &mut Builder,
    value: Reg<F32>,
    combine: impl Fn(&mut Builder, Reg<F32>, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    [1, 2].into_iter().fold(value, |value, distance| {
        let other = b.shuffle_xor(value, distance);
        combine(b, value, other)
    })
}

/// Factor and LSE of a row with reference `top` (in powers of two) and sum `sum`.
#[track_caller]
fn close(b: &mut Builder, top: Reg<F32>, sum: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    let inverse = b.rcp(sum);
    let factor = b.let_(sum.eq(0.0).select(0.0, inverse));
    let log = b.log2(sum);
    (factor, b.let_((top + log) * LN_2))
}

/// As [`close`], with one more logit (in natural units) that has no value.
#[track_caller]
fn close_with_sink(b: &mut Builder, top: Reg<F32>, sum: Reg<F32>, sink: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    let sink = b.let_(sink * LOG2_E);
    let highest = b.let_(top.max(sink));
    let keys = b.exp2(top - highest);
    let extra = b.exp2(sink - highest);
    let total = b.fma(sum, keys, extra);
    let (inverse, lse) = close(b, highest, total);
    (b.let_(inverse * keys), lse)
}
