//! The prefill kernel: folds a block of keys into a tile of query rows.
//!
//! Vectors run along the *rows*: Q, scores and the result are transposed (`[feature][row]`, `[key][row]`), while keys
//! and values are read as scalars and broadcast to the lanes. So K and V need no packing, and the softmax needs no
//! sums across lanes. A tile's micro-kernels hold `J` keys (or features of V) × `RV` vectors of rows in registers.
//!
//! What a lane computes depends on its own row only, so a row's bits do not depend on its place in a tile.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use flashcore_core::Problem;

use super::{
    Kernel, Simd,
    dropout::BlockDropout,
    exp2::{Exp2, tanh},
};

/// The running maximum of a row that has seen no key; finite, so that differences of maxima are never NaN.
pub(crate) const NO_MAX: f32 = f32::MIN;

/// Rows of f32 in memory.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// The elements, starting with the first row.
    pub(crate) data: &'a [f32],
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl Rows<'_> {
    /// Without the first `rows` rows.
    pub(crate) fn skip(self, rows: usize) -> Self {
        Self { data: &self.data[rows * self.stride..], ..self }
    }

    /// Panics unless `rows` rows of `dim` elements lie in memory.
    pub(crate) fn check(&self, rows: usize, dim: usize) {
        assert!(rows == 0 || (rows - 1) * self.stride + dim <= self.data.len(), "rows lie in their slice");
    }
}

/// From dot products to logits: a score is a dot product, capped or not; a logit is [`Logits::factor`] times a score, in
/// base 2. The factor is applied to differences of scores, so that the largest has the weight 1 exactly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Logits {
    /// Factor on the queries: 1 unless the scale is too small for [`Logits::factor`].
    pub(crate) query: f32,
    /// `scale / cap` and `cap` where scores are capped.
    pub(crate) softcap: Option<[f32; 2]>,
    /// Factor from scores to base-2 logits.
    pub(crate) factor: f32,
}

impl Logits {
    /// The logits of a problem. What is added to scores is in natural units, and so they are then.
    pub(crate) fn of(problem: &Problem) -> Self {
        let (scale, softcap) = (problem.scale(), problem.softcap());
        match (problem.bias(), softcap) {
            (Some(_), None) => Self { query: scale, softcap: None, factor: std::f32::consts::LOG2_E },
            _ => Self::new(scale, softcap),
        }
    }

    /// The logits of scores to which nothing is added.
    pub(crate) fn new(scale: f32, softcap: Option<f32>) -> Self {
        let log2e = std::f32::consts::LOG2_E;
        match softcap {
            Some(cap) => Self { query: 1.0, softcap: Some([scale / cap, cap]), factor: log2e },
            // Logits this small are lost beside each other: rounding the queries does no harm.
            None if scale < 1e-20 => Self { query: scale, softcap: None, factor: log2e },
            None => Self { query: 1.0, softcap: None, factor: scale * log2e },
        }
    }
}

/// What each row of a tile has seen so far.
pub(crate) struct TileState<'a> {
    /// Largest score, [`NO_MAX`] at first.
    pub(crate) max: &'a mut [f32],
    /// Sum of `2^(logit − max)`.
    pub(crate) sum: &'a mut [f32],
    /// Sum of `2^(logit − max) · v`, `[feature][row]`.
    pub(crate) out: &'a mut [f32],
}

impl TileState<'_> {
    /// Panics unless it holds `rows` rows of `dim_v` features.
    pub(crate) fn check(&self, rows: usize, dim_v: usize) {
        assert!(self.max.len() >= rows && self.sum.len() >= rows, "tile state fits");
        assert!(self.out.len() >= dim_v * rows, "tile result fits");
    }
}

/// A tile and the keys to fold into it.
pub(crate) struct TileBlock<'a> {
    /// Rows of the tile: a multiple of the lanes.
    pub(crate) rows: usize,
    /// Features of queries and keys, and of values.
    pub(crate) dims: [usize; 2],
    /// Number of keys.
    pub(crate) keys: usize,
    /// Queries, `[feature][row]`.
    pub(crate) q: &'a [f32],
    /// Keys and values.
    pub(crate) k: Rows<'a>,
    pub(crate) v: Rows<'a>,
    /// From scores to logits.
    pub(crate) logits: Logits,
    /// First visible key and one past the last for each row, relative to the block, where some are hidden.
    pub(crate) bounds: Option<[&'a [f32]; 2]>,
    /// Weights that are dropped once they are summed, if any are.
    pub(crate) dropout: Option<BlockDropout<'a>>,
    /// Space for `[key][row]`.
    pub(crate) scores: &'a mut [f32],
    /// What the rows have seen.
    pub(crate) state: TileState<'a>,
}

