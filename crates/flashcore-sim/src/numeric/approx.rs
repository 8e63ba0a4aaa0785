//! The special-function unit. The ISA bounds the error of these; here they are as exact as f32 allows.

use super::single::{NAN_BITS, flush};

/// Which function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Function {
    Ex2,
    Lg2,
    Rcp,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Tanh,
}

impl Function {
    /// The exact function on f64.
    pub(crate) fn exact(self, x: f64) -> f64 {
        match self {
            Self::Ex2 => x.exp2(),
            Self::Lg2 => x.log2(),
            Self::Rcp => x.recip(),
            Self::Sqrt => x.sqrt(),
            Self::Rsqrt => x.sqrt().recip(),
            Self::Sin => x.sin(),
            Self::Cos => x.cos(),
            Self::Tanh => x.tanh(),
        }
    }

    /// The function on f32 bits.
    pub(crate) fn on_f32(self, bits: u64, ftz: bool) -> u64 {
        let x = flush(f32::from_bits(bits as u32), ftz);
        let y = flush(self.exact(f64::from(x)) as f32, ftz);
        u64::from(if y.is_nan() { NAN_BITS } else { y.to_bits() })
    }
}

/// `div.approx` and `div.full`: at most 2 ulp; infinite or zero where the ISA's reciprocal is.
pub(crate) fn divide(a: f32, b: f32) -> f32 {
    (f64::from(a) / f64::from(b)) as f32
}
