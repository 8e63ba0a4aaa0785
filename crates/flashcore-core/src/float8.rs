//! 8-bit floats: E4M3 and E5M2, as GPUs and frameworks define them. Out-of-range values saturate, and never become
//! infinity.

use bytemuck::{Pod, Zeroable};

macro_rules! float8 {
    ($name:ident, $docs:literal, exponent $exponent:literal, mantissa $mantissa:literal, max $max:literal, above $above:expr) => {
        #[doc = $docs]
        ///
        /// Two are equal if their bits are.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The largest number.
            pub const MAX: f32 = WIDE_MAX[$mantissa];
            const BIAS: i32 = (1 << ($exponent - 1)) - 1;

            /// The number with these bits.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits of the number.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The number, exactly.
            pub fn to_f32(self) -> f32 {
                let (sign, magnitude) = (self.0 & 0x80, self.0 & 0x7f);
                let value = match magnitude {
                    0..=$max => decode(magnitude, $mantissa, Self::BIAS),
                    above => $above(above),
                };
                if sign == 0 { value } else { -value }
            }

            /// The nearest number, ties to even; what is too large becomes [`MAX`](Self::MAX), NaN stays NaN.
            pub fn from_f32(value: f32) -> Self {
                if value.is_nan() {
                    return Self(0x7f);
                }
                let sign = if value.is_sign_negative() { 0x80 } else { 0 };
                Self(sign | encode(value.abs().min(Self::MAX), $mantissa, Self::BIAS))
            }
        }
    };
}

/// The largest number by bits of mantissa.
const WIDE_MAX: [f32; 4] = [0.0, 0.0, 57344.0, 448.0];

float8!(E4M3, "An 8-bit float with 4 bits of exponent and 3 of mantissa, without infinity: up to 448.", exponent 4, mantissa 3, max 0x7e, above |_| f32::NAN);
float8!(E5M2, "An 8-bit float with 5 bits of exponent and 2 of mantissa: up to 57344.", exponent 5, mantissa 2, max 0x7b, above |bits| if bits == 0x7c { f32::INFINITY } else { f32::NAN });

/// The value of a magnitude's bits.
fn decode(bits: u8, mantissa: u32, bias: i32) -> f32 {
    let exponent = i32::from(bits >> mantissa);
    let hidden = if exponent == 0 { 0 } else { 1 << mantissa };
    let digits = (bits & ((1 << mantissa) - 1)) | hidden;
    f32::from(digits) * power_of_two(exponent.max(1) - bias - mantissa as i32)
}

/// The bits of a magnitude that is not out of range.
fn encode(value: f32, mantissa: u32, bias: i32) -> u8 {
    let exponent = ((value.to_bits() >> 23) as i32 - 127).max(1 - bias);
    let digits = (value * power_of_two(mantissa as i32 - exponent)).round_ties_even();
    // The leading digit of a normal number carries into the exponent, and so does one more by rounding.
    (((exponent + bias - 1) << mantissa) + digits as i32) as u8
}

/// 2^exponent, for exponents of small formats.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_and_neighbours_are_told_apart() {
        for bits in 0..=u8::MAX {
            let (four, five) = (E4M3::from_bits(bits), E5M2::from_bits(bits));
            if four.to_f32().is_finite() {
                assert_eq!(E4M3::from_f32(four.to_f32()), four, "{bits:#x}");
            }
            if five.to_f32().is_finite() {
                assert_eq!(E5M2::from_f32(five.to_f32()), five, "{bits:#x}");
            }
        }
        for bits in 0..0x7e {
            let [low, high] = [bits, bits + 1].map(|bits| E4M3::from_bits(bits).to_f32());
            let middle = (low + high) / 2.0;
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            assert_eq!(E4M3::from_f32(middle).to_bits(), even, "a tie at {middle}");
            assert_eq!(E4M3::from_f32(middle.next_down()).to_bits(), bits);
            assert_eq!(E4M3::from_f32(-middle.next_up()).to_bits(), (bits + 1) | 0x80);
        }
    }

    #[test]
    fn what_is_too_large_saturates_and_nan_stays() {
        let large = [449.0, 1e9, f32::INFINITY];
        for value in large {
            assert_eq!(E4M3::from_f32(value).to_f32(), 448.0);
            assert_eq!(E4M3::from_f32(-value).to_f32(), -448.0);
        }
        assert_eq!(E5M2::from_f32(f32::INFINITY).to_f32(), 57344.0);
        assert!(E4M3::from_f32(f32::NAN).to_f32().is_nan() && E5M2::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(E5M2::from_bits(0xfc).to_f32(), f32::NEG_INFINITY);
        assert_eq!((E4M3::from_f32(1e-9).to_bits(), E4M3::from_f32(-1e-9).to_bits()), (0, 0x80));
    }
}