impl TileBlock<'_> {
    fn check(&self) {
        let (rows, [dim_qk, dim_v]) = (self.rows, self.dims);
        self.k.check(self.keys, dim_qk);
        self.v.check(self.keys, dim_v);
        assert!(self.q.len() >= dim_qk * rows && self.scores.len() >= self.keys * rows, "tile buffers fit");
        self.state.check(rows, dim_v);
        assert!(self.bounds.is_none_or(|[a, b]| a.len() >= rows && b.len() >= rows), "bounds fit");
        self.dropout.iter().for_each(|dropout| dropout.check(rows));
    }
}

impl Kernel for TileBlock<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        // SAFETY: the caller's promise.
        unsafe { S::tile(&mut self) }
    }
}

/// Folds the block in: scores, softmax, values.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd, const RV: usize, const J: usize>(block: &mut TileBlock<'_>) {
    block.check();
    assert_eq!(block.rows, RV * S::LANES, "a tile has as many rows as its vectors");
    // SAFETY: the caller's promise, and `check` saw that all buffers hold what the sizes say.
    unsafe {
        let mut top = scores::<S, RV, J>(block);
        if block.logits.softcap.is_some() || block.bounds.is_some() {
            let scores = Scores { at: block.scores.as_mut_ptr(), keys: block.keys };
            top = adjust::<S, RV>(scores, block.logits.softcap, block.bounds);
        }
        let shrink = probabilities::<S, RV>(block, top);
        accumulate::<S, RV, J>(block, shrink);
    }
}

/// One element for each row of a tile.
pub(crate) type Vectors<S, const RV: usize> = [<S as Simd>::V; RV];

/// Loads one element for each row.
///
/// # Safety
/// All of them are there.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd, const RV: usize>(p: *const f32) -> Vectors<S, RV> {
    // SAFETY: the caller passes a pointer to a whole row set.
    unsafe {
        let mut x = [S::splat(0.0); RV];
        for r in 0..RV {
            x[r] = S::load(p.add(r * S::LANES));
        }
        x
    }
}

/// Stores one element for each row.
///
/// # Safety
/// There is space for all of them.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, const RV: usize>(p: *mut f32, x: Vectors<S, RV>) {
    for r in 0..RV {
        // SAFETY: the caller passes a pointer to a whole row set.
        unsafe { S::store(p.add(r * S::LANES), x[r]) };
    }
}

/// Writes all dot products and returns the largest of each row.
#[inline(always)]
unsafe fn scores<S: Simd, const RV: usize, const J: usize>(block: &mut TileBlock<'_>) -> Vectors<S, RV> {
    let (q, k, s) = (block.q.as_ptr(), block.k.data.as_ptr(), block.scores.as_mut_ptr());
    // SAFETY: `TileBlock::check`.
    unsafe {
        let mut top = [S::splat(NO_MAX); RV];
        let mut n = 0;
        while n + J <= block.keys {
            let s = s.add(n * block.rows);
            dots::<S, RV, J>(q, k.add(n * block.k.stride), block.k.stride, block.dims[0], s, &mut top);
            n += J;
        }
        while n < block.keys {
            let s = s.add(n * block.rows);
            dots::<S, RV, 1>(q, k.add(n * block.k.stride), block.k.stride, block.dims[0], s, &mut top);
            n += 1;
        }
        top
    }
}

/// Dot products of `J` keys with all rows.
#[inline(always)]
unsafe fn dots<S: Simd, const RV: usize, const J: usize>(
    q: *const f32,
    k: *const f32,
    stride: usize,
    dim: usize,
    s: *mut f32,
    top: &mut Vectors<S, RV>,
) {
    // SAFETY: `TileBlock::check`.
    unsafe {
        let mut acc = [[S::splat(0.0); RV]; J];
        for d in 0..dim {
            let q = load::<S, RV>(q.add(d * RV * S::LANES));
            for j in 0..J {
                let k = S::splat(*k.add(j * stride + d));
                for r in 0..RV {
                    acc[j][r] = S::fma(q[r], k, acc[j][r]);
                }
            }
        }
        for j in 0..J {
            for r in 0..RV {
                top[r] = S::max(acc[j][r], top[r]);
            }
            store::<S, RV>(s.add(j * RV * S::LANES), acc[j]);
        }
    }
}

/// Scores of a tile, `[key][row]`.
pub(crate) struct Scores {
    pub(crate) at: *mut f32,
    pub(crate) keys: usize,
}

/// Caps and masks the scores; returns the largest of each row.
///
/// # Safety
/// The machine has the instructions of `S`; scores and bounds hold as many rows as the vectors.
#[inline(always)]
pub(crate) unsafe fn adjust<S: Simd, const RV: usize>(
    scores: Scores,
    softcap: Option<[f32; 2]>,
    bounds: Option<[&[f32]; 2]>,
) -> Vectors<S, RV> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut top = [S::splat(NO_MAX); RV];
        for n in 0..scores.keys {
            let p = scores.at.add(n * RV * S::LANES);
            let mut s = load::<S, RV>(p);
            for r in 0..RV {
                if let Some([inner, cap]) = softcap {
                    s[r] = S::mul(S::splat(cap), tanh::<S>(S::mul(S::splat(inner), s[r])));
                }
                if let Some([start, end]) = bounds {
                    let start = S::load(start.as_ptr().add(r * S::LANES));
                    let end = S::load(end.as_ptr().add(r * S::LANES));
                    s[r] = S::within(s[r], S::splat(n as f32), start, end);
                }
                top[r] = S::max(s[r], top[r]);
            }
            store::<S, RV>(p, s);
        }
        top
    }
}

