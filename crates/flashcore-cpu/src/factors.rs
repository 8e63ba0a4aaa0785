//! Factors of products in any layout, and how parts of them are packed. Called by `matmul`; calls `simd`.

use std::ops::Range;

use flashcore_core::ExpertLayout;
use half::bf16;

use crate::simd::{
    Lane,
    pack::{Join, Lines, Terms, Turn},
    panel::COLUMNS,
    runner::Runner,
};

/// Columns of the first of two matrices that share a panel.
pub(crate) const HALF: usize = COLUMNS / 2;
/// Lines that are gathered at a time where neither axis is contiguous.
const GATHERED: usize = 16;

/// Where the lines of an axis start, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Steps<'a> {
    /// So many elements apart.
    Even(usize),
    /// Anywhere.
    Listed(&'a [usize]),
    /// Two matrices of `count` columns, `step` elements apart; the second starts at `second`. [`HALF`] columns of either
    /// make a panel.
    Joined { step: usize, second: usize, count: usize },
}

/// Columns of one or more panels that are equal distances apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// The first's place in its panel, and how many each panel takes.
    pub(crate) at: usize,
    pub(crate) each: usize,
    /// Where the first starts, and elements from one to the next.
    pub(crate) start: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl Steps<'_> {
    fn at(&self, n: usize) -> usize {
        match self {
            Self::Even(step) => n * step,
            Self::Listed(starts) => starts[n],
            Self::Joined { .. } => unreachable!("joined columns come in runs"),
        }
    }

    /// How many columns panels have in all for `count` of an axis.
    pub(crate) fn columns(&self, count: usize) -> usize {
        match self {
            Self::Joined { .. } => count.div_ceil(HALF) * COLUMNS,
            _ => count,
        }
    }

    /// The columns of some panels.
    pub(crate) fn runs(&self, columns: &Range<usize>) -> impl Iterator<Item = Run> {
        let runs = match *self {
            Self::Even(step) => [
                Some(Run { at: 0, each: COLUMNS, start: columns.start * step, step, count: columns.len() }),
                None,
            ],
            Self::Joined { step, second, count } => {
                let first = columns.start / COLUMNS * HALF;
                let count = (columns.len() / 2).min(count - first);
                let run = |at: usize, start: usize| {
                    Some(Run { at, each: HALF, start: start + first * step, step, count })
                };
                [run(0, 0), run(HALF, second)]
            }
            Self::Listed(_) => unreachable!("right factors have equal distances between columns"),
        };
        runs.into_iter().flatten()
    }
}

/// A factor: element (r, c) lies where row r starts, plus where column c does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) rows: Steps<'a>,
    pub(crate) columns: Steps<'a>,
}

impl<'a, T: Lane> Matrix<'a, T> {
    /// A matrix with these distances between rows and columns.
    pub(crate) const fn new(data: &'a [T], [rows, columns]: [usize; 2]) -> Self {
        Self { data, rows: Steps::Even(rows), columns: Steps::Even(columns) }
    }

    /// Contiguous rows that start anywhere.
    pub(crate) const fn listed(data: &'a [T], rows: &'a [usize]) -> Self {
        Self { data, rows: Steps::Listed(rows), columns: Steps::Even(1) }
    }

    /// An expert's matrix.
    pub(crate) fn of_expert(data: &'a [T], layout: &ExpertLayout, expert: usize) -> Self {
        let [_, row, column] = layout.strides();
        Self::new(&data[layout.at(expert, 0, 0)..], [row, column])
    }

    /// Rows and columns exchanged.
    pub(crate) const fn turned(self) -> Self {
        Self { data: self.data, rows: self.columns, columns: self.rows }
    }

