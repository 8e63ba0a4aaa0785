//! f64 arithmetic with other rounding modes than nearest: exact in 128 bits with a sticky last bit, then rounded.
//!
//! The decoders of `program/float.rs` build lane functions from these; rounding to nearest is the CPU's own.

use super::Rounding;

const MANTISSA_BITS: i32 = 52;
/// The exponent of the last bit of the smallest numbers.
const LOWEST: i32 = -1074;
/// Where the leading bit of a number lies that takes part in a sum: one free bit above for the carry.
const TOP: u32 = 126;

/// `mantissa · 2^exponent`; the last bit also stands for everything smaller that is not zero.
#[derive(Clone, Copy, Debug)]
struct Exact {
    negative: bool,
    mantissa: u128,
    exponent: i32,
}

impl Exact {
    fn of(value: f64) -> Self {
        let bits = value.to_bits();
        let (field, fraction) = ((bits >> MANTISSA_BITS & 0x7ff) as i32, bits & ((1 << MANTISSA_BITS) - 1));
        let mantissa = if field == 0 { fraction } else { fraction | 1 << MANTISSA_BITS };
        Self {
            negative: value.is_sign_negative(),
            mantissa: mantissa.into(),
            exponent: LOWEST + (field - 1).max(0),
        }
    }

    /// The same number with its leading bit at `top`.
    fn normal(self, top: u32) -> Self {
        if self.mantissa == 0 {
            return self;
        }
        let shift = self.mantissa.leading_zeros() as i32 - (127 - top as i32);
        let mantissa = if shift >= 0 { self.mantissa << shift } else { jam(self.mantissa, -shift) };
        Self { mantissa, exponent: self.exponent - shift, ..self }
    }

    fn times(self, other: Self) -> Self {
        Self {
            negative: self.negative != other.negative,
            mantissa: self.mantissa * other.mantissa,
            exponent: self.exponent + other.exponent,
        }
    }

    fn plus(self, other: Self, mode: Rounding) -> Self {
        let (a, b) = (self.normal(TOP), other.normal(TOP));
        if a.mantissa == 0 || b.mantissa == 0 {
            let zero = Self { negative: zero_sign(a.negative, b.negative, mode), mantissa: 0, exponent: 0 };
            return [a, b].into_iter().find(|n| n.mantissa != 0).unwrap_or(zero);
        }
        let (large, small) =
            if (a.exponent, a.mantissa) >= (b.exponent, b.mantissa) { (a, b) } else { (b, a) };
        let part = jam(small.mantissa, large.exponent - small.exponent);
        if large.negative == small.negative {
            return Self { mantissa: large.mantissa + part, ..large };
        }
        let rest = large.mantissa - part;
        let negative = if rest == 0 { mode == Rounding::Down } else { large.negative };
        Self { negative, mantissa: rest, ..large }
    }

    fn over(self, other: Self) -> Self {
        let (a, b) = (self.normal(TOP), other.normal(MANTISSA_BITS as u32));
        let (quotient, rest) = (a.mantissa / b.mantissa, a.mantissa % b.mantissa);
        let mantissa = quotient << 1 | u128::from(rest != 0);
        Self { negative: a.negative != b.negative, mantissa, exponent: a.exponent - b.exponent - 1 }
    }

    fn root(self) -> Self {
        let mut n = self.normal(TOP);
        if n.exponent % 2 != 0 {
            n = Self { mantissa: n.mantissa >> 1, exponent: n.exponent + 1, ..n };
        }
        let root = n.mantissa.isqrt();
        let mantissa = root << 1 | u128::from(root * root != n.mantissa);
        Self { mantissa, exponent: n.exponent / 2 - 1, ..n }
    }

    /// The nearest f64 in the direction of `mode`.
    fn round(self, mode: Rounding) -> f64 {
        let sign = if self.negative { -1.0 } else { 1.0 };
        if self.mantissa == 0 {
            return 0.0f64.copysign(sign);
        }
        let n = self.normal(TOP);
        let drop = (TOP as i32 - MANTISSA_BITS).max(LOWEST - n.exponent);
        let kept = if drop > TOP as i32 { 0 } else { (n.mantissa >> drop) as u64 };
        let exact = drop <= TOP as i32 && n.mantissa == u128::from(kept) << drop;
        let outwards = matches!((mode, self.negative), (Rounding::Up, false) | (Rounding::Down, true));
        // A carry out of the mantissa moves into the exponent, which is what it should do.
        let field = (n.exponent + drop - LOWEST + i32::from(kept >> MANTISSA_BITS != 0)).max(0) as u64;
        let bits =
            (field << MANTISSA_BITS | kept & ((1 << MANTISSA_BITS) - 1)) + u64::from(!exact && outwards);
        let limit = if outwards { f64::INFINITY } else { f64::MAX };
        if field >= 0x7ff || bits >= f64::INFINITY.to_bits() {
            return limit.copysign(sign);
        }
        f64::from_bits(bits).copysign(sign)
    }
}

