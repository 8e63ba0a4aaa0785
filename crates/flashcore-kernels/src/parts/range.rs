//! Keeps gradients of scores in the range of f16, whose largest number is 65504; bf16 has f32's range.
//!
//! A warp multiplies its `dS` by a power of two before rounding: 1, unless one of them is too large. The running sums of
//! `dS·b` are rescaled from one factor to the next. So the only values rounded differently are those rounded together with
//! numbers that would have overflowed; later ones are unaffected. Infinities and NaN change no factor: rows that have them do
//! not take the others out of range.

use flashcore_tile::{Acc, Builder, F32, Reg, Scope, Val};

/// The largest `dS` that are rounded as they are, a power of two.
const LIMIT: f32 = 32768.0;
/// The bits of a float's exponent.
const EXPONENT: i32 = 0x7f80_0000;
/// Less the bits of a power of two, these are the bits of its inverse.
const INVERSE: i32 = 0x7f00_0000;

/// The power of two that a warp's `dS` are multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    factor: Reg<F32>,
}

impl Range {
    /// A range to be kept.
    pub(crate) fn new(b: &mut Builder) -> Self {
        Self { factor: b.var_in(Scope::Lane, 1.0) }
    }

    /// What `dS` are multiplied by: at most 1.
    pub(crate) const fn factor(&self) -> Reg<F32> {
        self.factor
    }

    /// Brings new `dS` into range, and the sums along. Whether all of a thread's are within it their squares tell: a product
    /// takes half the time of a comparison.
    pub(crate) fn keep(&self, b: &mut Builder, slopes: &[Acc], sums: &[Acc]) {
        let squares = b.var_in::<F32>(Scope::Lane, 0.0);
        slopes.iter().flat_map(Acc::regs).for_each(|&value| b.fma_into(squares, value, value, squares));
        let within = b.let_(squares.le(LIMIT * LIMIT) & self.factor.eq(1.0));
        let all = b.all(within);
        b.if_uniform(all.not(), |b| self.fit(b, slopes, sums));
    }

    fn fit(&self, b: &mut Builder, slopes: &[Acc], sums: &[Acc]) {
        let largest = largest(b, slopes);
        let room = b.rcp(largest * (1.0 / LIMIT));
        let bits = b.float_bits(room);
        let power = b.let_(bits & EXPONENT);
        let power = b.float_of_bits(power);
        let back = inverse(b, self.factor);
        b.select_into(self.factor, largest.gt(LIMIT), power, 1.0);
        let change = b.let_(self.factor * back);
        sums.iter().flat_map(Acc::regs).for_each(|&sum| b.mul_into(sum, sum, change));
        slopes.iter().flat_map(Acc::regs).for_each(|&value| b.mul_into(value, value, self.factor));
    }

    /// What sums are multiplied by to be what they are without the factor.
    pub(crate) fn inverse(&self, b: &mut Builder) -> Reg<F32> {
        inverse(b, self.factor)
    }
}

/// The largest size of a warp's values, but for infinities and NaN.
fn largest(b: &mut Builder, values: &[Acc]) -> Reg<F32> {
    let own = b.var_in::<F32>(Scope::Lane, 0.0);
    for &value in values.iter().flat_map(Acc::regs) {
        let size = b.abs(value);
        let counts = b.let_(size.lt(f32::INFINITY) & size.gt(own));
        b.select_into(own, counts, size, own);
    }
    [16, 8, 4, 2, 1].into_iter().fold(own, |largest, distance| {
        let other = b.shuffle_xor(largest, distance);
        b.max(largest, other)
    })
}

/// One over a power of two.
pub(crate) fn inverse(b: &mut Builder, power: Reg<F32>) -> Reg<F32> {
    let bits = b.float_bits(power);
    let inverse = b.let_(Val::Const(INVERSE) - bits);
    b.float_of_bits(inverse)
}