    /// The same where it is bf16.
    pub(crate) fn as_bf16(&self) -> Option<Matrix<'a, bf16>> {
        Some(Matrix { data: T::as_bf16(self.data)?, rows: self.rows, columns: self.columns })
    }

    /// Whether its columns are contiguous and equal distances apart, as those of turned weights are.
    pub(crate) fn streams(&self) -> bool {
        self.rows == Steps::Even(1) && !matches!(self.columns, Steps::Listed(_) | Steps::Even(1))
    }

    /// Packs rows of a left factor, so many terms apart; `stage` has room for a panel.
    pub(crate) fn pack_rows<E: Terms<T>>(
        &self,
        (rows, depth): (Range<usize>, Range<usize>),
        (to, stride): (&mut [E], usize),
        stage: &mut [E],
        runner: Runner,
    ) {
        let mut starts = [0; COLUMNS];
        for (n, first) in rows.clone().step_by(COLUMNS).enumerate() {
            let rows = first..rows.end.min(first + COLUMNS);
            let to = &mut to[n * COLUMNS * stride..];
            if self.columns == Steps::Even(1) {
                rows.clone().zip(&mut starts).for_each(|(row, to)| *to = self.rows.at(row) + depth.start);
                let (starts, len) = (&starts[..rows.len()], depth.len());
                runner.run(Lines { from: self.data, starts, len, to: (to, stride) });
            } else if self.rows == Steps::Even(1) {
                let start = |d: usize| self.columns.at(depth.start + d) + first;
                let (from, len, lines) = (self.data, depth.len(), rows.len());
                runner.run(Join { from, start, len, lines, last: len - 1, to: (stage, COLUMNS) });
                for (n, term) in (0..len.div_ceil(E::EACH)).step_by(COLUMNS).enumerate() {
                    let terms = term..len.div_ceil(E::EACH).min(term + COLUMNS);
                    terms.clone().zip(&mut starts).for_each(|(term, to)| *to = term * COLUMNS);
                    let from: &[f32] = bytemuck::cast_slice(stage);
                    let to = (&mut bytemuck::cast_slice_mut::<E, f32>(to)[n * COLUMNS..], stride);
                    runner.run(Turn { from, starts: &starts[..terms.len()], len: lines, to });
                }
            } else {
                let from =
                    gather(self.data, rows.map(|row| self.rows.at(row)), |d| self.columns.at(d), &depth);
                let starts: Vec<usize> = (0..from.len()).step_by(depth.len()).collect();
                runner.run(Lines { from: &from, starts: &starts, len: depth.len(), to: (to, stride) });
            }
        }
    }

    /// Whether several panels are packed at a time, since their columns lie side by side.
    pub(crate) fn is_wide(&self) -> bool {
        let side_by_side = matches!(self.columns, Steps::Even(1) | Steps::Joined { step: 1, .. });
        side_by_side && self.rows != Steps::Even(1)
    }

    /// Packs a panel of a right factor, or several that [`Self::is_wide`].
    pub(crate) fn pack_panels<E: Terms<T>>(
        &self,
        (depth, columns): (Range<usize>, Range<usize>),
        to: &mut [E],
        runner: Runner,
    ) {
        for run in self.columns.runs(&columns) {
            let to = &mut to[run.at..];
            if self.rows == Steps::Even(1) {
                let mut starts = [0; COLUMNS];
                let starts = &mut starts[..run.count];
                starts
                    .iter_mut()
                    .enumerate()
                    .for_each(|(n, to)| *to = run.start + n * run.step + depth.start);
                runner.run(Turn { from: self.data, starts, len: depth.len(), to: (to, COLUMNS) });
            } else if run.step == 1 {
                let start = |d: usize| self.rows.at(depth.start + d) + run.start;
                let (from, len, lines) = (self.data, depth.len(), run.count);
                runner.run(Join { from, start, len, lines, last: len - 1, to: (to, run.each) });
            } else {
                for n in (0..run.count).step_by(GATHERED) {
                    let some = n..run.count.min(n + GATHERED);
                    let columns = some.map(|n| run.start + n * run.step);
                    let from = gather(self.data, columns, |d| self.rows.at(d), &depth);
                    let starts: Vec<usize> = (0..from.len()).step_by(depth.len()).collect();
                    let to = (&mut to[n..], COLUMNS);
                    runner.run(Turn { from: &from, starts: &starts, len: depth.len(), to });
                }
            }
        }
    }

    /// Addresses that packing a panel reads first: what starts there, and bytes that follow each.
    pub(crate) fn addresses(
        &self,
        (depth, columns): (Range<usize>, Range<usize>),
        to: &mut Vec<usize>,
    ) -> usize {
        let address = |start: usize| self.data.as_ptr().wrapping_add(start).addr();
        to.clear();
        for run in self.columns.runs(&columns) {
            if self.rows == Steps::Even(1) {
                to.extend((0..run.count).map(|n| address(run.start + n * run.step + depth.start)));
            } else {
                to.extend(depth.clone().map(|d| address(self.rows.at(d) + run.start)));
            }
        }
        let joined = matches!(self.columns, Steps::Joined { .. });
        let across = if joined { columns.len() / 2 } else { columns.len() };
        let len = if self.rows == Steps::Even(1) { depth.len() } else { across };
        len * size_of::<T>()
    }
}

/// Lines of a matrix that has no contiguous axis.
fn gather<T: Lane>(
    data: &[T],
    lines: impl Iterator<Item = usize>,
    at: impl Fn(usize) -> usize,
    depth: &Range<usize>,
) -> Vec<T> {
    lines.flat_map(|line| depth.clone().map(|d| data[line + at(d)]).collect::<Vec<_>>()).collect()
}
