//! The decode kernel: folds a block of keys into a few query rows.
//!
//! Vectors run along the *features*, so that K and V stream through once, converted as they are loaded; up to four rows
//! share each load. Features must be a multiple of the lanes; the driver pads others.
//!
//! A row by itself reads keys one after another: memory streams best in its own order. Rows that share keys multiply four of
//! them at once, since sums across lanes are cheaper together; to keep memory streaming, each half prefetches what the other
//! half reads next: the dot products the values of their keys, the weighted sums the next block's keys.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use super::{
    Kernel, Lane, Simd,
    dropout::BlockDropout,
    exp2::{Exp2, tanh},
    tile::{Logits, NO_MAX},
};

/// Keys of a block, and the distance between rows of scores. Small, so that keys and values come from memory in short
/// turns: 32 streamed faster than 128 on a Zen 4.
pub(crate) const BLOCK: usize = 32;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Where the rows of keys or values start.
pub(crate) trait Starts: Copy {
    /// The start of row `n` of the block.
    fn at(self, n: usize) -> usize;
    /// Where the row starts that is likely read a block later; perhaps beyond the end.
    fn later(self, n: usize) -> usize;
    /// The largest start of the first `count` rows.
    fn last(self, count: usize) -> usize;
}

/// Rows at equal distances.
#[derive(Clone, Copy)]
pub(crate) struct Strided {
    pub(crate) first: usize,
    pub(crate) step: usize,
}

impl Starts for Strided {
    #[inline(always)]
    fn at(self, n: usize) -> usize {
        self.first + n * self.step
    }

    #[inline(always)]
    fn later(self, n: usize) -> usize {
        self.first.wrapping_add(self.step.wrapping_mul(n + BLOCK))
    }

    #[inline(always)]
    fn last(self, count: usize) -> usize {
        self.at(count - 1)
    }
}

/// Rows of several pages.
#[derive(Clone, Copy)]
pub(crate) struct Listed<'a> {
    pub(crate) starts: &'a [usize; BLOCK],
    pub(crate) later: &'a [usize; BLOCK],
}

impl Starts for Listed<'_> {
    #[inline(always)]
    fn at(self, n: usize) -> usize {
        self.starts[n]
    }

    #[inline(always)]
    fn later(self, n: usize) -> usize {
        self.later[n]
    }

    #[inline(always)]
    fn last(self, count: usize) -> usize {
        self.starts[..count].iter().fold(0, |last, &start| last.max(start))
    }
}

/// A few rows and the keys to fold into them.
pub(crate) struct RowBlock<'a, T, P> {
    /// Number of rows.
    pub(crate) rows: usize,
    /// Features of queries and keys, and of values.
    pub(crate) dims: [usize; 2],
    /// Number of keys, at most [`BLOCK`].
    pub(crate) keys: usize,
    /// Queries, `[row][feature]`.
    pub(crate) q: &'a [f32],
    /// Where keys and values are.
    pub(crate) k: &'a [T],
    pub(crate) v: &'a [T],
    /// Where the row of each key starts in either.
    pub(crate) starts: [P; 2],
    /// From scores to logits.
    pub(crate) logits: Logits,
    /// What is added to scores, `[row][BLOCK]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// Weights that are dropped once they are summed, if any are.
    pub(crate) dropout: Option<BlockDropout<'a>>,
    /// Visible keys of each row, relative to the block.
    pub(crate) visible: &'a [[usize; 2]],
    /// Space for `[row][BLOCK]`.
    pub(crate) scores: &'a mut [f32],
    /// Largest score, sum of `2^(logit − max)`, and the sum of values, `[row][feature]`.
    pub(crate) max: &'a mut [f32],
    pub(crate) sum: &'a mut [f32],
    pub(crate) out: &'a mut [f32],
}

