//! The prefill kernel for bf16 on machines that multiply pairs of bf16: the tile kernel with two features, or two keys,
//! per instruction. See `tile` for the layout; here Q is `[feature pair][row]` and V `[key pair][feature]`, while K is
//! read in place. Weights are rounded to bf16 before the product with V; their sum is not.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use half::bf16;

use super::{
    Simd,
    dropout::BlockDropout,
    exp2::Exp2,
    tile::{self, Logits, Scores, TileState, Vectors, load, store},
};

/// Vectors of bf16 pairs, the first element in the low half.
///
/// # Safety
/// As for [`Simd`].
pub(crate) trait Pairs: Simd {
    /// A vector of pairs.
    type P: Copy;

    unsafe fn splat_pair(bits: u32) -> Self::P;
    unsafe fn load_pairs(p: *const u32) -> Self::P;
    unsafe fn store_pairs(p: *mut u32, x: Self::P);
    /// `c` plus the dot product of each pair.
    unsafe fn dot(a: Self::P, b: Self::P, c: Self::V) -> Self::V;
    /// Rounds to nearest, ties to even, and pairs up.
    unsafe fn round_pairs(first: Self::V, second: Self::V) -> Self::P;
}

/// A tile and the keys to fold into it.
pub(crate) struct PairBlock<'a> {
    /// Rows of the tile: a multiple of the lanes.
    pub(crate) rows: usize,
    /// Features of queries and keys (an even number), and of values.
    pub(crate) dims: [usize; 2],
    /// Number of keys; an odd one out pairs with a zero.
    pub(crate) keys: usize,
    /// Queries, `[feature pair][row]`.
    pub(crate) q: &'a [u32],
    /// Keys, and the elements from one to the next.
    pub(crate) k: (&'a [bf16], usize),
    /// Values, `[key pair][feature]`.
    pub(crate) v: &'a [u32],
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

impl PairBlock<'_> {
    fn check(&self) {
        let (rows, [dim_qk, dim_v]) = (self.rows, self.dims);
        assert!(dim_qk.is_multiple_of(2), "features pair up");
        let (k, stride) = self.k;
        assert!(self.keys > 0 && (self.keys - 1) * stride + dim_qk <= k.len(), "keys lie in their slice");
        assert!(self.v.len() >= self.keys.div_ceil(2) * dim_v, "values fit");
        assert!(self.q.len() >= dim_qk / 2 * rows, "queries fit");
        assert!(self.scores.len() >= self.keys.next_multiple_of(2) * rows, "scores fit");
        self.state.check(rows, dim_v);
        assert!(self.bounds.is_none_or(|[a, b]| a.len() >= rows && b.len() >= rows), "bounds fit");
        self.dropout.iter().for_each(|dropout| dropout.check(rows));
    }
}

/// Folds the block in: scores, softmax, values.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn attend<S: Pairs, const RV: usize, const J: usize>(block: &mut PairBlock<'_>) {
    block.check();
    assert_eq!(block.rows, RV * S::LANES, "a tile has as many rows as its vectors");
    // SAFETY: the caller's promise, and `check` saw that all buffers hold what the sizes say.
    unsafe {
        let mut top = scores::<S, RV, J>(block);
        if block.logits.softcap.is_some() || block.bounds.is_some() {
            let scores = Scores { at: block.scores.as_mut_ptr(), keys: block.keys };
            top = tile::adjust::<S, RV>(scores, block.logits.softcap, block.bounds);
        }
        let shrink = probabilities::<S, RV>(block, top);
        accumulate::<S, RV, J>(block, shrink);
    }
}

/// Writes all dot products and returns the largest of each row.
#[inline(always)]
unsafe fn scores<S: Pairs, const RV: usize, const J: usize>(block: &mut PairBlock<'_>) -> Vectors<S, RV> {
    let (k, stride) = block.k;
    let (q, k, s) = (block.q.as_ptr(), k.as_ptr(), block.scores.as_mut_ptr());
    // SAFETY: `PairBlock::check`.
    unsafe {
        let mut top = [S::splat(tile::NO_MAX); RV];
        let mut n = 0;
        while n + J <= block.keys {
            dots::<S, RV, J>(q, k.add(n * stride), stride, block.dims[0], s.add(n * block.rows), &mut top);
            n += J;
        }
        while n < block.keys {
            dots::<S, RV, 1>(q, k.add(n * stride), stride, block.dims[0], s.add(n * block.rows), &mut top);
            n += 1;
        }
        top
    }
}

