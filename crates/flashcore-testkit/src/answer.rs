//! A result in logical order, as f64: of the oracle, of the yardstick, of a backend.

use std::{fmt, ops::Range};

use flashcore_core::{Data, Instance, Problem, Sequences};

use crate::values;

/// Which rows of each head are checked: all of them or every n-th.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    step: usize,
}

impl Rows {
    /// Every row.
    pub const ALL: Self = Self { step: 1 };

    /// As many evenly spaced rows as keep one plain computation below about `budget` multiply-adds.
    pub fn within(problem: &Problem, budget: f64) -> Self {
        let step = (problem.flops() / 2.0 / budget).ceil().clamp(1.0, problem.seq_q().max(1) as f64);
        // An odd step visits every row of a tile whose height is a power of two.
        Self { step: step as usize | 1 }
    }
}

/// Extents of an answer: which rows it holds and how many features each has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    pub batch: usize,
    pub heads: usize,
    /// Rows held per head.
    pub rows: usize,
    /// Distance between the rows held.
    pub step: usize,
    pub dim: usize,
}

impl Grid {
    /// The answer to `problem` has these extents.
    pub fn of(problem: &Problem, rows: Rows) -> Self {
        Self {
            batch: problem.batch(),
            heads: problem.heads_q(),
            rows: problem.seq_q().div_ceil(rows.step),
            step: rows.step,
            dim: problem.dim_v(),
        }
    }

    /// Rows over all heads and batch entries.
    pub const fn total_rows(&self) -> usize {
        self.batch * self.heads * self.rows
    }

    /// Where element `index` of the answer lies in the problem's output.
    pub const fn position(&self, index: usize) -> Position {
        let (row, dim) = (index / self.dim, index % self.dim);
        let plane = row / self.rows;
        Position {
            batch: plane / self.heads,
            head: plane % self.heads,
            seq: row % self.rows * self.step,
            dim,
        }
    }
}

/// A place in the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    pub batch: usize,
    pub head: usize,
    pub seq: usize,
    pub dim: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {} head {} row {} dim {}", self.batch, self.head, self.seq, self.dim)
    }
}

/// A result, dense in the order batch, heads, row, dim.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    pub grid: Grid,
    pub out: Vec<f64>,
    /// The log-sum-exp of each row.
    pub lse: Vec<f64>,
    /// Rows without any key to attend to, which must be zero; known to plain computations only.
    pub sees_nothing: Vec<bool>,
    /// How far f32 arithmetic alone may take each row; known to plain computations only.
    pub f32_noise: Vec<f64>,
    /// Standard deviation of what rounding factors to the tensors' type does to each element, where a plain computation knows
    /// it: it then bounds the rule from below, as the yardstick may by luck have less.
    pub chance: Vec<f64>,
}

impl Answer {
    /// Extents alone: where an answer starts that is made of something else.
    pub fn empty(grid: Grid) -> Self {
        let (out, lse, sees_nothing) = (Vec::new(), Vec::new(), Vec::new());
        Self { grid, out, lse, sees_nothing, f32_noise: Vec::new(), chance: Vec::new() }
    }

    /// Reads a backend's result; without `lse` the answer's LSE is empty.
    pub fn gather(problem: &Problem, out: Data<'_>, lse: Option<&[f32]>, rows: Rows) -> Self {
        let grid = Grid::of(problem, rows);
        let mut flat = Vec::with_capacity(grid.dim);
        let mut answer = Self::empty(grid);
        for row in 0..grid.total_rows() {
            let Position { batch, head, seq, .. } = grid.position(row * grid.dim);
            flat.clear();
            values::row(out, problem.out().row(batch, head, seq), grid.dim, &mut flat);
            answer.out.extend(flat.iter().map(|&x| f64::from(x)));
            answer.lse.extend(lse.map(|lse| f64::from(lse[problem.lse_index(batch, head, seq)])));
        }
        answer
    }

    /// What accumulating this answer to `problem` makes of `old`: rows that are not used stay as they are, the others are
    /// weighed by their LSE.
    #[must_use]
    pub fn onto(&self, old: &Self, problem: Instance<'_>) -> Self {
        let mut sum = self.clone();
        for row in 0..self.grid.total_rows() {
            let features = row * self.grid.dim..(row + 1) * self.grid.dim;
            let Position { batch, seq, .. } = self.grid.position(features.start);
            let used = matches!(problem.sequences_kind(), Sequences::Used { .. });
            if used && seq >= problem.sequence(batch).q_len {
                sum.out[features.clone()].copy_from_slice(&old.out[features]);
                sum.lse[row] = old.lse[row];
                sum.sees_nothing.iter_mut().skip(row).take(1).for_each(|nothing| *nothing = false);
            } else if old.lse[row] > f64::NEG_INFINITY {
                let lses = [old.lse[row], self.lse[row]];
                let top = lses[0].max(lses[1]);
                let lse = top + lses.iter().map(|lse| (lse - top).exp()).sum::<f64>().ln();
                let [of_old, of_new] = lses.map(|lse_part| (lse_part - lse).exp());
                for i in features {
                    sum.out[i] = old.out[i] * of_old + self.out[i] * of_new;
                }
                sum.lse[row] = lse;
                sum.sees_nothing.iter_mut().skip(row).take(1).for_each(|nothing| *nothing = false);
            }
        }
        sum
    }

    /// Some rows of some heads of a batch entry of a result with LSE.
    pub fn part(&self, batch: usize, heads: Range<usize>, rows: Range<usize>) -> Self {
        let grid = Grid { batch: 1, heads: heads.len(), rows: rows.len(), ..self.grid };
        let mut part = Self::empty(grid);
        for head in heads {
            let first = (batch * self.grid.heads + head) * self.grid.rows;
            let (start, end) = (first + rows.start, first + rows.end);
            part.out.extend_from_slice(&self.out[start * grid.dim..end * grid.dim]);
            part.lse.extend_from_slice(&self.lse[start..end]);
        }
        part
    }
}