impl<T: Lane, P: Starts> RowBlock<'_, T, P> {
    fn check(&self, lanes: usize) {
        let (rows, [dim_qk, dim_v]) = (self.rows, self.dims);
        assert!(dim_qk.is_multiple_of(lanes) && dim_v.is_multiple_of(lanes), "features fill vectors");
        assert!(self.keys > 0 && self.keys <= BLOCK, "a block holds 1 to {BLOCK} keys");
        let last = self.starts.map(|starts| starts.last(self.keys));
        assert!(
            last[0] + dim_qk <= self.k.len() && last[1] + dim_v <= self.v.len(),
            "rows lie in their slices"
        );
        assert!(self.q.len() >= rows * dim_qk && self.scores.len() >= rows * BLOCK, "row buffers fit");
        assert!(self.bias.is_none_or(|bias| bias.len() >= rows * BLOCK), "biases fit");
        self.dropout.iter().for_each(|dropout| dropout.check(rows));
        assert!(self.max.len() >= rows && self.sum.len() >= rows && self.out.len() >= rows * dim_v);
        assert!(self.visible[..rows].iter().all(|&[a, b]| a <= b && b <= self.keys), "visible keys are keys");
    }
}

impl<T: Lane, P: Starts> Kernel for RowBlock<'_, T, P> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        self.check(S::LANES);
        // SAFETY: the caller's promise, and `check` saw that all buffers hold what the sizes say.
        unsafe {
            let mut row = 0;
            // Few registers hold few sums.
            while S::LANES >= 16 && row + 4 <= self.rows {
                rows::<S, T, P, 4>(&mut self, row);
                row += 4;
            }
            while row + 2 <= self.rows {
                rows::<S, T, P, 2>(&mut self, row);
                row += 2;
            }
            if row < self.rows {
                rows::<S, T, P, 1>(&mut self, row);
            }
        }
    }
}

/// Folds the keys into `R` rows, which share each key and value that is loaded and widened.
#[inline(always)]
unsafe fn rows<S: Simd, T: Lane, P: Starts, const R: usize>(block: &mut RowBlock<'_, T, P>, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        scores::<S, T, P, R>(block, row);
        for r in 0..R {
            softmax::<S, T, P>(block, row + r);
        }
        values::<S, T, P, R>(block, row);
    }
}

/// Dot products of `R` rows with every key.
#[inline(always)]
unsafe fn scores<S: Simd, T: Lane, P: Starts, const R: usize>(block: &mut RowBlock<'_, T, P>, row: usize) {
    let mut n = 0;
    // SAFETY: the caller's promise.
    unsafe {
        if R == 1 {
            return in_order::<S, T, P>(block, row);
        }
        while n + 4 <= block.keys {
            dots::<S, T, P, R, 4>(block, row, n);
            n += 4;
        }
        match block.keys - n {
            1 => dots::<S, T, P, R, 1>(block, row, n),
            2 => dots::<S, T, P, R, 2>(block, row, n),
            3 => dots::<S, T, P, R, 3>(block, row, n),
            _ => {}
        }
    }
}

/// Dot products of one row with every key, one key after another: memory streams best in its own order.
#[inline(always)]
unsafe fn in_order<S: Simd, T: Lane, P: Starts>(block: &mut RowBlock<'_, T, P>, row: usize) {
    let dim = block.dims[0];
    // SAFETY: `RowBlock::check`.
    unsafe {
        let q = block.q.as_ptr().add(row * dim);
        for n in 0..block.keys {
            let k = block.k.as_ptr().add(block.starts[0].at(n));
            let mut sum = S::splat(0.0);
            for d in (0..dim).step_by(S::LANES) {
                sum = S::fma(S::load(q.add(d)), T::load::<S>(k.add(d)), sum);
            }
            *block.scores.get_unchecked_mut(row * BLOCK + n) = S::sum(sum);
        }
    }
}

