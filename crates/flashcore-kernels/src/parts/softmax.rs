//! Online softmax over accumulator tiles, in base 2; used by every forward kernel.
//!
//! A thread keeps, for each of its two rows, the row's reference, relative to which probabilities are computed, and its
//! own part of the running sum. Scores stay in the units of the matrix product; the scale is folded into the one FMA
//! before `exp2`.
//!
//! A reference is not a running maximum. It lies near the maximum of the first scores that the row saw, and moves only
//! when probabilities outgrow what 16-bit floats hold, so that most steps leave the output tile alone. So a dominant key
//! may have any probability, not 1, and its rounding would reach the output if that were divided by the sum of unrounded
//! probabilities. A row therefore has a second sum, which counts the largest probability that each thread meets in a tile
//! as rounded, and the others unrounded: the errors cancel. The output is divided by the second sum; the LSE comes from
//! the first.
//!
//! There are two ways to notice that a reference has to move. [`Softmax::raise`] compares the maximum of new scores
//! before it computes exponentials. [`Softmax::step`] computes them at once and checks their sum, which is needed anyway;
//! if that is large, it computes the maximum and redoes the tile. Both move the same rows by the same maxima. Whether a
//! row moves is decided for that row alone and a vote only skips the work, so that a row's bits do not depend on its
//! neighbours.

use flashcore_tile::{Acc, Builder, Element, F32, Fragment, Pred, ROWS_PER_THREAD, Reg, S32, Scope, U32};

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
        match element {
            Element::F16 => Self { top: -5.0, limit: 15.0 },
            Element::Bf16 => Self { top: -24.0, limit: 40.0 },
            // E4M3 ends at 448 and loses bits below 2^-6: 32 keys that weigh as much as the largest stay below the limit.
            Element::E4m3 => Self { top: 1.0, limit: 8.8 },
            Element::E5m2 => Self { top: 1.0, limit: 15.0 },
            Element::F32 => Self { top: 0.0, limit: 4.0 },
        }
    }
}

/// Minus the reference of a row that has seen no key: whatever it sees first is infinitely far above.
const UNSEEN: f32 = 1.0e38;
/// The reference of a part of a row that has seen no key.
pub(crate) const UNSEEN_TOP: f32 = -UNSEEN;
/// Moves of references in a row tile from which on looking for maxima first pays.
const RESTLESS: u32 = 2;
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
    /// This thread's part of the sum of probabilities, for the LSE.
    sum: Rows<F32>,
    /// The same with the largest ones rounded, for the output.
    rounded: Rows<F32>,
    /// What probabilities become.
    element: Element,
    /// How often references of this warp's rows have moved since their first tile.
    moves: Reg<U32>,
}

/// What the epilogue needs of a finished softmax.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// What the output rows must be multiplied by.
    pub factor: Rows<F32>,
    /// Natural logarithm of the sum of exponentials; −∞ for a row without keys.
    pub lse: Rows<F32>,
}

