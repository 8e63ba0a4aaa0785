//! From dot products to weights and gradients of scores: the middle of the backward pass.
//!
//! Vectors run along the keys. A weight is `exp(score − lse)`, 0 where the mask hides the key; the gradient of the score is
//! `weight · (dO·V − sum)`, with a softcap times its slope. With dropout, `dO·V` and the weight for the values are 0 for a
//! dropped weight and otherwise multiplied by dropout's factor. The scale is applied after the sums over keys or queries:
//! earlier it would not make a rounded gradient more accurate, and a small one would underflow bf16.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use super::{
    Kernel, Simd,
    dropout::BlockDropout,
    exp2::{Exp2, tanh},
    pairs::Pairs,
    product::Pair,
};

/// What every row of a tile needs beside its dot products.
#[derive(Clone, Copy)]
pub(crate) struct RowFacts<'a> {
    /// The LSE of each row; +∞ for a row without gradients.
    pub(crate) lse: &'a [f32],
    /// The sum of `dO ∘ O` of each row.
    pub(crate) sums: &'a [f32],
    /// First visible key and one past the last for each row, where some are hidden.
    pub(crate) bounds: Option<[&'a [f32]; 2]>,
    /// What is added to scores, and the numbers from one row's to the next one's, if anything.
    pub(crate) bias: Option<(&'a [f32], usize)>,
    /// Weights that are dropped, if any are.
    pub(crate) dropout: Option<BlockDropout<'a>>,
    /// Factor on the dot products.
    pub(crate) scale: f32,
    /// Limit of the scores.
    pub(crate) softcap: Option<f32>,
}

/// Extents and stride of the tiles, `[row][key]`.
#[derive(Clone, Copy)]
pub(crate) struct TileSize {
    pub(crate) rows: usize,
    /// A multiple of the lanes.
    pub(crate) keys: usize,
    pub(crate) stride: usize,
}

impl TileSize {
    fn check(self, facts: &RowFacts<'_>, lens: [usize; 2], lanes: usize) {
        let reach = if self.rows == 0 { 0 } else { (self.rows - 1) * self.stride + self.keys };
        assert!(lens.into_iter().all(|len| len >= reach) && self.keys.is_multiple_of(lanes), "tiles fit");
        assert!(facts.lse.len() >= self.rows && facts.sums.len() >= self.rows, "row facts fit");
        let bounds = |[a, b]: [&[f32]; 2]| a.len() >= self.rows && b.len() >= self.rows;
        assert!(facts.bounds.is_none_or(bounds), "bounds fit");
        let holds = |(bias, stride): (&[f32], usize)| {
            self.rows == 0 || bias.len() >= (self.rows - 1) * stride + self.keys
        };
        assert!(facts.bias.is_none_or(holds), "biases fit");
        facts.dropout.iter().for_each(|dropout| dropout.check(self.rows));
    }
}

/// Turns dot products into weights and gradients, in place.
pub(crate) struct Slopes<'a> {
    pub(crate) size: TileSize,
    pub(crate) facts: RowFacts<'a>,
    /// `Q·Kᵀ` in, weights out.
    pub(crate) scores: &'a mut [f32],
    /// `dO·Vᵀ` in, gradients of scores out.
    pub(crate) grads: &'a mut [f32],
}

impl Kernel for Slopes<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let TileSize { rows, keys, stride } = self.size;
        self.size.check(&self.facts, [self.scores.len(), self.grads.len()], S::LANES);
        // SAFETY: the caller's promise; `check` saw that all lies in its slice.
        unsafe {
            let step = Step::<S>::new(&self.facts);
            for row in 0..rows {
                let (scores, grads) =
                    (self.scores.as_mut_ptr().add(row * stride), self.grads.as_mut_ptr().add(row * stride));
                for n in (0..keys).step_by(S::LANES) {
                    let (p, g) = step.of(&self.facts, row, n, S::load(scores.add(n)), S::load(grads.add(n)));
                    S::store(scores.add(n), p);
                    S::store(grads.add(n), g);
                }
            }
        }
    }
}

/// The same, rounded to bf16: pairs of rows for products that sum over rows, and rows for the one that sums over keys.
pub(crate) struct PairSlopes<'a> {
    pub(crate) size: TileSize,
    pub(crate) facts: RowFacts<'a>,
    /// `Q·Kᵀ`.
    pub(crate) scores: &'a [f32],
    /// `dO·Vᵀ`.
    pub(crate) grads: &'a [f32],
    /// Weights, `[row pair][key]`.
    pub(crate) weights: &'a mut [Pair],
    /// Gradients, `[row pair][key]`.
    pub(crate) grad_pairs: &'a mut [Pair],
    /// Gradients, `[row][key pair]`.
    pub(crate) grad_rows: &'a mut [Pair],
}

