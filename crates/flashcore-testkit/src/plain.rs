//! Attention computed plainly: all scores of a row, softmax, product with V; no tiles, no online softmax.
//!
//! One computation in two precisions. In f64 it is the oracle ([`reference()`]); in f32, rounded to the tensors' own
//! type after each step, it is the yardstick ([`yardstick`]) that says how much error a decent kernel may have.
//! [`crate::compare`] calls both; [`crate::naive`] is the f32 form as a backend. [`crate::backward`] computes gradients in the
//! same two precisions.

use std::{
    f32::consts::LOG2_E,
    ops::{Add, AddAssign, Div, Mul, Range},
};

use flashcore_core::{DType, Data, HeadBias, HeadDropout, Instance, Operand, Sequence, Sequences as Kind};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use crate::{
    answer::{Answer, Grid, Rows},
    pages::Together,
    values,
};

/// The oracle: the operation in f64.
pub fn reference(problem: Instance<'_>, inputs: [Data<'_>; 3], rows: Rows) -> Answer {
    attention(&Exact, problem, inputs, rows)
}

/// The unfused computation in the tensors' own precision, accumulated in f32.
pub fn yardstick(problem: Instance<'_>, inputs: [Data<'_>; 3], rows: Rows) -> Answer {
    attention(&Rounded(problem.dtype()), problem, inputs, rows)
}

/// The unfused computation in f32 throughout, whatever the tensors hold.
pub fn single(problem: Instance<'_>, inputs: [Data<'_>; 3]) -> Answer {
    attention(&Rounded(DType::F32), problem, inputs, Rows::ALL)
}

/// A number type to compute in.
pub(crate) trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Default
    + AddAssign
    + Add<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    const NEG_INFINITY: Self;
    fn new(value: f32) -> Self;
    /// A number as exactly as the type has it.
    fn exact(value: f64) -> Self;
    fn wide(self) -> f64;
    /// `exp(self - max)`.
    fn weight(self, max: Self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}

macro_rules! real {
    ($type:ident, $weight:expr) => {
        impl Real for $type {
            const NEG_INFINITY: Self = $type::NEG_INFINITY;

            fn new(value: f32) -> Self {
                value.into()
            }

            fn exact(value: f64) -> Self {
                value as $type
            }

            fn wide(self) -> f64 {
                self.into()
            }

            fn weight(self, max: Self) -> Self {
                $weight(self, max)
            }

            fn ln(self) -> Self {
                self.ln()
            }

            fn tanh(self) -> Self {
                self.tanh()
            }
        }
    };
}

real!(f64, |score: f64, max: f64| (score - max).exp());
// In base 2, as kernels do: its rounding of large scores is part of what the yardstick allows.
real!(f32, |score: f32, max: f32| (score * LOG2_E - max * LOG2_E).exp2());

/// What happens to intermediate results.
pub(crate) trait Arithmetic: Sync {
    type Real: Real;

    /// Stores a step's results: rounds them to what memory would hold.
    fn store(&self, values: &mut [Self::Real]);

    /// The same for the weights of a row, in the order of keys.
    fn store_weights(&self, weights: &mut [Self::Real]) {
        self.store(weights);
    }
}

pub(crate) struct Exact;

impl Arithmetic for Exact {
    type Real = f64;

    fn store(&self, _: &mut [f64]) {}
}

/// Weights of 8 bits are measured from the largest of so many keys at the end, which kernels meet first, unless the row's
/// largest is so many times as large: then from that. A weight that rounding leaves as it is, as it would leave the largest
/// of a row that is measured from its maximum, is luck.
const MET_FIRST: usize = 128;
const MOST_GROWTH: f32 = 222.0;

pub(crate) struct Rounded(pub(crate) DType);

impl Arithmetic for Rounded {
    type Real = f32;

    fn store(&self, values: &mut [f32]) {
        match self.0 {
            DType::F16 => round_by(values, f16::ZERO),
            DType::BF16 => round_by(values, bf16::ZERO),
            // What lies between 8-bit tensors and the result stays f32, but for weights.
            _ => {}
        }
    }

