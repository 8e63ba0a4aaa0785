//! The two products of experts over rows of tokens: blocks of features, shared among threads. Called by `moe`.

use std::ops::Range;

use flashcore_core::{Activation, ExpertLayout, GateUp};
use half::bf16;

use super::route::Buckets;
use crate::{
    crew::Crew,
    output::Shared,
    simd::{
        Lane,
        convert::{Narrow, Widen},
        dots::{Dots, depth_padded},
        glu::Glu,
        product::{Left, Product, Size},
        runner::Runner,
    },
};

/// Features of a unit of work: a multiple of every vector's lanes.
const FEATURES: usize = 32;
/// Rows whose tokens stay in the cache while a block of weights passes.
const ROWS: usize = 24;
/// Elements along the depth that are widened at a time.
const DEPTH: usize = 256;

/// How rows are multiplied with weights of type `T`.
pub(super) trait Path<T: Lane>: Lane {
    /// A token as the path wants it.
    fn take(runner: Runner, from: &[T], to: &mut [Self]);
    fn dots(runner: Runner, dots: Dots<'_, Self, T>);
    /// Rows as f32, for weights whose columns are contiguous.
    fn widen(runner: Runner, from: &[Self], to: &mut [f32]) {
        runner.run(Widen { from, to });
    }
}

impl<T: Lane> Path<T> for f32 {
    fn take(runner: Runner, from: &[T], to: &mut [f32]) {
        runner.run(Widen { from, to });
    }

    fn dots(runner: Runner, dots: Dots<'_, f32, T>) {
        runner.run(dots);
    }
}

/// Where bf16 is multiplied pair by pair.
impl Path<bf16> for bf16 {
    fn take(_: Runner, from: &[bf16], to: &mut [bf16]) {
        to.copy_from_slice(from);
    }

    fn dots(runner: Runner, mut dots: Dots<'_, bf16, bf16>) {
        runner.run_pair_dots(&mut dots);
    }
}

/// One of the products of all experts.
pub(super) struct Weights<'a, T> {
    pub(super) layout: ExpertLayout,
    pub(super) data: &'a [T],
    pub(super) bias: Option<&'a [T]>,
}

/// Rows in memory: their elements, and where each starts.
pub(super) struct Rows<'a, X> {
    pub(super) data: &'a [X],
    pub(super) starts: Vec<usize>,
}

/// What a thread works with.
#[derive(Default)]
struct Worker {
    /// Results of the two kinds of rows of weights.
    results: [Vec<f32>; 2],
    /// Rows and weights, widened.
    rows: Vec<f32>,
    weights: Vec<f32>,
}

