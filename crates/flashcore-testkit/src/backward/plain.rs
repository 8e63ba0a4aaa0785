//! Gradients computed plainly, row by row: in f64 as the oracle; in f32, with weights and gradients of scores rounded to
//! the tensors' own type as an unfused computation stores them, as the yardstick.

use std::ops::Range;

use flashcore_core::{DType, Data, Dims, HeadBias, HeadDropout, Instance, Layout, RowTerms, Sequence};
use rayon::prelude::*;

use crate::{
    answer::{Answer, Grid},
    plain::{Arithmetic, Exact, Real, Rounded},
    values,
};

/// Gradients in logical order, and what may be said about each row of them.
#[derive(Clone, PartialEq, Debug)]
pub struct Gradients {
    pub dq: Answer,
    pub dk: Answer,
    pub dv: Answer,
    /// One row with a value for each query head; without sinks all are 0.
    pub d_sinks: Answer,
}

impl Gradients {
    /// Changes every value.
    #[must_use]
    pub fn map(mut self, change: impl Fn(f64) -> f64) -> Self {
        for answer in [&mut self.dq, &mut self.dk, &mut self.dv] {
            answer.out.iter_mut().for_each(|x| *x = change(*x));
        }
        self
    }

    /// All of them, with their names.
    pub fn named(&self) -> [(&'static str, &Answer); 4] {
        [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv), ("d_sinks", &self.d_sinks)]
    }
}

/// The output's gradient, and where it lies.
pub type OutGrad<'a> = (Data<'a>, &'a Layout);

/// The oracle: gradients in f64 of the inputs as they are, weights and row sums of its own.
pub fn reference(problem: Instance<'_>, inputs: [Data<'_>; 3], d_out: OutGrad<'_>) -> Gradients {
    gradients(&Exact, problem, inputs, d_out, None)
}