/// Dot products of `R` rows with `N` keys, the first of which is a multiple of four.
#[inline(always)]
unsafe fn dots<S: Simd, T: Lane, P: Starts, const R: usize, const N: usize>(
    block: &mut RowBlock<'_, T, P>,
    row: usize,
    n: usize,
) {
    let dim = block.dims[0];
    // SAFETY: `RowBlock::check`.
    unsafe {
        let (q, mut k) = (block.q.as_ptr().add(row * dim), [block.k.as_ptr(); N]);
        for j in 0..N {
            k[j] = k[j].add(block.starts[0].at(n + j));
            fetch::<S, T>(block.v.as_ptr().add(block.starts[1].at(n + j)), block.dims[1]);
        }
        let mut sums = [[S::splat(0.0); 4]; R];
        for d in (0..dim).step_by(S::LANES) {
            let mut keys = [S::splat(0.0); N];
            for j in 0..N {
                keys[j] = T::load::<S>(k[j].add(d));
            }
            for r in 0..R {
                let q = S::load(q.add(r * dim + d));
                for j in 0..N {
                    sums[r][j] = S::fma(q, keys[j], sums[r][j]);
                }
            }
        }
        for r in 0..R {
            let to = &mut block.scores[(row + r) * BLOCK + n..][..4];
            to.copy_from_slice(&S::sums(sums[r]));
        }
    }
}

/// Prefetches `len` elements, which need not exist.
#[inline(always)]
unsafe fn fetch<S: Simd, T: Lane>(at: *const T, len: usize) {
    for n in (0..len).step_by(LINE / size_of::<T>()) {
        // SAFETY: the caller's promise.
        unsafe { S::fetch(at.wrapping_add(n).cast()) };
    }
}

/// Turns a row's scores into `2^(logit − max)`, zero where hidden, and updates what the row has seen.
#[inline(always)]
unsafe fn softmax<S: Simd, T: Lane, P: Starts>(block: &mut RowBlock<'_, T, P>, row: usize) {
    let padded = block.keys.next_multiple_of(S::LANES);
    let scores = &mut block.scores[row * BLOCK..][..padded];
    let out = &mut block.out[row * block.dims[1]..][..block.dims[1]];
    // SAFETY: the caller's promise; both slices are multiples of the lanes.
    unsafe {
        if let Some(softcap) = block.logits.softcap {
            cap::<S>(scores, softcap);
        }
        if let Some(bias) = block.bias {
            scores.iter_mut().zip(&bias[row * BLOCK..]).for_each(|(score, bias)| *score += bias);
        }
        let [start, end] = block.visible[row];
        scores[..start].fill(f32::NEG_INFINITY);
        scores[end..].fill(f32::NEG_INFINITY);
        let top = largest::<S>(scores);
        let old = block.max[row];
        let max = if top > old { top } else { old };
        let shrink = if max == old { 1.0 } else { (block.logits.factor * (old - max)).exp2() };
        let sum = exponentiate::<S>(scores, block.logits.factor, max);
        if let Some(dropout) = block.dropout {
            leave_out::<S>(scores, dropout, row);
        }
        block.sum[row] = block.sum[row] * shrink + sum;
        block.max[row] = max;
        if shrink != 1.0 {
            scale::<S>(out, shrink);
        }
    }
}

#[inline(always)]
unsafe fn cap<S: Simd>(scores: &mut [f32], [inner, cap]: [f32; 2]) {
    for chunk in scores.chunks_exact_mut(S::LANES) {
        // SAFETY: `softmax` passes a multiple of the lanes.
        unsafe {
            let x = tanh::<S>(S::mul(S::load(chunk.as_ptr()), S::splat(inner)));
            S::store(chunk.as_mut_ptr(), S::mul(x, S::splat(cap)));
        }
    }
}

#[inline(always)]
unsafe fn largest<S: Simd>(scores: &[f32]) -> f32 {
    // SAFETY: `softmax` passes a multiple of the lanes.
    unsafe {
        let mut top = S::splat(NO_MAX);
        for chunk in scores.chunks_exact(S::LANES) {
            top = S::max(S::load(chunk.as_ptr()), top);
        }
        S::largest(top)
    }
}