/// Shifts right; what is lost stays in the last bit.
const fn jam(mantissa: u128, by: i32) -> u128 {
    if by > 127 {
        return (mantissa != 0) as u128;
    }
    let kept = mantissa >> by;
    kept | (kept << by != mantissa) as u128
}

fn zero_sign(a: bool, b: bool, mode: Rounding) -> bool {
    if a == b { a } else { mode == Rounding::Down }
}

/// `a · b + c`; where one of them, or the result, is no number or infinite, rounding does not matter.
pub(crate) fn fma(a: f64, b: f64, c: f64, mode: Rounding) -> f64 {
    if !(a.is_finite() && b.is_finite() && c.is_finite()) {
        return a.mul_add(b, c);
    }
    Exact::of(a).times(Exact::of(b)).plus(Exact::of(c), mode).round(mode)
}

pub(crate) fn add(a: f64, b: f64, mode: Rounding) -> f64 {
    fma(a, 1.0, b, mode)
}

pub(crate) fn mul(a: f64, b: f64, mode: Rounding) -> f64 {
    if !(a.is_finite() && b.is_finite()) {
        return a * b;
    }
    Exact::of(a).times(Exact::of(b)).round(mode)
}

pub(crate) fn div(a: f64, b: f64, mode: Rounding) -> f64 {
    if !(a.is_finite() && b.is_finite()) || a == 0.0 || b == 0.0 {
        return a / b;
    }
    Exact::of(a).over(Exact::of(b)).round(mode)
}

pub(crate) fn sqrt(a: f64, mode: Rounding) -> f64 {
    if !a.is_finite() || a <= 0.0 {
        return a.sqrt();
    }
    Exact::of(a).root().round(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [f64; 12] =
        [0.0, 1.0, -1.5, 0.1, 3.0, 1e-310, -5e-324, f64::MIN_POSITIVE, f64::MAX, -1e300, 1e16, 7e-160];

    /// Down and up enclose the nearest and are neighbours, or all three are equal; zero is the one nearer to zero.
    fn check(what: &str, nearest: f64, directed: impl Fn(Rounding) -> f64) {
        let [down, up, zero] = [Rounding::Down, Rounding::Up, Rounding::Zero].map(directed);
        if nearest.is_nan() {
            return assert!(down.is_nan() && up.is_nan(), "{what}");
        }
        assert!(down <= nearest && nearest <= up, "{what}: {down:e} {nearest:e} {up:e}");
        assert!(down == up || down.next_up() == up, "{what}: {down:e} {up:e}");
        assert_eq!(zero, if down.abs() < up.abs() { down } else { up }, "{what}");
    }

    #[test]
    fn directions_enclose_the_nearest() {
        for a in VALUES {
            check(&format!("root of {a:e}"), a.sqrt(), |mode| sqrt(a, mode));
            for b in VALUES {
                check(&format!("{a:e} + {b:e}"), a + b, |mode| add(a, b, mode));
                check(&format!("{a:e} * {b:e}"), a * b, |mode| mul(a, b, mode));
                check(&format!("{a:e} / {b:e}"), a / b, |mode| div(a, b, mode));
                for c in VALUES {
                    check(&format!("{a:e} * {b:e} + {c:e}"), a.mul_add(b, c), |mode| fma(a, b, c, mode));
                }
            }
        }
    }

    #[test]
    fn exact_results_are_left_alone() {
        for mode in [Rounding::Down, Rounding::Up, Rounding::Zero] {
            assert_eq!((add(1.5, 2.25, mode), mul(3.0, 0.5, mode), div(7.0, 2.0, mode)), (3.75, 1.5, 3.5));
            assert_eq!((sqrt(2.25, mode), fma(3.0, 4.0, -12.0, mode).abs()), (1.5, 0.0));
        }
        assert!(
            add(1.0, -1.0, Rounding::Down).is_sign_negative()
                && add(1.0, -1.0, Rounding::Up).is_sign_positive()
        );
        assert_eq!(add(1.0, 1e-300, Rounding::Up), 1.0f64.next_up());
        assert_eq!(add(1.0, -1e-300, Rounding::Zero), 1.0f64.next_down());
    }
}
