//! Vectors in plain Rust: arrays that the compiler maps to whatever the target has. Runs everywhere, under miri too.

use flashcore_core::{DROPOUT_FACTORS, E4M3, E5M2, Element};
use half::{bf16, f16};

use super::{
    Kernel, Simd,
    panel::{self, PanelProduct},
    product::{self, Product},
    tile::{self, TileBlock},
};

/// Plain arrays.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// Runs `kernel` on plain arrays.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: every machine has what plain Rust needs.
    unsafe { kernel.run::<Portable>() }
}

type Array = [f32; 8];

#[inline(always)]
fn zip(a: Array, b: Array, f: impl Fn(f32, f32) -> f32) -> Array {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
unsafe fn widen<T: Element>(p: *const T) -> Array {
    // SAFETY: the trait's contract: `p` is valid for LANES elements.
    unsafe { p.cast::<[T; 8]>().read_unaligned() }.map(T::to_f32)
}

#[inline(always)]
unsafe fn round<T: Element>(p: *mut T, x: Array) {
    // SAFETY: the trait's contract: `p` is valid for LANES elements.
    unsafe { p.cast::<[T; 8]>().write_unaligned(x.map(T::from_f32)) }
}

impl Simd for Portable {
    type V = Array;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Array {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen(p) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen(p) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen(p) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const E4M3) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen(p) }
    }

    #[inline(always)]
    unsafe fn load_e5m2(p: *const E5M2) -> Array {
        // SAFETY: the caller's promise.
        unsafe { widen(p) }
    }

    #[inline(always)]
    unsafe fn fetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Array) {
        // SAFETY: the caller's promise.
        unsafe { round(p, x) }
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: Array) {
        // SAFETY: the caller's promise.
        unsafe { round(p, x) }
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut bf16, x: Array) {
        // SAFETY: the caller's promise.
        unsafe { round(p, x) }
    }

    #[inline(always)]
    unsafe fn add(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(a: Array, b: Array, c: Array) -> Array {
        // A fused `mul_add` would be a library call where the target has no such instruction.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn max(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(a: Array, b: Array) -> Array {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn exponent(x: Array) -> Array {
        x.map(|x| f32::from_bits(x.to_bits() << 23))
    }

    #[inline(always)]
    unsafe fn within(x: Array, at: Array, start: Array, end: Array) -> Array {
        std::array::from_fn(|i| if at[i] >= start[i] && at[i] < end[i] { x[i] } else { f32::NEG_INFINITY })
    }

    #[inline(always)]
    unsafe fn kept(x: Array, [first, second]: [Array; 2], offset: u32, threshold: u32) -> Array {
        std::array::from_fn(|i| {
            let word = first[i].to_bits().wrapping_add(offset);
            let word = (word ^ word >> 16).wrapping_mul(DROPOUT_FACTORS[0]);
            let hash = (word ^ word >> 15 ^ second[i].to_bits()).wrapping_mul(DROPOUT_FACTORS[1]);
            if hash >= threshold { x[i] } else { 0.0 }
        })
    }

    #[inline(always)]
    unsafe fn sum(x: Array) -> f32 {
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }

    #[inline(always)]
    unsafe fn sums(x: [Array; 4]) -> [f32; 4] {
        // SAFETY: needs nothing.
        x.map(|x| unsafe { Self::sum(x) })
    }

    #[inline(always)]
    unsafe fn largest(x: Array) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn tile(block: &mut TileBlock<'_>) {
        // SAFETY: the caller's promise. 2 × 8 lanes fit the sixteen 4-lane registers that most targets have.
        unsafe { tile::attend::<Self, 1, 2>(block) }
    }

    #[inline(always)]
    unsafe fn product(product: &mut Product<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe { product::multiply::<Self, f32, 1, 4>(product) }
    }

    #[inline(always)]
    unsafe fn panel(product: &mut PanelProduct<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe { panel::multiply::<Self, f32, 1, 4>(product) }
    }
}
