//! Rows rounded to 8 bits: largest magnitudes, then numbers. Called by `quantise`.

use flashcore_core::{E4M3, E5M2, Element};

use super::{Kernel, Simd};

/// 8-bit floats.
pub(crate) trait Float8: Element {
    /// Bits of mantissa.
    const MANTISSA: u32;
    /// The exponent of 1.
    const BIAS: u32;
    /// The largest number's bits.
    const LARGEST: u32;
}

impl Float8 for E4M3 {
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const LARGEST: u32 = 0x7e;
}

impl Float8 for E5M2 {
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
    const LARGEST: u32 = 0x7b;
}

/// Raises the largest magnitude of each feature to that of a row less its means; what is not finite has no say.
pub(crate) struct Magnitudes<'a> {
    pub(crate) row: &'a [f32],
    /// As many elements.
    pub(crate) means: &'a [f32],
    /// As many elements.
    pub(crate) largest: &'a mut [f32],
}

impl Kernel for Magnitudes<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // Plain loops: the compiler turns them into vectors.
        for ((largest, x), mean) in self.largest.iter_mut().zip(self.row).zip(self.means) {
            let magnitude = (x - mean).abs();
            let counts = magnitude < f32::INFINITY && magnitude > *largest;
            *largest = if counts { magnitude } else { *largest };
        }
    }
}

/// Rounds a row less its means, divided by factors: to nearest, ties to even, at most the largest number.
pub(crate) struct Round<'a, N> {
    /// The row, which is used up.
    pub(crate) row: &'a mut [f32],
    /// As many elements.
    pub(crate) means: &'a [f32],
    /// As many, or one.
    pub(crate) factors: &'a [f32],
    /// As many elements as the row.
    pub(crate) to: &'a mut [N],
}

impl<N: Float8> Kernel for Round<'_, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // Plain loops: the compiler turns them into vectors.
        self.row.iter_mut().zip(self.means).for_each(|(x, mean)| *x -= mean);
        match self.factors {
            [factor] => self.row.iter_mut().for_each(|x| *x /= factor),
            factors => self.row.iter_mut().zip(factors).for_each(|(x, factor)| *x /= factor),
        }
        let to: &mut [u8] = bytemuck::cast_slice_mut(self.to);
        to.iter_mut().zip(&*self.row).for_each(|(to, x)| *to = round::<N>(*x));
    }
}

/// The bits of the nearest number, without a branch.
#[inline(always)]
fn round<N: Float8>(x: f32) -> u8 {
    let (bits, shift) = (x.to_bits() & 0x7fff_ffff, 23 - N::MANTISSA);
    // Half of the last digit that is kept, less one where that is even already.
    let nearest = bits + ((1 << (shift - 1)) - 1) + (bits >> shift & 1);
    let normal = (nearest >> shift).wrapping_sub((127 - N::BIAS) << N::MANTISSA);
    // Numbers without an exponent of their own are counted: beside this one they have no other digits.
    let unit = f32::from_bits((127 + 23 + 1 - N::BIAS - N::MANTISSA) << 23);
    let small = (f32::from_bits(bits) + unit).to_bits() - unit.to_bits();
    let is_small = bits < (128 - N::BIAS) << 23;
    let magnitude = if is_small { small } else { normal };
    let magnitude = if magnitude > N::LARGEST { N::LARGEST } else { magnitude };
    let signed = magnitude | (x.to_bits() >> 31 << 7);
    (if bits > 0x7f80_0000 { 0x7f } else { signed }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SimdLevel, simd::runner::Runner};

    fn check<N: Float8>(numbers: &[f32]) {
        for level in SimdLevel::ALL.into_iter().filter_map(Runner::new) {
            let (mut row, mut to) = (numbers.to_vec(), vec![N::from_f32(1.0); numbers.len()]);
            let means = vec![0.0; numbers.len()];
            level.run(Round { row: &mut row, means: &means, factors: &[1.0], to: &mut to });
            for (x, got) in numbers.iter().zip(to) {
                let same = bytemuck::bytes_of(&got) == bytemuck::bytes_of(&N::from_f32(*x));
                assert!(same, "{x:e} became {got:?} on {}", level.level());
            }
        }
    }

    #[test]
    fn every_kind_of_number_is_rounded_to_the_nearest() {
        // Upper halves of all floats, with what makes a tie and what breaks it.
        let tails = [0, 1, 0x7fff, 0x8000, 0xffff];
        let numbers: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| tails.map(|low| f32::from_bits(u32::from(high) << 16 | low)))
            .collect();
        check::<E4M3>(&numbers);
        check::<E5M2>(&numbers);
    }
}
