//! Dot products of rows with rows: a product whose right factor has the layout of weights, one row per result.
//!
//! A micro-kernel holds the sums of `R` weight rows × `M` rows in registers, lanes along the summed dimension, so
//! weights stream through once and nothing is transposed. Every sum has the same order whatever its neighbours are:
//! bits do not depend on how many rows there are.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;

use half::bf16;

use super::{Kernel, Lane, Simd, pairs::Pairs};

/// Most rows whose sums are held at once.
const MOST_ROWS: usize = 6;
/// Most elements that a step multiplies.
const LONGEST: usize = 32;

/// Rows to be multiplied with weight rows.
pub(crate) struct Dots<'a, X, W> {
    /// Rows lie here, their padding to [`depth_padded`] elements being 0.
    pub(crate) x: &'a [X],
    /// Where each row starts.
    pub(crate) starts: &'a [usize],
    /// Weight rows, and the elements from one to the next.
    pub(crate) w: (&'a [W], usize),
    /// Number of weight rows.
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) depth: usize,
    /// Results, one row for each of `starts`, and the elements from one to the next.
    pub(crate) to: (&'a mut [f32], usize),
}

/// What a row of `depth` elements is padded to: an odd number of steps, so that rows one after another do not share a few
/// sets of the cache.
pub(crate) const fn depth_padded(depth: usize) -> usize {
    (depth.div_ceil(LONGEST) | 1) * LONGEST
}

impl<X, W> Dots<'_, X, W> {
    fn check(&self) {
        let reach = depth_padded(self.depth);
        assert!(self.starts.iter().all(|&start| start + reach <= self.x.len()), "rows lie in their slice");
        let w = if self.rows == 0 { 0 } else { (self.rows - 1) * self.w.1 + self.depth };
        assert!(w <= self.w.0.len(), "weights lie in their slice");
        let to = if self.starts.is_empty() { 0 } else { (self.starts.len() - 1) * self.to.1 + self.rows };
        assert!(to <= self.to.0.len(), "results lie in their slice");
    }
}

/// How elements of both factors are multiplied.
///
/// # Safety
/// As for [`Simd`].
pub(crate) trait Factors<S: Simd> {
    type X: Copy;
    type W: Copy;
    type Vector: Copy;
    /// Elements of a vector: at most [`LONGEST`].
    const STEP: usize;
    const ZERO: Self::W;

    unsafe fn x(p: *const Self::X) -> Self::Vector;
    unsafe fn w(p: *const Self::W) -> Self::Vector;
    /// `c` plus the products.
    unsafe fn multiply(a: Self::Vector, b: Self::Vector, c: S::V) -> S::V;
}

/// f32 rows with weights of any type, widened.
struct Widened<W>(PhantomData<W>);

impl<S: Simd, W: Lane> Factors<S> for Widened<W> {
    type X = f32;
    type W = W;
    type Vector = S::V;
    const STEP: usize = S::LANES;
    const ZERO: W = W::ZERO;

    #[inline(always)]
    unsafe fn x(p: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(p) }
    }

    #[inline(always)]
    unsafe fn w(p: *const W) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { W::load::<S>(p) }
    }

    #[inline(always)]
    unsafe fn multiply(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::fma(a, b, c) }
    }
}

/// bf16 rows with bf16 weights, pair by pair.
pub(crate) struct Paired;

impl<S: Pairs> Factors<S> for Paired {
    type X = bf16;
    type W = bf16;
    type Vector = S::P;
    const STEP: usize = 2 * S::LANES;
    const ZERO: bf16 = bf16::ZERO;

    #[inline(always)]
    unsafe fn x(p: *const bf16) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { S::load_pairs(p.cast()) }
    }

    #[inline(always)]
    unsafe fn w(p: *const bf16) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { S::load_pairs(p.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply(a: S::P, b: S::P, c: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::dot(a, b, c) }
    }
}