    fn store_weights(&self, weights: &mut [f32]) {
        if !self.0.is_narrow() {
            return self.store(weights);
        }
        let largest = |of: &[f32]| of.iter().fold(0.0f32, |top, &weight| top.max(weight));
        let (met_first, all) =
            (largest(&weights[weights.len().saturating_sub(MET_FIRST)..]), largest(weights));
        let one = if all < MOST_GROWTH * met_first { met_first / 2.0 } else { all / 256.0 };
        if one > 0.0 {
            weights
                .iter_mut()
                .for_each(|weight| *weight = self.0.round(f64::from(*weight / one)) as f32 * one);
        }
    }
}

/// Rounds to the type of `zero`, in the chunks that the conversion instructions take.
fn round_by<H: Copy>(values: &mut [f32], zero: H)
where
    [H]: HalfFloatSliceExt,
{
    let mut narrow = [zero; 64];
    for chunk in values.chunks_mut(64) {
        let narrow = &mut narrow[..chunk.len()];
        narrow.convert_from_f32_slice(chunk);
        narrow.convert_to_f32_slice(chunk);
    }
}

fn attention<A: Arithmetic>(
    arithmetic: &A,
    problem: Instance<'_>,
    inputs: [Data<'_>; 3],
    rows: Rows,
) -> Answer {
    // Sequences that are packed may have factors of their own.
    let packed_cache =
        problem.spec().kv_dtype.is_some() && matches!(problem.sequences_kind(), Kind::Ragged { .. });
    if problem.pages().is_some() || packed_cache {
        let together = Together::of(problem, [inputs[1], inputs[2]]);
        let [k, v] = together.kv();
        return attention(arithmetic, together.instance(), [inputs[0], k, v], rows);
    }
    let grid = Grid::of(&problem, rows);
    let mut out = vec![0.0; grid.total_rows() * grid.dim];
    let mut ends = vec![RowEnd::NOTHING; grid.total_rows()];
    let in_plane = problem.group() * grid.rows;
    if in_plane > 0 {
        let sequences = Sequences::of(problem);
        let planes = out.par_chunks_mut(in_plane * grid.dim).zip(ends.par_chunks_mut(in_plane));
        planes.enumerate().for_each(|(index, (out, ends))| {
            let plane = Plane::gather(arithmetic, problem, inputs, index);
            let rows = out.par_chunks_mut(grid.dim).zip(ends).enumerate().with_min_len(16);
            rows.for_each_init(Vec::new, |scores, (row, (out, end))| {
                let (head, seq) = (plane.first_head + row / grid.rows, row % grid.rows * grid.step);
                if let Some((n, sequence)) = sequences.at(plane.batch, seq) {
                    let context = Context {
                        sequence,
                        bias: problem.bias_of(n, head),
                        dropout: problem.dropout_of(n, head),
                    };
                    *end = plane.row([head, seq], &context, scores, out);
                }
            });
        });
    }
    let lse = ends.iter().map(|end| end.lse).collect();
    let sees_nothing = ends.iter().map(|end| end.sees_nothing).collect();
    let f32_noise = ends.iter().map(|end| end.f32_noise).collect();
    Answer { grid, out, lse, sees_nothing, f32_noise, chance: Vec::new() }
}

/// What is known of a row besides its output.
#[derive(Clone, Copy)]
struct RowEnd {
    lse: f64,
    sees_nothing: bool,
    f32_noise: f64,
}

impl RowEnd {
    const NOTHING: Self = Self { lse: f64::NEG_INFINITY, sees_nothing: true, f32_noise: 0.0 };
}

/// What a row's sequence and head say about it.
struct Context<'a> {
    sequence: Sequence,
    bias: Option<HeadBias<'a>>,
    dropout: Option<HeadDropout>,
}

/// Which sequence a row belongs to.
enum Sequences {
    PerEntry(Vec<Sequence>),
    Packed(Vec<Sequence>),
}

