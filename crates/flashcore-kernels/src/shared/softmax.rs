//! Online softmax over accumulator tiles, in base 2; used by every forward kernel.
//!
//! A thread keeps, for each of its two rows, the running maximum, and its own part of the running sum. Scores stay in
//! the units in which they come out of the matrix product; the scale is folded into the one FMA before `exp2`.
//!
//! Rescaling is lazy: the reference maximum moves only when a row grew by more than [`LAZY_LOG2`], so that most steps
//! leave the output tile alone. Whether a row moves is decided for that row alone and a vote only skips the work, so
//! that a row's bits do not depend on its neighbours.

use flashcore_tile::{Acc, Builder, Cmp, F32, Pred, ROWS_PER_THREAD, Reg, Scope, Uniform, Warp};

/// Growth of a row's maximum, in powers of two, up to which the output is not rescaled: probabilities then stay below
/// 2^8, which 16-bit floats hold without loss.
pub const LAZY_LOG2: f32 = 8.0;
/// Independent chains of a row's maximum: the latency of `max` is hidden four deep.
const CHAINS: usize = 4;
const LN_2: f32 = std::f32::consts::LN_2;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The values of a thread's two rows.
pub type Rows<T> = [Reg<T>; ROWS_PER_THREAD];

/// Running maximum and sum of a thread's rows.
#[derive(Debug)]
pub struct Softmax {
    scale: Reg<F32>,
    negated_scale: Reg<F32>,
    threshold: Reg<F32>,
    max: Rows<F32>,
    sum: Rows<F32>,
    /// What the output must be multiplied by after the latest step.
    factor: Rows<F32>,
    keys: Keys,
}

/// What is known of the keys that the rows of a tile see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys {
    /// Every row sees a key in its first key tile.
    FromTheFirst,
    /// A row may see none, or none at first.
    MaybeNone,
}