/// New maxima, the sums so far, and the factor on what was summed before.
pub(crate) struct Update<S: Simd, const RV: usize> {
    pub(crate) max: Vectors<S, RV>,
    pub(crate) sum: Vectors<S, RV>,
    pub(crate) shrink: Vectors<S, RV>,
}

/// Raises the maxima to `top`.
///
/// # Safety
/// The machine has the instructions of `S`; the state holds as many rows as the vectors.
#[inline(always)]
pub(crate) unsafe fn update<S: Simd, const RV: usize>(
    state: &mut TileState<'_>,
    exp2: Exp2<S>,
    top: Vectors<S, RV>,
) -> Update<S, RV> {
    // SAFETY: the caller's promise.
    unsafe {
        let old = load::<S, RV>(state.max.as_ptr());
        let (mut max, mut sum, mut shrink) = (old, load::<S, RV>(state.sum.as_ptr()), old);
        for r in 0..RV {
            max[r] = S::max(old[r], top[r]);
            shrink[r] = exp2.of(S::sub(old[r], max[r]));
            sum[r] = S::mul(sum[r], shrink[r]);
        }
        store::<S, RV>(state.max.as_mut_ptr(), max);
        Update { max, sum, shrink }
    }
}

/// Turns scores into `2^(factor·(score − max))` and returns the factor on what was summed before.
#[inline(always)]
unsafe fn probabilities<S: Simd, const RV: usize>(
    block: &mut TileBlock<'_>,
    top: Vectors<S, RV>,
) -> Vectors<S, RV> {
    // SAFETY: `TileBlock::check`.
    unsafe {
        let exp2 = Exp2::<S>::new(block.logits.factor);
        let Update { max, mut sum, shrink } = update::<S, RV>(&mut block.state, exp2, top);
        let dropout = block.dropout;
        for n in 0..block.keys {
            let p = block.scores.as_mut_ptr().add(n * block.rows);
            let mut s = load::<S, RV>(p);
            for r in 0..RV {
                s[r] = exp2.of(S::sub(s[r], max[r]));
                sum[r] = S::add(sum[r], s[r]);
                if let Some(dropout) = dropout {
                    s[r] = dropout.along_rows::<S>(r * S::LANES, n, s[r]);
                }
            }
            store::<S, RV>(p, s);
        }
        store::<S, RV>(block.state.sum.as_mut_ptr(), sum);
        shrink
    }
}

/// Adds the values, weighted, to what was summed before times `shrink`.
#[inline(always)]
unsafe fn accumulate<S: Simd, const RV: usize, const J: usize>(
    block: &mut TileBlock<'_>,
    shrink: Vectors<S, RV>,
) {
    let dim = block.dims[1];
    // SAFETY: `TileBlock::check`.
    unsafe {
        let mut d = 0;
        while d + J <= dim {
            weigh::<S, RV, J>(block, d, shrink);
            d += J;
        }
        while d < dim {
            weigh::<S, RV, 1>(block, d, shrink);
            d += 1;
        }
    }
}

/// `J` features of the result, from feature `d`.
#[inline(always)]
unsafe fn weigh<S: Simd, const RV: usize, const J: usize>(
    block: &mut TileBlock<'_>,
    d: usize,
    shrink: Vectors<S, RV>,
) {
    let rows = RV * S::LANES;
    let (p, v, stride) = (block.scores.as_ptr(), block.v.data.as_ptr(), block.v.stride);
    // SAFETY: `TileBlock::check`.
    unsafe {
        let out = block.state.out.as_mut_ptr().add(d * rows);
        let mut acc = shrunk::<S, RV, J>(out, shrink);
        for n in 0..block.keys {
            let p = load::<S, RV>(p.add(n * rows));
            for j in 0..J {
                let v = S::splat(*v.add(n * stride + d + j));
                for r in 0..RV {
                    acc[j][r] = S::fma(p[r], v, acc[j][r]);
                }
            }
        }
        for j in 0..J {
            store::<S, RV>(out.add(j * rows), acc[j]);
        }
    }
}

/// `J` features of the result so far, times `shrink`.
///
/// # Safety
/// The machine has the instructions of `S`; `J` features lie at `out`.
#[inline(always)]
pub(crate) unsafe fn shrunk<S: Simd, const RV: usize, const J: usize>(
    out: *const f32,
    shrink: Vectors<S, RV>,
) -> [Vectors<S, RV>; J] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [shrink; J];
        for j in 0..J {
            let old = load::<S, RV>(out.add(j * RV * S::LANES));
            for r in 0..RV {
                acc[j][r] = S::mul(old[r], shrink[r]);
            }
        }
        acc
    }
}
