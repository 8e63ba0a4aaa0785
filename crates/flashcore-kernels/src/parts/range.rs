//! Keeps gradients of scores in the range of f16, whose largest number is 65504; bf16 has f32's.
//!
//! A warp's sums of `dS·b` are made of `dS` times a power of two, 1 unless a larger number has been met: then the factor
//! moves, and the sums so far with it. Nothing is rounded differently but where it would not have been a number.

use flashcore_tile::{Acc, Builder, F32, Reg, Scope, Val};

/// Where the factor moves at the latest.
const LIMIT: f32 = 32768.0;
/// Below this lies the number that made it move.
const TOP: f32 = 4096.0;
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

    /// Brings new `dS` into range, and the sums along.
    pub(crate) fn keep(&self, b: &mut Builder, slopes: &[Acc], sums: &[Acc]) {
        let values = slopes.iter().flat_map(Acc::regs);
        let largest = values.fold(None, |largest, &value| {
            let size = b.abs(value);
            Some(largest.map_or(size, |largest| b.max(largest, size)))
        });
        let Some(largest) = largest else { return };
        let moves = b.let_((largest * self.factor).gt(LIMIT) | self.factor.ne(1.0));
        let any = b.any(moves);
        b.if_uniform(any, |b| self.shrink(b, largest, slopes, sums));
    }

    fn shrink(&self, b: &mut Builder, largest: Reg<F32>, slopes: &[Acc], sums: &[Acc]) {
        let largest = [16, 8, 4, 2, 1].into_iter().fold(largest, |largest, distance| {
            let other = b.shuffle_xor(largest, distance);
            b.max(largest, other)
        });
        let room = b.rcp(largest * (1.0 / TOP));
        let bits = b.float_bits(room);
        let power = b.let_(bits & EXPONENT);
        let power = b.float_of_bits(power);
        let before = self.inverse(b);
        let too_large = b.let_((largest * self.factor).gt(LIMIT));
        b.select_into(self.factor, too_large, power, self.factor);
        let change = b.let_(self.factor * before);
        sums.iter().flat_map(Acc::regs).for_each(|&sum| b.mul_into(sum, sum, change));
        slopes.iter().flat_map(Acc::regs).for_each(|&value| b.mul_into(value, value, self.factor));
    }

    /// What sums are multiplied by to be what they are without the factor.
    pub(crate) fn inverse(&self, b: &mut Builder) -> Reg<F32> {
        let bits = b.float_bits(self.factor);
        let inverse = b.let_(Val::Const(INVERSE) - bits);
        b.float_of_bits(inverse)
    }
}
