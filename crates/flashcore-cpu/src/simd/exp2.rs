//! Vectorised `2^x` and `tanh`.
//!
//! `2^x = 2^n · 2^r` with `n = round(x)` and `r` in [−½, ½]; `2^r − 1 = r·q(r)` with `q` the minimax polynomial of degree
//! 4 (relative error of `1 + r·q(r)`: 9.2e-8). With f32 rounding the relative error stays below [`MAX_ERROR`].

use super::Simd;

/// Bound on the relative error of [`Exp2::of`] for results that are normal numbers; tested over the whole range.
#[cfg(test)]
pub(crate) const MAX_ERROR: f64 = 2.5e-7;

/// Below this, `2^x` is zero.
const LOWEST: f32 = -127.0;

/// Adding it leaves `round(x) + 127` in the low mantissa bits.
const ROUND: f32 = 12_582_912.0 + 127.0;

const Q: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_8];

/// Taylor coefficients of `(2^r − 1)/r`, for `tanh`, whose relative accuracy near 0 rests on them.
const SERIES: [f32; 7] = [
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_504_11,
    0.009_618_129,
    0.001_333_355_8,
    0.000_154_035_3,
    0.000_015_252_734,
];

/// `2^(factor·x)`; the factor costs nothing here and no rounding either.
#[derive(Clone, Copy)]
pub(crate) struct Exp2<S: Simd> {
    factor: S::V,
    lowest: S::V,
}

impl<S: Simd> Exp2<S> {
    /// For a factor of at least 1e-30.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    #[inline(always)]
    pub(crate) unsafe fn new(factor: f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { factor: S::splat(factor), lowest: S::splat(LOWEST / factor) } }
    }

    /// `2^(factor·x)` for `factor·x ≤ 127`: exactly 1 at 0, exactly 0 below −127 (−∞ included), NaN for NaN.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    #[inline(always)]
    pub(crate) unsafe fn of(self, x: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe {
            let (r, power) = reduce::<S>(S::max(self.lowest, x), self.factor);
            let p = S::fma(r, polynomial::<S>(r), S::splat(1.0));
            S::mul(p, power)
        }
    }
}

/// `tanh(x)` by `e/(e + 2)` with `e = exp(2x) − 1`, which keeps its relative accuracy near 0.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        // Beyond ±10 the result rounds to ±1.
        let x = S::min(S::splat(10.0), S::max(S::splat(-10.0), x));
        let (r, power) = reduce::<S>(x, S::splat(2.0 * std::f32::consts::LOG2_E));
        let grown = S::mul(S::mul(r, series::<S>(r)), power);
        let e = S::add(grown, S::sub(power, S::splat(1.0)));
        S::div(e, S::add(e, S::splat(2.0)))
    }
}

/// `(factor·x − n, 2^n)` with `n = round(factor·x)`; `2^-127` comes out as 0.
#[inline(always)]
unsafe fn reduce<S: Simd>(x: S::V, factor: S::V) -> (S::V, S::V) {
    // SAFETY: the caller's promise.
    unsafe {
        let shifted = S::fma(x, factor, S::splat(ROUND));
        let r = S::fma(x, factor, S::sub(S::splat(ROUND), shifted));
        (r, S::exponent(shifted))
    }
}

#[inline(always)]
unsafe fn polynomial<S: Simd>(r: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let q = S::fma(r, S::splat(Q[4]), S::splat(Q[3]));
        let q = S::fma(r, q, S::splat(Q[2]));
        let q = S::fma(r, q, S::splat(Q[1]));
        S::fma(r, q, S::splat(Q[0]))
    }
}

/// `(2^r − 1)/r` to within an ulp.
#[inline(always)]
unsafe fn series<S: Simd>(r: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut q = S::splat(SERIES[6]);
        for coefficient in [SERIES[5], SERIES[4], SERIES[3], SERIES[2], SERIES[1], SERIES[0]] {
            q = S::fma(r, q, S::splat(coefficient));
        }
        q
    }
}
