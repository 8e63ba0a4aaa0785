//! Powers of two by a polynomial, beside those of the special function unit, which takes 16 of an SM's scores in a clock: as
//! long as products of 8-bit numbers with 128 features take.
//!
//! A saturating multiplication brings the exponent x into −127…127 as y = (x + 127) / 254, so that what is hidden becomes
//! exactly 0 and what is too large shows in the sum. Adding a large constant rounds x to the nearest integer n, whose bits
//! move into the exponent of a cubic polynomial of x − n that errs by 1e-4 at most and is exactly 1 at 0.

use flashcore_tile::{Builder, F32, ROWS_PER_THREAD, Reg, Scope};

/// Of how many exponentials some are polynomials.
const OF: usize = 8;
/// Exponents from the least to the largest.
const SPAN: f32 = 254.0;
/// What is added to y times that: integers lie in the low bits of such floats, here those from −127 on.
const ROUNDER: f32 = 12_582_912.0 - 127.0;
/// The polynomial but for its 1, highest power first.
const CUBIC: [f32; 3] = [0.055_008_95, 0.242_211_01, 0.693_282_9];
/// Bits of a float below its exponent.
const MANTISSA: u32 = 23;

/// Scale and offset of scores, such that exponents lie between 0 and 1.
#[derive(Debug)]
pub(crate) struct Computed {
    share: usize,
    scale: Reg<F32>,
    offset: [Reg<F32>; ROWS_PER_THREAD],
}

impl Computed {
    /// For `share` of eight scores; [`follow_scale`](Self::follow_scale) and [`follow_offset`](Self::follow_offset) come first.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, share: u32) -> Self {
        let row = |b: &mut Builder| b.var_in(Scope::Lane, 0.0);
        Self { share: share as usize, scale: row(b), offset: std::array::from_fn(|_| row(b)) }
    }

    /// Takes note of what scores are multiplied by.
    #[track_caller]
    pub(crate) fn follow_scale(&self, b: &mut Builder, scale: Reg<F32>) {
        b.set(self.scale, scale * (1.0 / SPAN));
    }

    /// Takes note of what is added to the scores of a row.
    #[track_caller]
    pub(crate) fn follow_offset(&self, b: &mut Builder, row: usize, offset: Reg<F32>) {
        b.fma_into(self.offset[row], offset, 1.0 / SPAN, 0.5);
    }

    /// Whether score number `n` of a thread is one of its own.
    pub(crate) const fn takes(&self, n: usize) -> bool {
        n * self.share % OF < self.share
    }

    /// The probability of a score.
    #[track_caller]
    pub(crate) fn prob(&self, b: &mut Builder, row: usize, score: Reg<F32>) -> Reg<F32> {
        let y = b.fma_saturated(score, self.scale, self.offset[row]);
        let rounded = b.fma(y, SPAN, ROUNDER);
        let below = b.let_(rounded - ROUNDER);
        let below = b.neg(below);
        let rest = b.fma(y, SPAN, below);
        let [high, low @ ..] = CUBIC;
        let slope = low.into_iter().fold(None, |sum: Option<Reg<F32>>, next| {
            Some(match sum {
                None => b.fma(rest, high, next),
                Some(sum) => b.fma(sum, rest, next),
            })
        });
        let power = b.fma(slope.expect("a cubic has slopes"), rest, 1.0);
        let (exponent, power) = (b.float_bits(rounded), b.float_bits(power));
        let bits = b.let_((exponent.unsigned() << MANTISSA) + power.unsigned());
        b.float_of_bits(bits.signed())
    }
}
