//! f32 and f64 arithmetic with PTX's modifiers: rounding, `.ftz`, `.sat`, canonical NaN, NaN-aware min and max.

use super::format::{F32, Rounding, to_odd, two_sum};

/// The NaN that f32 instructions produce.
pub(crate) const NAN_BITS: u32 = 0x7fff_ffff;

/// What the dotted words say about an f32 operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    pub(crate) rounding: Rounding,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
}

impl Mode {
    /// An operand as the operation sees it.
    pub(crate) fn input(self, bits: u64) -> f32 {
        flush(f32::from_bits(bits as u32), self.ftz)
    }

    /// A result as the register holds it.
    pub(crate) fn output(self, value: f32) -> u64 {
        let value = flush(value, self.ftz);
        if self.sat {
            return u64::from(saturate(value).to_bits());
        }
        u64::from(if value.is_nan() { NAN_BITS } else { value.to_bits() })
    }

    pub(crate) fn add(self, a: f32, b: f32) -> f32 {
        match self.rounding {
            Rounding::NearestEven => a + b,
            _ => self.sum(f64::from(a), f64::from(b)),
        }
    }

    pub(crate) fn mul(self, a: f32, b: f32) -> f32 {
        match self.rounding {
            Rounding::NearestEven => a * b,
            mode => f32::from_bits(F32.encode(f64::from(a) * f64::from(b), mode)),
        }
    }

    pub(crate) fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        match self.rounding {
            Rounding::NearestEven => a.mul_add(b, c),
            _ => self.sum(f64::from(a) * f64::from(b), f64::from(c)),
        }
    }

    /// Division and roots: the f64 result is right to far more bits than f32 has, and never lies on a tie.
    pub(crate) fn round_f64(self, value: f64) -> f32 {
        match self.rounding {
            Rounding::NearestEven => value as f32,
            mode => f32::from_bits(F32.encode(value, mode)),
        }
    }

    fn sum(self, a: f64, b: f64) -> f32 {
        let (sum, tail) = two_sum(a, b);
        let cancels = sum == 0.0 && tail == 0.0 && !(a.is_sign_negative() && b.is_sign_negative());
        if cancels
            && self.rounding == Rounding::Down
            && (a != 0.0 || a.is_sign_negative() != b.is_sign_negative())
        {
            return -0.0;
        }
        f32::from_bits(F32.encode(to_odd(sum, tail), self.rounding))
    }
}

/// `.ftz`: subnormal numbers become zero of the same sign.
pub(crate) fn flush(value: f32, ftz: bool) -> f32 {
    if ftz && value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// `.sat`: clamped to [0, 1], NaN becomes +0.
pub(crate) fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// `max`, or `min` where `least`; a NaN loses against a number unless `propagate`.
pub(crate) fn extremum(a: f32, b: f32, least: bool, propagate: bool) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => f32::NAN,
        (true, false) => {
            if propagate {
                f32::NAN
            } else {
                b
            }
        }
        (false, true) => {
            if propagate {
                f32::NAN
            } else {
                a
            }
        }
        (false, false) if a == b => {
            if a.is_sign_negative() == least {
                a
            } else {
                b
            }
        }
        (false, false) => {
            if (a < b) == least {
                a
            } else {
                b
            }
        }
    }
}

/// [`extremum`] for f64.
pub(crate) fn extremum64(a: f64, b: f64, least: bool) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (false, true) => a,
        _ if a == b => {
            if a.is_sign_negative() == least {
                a
            } else {
                b
            }
        }
        _ => {
            if (a < b) == least {
                a
            } else {
                b
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn mode(rounding: Rounding) -> Mode {
        Mode { rounding, ftz: false, sat: false }
    }

    #[test]
    fn directed_sums_bracket_the_exact_one() {
        let tiny = f32::from_bits(1);
        assert_eq!(mode(Rounding::Up).add(1.0, tiny), 1.0 + f32::EPSILON);
        assert_eq!(mode(Rounding::Down).add(1.0, tiny), 1.0);
        assert_eq!(mode(Rounding::Zero).add(-1.0, -tiny), -1.0);
        assert_eq!(mode(Rounding::Down).add(-1.0, -tiny), -1.0 - f32::EPSILON);
        assert!(mode(Rounding::Down).add(1.0, -1.0).is_sign_negative());
        assert!(mode(Rounding::Up).add(1.0, -1.0).is_sign_positive());
    }

    #[test]
    fn a_fused_product_keeps_what_two_roundings_lose() {
        let a = 1.0 + f32::EPSILON;
        assert_eq!(mode(Rounding::Zero).fma(a, a, -1.0), mode(Rounding::NearestEven).fma(a, a, -1.0));
        assert_eq!(mode(Rounding::Zero).fma(1e30, 1e30, f32::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn extremum_knows_nan_and_signed_zero() {
        assert_eq!(extremum(f32::NAN, 1.0, false, false), 1.0);
        assert!(extremum(f32::NAN, 1.0, false, true).is_nan());
        assert!(extremum(-0.0, 0.0, false, false).is_sign_positive());
        assert!(extremum(0.0, -0.0, true, false).is_sign_negative());
    }
}