/// Dot products of `J` keys with all rows.
#[inline(always)]
unsafe fn dots<S: Pairs, const RV: usize, const J: usize>(
    q: *const u32,
    k: *const bf16,
    stride: usize,
    dim: usize,
    s: *mut f32,
    top: &mut Vectors<S, RV>,
) {
    // SAFETY: `PairBlock::check`.
    unsafe {
        let mut acc = [[S::splat(0.0); RV]; J];
        for d in 0..dim / 2 {
            let q = load_pairs::<S, RV>(q.add(d * RV * S::LANES));
            for j in 0..J {
                let k = S::splat_pair(k.add(j * stride + 2 * d).cast::<u32>().read_unaligned());
                for r in 0..RV {
                    acc[j][r] = S::dot(q[r], k, acc[j][r]);
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

/// Turns scores into pairs of rounded weights, in place; see [`tile::TileBlock`].
#[inline(always)]
unsafe fn probabilities<S: Pairs, const RV: usize>(
    block: &mut PairBlock<'_>,
    top: Vectors<S, RV>,
) -> Vectors<S, RV> {
    let rows = block.rows;
    let at = block.scores.as_mut_ptr();
    // SAFETY: `PairBlock::check`; the weights of a pair of keys lie before the scores of the next.
    unsafe {
        let exp2 = Exp2::<S>::new(block.logits.factor);
        let tile::Update { max, mut sum, shrink } = tile::update::<S, RV>(&mut block.state, exp2, top);
        let dropout = block.dropout;
        if block.keys % 2 == 1 {
            store::<S, RV>(at.add(block.keys * rows), [S::splat(f32::NEG_INFINITY); RV]);
        }
        for n in 0..block.keys.div_ceil(2) {
            let first = load::<S, RV>(at.add(2 * n * rows));
            let second = load::<S, RV>(at.add((2 * n + 1) * rows));
            for r in 0..RV {
                let mut a = exp2.of(S::sub(first[r], max[r]));
                let mut b = exp2.of(S::sub(second[r], max[r]));
                sum[r] = S::add(sum[r], S::add(a, b));
                if let Some(dropout) = dropout {
                    a = dropout.along_rows::<S>(r * S::LANES, 2 * n, a);
                    b = dropout.along_rows::<S>(r * S::LANES, 2 * n + 1, b);
                }
                S::store_pairs(at.add(n * rows + r * S::LANES).cast(), S::round_pairs(a, b));
            }
        }
        store::<S, RV>(block.state.sum.as_mut_ptr(), sum);
        shrink
    }
}

/// Adds the values, weighted, to what was summed before times `shrink`.
#[inline(always)]
unsafe fn accumulate<S: Pairs, const RV: usize, const J: usize>(
    block: &mut PairBlock<'_>,
    shrink: Vectors<S, RV>,
) {
    let dim = block.dims[1];
    // SAFETY: `PairBlock::check`.
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
unsafe fn weigh<S: Pairs, const RV: usize, const J: usize>(
    block: &mut PairBlock<'_>,
    d: usize,
    shrink: Vectors<S, RV>,
) {
    let (rows, dim) = (RV * S::LANES, block.dims[1]);
    let (p, v) = (block.scores.as_ptr().cast::<u32>(), block.v.as_ptr());
    // SAFETY: `PairBlock::check`.
    unsafe {
        let out = block.state.out.as_mut_ptr().add(d * rows);
        let mut acc = tile::shrunk::<S, RV, J>(out, shrink);
        for n in 0..block.keys.div_ceil(2) {
            let p = load_pairs::<S, RV>(p.add(n * rows));
            for j in 0..J {
                let v = S::splat_pair(*v.add(n * dim + d + j));
                for r in 0..RV {
                    acc[j][r] = S::dot(p[r], v, acc[j][r]);
                }
            }
        }
        for j in 0..J {
            store::<S, RV>(out.add(j * rows), acc[j]);
        }
    }
}

#[inline(always)]
unsafe fn load_pairs<S: Pairs, const RV: usize>(p: *const u32) -> [S::P; RV] {
    // SAFETY: the caller passes a pointer to a whole row set.
    unsafe {
        let mut x = [S::load_pairs(p); RV];
        for r in 1..RV {
            x[r] = S::load_pairs(p.add(r * S::LANES));
        }
        x
    }
}
