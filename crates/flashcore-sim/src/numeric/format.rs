//! Binary floating-point formats of at most 32 bits, and correct rounding into them from exact values.

/// How to choose between the two neighbours of an exact value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rounding {
    /// To the nearest, ties to even.
    NearestEven,
    /// To the nearest, ties away from zero.
    NearestAway,
    /// Towards zero.
    Zero,
    /// Towards minus infinity.
    Down,
    /// Towards plus infinity.
    Up,
}

/// A format: sign, exponent, mantissa, and what lies at the top of its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The bits of the largest finite value.
    max_finite: u32,
    /// The bits of infinity; `None` where the format has none.
    infinity: Option<u32>,
    /// The NaN the GPU produces.
    pub(crate) nan: u32,
}

/// IEEE half precision.
pub(crate) const F16: Format = ieee(5, 10, 0x7fff);
/// bfloat16.
pub(crate) const BF16: Format = ieee(8, 7, 0x7fff);
/// TF32 in the upper 19 bits is expressed as f32 with 10 mantissa bits; see [`crate::numeric::small::tf32`].
pub(crate) const TF32: Format = ieee(8, 10, 0x3ffff);
/// IEEE single precision.
pub(crate) const F32: Format = ieee(8, 23, 0x7fff_ffff);
/// FP8 with five exponent bits.
pub(crate) const E5M2: Format = ieee(5, 2, 0x7f);
/// FP8 with four exponent bits: no infinity, one NaN.
pub(crate) const E4M3: Format =
    Format { exponent_bits: 4, mantissa_bits: 3, max_finite: 0x7e, infinity: None, nan: 0x7f };

