//! Kernels that pack factors for `panel`: terms of f32, or pairs of bf16. Called by `factors`.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use bytemuck::Pod;
use half::bf16;

use super::{
    Kernel, Lane, MOST_LANES, Simd,
    convert::{Widen, Zip},
    panel::{COLUMNS, PANEL},
    product::Pair,
};

/// Steps along the depth that are fetched ahead.
const AHEAD: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;

/// What elements of type `T` become: one or two along the depth are a term of a product.
pub(crate) trait Terms<T: Lane>: Pod {
    /// Elements of a term.
    const EACH: usize;

    /// A vector of terms that lie one after another.
    ///
    /// # Safety
    /// As for [`Simd::load`]; the terms are there.
    unsafe fn load<S: Simd>(p: *const T) -> S::V;

    /// A line along the depth; an odd element pairs with zero.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    unsafe fn line<S: Simd>(from: &[T], to: &mut [Self]);

    /// The terms of neighbouring lines, which lie side by side, from as many elements of each as a term has: of the second
    /// there may be none.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    unsafe fn join<S: Simd>(first: &[T], second: Option<&[T]>, to: &mut [Self]);
}

impl<T: Lane> Terms<T> for f32 {
    const EACH: usize = 1;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const T) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load::<S>(p) }
    }

    #[inline(always)]
    unsafe fn line<S: Simd>(from: &[T], to: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { Widen { from, to }.run::<S>() }
    }

    #[inline(always)]
    unsafe fn join<S: Simd>(first: &[T], _: Option<&[T]>, to: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { Widen { from: first, to }.run::<S>() }
    }
}

impl Terms<bf16> for Pair {
    const EACH: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const bf16) -> S::V {
        // SAFETY: the caller's promise; vectors of f32 hold any bits.
        unsafe { S::load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn line<S: Simd>(from: &[bf16], to: &mut [Pair]) {
        let to: &mut [bf16] = bytemuck::cast_slice_mut(to);
        to[..from.len()].copy_from_slice(from);
        to[from.len()..].fill(bf16::ZERO);
    }

    #[inline(always)]
    unsafe fn join<S: Simd>(first: &[bf16], second: Option<&[bf16]>, to: &mut [Pair]) {
        // SAFETY: the caller's promise.
        unsafe { Zip { first: Some(first), second, to }.run::<S>() }
    }
}

/// Lines along the depth that stay so.
pub(crate) struct Lines<'a, T, E> {
    pub(crate) from: &'a [T],
    /// Where each line starts.
    pub(crate) starts: &'a [usize],
    /// Elements of a line.
    pub(crate) len: usize,
    /// Line after line, and the terms from one to the next.
    pub(crate) to: (&'a mut [E], usize),
}

impl<T: Lane, E: Terms<T>> Kernel for Lines<'_, T, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let terms = self.len.div_ceil(E::EACH);
        for (&start, to) in self.starts.iter().zip(self.to.0.chunks_mut(self.to.1)) {
            // SAFETY: the caller's promise.
            unsafe { E::line::<S>(&self.from[start..][..self.len], &mut to[..terms]) };
        }
    }
}

/// Lines along the depth that are turned round: term after term, those of all lines side by side.
pub(crate) struct Turn<'a, T, E> {
    pub(crate) from: &'a [T],
    /// Where each line starts.
    pub(crate) starts: &'a [usize],
    /// Elements of a line.
    pub(crate) len: usize,
    /// Term after term, and the elements from one to the next. Lines are filled up to whole vectors.
    pub(crate) to: (&'a mut [E], usize),
}

impl<T: Lane, E: Terms<T>> Kernel for Turn<'_, T, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let (step, padded) = (S::LANES * E::EACH, self.starts.len().next_multiple_of(S::LANES));
        let terms = self.len.div_ceil(E::EACH);
        assert!(
            self.starts.iter().all(|start| start + self.len <= self.from.len()),
            "lines lie in their slice"
        );
        assert!(terms == 0 || (terms - 1) * self.to.1 + padded <= self.to.0.len(), "turned lines fit");
        let whole = self.len / step * step;
        for first in (0..self.starts.len()).step_by(S::LANES) {
            let starts = &self.starts[first..self.starts.len().min(first + S::LANES)];
            let mut lines = [self.from.as_ptr(); MOST_LANES];
            for (n, &start) in starts.iter().enumerate() {
                lines[n] = self.from[start..].as_ptr();
            }
            // SAFETY: the caller's promise, and the assertions.
            unsafe {
                for d in (0..whole).step_by(step) {
                    match starts.len() == S::LANES {
                        true => self.square::<S, true>(&lines, [S::LANES, S::LANES], [first, d]),
                        false => self.square::<S, false>(&lines, [starts.len(), S::LANES], [first, d]),
                    }
                }
                if whole < self.len {
                    self.tails::<S>(starts, [first, whole], terms - whole / E::EACH);
                }
            }
        }
    }
}

