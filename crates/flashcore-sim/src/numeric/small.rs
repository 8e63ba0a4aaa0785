//! Arithmetic on f16 and bf16, alone or in pairs, and the conversions from f32 into small formats.

use super::{
    format::{Format, Rounding, TF32, to_odd, two_sum},
    single::{extremum, saturate},
};

/// What the dotted words say about a half-precision operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HalfMode {
    pub(crate) format: Format,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) relu: bool,
}

impl HalfMode {
    fn input(self, bits: u64) -> f64 {
        let value = self.format.decode(bits as u32 & 0xffff);
        let subnormal = bits & 0x7c00 == 0;
        if self.ftz && subnormal { 0.0f64.copysign(value) } else { value }
    }

    fn output(self, value: f64) -> u64 {
        let value = match () {
            () if self.sat => f64::from(saturate(value as f32)),
            () if self.relu && value <= 0.0 => 0.0,
            () => value,
        };
        let bits = u64::from(self.format.encode(value, Rounding::NearestEven));
        if self.ftz && bits & 0x7c00 == 0 { bits & 0x8000 } else { bits }
    }

    /// `a * b + c`, rounded once; sums and products are special cases of it.
    pub(crate) fn fma(self, a: u64, b: u64, c: u64) -> u64 {
        let (sum, tail) = two_sum(self.input(a) * self.input(b), self.input(c));
        self.output(to_odd(sum, tail))
    }

    pub(crate) fn add(self, a: u64, b: u64) -> u64 {
        let (sum, tail) = two_sum(self.input(a), self.input(b));
        self.output(to_odd(sum, tail))
    }

    pub(crate) fn sub(self, a: u64, b: u64) -> u64 {
        self.add(a, b ^ 0x8000)
    }

    /// The same number with another sign; a NaN becomes the canonical one.
    pub(crate) fn signed(self, a: u64, sign: impl Fn(u64) -> u64) -> u64 {
        let value = self.input(a);
        let rest = if value == 0.0 { 0 } else { a & 0x7fff };
        if value.is_nan() { 0x7fff } else { rest | sign(a & 0x8000) }
    }

    pub(crate) fn mul(self, a: u64, b: u64) -> u64 {
        self.output(self.input(a) * self.input(b))
    }

    pub(crate) fn extremum(self, a: u64, b: u64, least: bool, propagate: bool) -> u64 {
        let value = extremum(self.input(a) as f32, self.input(b) as f32, least, propagate);
        self.output(f64::from(value))
    }

    /// A function of one value, computed exactly and rounded.
    pub(crate) fn unary(self, a: u64, f: impl Fn(f64) -> f64) -> u64 {
        self.output(f(self.input(a)))
    }

    /// The values as f32, for comparisons.
    pub(crate) fn value(self, bits: u64) -> f32 {
        self.input(bits) as f32
    }
}

/// Applies `f` to the lower half, and to the upper half where the type is packed.
pub(crate) fn per_half(packed: bool, f: impl Fn(u32) -> u64) -> u64 {
    let low = f(0) & 0xffff;
    if packed { low | (f(16) & 0xffff) << 16 } else { low }
}

/// An f32 rounded into `format`, as `cvt` does it.
pub(crate) fn narrow(value: f32, format: Format, rounding: Rounding, relu: bool, finite: bool) -> u32 {
    let value = if relu && value < 0.0 { 0.0 } else { value };
    let value = f64::from(value);
    let bits = if finite { format.encode_finite(value, rounding) } else { format.encode(value, rounding) };
    // relu clamps -0 as well; a NaN stays the canonical NaN
    if relu && value == 0.0 { 0 } else { bits }
}

/// An f32 with the mantissa of TF32, still in f32's bits.
pub(crate) fn tf32(value: f32, rounding: Rounding, relu: bool) -> u32 {
    if value.is_nan() && rounding == Rounding::NearestAway {
        // Cut off, as an H200 does, even where only infinity remains; other roundings give the canonical NaN.
        return value.to_bits() & !0x1fff;
    }
    narrow(value, TF32, rounding, relu, false) << 13
}
