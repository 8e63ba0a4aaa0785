//! Vector instructions behind one trait, and the kernels written against it.
//!
//! A kernel is a value that implements [`Kernel`]: its `run` is generic over [`Simd`], always inlined, and entered
//! through [`runner::Runner::run`], which picks the instruction set and gives the whole kernel its target features. A
//! new instruction set is a new file with one `impl Simd` and one entry function, and a line in [`crate::SimdLevel`].
//! Instructions that multiply something other than vectors of f32 need a block layout of their own, as `pairs` does for
//! bf16 dot products and `matrix` for matrix units, and a variant of [`crate::panels::Panels`].

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "only x86-64 multiplies pairs and matrices")
)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512bf16;
pub(crate) mod chains;
pub(crate) mod convert;
pub(crate) mod dots;
pub(crate) mod dropout;
pub(crate) mod exp2;
pub(crate) mod glu;
pub(crate) mod matrix;
pub(crate) mod narrow;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod pack;
pub(crate) mod pairs;
pub(crate) mod panel;
pub(crate) mod portable;
pub(crate) mod product;
pub(crate) mod rows;
pub(crate) mod runner;
pub(crate) mod slopes;
pub(crate) mod tile;

use flashcore_core::{E4M3, E5M2, Element};
use half::{bf16, f16};

use panel::PanelProduct;
use product::Product;
use tile::TileBlock;

/// Vectors of f32.
///
/// # Safety
/// Every function may only be called on a machine that has the instructions of `Self`, and pointers must be valid for
/// [`Self::LANES`] elements (no alignment needed).
pub(crate) trait Simd: Copy {
    /// A vector.
    type V: Copy;
    /// Elements of a vector.
    const LANES: usize;
    /// Rows of a tile: a multiple of [`Self::LANES`].
    const TILE_ROWS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn load_f16(p: *const f16) -> Self::V;
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    unsafe fn load_e4m3(p: *const E4M3) -> Self::V;
    unsafe fn load_e5m2(p: *const E5M2) -> Self::V;
    /// Prefetches a cache line; any address is allowed.
    unsafe fn fetch(p: *const u8);
    unsafe fn store(p: *mut f32, x: Self::V);
    /// Rounds to nearest, ties to even.
    unsafe fn store_f16(p: *mut f16, x: Self::V);
    /// Rounds to nearest, ties to even.
    unsafe fn store_bf16(p: *mut bf16, x: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, rounded once where the machine can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of each pair; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of each pair; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The vector whose bits are those of `x` shifted left by 23: the low bits become an exponent.
    unsafe fn exponent(x: Self::V) -> Self::V;
    /// `x` where `start ≤ at < end`, −∞ elsewhere.
    unsafe fn within(x: Self::V, at: Self::V, start: Self::V, end: Self::V) -> Self::V;
    /// `x` where a hash of words, which vectors hold as bits, is at least `threshold`; 0 elsewhere. The hash is that of
    /// [`flashcore_core::DropoutWords::hash`], whose first word is the sum of the first vector's and `offset`.
    unsafe fn kept(x: Self::V, words: [Self::V; 2], offset: u32, threshold: u32) -> Self::V;
    /// The sum of all elements, in a fixed order.
    unsafe fn sum(x: Self::V) -> f32;
    /// The sum of all elements of each, in an order that is the same for all of them.
    unsafe fn sums(x: [Self::V; 4]) -> [f32; 4];
    /// The largest element.
    unsafe fn largest(x: Self::V) -> f32;

    /// Folds a block of keys into a tile, with the register blocking that suits the instruction set.
    unsafe fn tile(block: &mut TileBlock<'_>);

    /// Computes a product, likewise.
    unsafe fn product(product: &mut Product<'_, f32>);

    /// Computes a product of packed factors, likewise.
    unsafe fn panel(product: &mut PanelProduct<'_, f32>);

    /// Exchanges rows and columns of the first [`Self::LANES`] vectors.
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self::V; MOST_LANES]) {
        let mut flat = [[0.0; MOST_LANES]; MOST_LANES];
        // SAFETY: the caller's promise; no vector has more lanes.
        unsafe {
            for n in 0..Self::LANES {
                Self::store(flat[n].as_mut_ptr(), square[n]);
            }
            for n in 0..Self::LANES {
                let mut column = [0.0; MOST_LANES];
                for m in 0..Self::LANES {
                    column[m] = flat[m][n];
                }
                square[n] = Self::load(column.as_ptr());
            }
        }
    }
}

/// Who made the processor, in its own words.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "safe in newer releases of Rust")]
pub(crate) fn maker() -> [u8; 12] {
    // SAFETY: every x86-64 has CPUID leaf 0.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    let mut name = [0; 12];
    for (to, word) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    name
}

/// Something to run with the target features of an instruction set.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// Runs it; implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The machine has the instructions of `S`.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// An element type that vectors can load and store.
pub(crate) trait Lane: flashcore_core::Element {
    /// Zero.
    const ZERO: Self;
    /// Parts of bf16 that hold a number.
    const PARTS: usize;
    /// Loads and widens.
    ///
    /// # Safety
    /// As for [`Simd::load`].
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    /// Rounds and stores.
    ///
    /// # Safety
    /// As for [`Simd::store`].
    unsafe fn store<S: Simd>(p: *mut Self, x: S::V);
    /// The slice itself where it is f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
    /// The same, to be written.
    fn as_f32_mut(_: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
    /// The slice itself where it is bf16.
    fn as_bf16(_: &[Self]) -> Option<&[bf16]> {
        None
    }
}

impl Lane for f32 {
    const ZERO: Self = 0.0;
    const PARTS: usize = 3;

    fn as_f32(slice: &[Self]) -> Option<&[f32]> {
        Some(slice)
    }

    fn as_f32_mut(slice: &mut [Self]) -> Option<&mut [f32]> {
        Some(slice)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store(p, x) }
    }
}

impl Lane for f16 {
    const ZERO: Self = f16::ZERO;
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store_f16(p, x) }
    }
}

impl Lane for bf16 {
    const ZERO: Self = bf16::ZERO;
    const PARTS: usize = 1;

    fn as_bf16(slice: &[Self]) -> Option<&[bf16]> {
        Some(slice)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::V) {
        // SAFETY: the caller's promise.
        unsafe { S::store_bf16(p, x) }
    }
}

/// 8-bit floats are read by vectors and written one by one: no result is made of many.
macro_rules! lane_of_bytes {
    ($type:ty, $load:ident) => {
        impl Lane for $type {
            const ZERO: Self = <$type>::from_bits(0);
            const PARTS: usize = 1;

            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { S::$load(p) }
            }

            #[inline(always)]
            unsafe fn store<S: Simd>(p: *mut Self, x: S::V) {
                let mut wide = [0.0; MOST_LANES];
                // SAFETY: the caller's promise; no vector has more lanes.
                unsafe {
                    S::store(wide.as_mut_ptr(), x);
                    for n in 0..S::LANES {
                        p.add(n).write(Element::from_f32(wide[n]));
                    }
                }
            }
        }
    };
}

/// Elements of the widest vector.
pub(crate) const MOST_LANES: usize = 16;

lane_of_bytes!(E4M3, load_e4m3);
lane_of_bytes!(E5M2, load_e5m2);