impl<T: Lane, E: Terms<T>> Turn<'_, T, E> {
    /// Turns a vector of each line: so many lines are there, and so many of their terms are kept; all where `FULL`.
    #[inline(always)]
    unsafe fn square<S: Simd, const FULL: bool>(
        &mut self,
        lines: &[*const T; MOST_LANES],
        [count, terms]: [usize; 2],
        [first, d]: [usize; 2],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut square = [S::splat(0.0); MOST_LANES];
            for n in 0..S::LANES {
                if FULL || n < count {
                    square[n] = E::load::<S>(lines[n].wrapping_add(d));
                }
            }
            S::transpose(&mut square);
            let to = self.to.0.as_mut_ptr().cast::<f32>().add(d / E::EACH * self.to.1 + first);
            for n in 0..S::LANES {
                if FULL || n < terms {
                    S::store(to.add(n * self.to.1), square[n]);
                }
            }
        }
    }

    /// Turns what is left of lines amid zeros, for what follows in memory may be anything.
    #[inline(always)]
    unsafe fn tails<S: Simd>(&mut self, starts: &[usize], [first, whole]: [usize; 2], terms: usize) {
        let mut tails = [[T::ZERO; 2 * MOST_LANES]; MOST_LANES];
        for (tail, &start) in tails.iter_mut().zip(starts) {
            tail[..self.len - whole].copy_from_slice(&self.from[start + whole..][..self.len - whole]);
        }
        let mut lines = [tails[0].as_ptr(); MOST_LANES];
        for n in 0..MOST_LANES {
            lines[n] = tails[n].as_ptr().wrapping_sub(whole);
        }
        // SAFETY: the caller's promise; a tail is shorter than its place.
        unsafe { self.square::<S, false>(&lines, [starts.len(), terms], [first, whole]) };
    }
}

/// Lines that lie side by side already.
pub(crate) struct Join<'a, T, E, F> {
    pub(crate) from: &'a [T],
    /// Where the elements of all lines start at each step along the depth.
    pub(crate) start: F,
    /// Elements of a line, and number of lines.
    pub(crate) len: usize,
    pub(crate) lines: usize,
    /// The last step that is there.
    pub(crate) last: usize,
    /// Panels, and how many lines each of them takes.
    pub(crate) to: (&'a mut [E], usize),
}

impl<T: Lane, E: Terms<T>, F: Fn(usize) -> usize> Kernel for Join<'_, T, E, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let of = |d: usize| &self.from[(self.start)(d)..][..self.lines];
        let (panels, each) = self.to;
        for d in (0..self.len).step_by(E::EACH) {
            for n in d..d + E::EACH {
                let later =
                    self.from.as_ptr().wrapping_add((self.start)((n + AHEAD).min(self.last))).cast::<u8>();
                for line in (0..self.lines * size_of::<T>()).step_by(LINE) {
                    // SAFETY: fetching ahead never faults.
                    unsafe { S::fetch(later.wrapping_add(line)) };
                }
            }
            let (first, second) = (of(d), (d + 1 < self.len && E::EACH > 1).then(|| of(d + 1)));
            for (n, first) in first.chunks(each).enumerate() {
                let second = second.map(|second| &second[n * each..][..first.len()]);
                let to = &mut panels[n * PANEL + d / E::EACH * COLUMNS..][..first.len()];
                // SAFETY: the caller's promise.
                unsafe { E::join::<S>(first, second, to) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SimdLevel, simd::runner::Runner};

    /// Lines of consecutive numbers, a thousand from one to the next.
    fn lines(count: usize, len: usize) -> (Vec<f32>, Vec<usize>) {
        let number = |n: usize, d: usize| (1000 * n + d) as f32;
        (
            (0..count).flat_map(|n| (0..len).map(move |d| number(n, d))).collect(),
            (0..count).map(|n| n * len).collect(),
        )
    }

    #[test]
    fn lines_are_turned_round() {
        for level in SimdLevel::ALL.into_iter().filter_map(Runner::new) {
            for (count, len) in [(1, 1), (16, 16), (8, 40), (33, 17), (64, 128), (5, 31)] {
                let (from, starts) = lines(count, len);
                let mut to = vec![-1.0; len * 80];
                level.run(Turn { from: &from, starts: &starts, len, to: (&mut to[..], 80) });
                let at = |n: usize, d: usize| to[d * 80 + n];
                let wrong = (0..count * len).find(|i| at(i / len, i % len) != from[*i]);
                assert_eq!(wrong, None, "{count} lines of {len} on {}", level.level());
                let narrow: Vec<bf16> = (0..count * len).map(|n| bf16::from_bits(n as u16)).collect();
                let mut to = vec![7u32; len * 80];
                level.run(Turn { from: &narrow, starts: &starts, len, to: (&mut to[..], 80) });
                let bits = |n: usize, d: usize| if d < len { narrow[n * len + d].to_bits() } else { 0 };
                let pair =
                    |n: usize, t: usize| u32::from(bits(n, 2 * t)) | u32::from(bits(n, 2 * t + 1)) << 16;
                let same = |n: usize| (0..len.div_ceil(2)).all(|t| to[t * 80 + n] == pair(n, t));
                assert!((0..count).all(same), "pairs of {count} lines of {len} on {}", level.level());
            }
        }
    }
}