/// The first product of every expert with its rows, and what joins gate and up: `to` gets one row of `half` features for
/// each row, padded with zeros.
pub(super) fn up<T: Lane, X: Path<T>>(
    (weights, order, activation): (&Weights<'_, T>, GateUp, Activation),
    (rows, buckets): (&Rows<'_, X>, &Buckets),
    to: &mut [X],
    (runner, crew): (Runner, Crew),
) {
    let half = weights.layout.rows() / 2;
    let (stride, to) = (depth_padded(half), Shared::new(to));
    each_unit(buckets, half, crew, |worker, expert, features| {
        let count = buckets.starts[expert + 1] - buckets.starts[expert];
        let mut results = std::mem::take(&mut worker.results);
        for (up, results) in [false, true].into_iter().zip(&mut results) {
            results.clear();
            results.resize(count * FEATURES, 0.0);
            let step = order.row(1, half, up) - order.row(0, half, up);
            let first = order.row(features.start, half, up);
            let block = Block { weights, expert, first, step, count: features.len() };
            block.multiply(rows, buckets.starts[expert], results, worker, runner);
        }
        let [gate, up] = &mut results;
        runner.run(Glu { activation, gate, up });
        for (row, values) in gate.chunks_exact(FEATURES).enumerate() {
            let start = (buckets.starts[expert] + row) * stride + features.start;
            // SAFETY: rows and blocks of features are disjoint.
            let to = unsafe { to.range(start, FEATURES) };
            runner.run(Narrow { from: values, factor: 1.0, to });
        }
        worker.results = results;
    });
}

/// The second product of every expert with its rows, one row of results for each.
pub(super) fn down<T: Lane, X: Path<T>>(
    weights: &Weights<'_, T>,
    (rows, buckets): (&Rows<'_, X>, &Buckets),
    to: &mut [f32],
    (runner, crew): (Runner, Crew),
) {
    let hidden = weights.layout.rows();
    let to = Shared::new(to);
    each_unit(buckets, hidden, crew, |worker, expert, features| {
        let count = buckets.starts[expert + 1] - buckets.starts[expert];
        let mut results = std::mem::take(&mut worker.results[0]);
        results.clear();
        results.resize(count * FEATURES, 0.0);
        let block = Block { weights, expert, first: features.start, step: 1, count: features.len() };
        block.multiply(rows, buckets.starts[expert], &mut results, worker, runner);
        for (row, values) in results.chunks_exact(FEATURES).enumerate() {
            let start = (buckets.starts[expert] + row) * hidden + features.start;
            // SAFETY: rows and blocks of features are disjoint.
            let to = unsafe { to.range(start, features.len()) };
            to.copy_from_slice(&values[..features.len()]);
        }
        worker.results[0] = results;
    });
}

/// Calls `work` for every expert that has rows and every block of features, on all threads.
fn each_unit(
    buckets: &Buckets,
    features: usize,
    crew: Crew,
    work: impl Fn(&mut Worker, usize, Range<usize>) + Sync + Send,
) {
    let blocks = features.div_ceil(FEATURES);
    let used = buckets.starts.windows(2).enumerate().filter(|(_, ends)| ends[0] < ends[1]);
    let used: Vec<usize> = used.map(|(expert, _)| expert).collect();
    crew.each_with(used.len() * blocks, |worker: &mut Worker, unit| {
        let first = unit % blocks * FEATURES;
        work(worker, used[unit / blocks], first..features.min(first + FEATURES));
    });
}

/// Some rows of an expert's weights.
struct Block<'a, T> {
    weights: &'a Weights<'a, T>,
    expert: usize,
    /// The first row, the rows from one to the next, and how many.
    first: usize,
    step: usize,
    count: usize,
}

impl<T: Lane> Block<'_, T> {
    /// The products with all rows of the expert, of which `from` is the first, plus the bias; rows of results have
    /// [`FEATURES`] elements.
    fn multiply<X: Path<T>>(
        &self,
        rows: &Rows<'_, X>,
        from: usize,
        results: &mut [f32],
        worker: &mut Worker,
        runner: Runner,
    ) {
        for (n, results) in results.chunks_mut(ROWS * FEATURES).enumerate() {
            let starts = &rows.starts[from + n * ROWS..][..results.len() / FEATURES];
            if self.weights.layout.is_row_major() {
                let stride = self.step * self.weights.layout.strides()[1];
                let w = &self.weights.data[self.weights.layout.at(self.expert, self.first, 0)..];
                let (depth, to) = (self.weights.layout.cols(), (&mut *results, FEATURES));
                X::dots(runner, Dots { x: rows.data, starts, w: (w, stride), rows: self.count, depth, to });
            } else {
                self.multiply_columns(rows.data, starts, results, worker, runner);
            }
            results.chunks_exact_mut(FEATURES).for_each(|row| self.add_bias(row));
        }
    }

    /// The same where the elements of a column of weights are contiguous.
    fn multiply_columns<X: Path<T>>(
        &self,
        data: &[X],
        starts: &[usize],
        results: &mut [f32],
        worker: &mut Worker,
        runner: Runner,
    ) {
        let depth = self.weights.layout.cols();
        worker.rows.resize(starts.len() * DEPTH, 0.0);
        worker.weights.clear();
        worker.weights.resize(DEPTH * FEATURES, 0.0);
        for k in (0..depth).step_by(DEPTH) {
            let len = DEPTH.min(depth - k);
            for (&start, to) in starts.iter().zip(worker.rows.chunks_exact_mut(DEPTH)) {
                X::widen(runner, &data[start + k..][..len], &mut to[..len]);
            }
            for (n, to) in worker.weights.chunks_exact_mut(FEATURES).take(len).enumerate() {
                self.widen_column(k + n, to, runner);
            }
            let size = Size { rows: starts.len(), columns: FEATURES, depth: len };
            let (a, b) = (Left::Rows(&worker.rows, DEPTH), (&worker.weights[..], FEATURES));
            runner.run(Product { size, a, b, c: (&mut *results, FEATURES), add: k > 0 });
        }
    }

    /// Elements of a column, those of every `step`-th row.
    fn widen_column(&self, col: usize, to: &mut [f32], runner: Runner) {
        let from = &self.weights.data[self.weights.layout.at(self.expert, self.first, col)..];
        if self.step == 1 {
            return runner.run(Widen { from: &from[..self.count], to: &mut to[..self.count] });
        }
        for (to, from) in to.iter_mut().zip(from.iter().step_by(self.step)).take(self.count) {
            *to = from.to_f32();
        }
    }

    fn add_bias(&self, row: &mut [f32]) {
        let Some(bias) = self.weights.bias else { return };
        let bias = &bias[self.expert * self.weights.layout.rows() + self.first..];
        for (to, bias) in row.iter_mut().zip(bias.iter().step_by(self.step)).take(self.count) {
            *to += bias.to_f32();
        }
    }
}