/// A part of rows whose keys are shared.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// References in powers of two.
    pub top: Rows<F32>,
    /// Sums of probabilities.
    pub sum: Rows<F32>,
    /// Sums with the largest ones rounded.
    pub rounded: Rows<F32>,
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
        Self {
            scale,
            negated_scale: b.neg(scale),
            offset: row(b, UNSEEN),
            sum: row(b, 0.0),
            rounded: row(b, 0.0),
            element: element.into(),
            moves: b.var_in(Scope::Warp, 0),
        }
    }

    /// Forgets all keys.
    #[track_caller]
    pub fn restart(&self, b: &mut Builder) {
        self.offset.into_iter().for_each(|offset| b.set(offset, UNSEEN));
        self.sum.into_iter().chain(self.rounded).for_each(|sum| b.set(sum, 0.0));
        b.set(self.moves, 0);
    }

    /// Takes note that the scale has been set to another value.
    #[track_caller]
    pub fn follow_scale(&self, b: &mut Builder) {
        b.set(self.negated_scale, -self.scale);
    }

    /// Turns the scores of a row's first tile into probabilities.
    #[track_caller]
    pub fn first(&self, b: &mut Builder, scores: &Acc, probs: &Fragment) {
        for (offset, top) in self.offset.into_iter().zip(row_maxima(b, scores)) {
            let from_top = self.offset_from(b, top);
            b.set(offset, from_top);
        }
        let sums = self.weigh(b, scores, probs);
        self.own(sums).for_each(|(own, tile)| b.set(own, tile));
        b.set(self.moves, 0);
    }

    /// Turns the scores of a further tile into probabilities, and brings tiles of the output along where rows grew.
    #[track_caller]
    pub fn step(&self, b: &mut Builder, scores: &Acc, probs: &Fragment, output: &[&Acc]) {
        let sums = self.weigh(b, scores, probs).map(|sum| b.var_in(Scope::Lane, sum));
        let large = [0, 1].map(|row| b.let_(sums.exact[row].ge(Room::of(self.element).limit.exp2())));
        let either = b.either(large[0], large[1]);
        let any = b.any(either);
        b.if_uniform(any, |b| {
            let top = row_maxima(b, scores);
            let grew = self.grew(b, top);
            self.follow(b, top, grew, output);
            let again = self.weigh(b, scores, probs);
            sums.pairs(again).for_each(|(sum, again)| b.set(sum, again));
        });
        self.add(b, sums);
    }

    /// As [`step`](Self::step), looking for maxima first: faster where references move often, and the same bits.
    #[track_caller]
    pub fn careful_step(&self, b: &mut Builder, scores: &Acc, probs: &Fragment, output: &[&Acc]) {
        let top = row_maxima(b, scores);
        let grew = self.grew(b, top);
        let either = b.either(grew[0], grew[1]);
        let any = b.any(either);
        b.if_uniform(any, |b| self.follow(b, top, grew, output));
        let sums = self.weigh(b, scores, probs);
        self.add(b, sums);
    }

    /// Whether references of this warp have moved so often that looking for maxima first pays.
    #[track_caller]
    pub fn is_restless(&self, b: &mut Builder) -> Pred {
        b.let_(self.moves.ge(RESTLESS))
    }

    /// Adds the sums of a tile.
    #[track_caller]
    fn add(&self, b: &mut Builder, tile: TileSums) {
        self.own(tile).for_each(|(own, tile)| b.add_to(own, tile));
    }

    /// The running sums, each with that of a tile.
    fn own(&self, tile: TileSums) -> impl Iterator<Item = (Reg<F32>, Reg<F32>)> + use<> {
        TileSums { exact: self.sum, rounded: self.rounded }.pairs(tile)
    }

    /// Probabilities of a tile, measured from the references as they are; returns this thread's sums.
    #[track_caller]
    fn weigh(&self, b: &mut Builder, scores: &Acc, probs: &Fragment) -> TileSums {
        let mut sums = Sums::default();
        if self.element.bytes() == 1 {
            self.weigh_narrow(b, scores, probs, &mut sums);
            return sums.total(b, self.element);
        }
        for (i, (pair, &packed)) in scores.regs().chunks_exact(2).zip(probs.regs()).enumerate() {
            let row = Acc::row(2 * i);
            let pair: [_; 2] = std::array::from_fn(|col| self.prob(b, &mut sums, [row, col], pair[col]));
            b.pack_into(packed, self.element, pair[0], pair[1]);
        }
        sums.total(b, self.element)
    }

    /// Probabilities of 8 bits. The left operand of a product wants four neighbouring columns of a row in a register,
    /// where a thread has two of one eight and two of the next: so columns are multiplied in another order inside
    /// each sixteen, in which [`crate::turn_values`] puts the values too.
    #[track_caller]
    fn weigh_narrow(&self, b: &mut Builder, scores: &Acc, probs: &Fragment, sums: &mut Sums) {
        for (sixteen, packed) in scores.regs().chunks_exact(8).zip(probs.regs().chunks_exact(ROWS_PER_THREAD))
        {
            for (row, &packed) in packed.iter().enumerate() {
                let four = [0, 1, 4, 5].map(|i| self.prob(b, sums, [row, i & 1], sixteen[2 * row + i]));
                b.pack_four_into(packed, self.element, four);
            }
        }
    }

    /// The probability of a score, measured from the reference as it is, and added to the sums.
    #[track_caller]
    fn prob(&self, b: &mut Builder, sums: &mut Sums, [row, col]: [usize; 2], score: Reg<F32>) -> Reg<F32> {
        let power = b.fma(score, self.scale, self.offset[row]);
        let prob = b.exp2(power);
        sums.add(b, row, col, prob, self.element);
        prob
    }

    /// Ends the rows: sums over the quad that shares them, and adds the sink's exponential if there is one. `counted` are
    /// sums of probabilities as they were rounded, where somebody else has added them up.
    #[track_caller]
    pub fn finish(&self, b: &mut Builder, sinks: Option<Rows<F32>>, counted: Option<Rows<F32>>) -> Finished {
        let whole = |b: &mut Builder, sum| over_quad(b, sum, |b, x, y| b.add(x, y));
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let exact = whole(b, self.sum[row]);
            let rounded = counted.map_or_else(|| whole(b, self.rounded[row]), |counted| counted[row]);
            let sums = [exact, rounded];
            let top = b.neg(self.offset[row]);
            close(b, top, sums, sinks.map(|sinks| sinks[row]))
        });
        Finished { factor: rows.map(|r| r.0), lse: rows.map(|r| r.1) }
    }

    /// What other parts of the same rows need to know.
    #[track_caller]
    pub fn part(&self, b: &mut Builder) -> Part {
        let whole =
            |b: &mut Builder, sums: Rows<F32>| sums.map(|sum| over_quad(b, sum, |b, x, y| b.add(x, y)));
        Part {
            top: self.offset.map(|offset| b.neg(offset)),
            sum: whole(b, self.sum),
            rounded: whole(b, self.rounded),
        }
    }

    /// Ends rows that were computed in parts, given what [`part`](Self::part) said of each.
    #[track_caller]
    pub fn merge_parts(b: &mut Builder, parts: &[Part], sinks: Option<Rows<F32>>) -> Merged {
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let top =
                parts.iter().map(|part| part.top[row]).reduce(|x, y| b.max(x, y)).expect("there is a part");
            let weights: Vec<_> = parts.iter().map(|part| b.exp2(part.top[row] - top)).collect();
            let sum = |b: &mut Builder, of: fn(&Part) -> Rows<F32>| {
                let start = b.var_in(Scope::Lane, 0.0);
                let terms = parts.iter().zip(&weights);
                terms.fold(start, |sum, (part, &weight)| b.fma(of(part)[row], weight, sum))
            };
            let sums = [sum(b, |part| part.sum), sum(b, |part| part.rounded)];
            let (factor, lse) = close(b, top, sums, sinks.map(|sinks| sinks[row]));
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
                tile.softmax.follow(b, top, grew, &[tile.output]);
            }
        });
    }

    /// Moves the references of the rows that grew to their maxima, and brings the output along.
    #[track_caller]
    fn follow(&self, b: &mut Builder, top: Rows<F32>, grew: [Pred; ROWS_PER_THREAD], output: &[&Acc]) {
        let factors: Rows<F32> = std::array::from_fn(|row| self.move_reference(b, row, top[row], grew[row]));
        output.iter().for_each(|output| output.scale_rows(b, factors));
        b.add_to(self.moves, 1);
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
        for sum in [self.sum[row], self.rounded[row]] {
            b.mul_into(sum, sum, factor);
        }
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
            self.sums.add(b, row, i & 1, score, self.softmax.element);
        }
    }

    /// Adds what was taken to the rows' sums.
    #[track_caller]
    pub fn finish(self, b: &mut Builder) {
        let sums = self.sums.total(b, self.softmax.element);
        self.softmax.add(b, sums);
    }
}

