//! Operands of the products: rows of the caller's tensors as f32, or as pairs of bf16, in the orientation a product needs.
//!
//! | product | sums over | left factor | right factor |
//! | --- | --- | --- | --- |
//! | scores `Q·Kᵀ`, `dO·Vᵀ` | features | rows of Q, dO | K, V *transposed*: `[feature][key]` |
//! | dV, dK | queries | weights, gradients of scores by column | rows of dO, Q *stacked*: `[query][feature]` |
//! | dQ | keys | gradients of scores by row | rows of K stacked: `[key][feature]` |
//!
//! In f32, stacked rows are just the rows. Pairs are neighbours along the summed dimension, so rows (pairs of features)
//! and stacked rows (pairs of rows) differ.

use flashcore_core::{Data, Layout};
use half::bf16;

use crate::{
    scratch::{padded, take},
    simd::{
        convert::{Widen, Zip},
        product::{Pair, Product},
        runner::Runner,
        slopes::{PairSlopes, RowFacts, Slopes, TileSize},
    },
};

/// Elements from one row of a small matrix to the next: an odd number of cache lines, so that columns of vectors spread
/// over the cache.
pub(super) fn spread(len: usize) -> usize {
    padded(len) | padded(1)
}

/// Widens elements from `start` on.
pub(super) fn widen(runner: Runner, data: Data<'_>, start: usize, to: &mut [f32]) {
    let len = to.len();
    match data {
        Data::F16(data) => runner.run(Widen { from: &data[start..start + len], to }),
        Data::BF16(data) => runner.run(Widen { from: &data[start..start + len], to }),
        Data::F32(data) => to.copy_from_slice(&data[start..start + len]),
        _ => unreachable!("`cpu` takes these types only"),
    }
}

/// Scores of a tile, `[query][key]`: dot products at first, then what is made of them.
pub(super) struct Tile<'a, E> {
    /// `Q·Kᵀ`, then the weights by column.
    pub(super) scores: &'a mut [f32],
    /// `dO·Vᵀ`, then in f32 the gradients of scores.
    pub(super) grads: &'a mut [f32],
    /// In pairs: weights and gradients by column, gradients by row. Empty in f32.
    pub(super) pairs: [&'a mut [E]; 3],
}

impl<'a, E: Element> Tile<'a, E> {
    /// Floats that hold `rows` rows of `stride` keys.
    pub(super) fn len(rows: usize, stride: usize) -> usize {
        2 * padded(rows * stride) + 3 * padded(Self::pairs(rows, stride))
    }

    /// Elements of a matrix of pairs.
    fn pairs(rows: usize, stride: usize) -> usize {
        if E::NUMBERS == 1 { 0 } else { rows * stride / E::NUMBERS }
    }

    /// Room for `rows` rows of `stride` keys, from the front of `rest`.
    pub(super) fn take(rest: &mut &'a mut [f32], rows: usize, stride: usize) -> Self {
        let pairs = Self::pairs(rows, stride);
        let (scores, grads) = (take(rest, rows * stride), take(rest, rows * stride));
        Self { scores, grads, pairs: [cut(rest, pairs), cut(rest, pairs), cut(rest, pairs)] }
    }
}