impl PairSlopes<'_> {
    /// Computes it.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Pairs>(&mut self) {
        let TileSize { rows, keys, stride } = self.size;
        self.size.check(&self.facts, [self.scores.len(), self.grads.len()], S::LANES);
        let pairs = self.weights.len().min(self.grad_pairs.len());
        assert!(pairs >= rows.div_ceil(2) * stride, "pairs of rows fit");
        assert!(stride.is_multiple_of(2) && self.grad_rows.len() >= rows * stride / 2, "pairs of keys fit");
        // SAFETY: the caller's promise; the checks saw that all lies in its slice.
        unsafe {
            let step = Step::<S>::new(&self.facts);
            let zero = S::splat(0.0);
            for row in (0..rows).step_by(2) {
                for n in (0..keys).step_by(S::LANES) {
                    let (p0, g0) = self.at(&step, row, n);
                    let (p1, g1) = if row + 1 < rows { self.at(&step, row + 1, n) } else { (zero, zero) };
                    let to = row / 2 * stride + n;
                    S::store_pairs(self.weights.as_mut_ptr().add(to), S::round_pairs(p0, p1));
                    S::store_pairs(self.grad_pairs.as_mut_ptr().add(to), S::round_pairs(g0, g1));
                    let halves = self.grad_rows.as_mut_ptr().cast::<half::bf16>();
                    S::store_bf16(halves.add(row * stride + n), g0);
                    if row + 1 < rows {
                        S::store_bf16(halves.add((row + 1) * stride + n), g1);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn at<S: Pairs>(&self, step: &Step<S>, row: usize, n: usize) -> (S::V, S::V) {
        let at = row * self.size.stride + n;
        // SAFETY: the caller's promise.
        unsafe {
            let (score, grad) = (S::load(self.scores.as_ptr().add(at)), S::load(self.grads.as_ptr().add(at)));
            step.of(&self.facts, row, n, score, grad)
        }
    }
}

/// What all vectors of a tile share.
struct Step<S: Simd> {
    exp2: Exp2<S>,
    scale: S::V,
    one: S::V,
    /// `scale / cap` and `cap`.
    softcap: Option<[f32; 2]>,
    /// 0, 1, 2, ...
    lanes: S::V,
}

impl<S: Simd> Step<S> {
    #[inline(always)]
    unsafe fn new(facts: &RowFacts<'_>) -> Self {
        let mut count = [0f32; 64];
        for n in 0..S::LANES {
            count[n] = n as f32;
        }
        let softcap = facts.softcap.map(|cap| [facts.scale / cap, cap]);
        // SAFETY: the caller's promise.
        unsafe {
            let exp2 = Exp2::new(std::f32::consts::LOG2_E);
            let (scale, one) = (S::splat(facts.scale), S::splat(1.0));
            Self { exp2, scale, one, softcap, lanes: S::load(count.as_ptr()) }
        }
    }

    /// Weights and gradients of a row's keys from key `n`.
    #[inline(always)]
    unsafe fn of(&self, facts: &RowFacts<'_>, row: usize, n: usize, dot: S::V, grad: S::V) -> (S::V, S::V) {
        // SAFETY: the caller's promise; `TileSize::check` saw the row's facts.
        unsafe {
            let lse = S::splat(-*facts.lse.get_unchecked(row));
            let mut slope = self.one;
            let mut exponent = if let Some([inner, cap]) = self.softcap {
                let t = tanh::<S>(S::mul(S::splat(inner), dot));
                slope = S::sub(self.one, S::mul(t, t));
                S::fma(S::splat(cap), t, lse)
            } else {
                S::fma(self.scale, dot, lse)
            };
            if let Some((bias, stride)) = facts.bias {
                exponent = S::add(exponent, S::load(bias.as_ptr().add(row * stride + n)));
            }
            if let Some([starts, ends]) = facts.bounds {
                let at = S::add(self.lanes, S::splat(n as f32));
                let (start, end) = (*starts.get_unchecked(row), *ends.get_unchecked(row));
                exponent = S::within(exponent, at, S::splat(start), S::splat(end));
            }
            let p = self.exp2.of(exponent);
            let (mut weight, mut grad) = (p, grad);
            if let Some(dropout) = facts.dropout {
                let kept = dropout.along_keys::<S>(row, n, S::splat(dropout.factor));
                (weight, grad) = (S::mul(p, kept), S::mul(grad, kept));
            }
            let centred = S::sub(grad, S::splat(*facts.sums.get_unchecked(row)));
            (weight, S::mul(S::mul(p, centred), slope))
        }
    }
}