/// Sums of a thread's probabilities in a tile.
#[derive(Clone, Copy, Debug)]
struct TileSums {
    exact: Rows<F32>,
    /// With the largest one rounded.
    rounded: Rows<F32>,
}

impl TileSums {
    fn map(self, mut f: impl FnMut(Reg<F32>) -> Reg<F32>) -> Self {
        Self { exact: self.exact.map(&mut f), rounded: self.rounded.map(f) }
    }

    /// Each with its counterpart.
    fn pairs(self, other: Self) -> impl Iterator<Item = (Reg<F32>, Reg<F32>)> + use<> {
        self.exact.into_iter().zip(other.exact).chain(self.rounded.into_iter().zip(other.rounded))
    }
}

/// Sums and maxima of a thread's probabilities so far.
#[derive(Debug, Default)]
struct Sums {
    /// For each row those of even and of odd columns: that hides the latency of the additions.
    sums: [[Option<Reg<F32>>; 2]; ROWS_PER_THREAD],
    /// Their bits, as numbers: Hopper finds the largest of three such in one instruction.
    largest: [Option<Reg<S32>>; ROWS_PER_THREAD],
}

impl Sums {
    #[track_caller]
    fn add(&mut self, b: &mut Builder, row: usize, col: usize, prob: Reg<F32>, element: Element) {
        let (sum, largest) = (&mut self.sums[row][col], &mut self.largest[row]);
        *sum = Some(sum.map_or(prob, |sum| b.add(sum, prob)));
        // Rounded probabilities of 8 bits are added up by tensor cores.
        if element.bytes() == 1 {
            return;
        }
        let bits = b.float_bits(prob);
        *largest = Some(largest.map_or(bits, |largest| b.max(largest, bits)));
    }