impl Sequences {
    fn of(problem: Instance<'_>) -> Self {
        let all = (0..problem.sequences()).map(|n| problem.sequence(n)).collect();
        match problem.sequences_kind() {
            Kind::Ragged { .. } => Self::Packed(all),
            _ => Self::PerEntry(all),
        }
    }

    /// The sequence of row `seq` of a batch entry, with its number; `None` where it is not used.
    fn at(&self, batch: usize, seq: usize) -> Option<(usize, Sequence)> {
        let end = |s: &Sequence| s.q_start + s.q_len;
        match self {
            Self::PerEntry(all) => Some((batch, all[batch])).filter(|(_, s)| seq < end(s)),
            Self::Packed(all) => {
                let n = all.partition_point(|s| end(s) <= seq);
                all.get(n).map(|&sequence| (n, sequence))
            }
        }
    }
}

/// The keys and values of one batch entry and key head, and the query heads that use them.
struct Plane<'a, A: Arithmetic> {
    arithmetic: &'a A,
    problem: Instance<'a>,
    q: Data<'a>,
    batch: usize,
    first_head: usize,
    /// dim × sequence: scores of neighbouring keys are computed side by side.
    keys: Vec<A::Real>,
    /// sequence × dim.
    values: Vec<A::Real>,
    largest_value: f64,
}

