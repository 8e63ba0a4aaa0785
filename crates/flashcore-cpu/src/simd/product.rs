//! Products of small matrices, used for gradients: `C = A·B`, or `C += A·B`, summed in f32.
//!
//! Vectors run along the rows of B and C, while elements of A are spread over the lanes. So B and C need rows of whole
//! vectors, and A may be transposed. A micro-kernel holds `J` rows × `RV` vectors of C in registers.
//!
//! Elements of A and B are f32, or pairs of bf16 that are neighbours along the summed dimension: see [`Term`].

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use super::{
    Kernel, Simd,
    pairs::Pairs,
    tile::{load, store},
};

/// Two bf16, the first in the low half: neighbours along what a product sums over.
pub(crate) type Pair = u32;

/// An element of A and B: f32, or a pair of bf16 where the instruction set multiplies such.
pub(crate) trait Term<S: Simd>: Copy {
    /// A vector of them.
    type Vector: Copy;

    /// # Safety
    /// As for [`Simd::splat`].
    unsafe fn splat(x: Self) -> Self::Vector;
    /// # Safety
    /// As for [`Simd::load`].
    unsafe fn load(p: *const Self) -> Self::Vector;
    /// `c` plus the products.
    ///
    /// # Safety
    /// As for [`Simd::fma`].
    unsafe fn multiply(a: Self::Vector, b: Self::Vector, c: S::V) -> S::V;
}

impl<S: Simd> Term<S> for f32 {
    type Vector = S::V;

    #[inline(always)]
    unsafe fn splat(x: Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::splat(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(p) }
    }

    #[inline(always)]
    unsafe fn multiply(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::fma(a, b, c) }
    }
}

impl<S: Pairs> Term<S> for Pair {
    type Vector = S::P;

    #[inline(always)]
    unsafe fn splat(x: Self) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { S::splat_pair(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const Self) -> S::P {
        // SAFETY: the caller's promise.
        unsafe { S::load_pairs(p) }
    }

    #[inline(always)]
    unsafe fn multiply(a: S::P, b: S::P, c: S::V) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::dot(a, b, c) }
    }
}

/// The left factor.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a, E> {
    /// Row after row, so many elements apart.
    Rows(&'a [E], usize),
    /// Column after column, so many elements apart.
    Columns(&'a [E], usize),
}

/// Extents of a product.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    /// Rows of A and C.
    pub(crate) rows: usize,
    /// Columns of B and C: a multiple of the lanes.
    pub(crate) columns: usize,
    /// Columns of A and rows of B.
    pub(crate) depth: usize,
}

/// A product to be computed.
pub(crate) struct Product<'a, E> {
    pub(crate) size: Size,
    pub(crate) a: Left<'a, E>,
    /// The right factor, and the elements from one row to the next.
    pub(crate) b: (&'a [E], usize),
    /// The result, likewise.
    pub(crate) c: (&'a mut [f32], usize),
    /// Whether it is added to what is there.
    pub(crate) add: bool,
}

impl<E> Product<'_, E> {
    fn check(&self) {
        let Size { rows, columns, depth } = self.size;
        let reach =
            |lines: usize, stride: usize, len: usize| if lines == 0 { 0 } else { (lines - 1) * stride + len };
        let (a, needed) = match self.a {
            Left::Rows(a, stride) => (a.len(), reach(rows, stride, depth)),
            Left::Columns(a, stride) => (a.len(), reach(depth, stride, rows)),
        };
        assert!(needed <= a, "the left factor lies in its slice");
        assert!(reach(depth, self.b.1, columns) <= self.b.0.len(), "the right factor lies in its slice");
        assert!(reach(rows, self.c.1, columns) <= self.c.0.len(), "the result lies in its slice");
    }
}

impl Kernel for Product<'_, f32> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        // SAFETY: the caller's promise.
        unsafe { S::product(&mut self) }
    }
}

/// Computes a product in blocks of `J` rows × `RV` vectors.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, E: Term<S>, const RV: usize, const J: usize>(p: &mut Product<'_, E>) {
    p.check();
    assert!(p.size.columns.is_multiple_of(S::LANES), "rows of whole vectors");
    let (b, c) = (p.b.0.as_ptr(), p.c.0.as_mut_ptr());
    let mut n = 0;
    // SAFETY: the caller's promise, and `check` saw that all lies in its slice.
    unsafe {
        while n < p.size.columns {
            let wide = n + RV * S::LANES <= p.size.columns;
            let block =
                Block { a: p.a, b: (b.add(n), p.b.1), c: (c.add(n), p.c.1), add: p.add, size: p.size };
            match (wide, p.a) {
                (true, Left::Rows(..)) => block.columns::<S, RV, J, false>(),
                (true, Left::Columns(..)) => block.columns::<S, RV, J, true>(),
                (false, Left::Rows(..)) => block.columns::<S, 1, J, false>(),
                (false, Left::Columns(..)) => block.columns::<S, 1, J, true>(),
            }
            n += if wide { RV * S::LANES } else { S::LANES };
        }
    }
}

/// Some columns of a product.
#[derive(Clone, Copy)]
struct Block<'a, E> {
    size: Size,
    a: Left<'a, E>,
    b: (*const E, usize),
    c: (*mut f32, usize),
    add: bool,
}

impl<E: Copy> Block<'_, E> {
    /// All rows of `RV` vectors of columns; `T` where A lies column after column.
    #[inline(always)]
    unsafe fn columns<S: Simd, const RV: usize, const J: usize, const T: bool>(&self)
    where
        E: Term<S>,
    {
        let (rows, mut m) = (self.size.rows, 0);
        // SAFETY: `Product::check`.
        unsafe {
            while m + J <= rows {
                self.rows::<S, RV, J, T>(m);
                m += J;
            }
            while m + 4 <= rows {
                self.rows::<S, RV, 4, T>(m);
                m += 4;
            }
            while m < rows {
                self.rows::<S, RV, 1, T>(m);
                m += 1;
            }
        }
    }

    /// `J` rows from row `m`.
    #[inline(always)]
    unsafe fn rows<S: Simd, const RV: usize, const J: usize, const T: bool>(&self, m: usize)
    where
        E: Term<S>,
    {
        let (a, stride) = match self.a {
            Left::Rows(a, stride) | Left::Columns(a, stride) => (a.as_ptr(), stride),
        };
        // SAFETY: `Product::check`.
        unsafe {
            let a = a.add(if T { m } else { m * stride });
            let mut acc = [[S::splat(0.0); RV]; J];
            for k in 0..self.size.depth {
                let b = self.b.0.add(k * self.b.1);
                let mut vectors = [E::load(b); RV];
                for r in 1..RV {
                    vectors[r] = E::load(b.add(r * S::LANES));
                }
                for j in 0..J {
                    let x = E::splat(*a.add(if T { k * stride + j } else { j * stride + k }));
                    for r in 0..RV {
                        acc[j][r] = E::multiply(x, vectors[r], acc[j][r]);
                    }
                }
            }
            for j in 0..J {
                let c = self.c.0.add((m + j) * self.c.1);
                if self.add {
                    let old = load::<S, RV>(c);
                    for r in 0..RV {
                        acc[j][r] = S::add(old[r], acc[j][r]);
                    }
                }
                store::<S, RV>(c, acc[j]);
            }
        }
    }
}