/// The left factors of the products that follow the scores, with their strides.
pub(super) struct Factors<'a, E> {
    /// Weights, `[query][key]`, summed over queries.
    pub(super) weights: (&'a [E], usize),
    /// Gradients, likewise.
    pub(super) grads: (&'a [E], usize),
    /// Gradients, `[query][key]`, summed over keys.
    pub(super) grad_rows: (&'a [E], usize),
}

/// Element type of products: f32, or pairs of bf16.
pub(super) trait Element: bytemuck::Pod {
    /// Numbers in an element.
    const NUMBERS: usize;

    /// Computes a product.
    fn multiply(runner: Runner, product: Product<'_, Self>);

    /// Puts one row of a tensor, which starts at `start`, into `to`.
    fn row(runner: Runner, data: Data<'_>, start: usize, len: usize, to: &mut [Self]);

    /// Stacks `count` rows of `stride` numbers, if rows cannot be used directly.
    fn stack(runner: Runner, rows: &[Self], count: usize, stride: usize, to: &mut [Self]);

    /// Makes weights and gradients of a tile's dot products, from key `first` of the block on.
    fn slopes<'a>(
        runner: Runner,
        tile: &'a mut Tile<'_, Self>,
        facts: RowFacts<'_>,
        size: TileSize,
        first: usize,
    ) -> Factors<'a, Self>;
}

impl Element for f32 {
    const NUMBERS: usize = 1;

    fn multiply(runner: Runner, product: Product<'_, Self>) {
        runner.run(product);
    }

    fn row(runner: Runner, data: Data<'_>, start: usize, len: usize, to: &mut [Self]) {
        widen(runner, data, start, &mut to[..len]);
    }

    fn stack(_: Runner, _: &[Self], _: usize, _: usize, _: &mut [Self]) {}

    fn slopes<'a>(
        runner: Runner,
        tile: &'a mut Tile<'_, Self>,
        facts: RowFacts<'_>,
        size: TileSize,
        first: usize,
    ) -> Factors<'a, Self> {
        let (scores, grads) = (&mut tile.scores[first..], &mut tile.grads[first..]);
        runner.run(Slopes { size, facts, scores, grads });
        let (weights, grads) = (&tile.scores[first..], &tile.grads[first..]);
        let stride = size.stride;
        Factors { weights: (weights, stride), grads: (grads, stride), grad_rows: (grads, stride) }
    }
}

impl Element for Pair {
    const NUMBERS: usize = 2;

    fn multiply(runner: Runner, mut product: Product<'_, Self>) {
        runner.run_pair_product(&mut product);
    }

    fn row(_: Runner, data: Data<'_>, start: usize, len: usize, to: &mut [Self]) {
        let row = data.slice::<bf16>().map_or(&[][..], |data| &data[start..start + len]);
        let to: &mut [bf16] = bytemuck::cast_slice_mut(to);
        to[..len].copy_from_slice(row);
        // An odd feature out pairs with a zero.
        to[len..len.next_multiple_of(2)].fill(bf16::ZERO);
    }

    fn stack(runner: Runner, rows: &[Self], count: usize, stride: usize, to: &mut [Self]) {
        let rows: &[bf16] = bytemuck::cast_slice(rows);
        let row = |n: usize| (n < count).then(|| &rows[n * stride..][..stride]);
        for (n, to) in to.chunks_exact_mut(stride).take(count.div_ceil(2)).enumerate() {
            runner.run(Zip { first: row(2 * n), second: row(2 * n + 1), to });
        }
    }

    fn slopes<'a>(
        runner: Runner,
        tile: &'a mut Tile<'_, Self>,
        facts: RowFacts<'_>,
        size: TileSize,
        first: usize,
    ) -> Factors<'a, Self> {
        let [weights, grad_pairs, grad_rows] = &mut tile.pairs;
        let (scores, grads) = (&tile.scores[first..], &tile.grads[first..]);
        let slopes = PairSlopes { size, facts, scores, grads, weights, grad_pairs, grad_rows };
        runner.run_pair_slopes(slopes);
        let (stride, pairs) = (size.stride, &tile.pairs);
        Factors {
            weights: (&*pairs[0], stride),
            grads: (&*pairs[1], stride),
            grad_rows: (&*pairs[2], stride / 2),
        }
    }
}

/// Rows of a tensor, and the same rows stacked.
pub(super) struct Panel<'a, E> {
    rows: &'a mut [E],
    /// Empty if rows are used directly.
    stacked: &'a mut [E],
    /// Numbers of a row.
    dim: usize,
    /// Numbers from one row to the next.
    stride: usize,
}

impl<'a, E: Element> Panel<'a, E> {
    /// Floats that hold `rows` rows of `dim` numbers.
    pub(super) fn len(rows: usize, dim: usize) -> usize {
        E::NUMBERS * padded(rows * spread(dim) / E::NUMBERS)
    }

    /// Room for `rows` rows of `dim` numbers, from the front of `rest`.
    pub(super) fn take(rest: &mut &'a mut [f32], rows: usize, dim: usize) -> Self {
        let stride = spread(dim);
        let len = rows * stride / E::NUMBERS;
        let stacked = if E::NUMBERS == 1 { 0 } else { len };
        Self { rows: cut(rest, len), stacked: cut(rest, stacked), dim, stride }
    }

    /// Numbers of a row.
    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    /// Fills in `count` rows of a tensor; those that `skip` names are zero, whatever they hold.
    pub(super) fn load(
        &mut self,
        runner: Runner,
        (data, layout): (Data<'_>, &Layout),
        [batch, head, first]: [usize; 3],
        count: usize,
        skip: impl Fn(usize) -> bool,
    ) {
        for (n, to) in self.rows.chunks_exact_mut(self.stride / E::NUMBERS).take(count).enumerate() {
            match skip(n) {
                true => to.fill(E::zeroed()),
                false => E::row(runner, data, layout.row(batch, head, first + n), self.dim, to),
            }
        }
        E::stack(runner, self.rows, count, self.stride, self.stacked);
    }

    /// The rows as a left factor, by row.
    pub(super) fn rows(&self) -> (&[E], usize) {
        (self.rows, self.stride / E::NUMBERS)
    }

    /// The rows as a right factor that is summed over rows.
    pub(super) fn stacked(&self) -> (&[E], usize) {
        (if E::NUMBERS == 1 { self.rows } else { self.stacked }, self.stride)
    }

    /// Transposes `count` rows: `[feature][row]`, zero beyond the last row.
    pub(super) fn turn(&self, count: usize, (to, to_stride): (&mut [E], usize)) {
        let (rows, stride) = self.rows();
        for (d, to) in to.chunks_exact_mut(to_stride).take(self.dim.div_ceil(E::NUMBERS)).enumerate() {
            let column = rows[d..].iter().step_by(stride).take(count);
            to.iter_mut().zip(column).for_each(|(to, x)| *to = *x);
            to[count..].fill(E::zeroed());
        }
    }
}

/// Takes `len` elements from the front of `rest`.
pub(super) fn cut<'a, E: Element>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [E] {
    bytemuck::cast_slice_mut(take(rest, len))
}
