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
        self.to.fill(0);
        // Plain loops: the compiler turns them into vectors.
        if let Some(row) = self.first {
            self.to.iter_mut().zip(row).for_each(|(to, x)| *to = u32::from(x.to_bits()));
        }
        if let Some(row) = self.second {
            self.to.iter_mut().zip(row).for_each(|(to, x)| *to |= u32::from(x.to_bits()) << 16);
        }
    }
}
