//! Kernels that move rows between the caller's tensors and the transposed, f32 tiles.

use half::bf16;

use super::{Kernel, Lane, Simd};

/// Widens one row to f32.
pub(crate) struct Widen<'a, T> {
    /// The row.
    pub(crate) from: &'a [T],
    /// As many elements.
    pub(crate) to: &'a mut [f32],
}

impl<T: Lane> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        assert_eq!(self.from.len(), self.to.len(), "rows of one length");
        let whole = self.from.len() / S::LANES * S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            // SAFETY: `d + LANES` is at most the length of both; the caller promises the instructions.
            unsafe { S::store(self.to.as_mut_ptr().add(d), T::load::<S>(self.from.as_ptr().add(d))) };
        }
        for (to, from) in self.to[whole..].iter_mut().zip(&self.from[whole..]) {
            *to = from.to_f32();
        }
    }
}

/// Rounds one row of f32, times a factor.
pub(crate) struct Narrow<'a, T> {
    /// The row.
    pub(crate) from: &'a [f32],
    /// Factor on every element.
    pub(crate) factor: f32,
    /// As many elements.
    pub(crate) to: &'a mut [T],
}

impl<T: Lane> Kernel for Narrow<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        assert_eq!(self.from.len(), self.to.len(), "rows of one length");
        let whole = self.from.len() / S::LANES * S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            // SAFETY: `d + LANES` is at most the length of both; the caller promises the instructions.
            unsafe {
                let x = S::mul(S::load(self.from.as_ptr().add(d)), S::splat(self.factor));
                T::store::<S>(self.to.as_mut_ptr().add(d), x);
            }
        }
        for (to, from) in self.to[whole..].iter_mut().zip(&self.from[whole..]) {
            *to = T::from_f32(from * self.factor);
        }
    }
}

/// Adds one row of f32, times a factor, to what is kept of another.
pub(crate) struct Accumulate<'a> {
    /// The row.
    pub(crate) from: &'a [f32],
    /// Factor on every element.
    pub(crate) factor: f32,
    /// As many elements.
    pub(crate) to: &'a mut [f32],
    /// Factor on what they hold; with 0 they may hold anything, NaN included.
    pub(crate) kept: f32,
}

impl Kernel for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // Plain loops: the compiler turns them into vectors.
        if self.kept == 0.0 {
            self.to.iter_mut().zip(self.from).for_each(|(to, x)| *to = x * self.factor);
        } else {
            self.to.iter_mut().zip(self.from).for_each(|(to, x)| *to = *to * self.kept + x * self.factor);
        }
    }
}

/// Adds one row, times a factor, to a row of f32.
pub(crate) struct AddTo<'a, T> {
    /// The row.
    pub(crate) from: &'a [T],
    /// Factor on every element.
    pub(crate) factor: f32,
    /// As many elements.
    pub(crate) to: &'a mut [f32],
}

impl<T: Lane> Kernel for AddTo<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        assert_eq!(self.from.len(), self.to.len(), "rows of one length");
        let whole = self.from.len() / S::LANES * S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            // SAFETY: `d + LANES` is at most the length of both; the caller promises the instructions.
            unsafe {
                let (x, to) = (T::load::<S>(self.from.as_ptr().add(d)), self.to.as_mut_ptr().add(d));
                S::store(to, S::fma(x, S::splat(self.factor), S::load(to)));
            }
        }
        for (to, from) in self.to[whole..].iter_mut().zip(&self.from[whole..]) {
            *to += from.to_f32() * self.factor;
        }
    }
}

/// The dot product of two rows.
pub(crate) struct Dot<'a> {
    pub(crate) a: &'a [f32],
    /// As many elements.
    pub(crate) b: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        assert_eq!(self.a.len(), self.b.len(), "rows of one length");
        let whole = self.a.len() / S::LANES * S::LANES;
        // SAFETY: `d + LANES` is at most the length of both; the caller promises the instructions.
        let sum = unsafe {
            let mut sum = S::splat(0.0);
            for d in (0..whole).step_by(S::LANES) {
                sum = S::fma(S::load(self.a.as_ptr().add(d)), S::load(self.b.as_ptr().add(d)), sum);
            }
            S::sum(sum)
        };
        self.a[whole..].iter().zip(&self.b[whole..]).fold(sum, |sum, (a, b)| sum + a * b)
    }
}

/// Splits one row into parts of bf16: each holds what those before it leave out, rounded.
pub(crate) struct Split<'a, T> {
    /// The row.
    pub(crate) from: &'a [T],
    /// The parts, so many elements apart.
    pub(crate) to: &'a mut [bf16],
    /// Elements from one part to the next.
    pub(crate) plane: usize,
    /// Number of parts.
    pub(crate) parts: usize,
}