    #[track_caller]
    fn total(self, b: &mut Builder, element: Element) -> TileSums {
        const SOME: &str = "a tile has at least two columns";
        let exact = self.sums.map(|[even, odd]| b.add(even.expect(SOME), odd.expect(SOME)));
        // Probabilities that stay f32 are as they were.
        if element == Element::F32 || element.bytes() == 1 {
            return TileSums { exact, rounded: exact };
        }
        let largest = self.largest.map(|bits| b.float_of_bits(bits.expect(SOME)));
        let known = b.rounded(element, largest[0], largest[1]);
        let rounded = std::array::from_fn(|row| b.let_(exact[row] + (known[row] - largest[row])));
        TileSums { exact, rounded }
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
pub(crate) fn over_quad(
    b: &mut Builder,
    value: Reg<F32>,
    combine: impl Fn(&mut Builder, Reg<F32>, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    [1, 2].into_iter().fold(value, |value, distance| {
        let other = b.shuffle_xor(value, distance);
        combine(b, value, other)
    })
}

/// Factor and LSE of a row with reference `top` (in powers of two) and its two sums; a sink is one more logit (in natural
/// units) that has no value.
#[track_caller]
pub(crate) fn close(
    b: &mut Builder,
    top: Reg<F32>,
    sums: [Reg<F32>; 2],
    sink: Option<Reg<F32>>,
) -> (Reg<F32>, Reg<F32>) {
    let Some(sink) = sink else { return close_keys(b, top, sums) };
    let sink = b.let_(sink * LOG2_E);
    let highest = b.let_(top.max(sink));
    let keys = b.exp2(top - highest);
    let extra = b.exp2(sink - highest);
    let sums = sums.map(|sum| b.fma(sum, keys, extra));
    let (inverse, lse) = close_keys(b, highest, sums);
    (b.let_(inverse * keys), lse)
}

/// Like [`close`], without a sink.
#[track_caller]
fn close_keys(b: &mut Builder, top: Reg<F32>, [sum, rounded]: [Reg<F32>; 2]) -> (Reg<F32>, Reg<F32>) {
    let inverse = b.rcp(rounded);
    let factor = b.let_(rounded.eq(0.0).select(0.0, inverse));
    let log = b.log2(sum);
    (factor, b.let_((top + log) * LN_2))
}