impl<W: Lane> Kernel for Dots<'_, f32, W> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        // SAFETY: the caller's promise.
        unsafe { dots::<S, Widened<W>>(&mut self) }
    }
}

/// Computes all results.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn dots<S: Simd, F: Factors<S>>(dots: &mut Dots<'_, F::X, F::W>) {
    dots.check();
    let mut row = 0;
    // SAFETY: the caller's promise, and `check` saw that all lies in its slice.
    unsafe {
        // Few registers hold few sums.
        if S::LANES >= 16 {
            while row + 4 <= dots.rows {
                rows::<S, F, 4>(dots, row);
                row += 4;
            }
        }
        while row + 2 <= dots.rows {
            rows::<S, F, 2>(dots, row);
            row += 2;
        }
        while row < dots.rows {
            rows::<S, F, 1>(dots, row);
            row += 1;
        }
    }
}

/// The results of `R` weight rows. The first pass over them fetches those that follow in memory, which streams best in one
/// direction.
#[inline(always)]
unsafe fn rows<S: Simd, F: Factors<S>, const R: usize>(dots: &mut Dots<'_, F::X, F::W>, row: usize) {
    let (mut n, count) = (0, dots.starts.len());
    // SAFETY: the caller's promise.
    unsafe {
        match count {
            0 => return,
            1 => return block::<S, F, R, 1, true>(dots, row, n),
            2..MOST_ROWS => {
                block::<S, F, R, 2, true>(dots, row, n);
                n += 2;
            }
            _ => {
                block::<S, F, R, MOST_ROWS, true>(dots, row, n);
                n += MOST_ROWS;
            }
        }
        while n + MOST_ROWS <= count {
            block::<S, F, R, MOST_ROWS, false>(dots, row, n);
            n += MOST_ROWS;
        }
        while n + 2 <= count {
            block::<S, F, R, 2, false>(dots, row, n);
            n += 2;
        }
        while n < count {
            block::<S, F, R, 1, false>(dots, row, n);
            n += 1;
        }
    }
}

/// The results of `R` weight rows with `M` rows.
#[inline(always)]
unsafe fn block<S: Simd, F: Factors<S>, const R: usize, const M: usize, const AHEAD: bool>(
    dots: &mut Dots<'_, F::X, F::W>,
    row: usize,
    n: usize,
) {
    // SAFETY: `Dots::check`, and the caller's promise.
    unsafe {
        let mut x = [dots.x.as_ptr(); M];
        for m in 0..M {
            x[m] = x[m].add(dots.starts[n + m]);
        }
        let w = dots.w.0.as_ptr().add(row * dots.w.1);
        let whole = dots.depth / F::STEP * F::STEP;
        let mut sums = [[S::splat(0.0); M]; R];
        let mut k = 0;
        while k < whole {
            for r in 0..R {
                let at = w.add(r * dots.w.1 + k);
                if AHEAD {
                    S::fetch(at.wrapping_add(R * dots.w.1).cast());
                }
                let weights = F::w(at);
                for m in 0..M {
                    sums[r][m] = F::multiply(F::x(x[m].add(k)), weights, sums[r][m]);
                }
            }
            k += F::STEP;
        }
        if whole < dots.depth {
            for r in 0..R {
                // The last elements of a weight row amid zeros, for what follows in memory may be anything.
                let (mut tail, start) = ([F::ZERO; LONGEST], (row + r) * dots.w.1);
                tail[..dots.depth - whole].copy_from_slice(&dots.w.0[start + whole..start + dots.depth]);
                let weights = F::w(tail.as_ptr());
                for m in 0..M {
                    sums[r][m] = F::multiply(F::x(x[m].add(whole)), weights, sums[r][m]);
                }
            }
        }
        for r in 0..R {
            for m in 0..M {
                dots.to.0[(n + m) * dots.to.1 + row + r] = S::sum(sums[r][m]);
            }
        }
    }
}