/// Replaces scores by `2^(factor·(score − max))` and returns their sum.
#[inline(always)]
unsafe fn exponentiate<S: Simd>(scores: &mut [f32], factor: f32, max: f32) -> f32 {
    // SAFETY: `softmax` passes a multiple of the lanes.
    unsafe {
        let (exp2, mut sum) = (Exp2::<S>::new(factor), S::splat(0.0));
        for chunk in scores.chunks_exact_mut(S::LANES) {
            let p = exp2.of(S::sub(S::load(chunk.as_ptr()), S::splat(max)));
            S::store(chunk.as_mut_ptr(), p);
            sum = S::add(sum, p);
        }
        S::sum(sum)
    }
}

/// Sets dropped weights of a row to 0.
#[inline(always)]
unsafe fn leave_out<S: Simd>(weights: &mut [f32], dropout: BlockDropout<'_>, row: usize) {
    for n in (0..weights.len()).step_by(S::LANES) {
        // SAFETY: `softmax` passes a multiple of the lanes, `RowBlock::check` saw the row.
        unsafe {
            let at = weights.as_mut_ptr().add(n);
            S::store(at, dropout.along_keys::<S>(row, n, S::load(at)));
        }
    }
}

#[inline(always)]
unsafe fn scale<S: Simd>(out: &mut [f32], factor: f32) {
    for chunk in out.chunks_exact_mut(S::LANES) {
        // SAFETY: `softmax` passes a multiple of the lanes.
        unsafe { S::store(chunk.as_mut_ptr(), S::mul(S::load(chunk.as_ptr()), S::splat(factor))) };
    }
}

/// Adds the weighted values to `R` rows.
#[inline(always)]
unsafe fn values<S: Simd, T: Lane, P: Starts, const R: usize>(block: &mut RowBlock<'_, T, P>, row: usize) {
    let dim = block.dims[1];
    let mut d = 0;
    // SAFETY: `RowBlock::check`.
    unsafe {
        // Sums of four rows fill the registers sooner.
        while R < 4 && d + 8 * S::LANES <= dim {
            weigh::<S, T, P, R, 8>(block, row, d);
            d += 8 * S::LANES;
        }
        while d + 4 * S::LANES <= dim {
            weigh::<S, T, P, R, 4>(block, row, d);
            d += 4 * S::LANES;
        }
        while d < dim {
            weigh::<S, T, P, R, 1>(block, row, d);
            d += S::LANES;
        }
    }
}

/// `C` vectors of features from feature `d` on, for `R` rows.
#[inline(always)]
unsafe fn weigh<S: Simd, T: Lane, P: Starts, const R: usize, const C: usize>(
    block: &mut RowBlock<'_, T, P>,
    row: usize,
    d: usize,
) {
    // SAFETY: `RowBlock::check`.
    unsafe {
        let out = block.out.as_mut_ptr().add(row * block.dims[1] + d);
        let p = block.scores.as_ptr().add(row * BLOCK);
        let mut acc = [[S::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = S::load(out.add(r * block.dims[1] + c * S::LANES));
            }
        }
        let [k, v] = block.starts;
        for n in 0..block.keys {
            if R > 1 {
                fetch::<S, T>(block.k.as_ptr().wrapping_add(k.later(n).wrapping_add(d)), C * S::LANES);
            }
            let v = block.v.as_ptr().add(v.at(n) + d);
            let mut columns = [S::splat(0.0); C];
            for c in 0..C {
                columns[c] = T::load::<S>(v.add(c * S::LANES));
            }
            for r in 0..R {
                let p = S::splat(*p.add(r * BLOCK + n));
                for c in 0..C {
                    acc[r][c] = S::fma(p, columns[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                S::store(out.add(r * block.dims[1] + c * S::LANES), acc[r][c]);
            }
        }
    }
}