/// Says whether, after a step, the output tile must be rescaled.
#[must_use = "the output tile may have to be rescaled"]
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    any: Uniform<Warp>,
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
    /// Registers for the rows of one tile; `scale` turns scores into powers of two.
    #[track_caller]
    pub fn new(b: &mut Builder, scale: Reg<F32>, keys: Keys) -> Self {
        let row = |b: &mut Builder, value: f32| std::array::from_fn(|_| b.var_in(Scope::Lane, value));
        let unscale = b.rcp(scale);
        Self {
            scale,
            negated_scale: b.neg(scale),
            // Finite even for the smallest scale: a row that has seen no key must always move.
            threshold: {
                let threshold = b.mul(unscale, LAZY_LOG2);
                b.min(threshold, f32::MAX)
            },
            max: row(b, f32::NEG_INFINITY),
            sum: row(b, 0.0),
            factor: row(b, 1.0),
            keys,
        }
    }

    /// Turns the scores of a row's first tile into probabilities, in place.
    #[track_caller]
    pub fn first(&self, b: &mut Builder, scores: &Acc) {
        let top = row_maxima(b, scores);
        for (max, top) in self.max.into_iter().zip(top) {
            b.set(max, top);
        }
        let sums = self.exponentials(b, scores);
        for (sum, tile) in self.sum.into_iter().zip(sums) {
            b.set(sum, tile);
        }
    }

    /// Turns the scores of a further tile into probabilities, in place.
    #[track_caller]
    pub fn step(&self, b: &mut Builder, scores: &Acc) -> Growth {
        let top = row_maxima(b, scores);
        let growth = self.move_maxima(b, top);
        let sums = self.exponentials(b, scores);
        for (sum, tile) in self.sum.into_iter().zip(sums) {
            b.add_to(sum, tile);
        }
        growth
    }

    /// Brings the output tile to the maximum that [`step`](Self::step) moved to.
    #[track_caller]
    pub fn rescale(&self, b: &mut Builder, growth: Growth, output: &Acc) {
        b.if_uniform(growth.any, |b| output.scale_rows(b, self.factor));
    }

    /// Ends the rows: sums over the quad that shares them, and adds the sink's exponential if there is one.
    #[track_caller]
    pub fn finish(&self, b: &mut Builder, sinks: Option<Rows<F32>>) -> Finished {
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let sum = over_quad(b, self.sum[row], |b, x, y| b.add(x, y));
            let top = b.mul(self.max[row], self.scale);
            match sinks {
                Some(sinks) => close_with_sink(b, top, sum, sinks[row]),
                None => close(b, top, sum),
            }
        });
        Finished { factor: rows.map(|r| r.0), lse: rows.map(|r| r.1) }
    }

    /// What other parts of the same rows need to know: maxima in powers of two, then sums over the quad.
    #[track_caller]
    pub fn part(&self, b: &mut Builder) -> [Reg<F32>; 2 * ROWS_PER_THREAD] {
        let [top0, top1] = self.max.map(|max| b.mul(max, self.scale));
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
            let none = b.test(Cmp::Eq, top, f32::NEG_INFINITY);
            let from = b.select(none, 0.0, top);
            let weights: Vec<_> = parts
                .iter()
                .map(|part| {
                    let power = b.sub(part[row], from);
                    b.exp2(power)
                })
                .collect();
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

    /// Moves the reference maximum of the rows that grew much, and remembers by how much.
    #[track_caller]
    fn move_maxima(&self, b: &mut Builder, top: Rows<F32>) -> Growth {
        let grew: [Pred; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let limit = b.add(self.max[row], self.threshold);
            b.set(self.factor[row], 1.0);
            b.test(Cmp::Gt, top[row], limit)
        });
        let either = b.either(grew[0], grew[1]);
        let any = b.any(either);
        b.if_uniform(any, |b| {
            for row in 0..ROWS_PER_THREAD {
                self.move_maximum(b, row, top[row], grew[row], self.factor[row]);
            }
        });
        Growth { any }
    }

    /// `2^(score * scale - max * scale)` in place; returns this thread's sums.
    #[track_caller]
    fn exponentials(&self, b: &mut Builder, scores: &Acc) -> Rows<F32> {
        let mut exponentials = Exponentials::start(b, self);
        exponentials.take(b, scores.regs());
        exponentials.sums(b)
    }

    /// Moves the reference maxima of several tiles of rows to those of new scores, and brings their outputs along,
    /// under one vote; [`Exponentials`] turn the scores into probabilities.
    #[track_caller]
    pub fn raise(b: &mut Builder, tiles: &[RowTile<'_>]) {
        let tops: Vec<_> = tiles.iter().map(|tile| row_maxima(b, tile.scores)).collect();
        let grew: Vec<_> = tiles.iter().zip(&tops).map(|(tile, top)| tile.softmax.grew(b, *top)).collect();
        let either = grew.iter().flatten().copied().reduce(|x, y| b.either(x, y)).expect("a tile has rows");
        let any = b.any(either);
        b.if_uniform(any, |b| {
            for ((tile, top), grew) in tiles.iter().zip(tops).zip(grew) {
                let factors: Rows<F32> = std::array::from_fn(|row| {
                    let factor = b.var_in(Scope::Lane, 1.0);
                    tile.softmax.move_maximum(b, row, top[row], grew[row], factor);
                    factor
                });
                tile.output.scale_rows(b, factors);
            }
        });
    }

    /// Which rows grew beyond what may be left unscaled.
    #[track_caller]
    fn grew(&self, b: &mut Builder, top: Rows<F32>) -> [Pred; ROWS_PER_THREAD] {
        std::array::from_fn(|row| {
            let limit = b.add(self.max[row], self.threshold);
            b.test(Cmp::Gt, top[row], limit)
        })
    }

    /// Moves one row's maximum to `top` if it grew, its sum with it, and says by which factor.
    #[track_caller]
    fn move_maximum(&self, b: &mut Builder, row: usize, top: Reg<F32>, grew: Pred, factor: Reg<F32>) {
        let moved = b.select(grew, top, self.max[row]);
        // −∞ − −∞ has no meaning: a row without keys yet keeps its factor of one.
        let shift = b.sub(self.max[row], moved);
        let power = b.mul(shift, self.scale);
        let growth = b.exp2(power);
        b.select_into(factor, grew, growth, 1.0);
        b.set(self.max[row], moved);
        b.mul_into(self.sum[row], self.sum[row], factor);
    }

    /// `-max * scale`, or 0 for a row that has seen no key, whose scores are all −∞.
    #[track_caller]
    fn offset(&self, b: &mut Builder, row: usize) -> Reg<F32> {
        let product = b.mul(self.max[row], self.negated_scale);
        if self.keys == Keys::FromTheFirst {
            return product;
        }
        let empty = b.test(Cmp::Eq, self.max[row], f32::NEG_INFINITY);
        b.select(empty, 0.0, product)
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
    offset: Rows<F32>,
    /// Two partial sums per row hide the latency of the additions.
    partial: [[Option<Reg<F32>>; 2]; ROWS_PER_THREAD],
}

impl<'a> Exponentials<'a> {
    /// Measures from the reference maximum as it is now.
    #[track_caller]
    pub fn start(b: &mut Builder, softmax: &'a Softmax) -> Self {
        let offset = std::array::from_fn(|row| softmax.offset(b, row));
        Self { softmax, offset, partial: Default::default() }
    }

    /// Turns scores, in the order of an accumulator's registers from a multiple of four on, into probabilities.
    #[track_caller]
    pub fn take(&mut self, b: &mut Builder, scores: &[Reg<F32>]) {
        for (i, &score) in scores.iter().enumerate() {
            let row = Acc::row(i);
            b.fma_into(score, score, self.softmax.scale, self.offset[row]);
            b.exp2_into(score, score);
            let sum = &mut self.partial[row][i & 1];
            *sum = Some(sum.map_or(score, |sum| b.add(sum, score)));
        }
    }

    /// Adds what was taken to the rows' sums.
    #[track_caller]
    pub fn finish(self, b: &mut Builder) {
        let softmax = self.softmax;
        let sums = self.sums(b);
        for (sum, tile) in softmax.sum.into_iter().zip(sums) {
            b.add_to(sum, tile);
        }
    }

    #[track_caller]
    fn sums(self, b: &mut Builder) -> Rows<F32> {
        self.partial.map(|[even, odd]| match (even, odd) {
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
    let mut chains = values.each_ref().map(|row| row[..CHAINS].to_vec());
    for i in CHAINS..values[0].len() {
        for (chain, row) in chains.iter_mut().zip(&values) {
            chain[i % CHAINS] = b.max(chain[i % CHAINS], row[i]);
        }
    }
    let own = chains.map(|chain| {
        let (left, right) = (b.max(chain[0], chain[1]), b.max(chain[2], chain[3]));
        b.max(left, right)
    });
    own.map(|top| over_quad(b, top, |b, x, y| b.max(x, y)))
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

/// Factor and LSE of a row with maximum `top` (in powers of two) and sum `sum`.
#[track_caller]
fn close(b: &mut Builder, top: Reg<F32>, sum: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    let inverse = b.rcp(sum);
    let empty = b.test(Cmp::Eq, sum, 0.0);
    let factor = b.select(empty, 0.0, inverse);
    let log = b.log2(sum);
    let log = b.add(top, log);
    (factor, b.mul(log, LN_2))
}

/// As [`close`], with one more logit (in natural units) that has no value.
#[track_caller]
fn close_with_sink(b: &mut Builder, top: Reg<F32>, sum: Reg<F32>, sink: Reg<F32>) -> (Reg<F32>, Reg<F32>) {
    let sink = b.mul(sink, LOG2_E);
    let highest = b.max(top, sink);
    // With neither keys nor sink everything is −∞; measuring from 0 keeps the differences defined.
    let nothing = b.test(Cmp::Eq, highest, f32::NEG_INFINITY);
    let from = b.select(nothing, 0.0, highest);
    let keys = b.sub(top, from);
    let keys = b.exp2(keys);
    let extra = b.sub(sink, from);
    let extra = b.exp2(extra);
    let total = b.fma(sum, keys, extra);
    let (inverse, lse) = close(b, highest, total);
    (b.mul(inverse, keys), lse)
}
