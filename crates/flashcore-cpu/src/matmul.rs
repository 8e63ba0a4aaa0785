//! Products of matrices of any layout, block by block on all threads. Called by `grouped` and by the gradients of `moe`.
//!
//! Where the right factor's depth is contiguous, as in weights, it streams through once and is not moved; else blocks of
//! both factors are widened into memory that stays in the cache. Bits of a result depend on its row, its column and the
//! depth alone.

use std::ops::Range;

use half::bf16;

use crate::{
    crew::Crew,
    simd::{
        Lane,
        convert::Widen,
        dots::{Dots, depth_padded},
        product::{Left, Product, Size},
        runner::Runner,
    },
};

/// Columns of a block: a multiple of every vector's lanes.
const COLUMNS: usize = 64;
/// Rows of a block whose factors are moved.
const ROWS: usize = 96;
/// Rows of a block past which the right factor streams.
const STREAMED_ROWS: usize = 24;
/// Elements along the depth that are widened at a time.
const DEPTH: usize = 256;

/// Where the lines of an axis start, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Steps<'a> {
    /// So many elements apart.
    Even(usize),
    /// Anywhere.
    Listed(&'a [usize]),
}

impl Steps<'_> {
    fn at(&self, n: usize) -> usize {
        match self {
            Self::Even(step) => n * step,
            Self::Listed(starts) => starts[n],
        }
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

    /// Rows and columns exchanged.
    pub(crate) const fn turned(self) -> Self {
        Self { data: self.data, rows: self.columns, columns: self.rows }
    }

    /// Widens a part of it: `to[r * stride + c]`.
    fn widen(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        (to, stride): (&mut [f32], usize),
        runner: Runner,
    ) {
        if columns.is_empty() {
            return;
        }
        for (row, to) in rows.zip(to.chunks_mut(stride)) {
            let (start, to) = (self.rows.at(row), &mut to[..columns.len()]);
            if self.columns == Steps::Even(1) {
                let from = &self.data[start + columns.start..][..columns.len()];
                runner.run(Widen { from, to });
            } else {
                for (to, column) in to.iter_mut().zip(columns.clone()) {
                    *to = self.data[start + self.columns.at(column)].to_f32();
                }
            }
        }
    }
}

/// Extents of a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extents {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

/// Multiplies `a` (rows × depth) with `b` (depth × columns) and hands out the results: a row, some of its columns, values.
pub(crate) fn multiply<A: Lane, B: Lane>(
    extents: Extents,
    (a, b): (Matrix<'_, A>, Matrix<'_, B>),
    (runner, crew): (Runner, Crew),
    write: impl Fn(usize, Range<usize>, &[f32]) + Sync + Send,
) {
    let Extents { rows, columns, depth } = extents;
    let tall = if streams(&b) { STREAMED_ROWS } else { ROWS };
    let across = columns.div_ceil(COLUMNS);
    crew.each_with(rows.div_ceil(tall) * across, |worker: &mut Worker, unit| {
        let [row, column] = [unit / across * tall, unit % across * COLUMNS];
        let block =
            Block { rows: row..rows.min(row + tall), columns: column..columns.min(column + COLUMNS), depth };
        worker.results.clear();
        worker.results.resize(block.rows.len() * COLUMNS, 0.0);
        match b.columns {
            Steps::Even(stride) if streams(&b) => worker.stream(&block, a, (b.data, stride), runner),
            _ => worker.multiply(&block, a, b, runner),
        }
        for (row, values) in block.rows.clone().zip(worker.results.chunks_exact(COLUMNS)) {
            write(row, block.columns.clone(), &values[..block.columns.len()]);
        }
    });
}

/// Whether the right factor is read as it lies.
fn streams<T>(b: &Matrix<'_, T>) -> bool {
    b.rows == Steps::Even(1) && matches!(b.columns, Steps::Even(step) if step != 1)
}

/// Some rows and columns of a product.
struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
    depth: usize,
}

/// What a thread works with.
#[derive(Default)]
struct Worker {
    a: Vec<f32>,
    /// Rows of bf16 that are multiplied pair by pair.
    pairs: Vec<bf16>,
    b: Vec<f32>,
    results: Vec<f32>,
}

impl Worker {
    /// Columns of the right factor lie `stride` apart, each contiguous.
    fn stream<A: Lane, B: Lane>(
        &mut self,
        block: &Block,
        a: Matrix<'_, A>,
        (b, stride): (&[B], usize),
        runner: Runner,
    ) {
        let (padded, depth) = (depth_padded(block.depth), block.depth);
        if depth == 0 {
            return;
        }
        let starts: Vec<usize> = (0..block.rows.len()).map(|row| row * padded).collect();
        let (starts, rows, to) = (&starts[..], block.columns.len(), (&mut self.results[..], COLUMNS));
        let b = &b[block.columns.start * stride..];
        let both = A::as_bf16(a.data).zip(B::as_bf16(b)).filter(|_| runner.has_pairs());
        if let Some((data, b)) = both.filter(|_| a.columns == Steps::Even(1)) {
            self.pairs.clear();
            self.pairs.resize(block.rows.len() * padded, bf16::ZERO);
            for (row, to) in block.rows.clone().zip(self.pairs.chunks_exact_mut(padded)) {
                to[..depth].copy_from_slice(&data[a.rows.at(row)..][..depth]);
            }
            let x = &self.pairs[..];
            return runner.run_pair_dots(&mut Dots { x, starts, w: (b, stride), rows, depth, to });
        }
        self.a.clear();
        self.a.resize(block.rows.len() * padded, 0.0);
        a.widen(block.rows.clone(), 0..depth, (&mut self.a, padded), runner);
        runner.run(Dots { x: &self.a, starts, w: (b, stride), rows, depth, to });
    }

    fn multiply<A: Lane, B: Lane>(
        &mut self,
        block: &Block,
        a: Matrix<'_, A>,
        b: Matrix<'_, B>,
        runner: Runner,
    ) {
        self.a.resize(ROWS * DEPTH, 0.0);
        self.b.clear();
        self.b.resize(DEPTH * COLUMNS, 0.0);
        let turned = a.columns != Steps::Even(1);
        for first in (0..block.depth).step_by(DEPTH) {
            let depth = first..block.depth.min(first + DEPTH);
            let left = match turned {
                true => {
                    a.turned().widen(depth.clone(), block.rows.clone(), (&mut self.a, ROWS), runner);
                    Left::Columns(&self.a, ROWS)
                }
                false => {
                    a.widen(block.rows.clone(), depth.clone(), (&mut self.a, DEPTH), runner);
                    Left::Rows(&self.a, DEPTH)
                }
            };
            b.widen(depth.clone(), block.columns.clone(), (&mut self.b, COLUMNS), runner);
            let size = Size { rows: block.rows.len(), columns: COLUMNS, depth: depth.len() };
            let (b, c) = ((&self.b[..], COLUMNS), (&mut self.results[..], COLUMNS));
            runner.run(Product { size, a: left, b, c, add: first > 0 });
        }
    }
}
