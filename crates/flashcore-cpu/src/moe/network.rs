//! The two products of experts over rows of tokens, and the joining of gate and up. Called by `moe`; calls `matmul`.

use flashcore_core::{Activation, ExpertLayout, GateUp};

use super::route::Buckets;
use crate::{
    crew::Crew,
    factors::{HALF, Matrix, Steps},
    matmul::{Block, Extents, Task, multiply},
    output::{Emit, Shared},
    simd::{Lane, glu::Glu, panel::COLUMNS, runner::Runner},
};

/// One of the products of all experts.
pub(super) struct Weights<'a, T> {
    pub(super) layout: ExpertLayout,
    pub(super) data: &'a [T],
    pub(super) bias: Option<&'a [T]>,
}

/// How products are computed: whether few rows are multiplied as many are, and by whom.
#[derive(Clone, Copy)]
pub(super) struct How {
    pub(super) alike: bool,
    pub(super) runner: Runner,
    pub(super) crew: Crew,
}

/// The first product of every expert with its rows, and what joins gate and up: `to` gets one row of features for each row.
pub(super) fn up<T: Lane, X: Lane>(
    (weights, order, activation): (&Weights<'_, T>, GateUp, Activation),
    (x, starts, buckets): (&[T], &[usize], &Buckets),
    to: &mut [X],
    how: How,
) {
    let half = weights.layout.rows() / 2;
    let [_, row, column] = weights.layout.strides();
    let columns = match order {
        GateUp::Halves => Steps::Joined { step: row, second: half * row, count: half },
        GateUp::Interleaved => Steps::Even(row),
    };
    let width = if order == GateUp::Halves { columns.columns(half) } else { 2 * half };
    let task = |expert: usize, rows: std::ops::Range<usize>| Task {
        extents: Extents { rows: rows.len(), columns: width, depth: weights.layout.cols() },
        a: Matrix::listed(x, &starts[rows]),
        b: Matrix { data: weights.of(expert), rows: Steps::Even(column), columns },
    };
    let (experts, tasks) = buckets.used(task);
    let to = Shared::new(to);
    multiply(&tasks, how.alike, (how.runner, how.crew), |block, values| {
        let (expert, first) = (experts[block.task], block.columns.start / 2);
        let len = HALF.min(half - first);
        let bias = weights.bias_of(expert).map(|bias| {
            let number = |n: usize| match order {
                GateUp::Halves => order.row(first + n % HALF, half, n >= HALF),
                GateUp::Interleaved => 2 * first + n,
            };
            // Beyond the block's columns there may be any.
            std::array::from_fn(|n| bias.get(number(n)).map_or(0.0, |x| x.to_f32()))
        });
        let by_turns = order == GateUp::Interleaved;
        how.runner.run(Glu { activation, values: &mut *values, by_turns, bias: bias.as_ref() });
        // Blocks are disjoint.
        let start = |n: usize| (buckets.starts[expert] + block.rows.start + n) * half + first;
        how.runner.run(Emit { from: (&*values, COLUMNS), len, to: &to, start });
    });
}

/// The second product of every expert with its rows, one row of results for each.
pub(super) fn down<T: Lane, X: Lane>(
    weights: &Weights<'_, T>,
    (joined, buckets): (&[X], &Buckets),
    to: &mut [f32],
    how: How,
) {
    let (hidden, half) = (weights.layout.rows(), weights.layout.cols());
    let task = |expert: usize, rows: std::ops::Range<usize>| Task {
        extents: Extents { rows: rows.len(), columns: hidden, depth: half },
        a: Matrix::new(&joined[rows.start * half..], [half, 1]),
        b: Matrix::of_expert(weights.data, &weights.layout, expert).turned(),
    };
    let (experts, tasks) = buckets.used(task);
    let to = Shared::new(to);
    multiply(&tasks, how.alike, (how.runner, how.crew), |Block { task, rows, columns }, values| {
        let expert = experts[*task];
        if let Some(bias) = weights.bias_of(expert) {
            for row in values.chunks_exact_mut(COLUMNS) {
                row.iter_mut().zip(&bias[columns.clone()]).for_each(|(to, bias)| *to += bias.to_f32());
            }
        }
        // Blocks are disjoint.
        let start = |n: usize| (buckets.starts[expert] + rows.start + n) * hidden + columns.start;
        how.runner.run(Emit { from: (&*values, COLUMNS), len: columns.len(), to: &to, start });
    });
}

impl<'a, T: Lane> Weights<'a, T> {
    /// The matrix of an expert, and those that follow.
    fn of(&self, expert: usize) -> &'a [T] {
        &self.data[self.layout.at(expert, 0, 0)..]
    }

    fn bias_of(&self, expert: usize) -> Option<&'a [T]> {
        let rows = self.layout.rows();
        Some(&self.bias?[expert * rows..][..rows])
    }
}