const fn ieee(exponent_bits: u32, mantissa_bits: u32, nan: u32) -> Format {
    let infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
    Format { exponent_bits, mantissa_bits, max_finite: infinity - 1, infinity: Some(infinity), nan }
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    const fn sign_bit(self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// The value of `bits`; exact, since every format fits into f64.
    pub(crate) fn decode(self, bits: u32) -> f64 {
        let sign = if bits & self.sign_bit() != 0 { -1.0 } else { 1.0 };
        let magnitude = bits & (self.sign_bit() - 1);
        if self.infinity == Some(magnitude) {
            return sign * f64::INFINITY;
        }
        if magnitude > self.max_finite {
            return f64::NAN;
        }
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let hidden = if exponent == 0 { 0 } else { 1 << self.mantissa_bits };
        let quantum = exponent.max(1) - self.bias() - self.mantissa_bits as i32;
        sign * f64::from(mantissa | hidden) * power_of_two(quantum)
    }

    /// `value` rounded into the format; overflow goes where the rounding mode sends it.
    pub(crate) fn encode(self, value: f64, mode: Rounding) -> u32 {
        if value.is_nan() {
            return self.nan;
        }
        let negative = value.is_sign_negative();
        let sign = if negative { self.sign_bit() } else { 0 };
        if value.is_infinite() {
            return sign | self.infinity.unwrap_or(self.max_finite);
        }
        let magnitude = self.round(value.abs(), mode, negative);
        sign | if magnitude > self.max_finite { self.overflow(mode, negative) } else { magnitude }
    }

    /// As [`encode`](Self::encode), but what is out of range, infinity included, becomes the largest finite value.
    pub(crate) fn encode_finite(self, value: f64, mode: Rounding) -> u32 {
        let bits = self.encode(value, mode);
        let magnitude = bits & (self.sign_bit() - 1);
        if !value.is_nan() && magnitude > self.max_finite {
            bits & self.sign_bit() | self.max_finite
        } else {
            bits
        }
    }

    fn round(self, value: f64, mode: Rounding, negative: bool) -> u32 {
        let exponent = floor_log2(value).max(1 - self.bias());
        let scaled = value * power_of_two(self.mantissa_bits as i32 - exponent);
        let floor = scaled.floor();
        let (fraction, integer) = (scaled - floor, floor as u32);
        let up = match mode {
            Rounding::NearestEven => fraction > 0.5 || (fraction == 0.5 && integer & 1 == 1),
            Rounding::NearestAway => fraction >= 0.5,
            Rounding::Zero => false,
            Rounding::Down => negative && fraction > 0.0,
            Rounding::Up => !negative && fraction > 0.0,
        };
        let biased = (exponent + self.bias()) as u32;
        // The hidden bit carries into the exponent field, a carry out of the mantissa likewise.
        if biased > 1 << self.exponent_bits {
            return u32::MAX >> 1;
        }
        ((biased - 1) << self.mantissa_bits) + integer + u32::from(up)
    }

    fn overflow(self, mode: Rounding, negative: bool) -> u32 {
        let stays = match mode {
            Rounding::Zero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
            _ => false,
        };
        if stays { self.max_finite } else { self.infinity.unwrap_or(self.nan) }
    }
}

/// 2^exponent for exponents that f64 holds.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent of the leading bit; very small for zero and f64 subnormals, which no target format holds.
fn floor_log2(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// The exact sum `value + tail` as an f64 that rounds as the sum would: round to odd keeps what was lost in the
/// last bit, and every target has at least two bits less.
pub(crate) fn to_odd(value: f64, tail: f64) -> f64 {
    if tail == 0.0 || value.to_bits() & 1 == 1 || !value.is_finite() {
        return value;
    }
    let outwards = (tail > 0.0) == (value > 0.0);
    f64::from_bits(if outwards { value.to_bits() + 1 } else { value.to_bits() - 1 })
}

/// `a + b` and what rounding it to f64 lost (Knuth's two-sum).
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    let tail = (a - (sum - part)) + (b - part);
    (sum, if sum.is_finite() { tail } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_value_survives_a_round_trip() {
        for (format, bits) in [(F16, 16), (BF16, 16), (E4M3, 8), (E5M2, 8)] {
            for pattern in 0..1u32 << bits {
                let value = format.decode(pattern);
                if !value.is_nan() {
                    assert_eq!(
                        format.encode(value, Rounding::NearestEven),
                        pattern,
                        "{format:?} {pattern:#x}"
                    );
                }
            }
        }
    }

    #[test]
    fn rounding_agrees_with_half_and_with_the_hardware_cast() {
        let mut state = 1u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state);
            if value.is_nan() {
                continue;
            }
            let nearest = |format: Format| format.encode(f64::from(value), Rounding::NearestEven);
            assert_eq!(nearest(F16), u32::from(half::f16::from_f32(value).to_bits()), "{value:e}");
            assert_eq!(nearest(BF16), u32::from(half::bf16::from_f32(value).to_bits()), "{value:e}");
            assert_eq!(nearest(F32), value.to_bits(), "{value:e}");
        }
    }

    #[test]
    fn overflow_and_ties_follow_the_mode() {
        let cases = [
            (E4M3, 449.0, Rounding::NearestEven, 0x7e),
            (E4M3, -1e9, Rounding::NearestEven, 0xfe),
            (E5M2, f64::INFINITY, Rounding::NearestEven, 0x7b),
            (F16, 65520.0, Rounding::Zero, 0x7bff),
            (F16, 1.0 + f64::EPSILON, Rounding::Up, 0x3c01),
            (F16, -1.0 - f64::EPSILON, Rounding::Down, 0xbc01),
            (E4M3, f64::NAN, Rounding::NearestEven, 0x7f),
        ];
        for (format, value, mode, bits) in cases {
            assert_eq!(format.encode_finite(value, mode), bits, "{format:?} {value} {mode:?}");
        }
        assert_eq!(F16.encode(65520.0, Rounding::NearestEven), 0x7c00);
        assert_eq!(F32.encode(1e300, Rounding::NearestEven), 0x7f80_0000);
    }
}