impl<'a, A: Arithmetic> Plane<'a, A> {
    fn gather(arithmetic: &'a A, problem: Instance<'a>, [q, k, v]: [Data<'a>; 3], index: usize) -> Self {
        let (batch, head) = (index / problem.heads_kv(), index % problem.heads_kv());
        let (seq_kv, dim_qk) = (problem.seq_kv(), problem.dim_qk());
        let factor = |operand, n| A::Real::new(problem.factor(operand, [batch, head], n));
        let of_features: Vec<_> = (0..problem.dim_v()).map(|n| factor(Operand::V, n)).collect();
        let mut keys = vec![A::Real::default(); seq_kv * dim_qk];
        let mut values = Vec::with_capacity(seq_kv * problem.dim_v());
        let mut row = Vec::new();
        for seq in 0..seq_kv {
            row.clear();
            values::row(k, problem.k().row(batch, head, seq), dim_qk, &mut row);
            let of_key = factor(Operand::K, seq);
            for (d, &x) in row.iter().enumerate() {
                keys[d * seq_kv + seq] = A::Real::new(x) * of_key;
            }
            row.clear();
            values::row(v, problem.v().row(batch, head, seq), problem.dim_v(), &mut row);
            values.extend(row.iter().zip(&of_features).map(|(&x, &factor)| A::Real::new(x) * factor));
        }
        let magnitudes = values.iter().map(|v: &A::Real| v.wide().abs());
        let largest_value = magnitudes.filter(|v| v.is_finite()).fold(0.0, f64::max);
        Self {
            arithmetic,
            problem,
            q,
            batch,
            first_head: head * problem.group(),
            keys,
            values,
            largest_value,
        }
    }

    /// Computes one row of the output.
    fn row(
        &self,
        [head, seq]: [usize; 2],
        context: &Context<'_>,
        scores: &mut Vec<A::Real>,
        out: &mut [f64],
    ) -> RowEnd {
        let sequence = &context.sequence;
        let query = seq - sequence.q_start;
        let keys = self.problem.mask().keys(query, sequence.q_len, sequence.kv_len);
        let visible = keys.start + sequence.kv_start..keys.end + sequence.kv_start;
        self.scores(head, seq, visible.clone(), scores);
        if let Some(bias) = context.bias {
            let of = |key: usize| A::Real::exact(bias.at(query, key));
            scores.iter_mut().zip(keys.clone()).for_each(|(score, key)| *score += of(key));
            self.arithmetic.store(scores);
        }
        let sees_nothing = scores.iter().all(|score| *score == A::Real::NEG_INFINITY);
        let factor = context.dropout.map_or(1.0, |dropout| dropout.factor());
        let f32_noise = self.f32_noise(scores) * f64::from(factor);
        let sink = self.problem.sink_logits().map(|sinks| A::Real::new(sinks[head]));
        let lse = self.softmax(scores, sink).wide();
        if sees_nothing {
            scores.fill(A::Real::default());
        }
        if let Some(dropout) = context.dropout {
            let left_out = scores.iter_mut().zip(keys).filter(|(_, key)| !dropout.keeps(query, *key));
            left_out.for_each(|(weight, _)| *weight = A::Real::default());
        }
        let dim_v = self.problem.dim_v();
        let mut sum = vec![A::Real::default(); dim_v];
        accumulate(&mut sum, scores, &self.values[visible.start * dim_v..], dim_v);
        sum.iter_mut().for_each(|x| *x = *x * A::Real::new(factor));
        self.arithmetic.store(&mut sum);
        out.iter_mut().zip(sum).for_each(|(out, sum)| *out = sum.wide());
        RowEnd { lse, sees_nothing, f32_noise }
    }

    fn scores(&self, head: usize, seq: usize, visible: Range<usize>, scores: &mut Vec<A::Real>) {
        let mut q = Vec::with_capacity(self.problem.dim_qk());
        values::row(self.q, self.problem.q().row(self.batch, head, seq), self.problem.dim_qk(), &mut q);
        let q: Vec<_> = q.into_iter().map(A::Real::new).collect();
        scores.clear();
        scores.resize(visible.len(), A::Real::default());
        if !visible.is_empty() {
            accumulate(scores, &q, &self.keys[visible.start..], self.problem.seq_kv());
        }
        let of_query = A::Real::new(self.problem.factor(Operand::Q, [self.batch, head], seq));
        let scale = A::Real::new(self.problem.scale()) * of_query;
        scores.iter_mut().for_each(|s| *s = *s * scale);
        self.arithmetic.store(scores);
        if let Some(cap) = self.problem.softcap().map(A::Real::new) {
            scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
            self.arithmetic.store(scores);
        }
    }

    /// How far f32 arithmetic alone may take the row: a weight carries the rounding of its score and 4 ulp of its
    /// exponential.
    fn f32_noise(&self, scores: &[A::Real]) -> f64 {
        let finite = scores.iter().map(|s| s.wide().abs()).filter(|s| s.is_finite());
        let largest_score = finite.fold(0.0, f64::max);
        f64::from(f32::EPSILON) / 2.0 * (4.0 + largest_score) * self.largest_value
    }

    /// Turns scores into weights and returns the LSE, which the sink is part of.
    fn softmax(&self, scores: &mut [A::Real], sink: Option<A::Real>) -> A::Real {
        let nothing = A::Real::NEG_INFINITY;
        // A NaN is larger than everything, so that the row becomes NaN.
        let larger = |max: A::Real, s: A::Real| if s > max || s.wide().is_nan() { s } else { max };
        let max = scores.iter().copied().chain(sink).fold(nothing, larger);
        if max == nothing {
            return nothing;
        }
        let mut sum = sink.map_or(A::Real::default(), |sink| sink.weight(max));
        for score in scores.iter_mut() {
            *score = score.weight(max);
            sum += *score;
        }
        scores.iter_mut().for_each(|p| *p = *p / sum);
        self.arithmetic.store_weights(scores);
        max + sum.ln()
    }
}

/// `sum[j] += Σ factors[i] · matrix[i][j]`, in the order of `i`; row `i` of the matrix starts at `i · stride`.
fn accumulate<R: Real>(sum: &mut [R], factors: &[R], matrix: &[R], stride: usize) {
    let n = sum.len();
    let (fours, rest) = factors.as_chunks::<4>();
    for (block, factors) in fours.iter().enumerate() {
        let rows: [&[R]; 4] = std::array::from_fn(|i| &matrix[(4 * block + i) * stride..][..n]);
        for j in 0..n {
            sum[j] = (0..4).fold(sum[j], |sum, i| sum + factors[i] * rows[i][j]);
        }
    }
    for (i, &factor) in rest.iter().enumerate() {
        let row = &matrix[(4 * fours.len() + i) * stride..][..n];
        sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += factor * x);
    }
}