impl<T: Lane> Kernel for Split<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let len = self.from.len();
        assert!(self.parts > 0 && (self.parts - 1) * self.plane + len <= self.to.len(), "parts fit");
        if let (Some(from), 1) = (T::as_bf16(self.from), self.parts) {
            return self.to[..len].copy_from_slice(from);
        }
        let whole = len / S::LANES * S::LANES;
        // SAFETY: `d + LANES` is at most the length of the row and of each part; the caller promises the instructions.
        let odd = unsafe {
            let mut odd = S::splat(0.0);
            for d in (0..whole).step_by(S::LANES) {
                let mut x = T::load::<S>(self.from.as_ptr().add(d));
                for part in 0..self.parts {
                    let to = self.to.as_mut_ptr().add(part * self.plane + d);
                    S::store_bf16(to, x);
                    x = S::sub(x, S::load_bf16(to));
                }
                // What is left of a number is finite unless its first part is not.
                odd = S::fma(x, S::splat(0.0), odd);
            }
            S::sum(odd)
        };
        let from = if odd == 0.0 { whole } else { 0 };
        for d in from..len {
            split(self.from[d].to_f32(), |part, x| self.to[part * self.plane + d] = x, self.parts);
        }
    }
}

/// Splits one number. What is infinite or NaN has one part; what would round to infinity does not.
fn split(x: f32, mut put: impl FnMut(usize, bf16), parts: usize) {
    let mut left = x;
    for part in 0..parts {
        let rounded = bf16::from_f32(left);
        let overflows = left.is_finite() && !rounded.is_finite();
        let rounded = if overflows { bf16::MAX.copysign(bf16::from_f32(left)) } else { rounded };
        put(part, rounded);
        left = if left.is_finite() { left - rounded.to_f32() } else { 0.0 };
    }
}

/// Pairs up the elements of two rows, the first in the low half; a missing row is zero.
pub(crate) struct Zip<'a> {
    pub(crate) first: Option<&'a [bf16]>,
    pub(crate) second: Option<&'a [bf16]>,
    /// As many elements.
    pub(crate) to: &'a mut [u32],
}

impl Kernel for Zip<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // Plain loops: the compiler turns them into vectors.
        if let (Some(first), Some(second)) = (self.first, self.second) {
            for ((to, a), b) in self.to.iter_mut().zip(first).zip(second) {
                *to = u32::from(a.to_bits()) | u32::from(b.to_bits()) << 16;
            }
            return;
        }
        self.to.fill(0);
        if let Some(row) = self.first {
            self.to.iter_mut().zip(row).for_each(|(to, x)| *to = u32::from(x.to_bits()));
        }
        if let Some(row) = self.second {
            self.to.iter_mut().zip(row).for_each(|(to, x)| *to |= u32::from(x.to_bits()) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SimdLevel, simd::runner::Runner};
    use flashcore_core::{E4M3, E5M2};

    fn check_widened<T: Lane>(numbers: &[T]) {
        for level in SimdLevel::ALL.into_iter().filter_map(Runner::new) {
            let mut wide = vec![-1.0; numbers.len()];
            level.run(Widen { from: numbers, to: &mut wide });
            for (x, got) in numbers.iter().zip(wide) {
                let want = x.to_f32();
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{x:?} became {got} instead of {want} on {}", level.level());
            }
        }
    }

    #[test]
    fn every_8_bit_number_is_widened_exactly() {
        check_widened(&(0..=u8::MAX).map(E4M3::from_bits).collect::<Vec<_>>());
        check_widened(&(0..=u8::MAX).map(E5M2::from_bits).collect::<Vec<_>>());
    }

    #[test]
    fn parts_add_up_to_the_number() {
        let mut numbers =
            vec![0.0, -0.0, 1.0, 1.0 + f32::EPSILON, -3.333_333_3, 65504.0, 1e-30, f32::MAX, f32::MIN];
        numbers.extend((0..50).map(|n| (n as f32).sin() * 1.7f32.powi(n)));
        for level in SimdLevel::ALL.into_iter().filter_map(Runner::new) {
            let mut parts = vec![bf16::NAN; 3 * numbers.len()];
            level.run(Split { from: &numbers, to: &mut parts, plane: numbers.len(), parts: 3 });
            for (n, x) in numbers.iter().enumerate() {
                let part = |p: usize| parts[p * numbers.len() + n].to_f32();
                assert_eq!(part(0) + (part(1) + part(2)), *x, "{x} on {}", level.level());
            }
            for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut row = [1.5; 40];
                row[7] = odd;
                let mut parts = [bf16::NAN; 80];
                level.run(Split { from: &row, to: &mut parts, plane: 40, parts: 2 });
                assert!(parts[7].to_f32() == odd || odd.is_nan() && parts[7].is_nan());
                assert!(parts[8].to_f32() == 1.5 && parts[40..].iter().all(|x| *x == bf16::ZERO));
            }
        }
    }
}