/// The unfused computation in f32 with weights and gradients of scores rounded to the tensors' type; results are not. Row
/// sums come from what a backend is given, too.
pub fn yardstick(
    problem: Instance<'_>,
    inputs: [Data<'_>; 3],
    d_out: OutGrad<'_>,
    terms: RowTerms<'_>,
) -> Gradients {
    gradients(&Rounded(problem.dtype()), problem, inputs, d_out, Some(terms))
}

fn gradients<A: Arithmetic>(
    arithmetic: &A,
    problem: Instance<'_>,
    inputs: [Data<'_>; 3],
    d_out: OutGrad<'_>,
    terms: Option<RowTerms<'_>>,
) -> Gradients {
    let planes: Vec<Plane<A::Real>> = (0..problem.batch() * problem.heads_kv())
        .into_par_iter()
        .map(|index| {
            let task = Task { arithmetic, problem, inputs, d_out, terms };
            task.plane(index / problem.heads_kv(), index % problem.heads_kv())
        })
        .collect();
    let gather = |dims: Dims, rows: fn(&Plane<A::Real>) -> &Rows<A::Real>| {
        let grid = Grid { batch: dims.batch, heads: dims.heads, rows: dims.seq, step: 1, dim: dims.dim };
        let out = planes.iter().flat_map(|plane| rows(plane).sums.iter().map(|x| x.wide())).collect();
        let f32_noise = planes.iter().flat_map(|plane| rows(plane).noise.clone()).collect();
        let sees_nothing = planes.iter().flat_map(|plane| rows(plane).untouched.clone()).collect();
        let chance = planes.iter().flat_map(|plane| rows(plane).variance.iter().map(|x| x.sqrt())).collect();
        Answer { out, sees_nothing, f32_noise, chance, ..Answer::empty(grid) }
    };
    Gradients {
        dq: gather(problem.q().dims(), |plane| &plane.dq),
        dk: gather(problem.k().dims(), |plane| &plane.dk),
        dv: gather(problem.v().dims(), |plane| &plane.dv),
        d_sinks: sinks(problem, &planes),
    }
}

/// Adds up what the batch entries say about each head's sink.
fn sinks<R: Real>(problem: Instance<'_>, planes: &[Plane<R>]) -> Answer {
    let heads = problem.heads_q();
    let grid = Grid { batch: 1, heads: 1, rows: 1, step: 1, dim: heads };
    let (mut out, mut noise, mut variance) = (vec![0.0; heads], 0f64, vec![0f64; heads]);
    for (index, plane) in planes.iter().enumerate() {
        let first = index % problem.heads_kv() * problem.group();
        for (n, sink) in plane.sinks.iter().enumerate() {
            out[first + n] += sink.sum;
            noise = noise.max(sink.noise * problem.batch() as f64);
            variance[first + n] += sink.variance;
        }
    }
    let chance = vec![variance.into_iter().fold(0.0, f64::max).sqrt()];
    Answer { out, sees_nothing: vec![false], f32_noise: vec![noise], chance, ..Answer::empty(grid) }
}

/// Rows of one gradient, of one plane.
struct Rows<R> {
    sums: Vec<R>,
    /// How far f32 arithmetic alone may take each row.
    noise: Vec<f64>,
    /// What rounding to the tensors' type does to each element.
    variance: Vec<f64>,
    /// Rows that nothing adds to: they must be 0.
    untouched: Vec<bool>,
    dim: usize,
}

impl<R: Real> Rows<R> {
    fn new(rows: usize, dim: usize) -> Self {
        Self {
            sums: vec![R::default(); rows * dim],
            noise: vec![0.0; rows],
            variance: vec![0.0; rows * dim],
            untouched: vec![true; rows],
            dim,
        }
    }

    /// Adds `factor · from` to a row; f32 arithmetic may take the factor off by `noise`, rounding by a variance.
    fn add(&mut self, row: usize, factor: R, from: &[R], noise: f64, variance: f64) {
        let to = &mut self.sums[row * self.dim..][..self.dim];
        to.iter_mut().zip(from).for_each(|(to, &x)| *to += factor * x);
        self.noise[row] += noise * largest(from);
        self.vary(row, variance, from);
        self.untouched[row] = false;
    }

    /// Lets `factor · from` vary, where the factor has this variance.
    fn vary(&mut self, row: usize, variance: f64, from: &[R]) {
        let to = &mut self.variance[row * self.dim..][..self.dim];
        to.iter_mut().zip(from).for_each(|(to, x)| *to += variance * x.wide() * x.wide());
    }
}

fn largest<R: Real>(values: &[R]) -> f64 {
    values.iter().map(|x| x.wide().abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// What is known of one sink's gradient.
#[derive(Clone, Copy, Default)]
struct Sink {
    sum: f64,
    noise: f64,
    variance: f64,
}

/// Gradients of one batch entry and key head, and of the query heads that use it.
struct Plane<R> {
    dq: Rows<R>,
    dk: Rows<R>,
    dv: Rows<R>,
    /// For each query head.
    sinks: Vec<Sink>,
}

struct Task<'a, A> {
    arithmetic: &'a A,
    problem: Instance<'a>,
    inputs: [Data<'a>; 3],
    d_out: OutGrad<'a>,
    terms: Option<RowTerms<'a>>,
}

/// One query that sees keys.
struct Query<'a, R> {
    /// Its number among the plane's rows of dQ.
    row: usize,
    q: Vec<R>,
    d_out: Vec<R>,
    keys: Range<usize>,
    /// Its number in the sequence.
    number: usize,
    /// The sequence's first key.
    first_key: usize,
    /// What is added to its scores.
    bias: Option<HeadBias<'a>>,
    /// Which weights are dropped.
    dropout: Option<HeadDropout>,
    k: &'a [Vec<R>],
    v: &'a [Vec<R>],
}

impl<R: Real> Query<'_, R> {
    /// What each weight is multiplied by before values are: 0 for dropped ones.
    fn kept(&self) -> Vec<R> {
        let kept = |dropout: HeadDropout, key: usize| match dropout.keeps(self.number, key - self.first_key) {
            true => R::new(dropout.factor()),
            false => R::default(),
        };
        let of = |key| self.dropout.map_or(R::new(1.0), |dropout| kept(dropout, key));
        self.keys.clone().map(of).collect()
    }
}

impl<A: Arithmetic> Task<'_, A> {
    fn row(&self, data: Data<'_>, layout: &Layout, [batch, head, seq]: [usize; 3]) -> Vec<A::Real> {
        let mut row = Vec::new();
        values::row(data, layout.row(batch, head, seq), layout.dims().dim, &mut row);
        row.into_iter().map(A::Real::new).collect()
    }

    fn plane(&self, batch: usize, kv_head: usize) -> Plane<A::Real> {
        let p = self.problem;
        let (keys, rows) = (p.seq_kv(), p.group() * p.seq_q());
        let read =
            |data, layout| (0..keys).map(|key| self.row(data, layout, [batch, kv_head, key])).collect();
        let (k, v): (Vec<_>, Vec<_>) = (read(self.inputs[1], p.k()), read(self.inputs[2], p.v()));
        let mut plane = Plane {
            dq: Rows::new(rows, p.dim_qk()),
            dk: Rows::new(keys, p.dim_qk()),
            dv: Rows::new(keys, p.dim_v()),
            sinks: vec![Sink::default(); p.group()],
        };
        let sequences = (0..p.sequences()).map(|n| (n, p.sequence(n)));
        for (number, s) in sequences.filter(|(_, s)| s.batch == batch) {
            for (n, i) in (0..p.group()).flat_map(|n| (0..s.q_len).map(move |i| (n, i))) {
                self.query(&mut plane, [&k, &v], (number, &s), [kv_head * p.group() + n, i]);
            }
        }
        plane
    }

    /// Adds what query `i` of a head says.
    fn query(
        &self,
        plane: &mut Plane<A::Real>,
        [k, v]: [&[Vec<A::Real>]; 2],
        (number, s): (usize, &Sequence),
        [head, i]: [usize; 2],
    ) {
        let (p, seq) = (self.problem, s.q_start + i);
        let seen = p.mask().keys(i, s.q_len, s.kv_len);
        let keys = seen.start + s.kv_start..seen.end + s.kv_start;
        let place = [s.batch, head, seq];
        let d_out = self.row(self.d_out.0, self.d_out.1, place);
        // What nothing depends on has no gradient.
        if d_out.iter().all(|x| x.wide() == 0.0) && self.given(place).is_none_or(|sum| sum.wide() == 0.0) {
            return;
        }
        let query = Query {
            row: head % p.group() * p.seq_q() + seq,
            q: self.row(self.inputs[0], p.q(), place),
            d_out,
            keys,
            number: i,
            first_key: s.kv_start,
            bias: p.bias_of(number, head),
            dropout: p.dropout_of(number, head),
            k,
            v,
        };
        let sums = self.given(place);
        let taken = self.add(plane, &query, sums, p.sink_logits().map(|sinks| sinks[head]));
        let sink = &mut plane.sinks[head % p.group()];
        sink.sum += taken.sum;
        sink.noise += taken.noise;
        sink.variance += taken.variance;
    }

    /// The row sum that a backend is given, or would compute from what it is given.
    fn given(&self, [batch, head, seq]: [usize; 3]) -> Option<A::Real> {
        match self.terms? {
            RowTerms::Sums(sums) => Some(A::Real::new(sums[self.problem.lse_index(batch, head, seq)])),
            RowTerms::Out(out) => {
                let out = self.row(out, self.problem.out(), [batch, head, seq]);
                let d_out = self.row(self.d_out.0, self.d_out.1, [batch, head, seq]);
                Some(dot(&out, &d_out))
            }
        }
    }

    /// Adds what a query says to the plane; returns what it says about its head's sink.
    fn add(
        &self,
        plane: &mut Plane<A::Real>,
        query: &Query<'_, A::Real>,
        sum: Option<A::Real>,
        sink: Option<f32>,
    ) -> Sink {
        let (scores, slopes) = self.scores(query);
        let weights = Weights::new(&scores, sink.map(A::Real::new));
        let p = &weights.of_keys;
        let kept = query.kept();
        let of_values = query.keys.clone().zip(&kept);
        let dp: Vec<_> = of_values.map(|(key, &kept)| kept * dot(&query.d_out, &query.v[key])).collect();
        let sum = sum.unwrap_or_else(|| dot(p, &dp));
        let mut rounded = p.clone();
        self.arithmetic.store(&mut rounded);
        let grad = |n: usize| rounded[n] * (dp[n] + A::Real::new(-1.0) * sum) * slopes[n];
        let mut ds: Vec<_> = (0..p.len()).map(grad).collect();
        self.arithmetic.store(&mut ds);
        let errors =
            Errors::new(self.problem.dtype(), self.problem.scale(), query, (&scores, &kept), &weights);
        let scale = A::Real::new(self.problem.scale());
        for (n, key) in query.keys.clone().enumerate() {
            let (weight, factor) = (p[n].wide(), scale * ds[n]);
            let noise = factor.wide().abs() * errors.weight + scale.wide() * weight * errors.difference;
            // The weight was rounded, and so is the gradient.
            let rounding = 2.0 * (errors.rounding * factor.wide()).powi(2);
            let of_sum = (scale.wide() * weight * errors.sum).powi(2);
            plane.dv.add(
                key,
                rounded[n] * kept[n],
                &query.d_out,
                weight * errors.weight * kept[n].wide(),
                (errors.rounding * weight * kept[n].wide()).powi(2),
            );
            plane.dk.add(key, factor, &query.q, noise, rounding + of_sum);
            plane.dq.add(query.row, factor, &query.k[key], noise, rounding);
        }
        if !query.keys.is_empty() {
            let of_sum = (scale.wide() * errors.sum).powi(2);
            plane.dq.vary(query.row, of_sum, &mix(p, query.k, &query.keys));
        }
        let taken = weights.of_sink * sum.wide();
        let noise = taken.abs() * errors.weight + weights.of_sink * errors.difference;
        Sink { sum: -taken, noise, variance: (weights.of_sink * errors.sum).powi(2) }
    }

    /// Scores, and how steeply the cap lets them follow the dot products.
    fn scores(&self, query: &Query<'_, A::Real>) -> (Vec<A::Real>, Vec<A::Real>) {
        let (scale, one) = (A::Real::new(self.problem.scale()), A::Real::new(1.0));
        let score = |key: usize| scale * dot(&query.q, &query.k[key]);
        let cap = self.problem.softcap().map(A::Real::new);
        let capped = |score: A::Real| match cap {
            Some(cap) => {
                let t = (score / cap).tanh();
                (cap * t, one + A::Real::new(-1.0) * t * t)
            }
            None => (score, one),
        };
        let biased = |key: usize| {
            let (score, slope) = capped(score(key));
            let at = |bias: HeadBias<'_>| A::Real::exact(bias.at(query.number, key - query.first_key));
            let bias = query.bias.map(at);
            (bias.map_or(score, |bias| score + bias), slope)
        };
        query.keys.clone().map(biased).unzip()
    }
}

/// How far a query's numbers may be off.
struct Errors {
    /// Share of a weight that f32 arithmetic may add or take: its score is a sum of products, its row's LSE is rounded,
    /// its exponential has some 4 units.
    weight: f64,
    /// What f32 arithmetic may add to the difference between a product with d_out and the row sum.
    difference: f64,
    /// Standard deviation of rounding to the tensors' type, relative to a number.
    rounding: f64,
    /// Standard deviation of the row sum when the output is rounded to that type.
    sum: f64,
}

impl Errors {
    fn new<R: Real>(
        dtype: DType,
        scale: f32,
        query: &Query<'_, R>,
        (scores, kept): (&[R], &[R]),
        weights: &Weights<R>,
    ) -> Self {
        let unit = f64::from(f32::EPSILON) / 2.0;
        // Four standard deviations of what rounding does to the largest sum of products.
        let most = |a: &[R], rows: &[Vec<R>]| {
            let steps = query.keys.clone().map(|key| sum_steps(a, &rows[key]));
            4.0 / 3f64.sqrt() * unit * steps.fold(0.0, f64::max)
        };
        let spacing = match dtype {
            DType::F16 => 0.5f64.powi(10),
            DType::BF16 => 0.5f64.powi(7),
            _ => 2.0 * unit,
        };
        let rounding = spacing / 12f64.sqrt();
        let of_values: Vec<_> =
            weights.of_keys.iter().zip(kept).map(|(&weight, &kept)| weight * kept).collect();
        let out = mix(&of_values, query.v, &query.keys);
        let terms = out.iter().zip(&query.d_out).map(|(a, b)| (a.wide() * b.wide()).powi(2));
        Self {
            weight: unit * (4.0 + largest(scores) + weights.lse.abs())
                + f64::from(scale) * most(&query.q, query.k),
            difference: 2.0 * largest(kept).max(1.0) * most(&query.d_out, query.v),
            rounding,
            sum: rounding * terms.sum::<f64>().sqrt(),
        }
    }
}

/// How far a sum of products goes on its way, as the root of all partial sums squared: each of them is rounded.
fn sum_steps<R: Real>(a: &[R], b: &[R]) -> f64 {
    let mut sum = 0.0;
    let steps = a.iter().zip(b).map(|(a, b)| {
        sum += a.wide() * b.wide();
        sum * sum
    });
    steps.sum::<f64>().sqrt()
}

/// Rows of keys, weighed and added up.
fn mix<R: Real>(weights: &[R], rows: &[Vec<R>], keys: &Range<usize>) -> Vec<R> {
    let mut sum = vec![R::default(); rows.first().map_or(0, Vec::len)];
    for (&weight, key) in weights.iter().zip(keys.clone()) {
        sum.iter_mut().zip(&rows[key]).for_each(|(sum, &x)| *sum += weight * x);
    }
    sum
}

/// The softmax of a row.
struct Weights<R> {
    of_keys: Vec<R>,
    of_sink: f64,
    lse: f64,
}

impl<R: Real> Weights<R> {
    fn new(scores: &[R], sink: Option<R>) -> Self {
        let larger = |max: R, score: R| if score > max || score.wide().is_nan() { score } else { max };
        let max = scores.iter().copied().chain(sink).fold(R::NEG_INFINITY, larger);
        if max == R::NEG_INFINITY {
            return Self { of_keys: vec![R::default(); scores.len()], of_sink: 0.0, lse: 0.0 };
        }
        let of_sink = sink.map_or(R::default(), |sink| sink.weight(max));
        let weights: Vec<R> = scores.iter().map(|score| score.weight(max)).collect();
        let sum = weights.iter().fold(of_sink, |sum, &weight| sum + weight);
        let of_keys = weights.into_iter().map(|weight| weight / sum).collect();
        Self { of_keys, of_sink: (of_sink / sum).wide(), lse: max.wide() + sum.ln().wide() }
    }
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).fold(R::default(), |sum, (&a, &b)| sum + a * b)
}
