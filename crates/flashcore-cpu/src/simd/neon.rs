//! NEON: 32 registers of 4 floats, two of which make a vector here.
//!
//! f16 and bf16 are converted on their way: every processor with NEON has the conversions of f16, and bf16 is half an f32.

use std::arch::{aarch64::*, asm};

use flashcore_core::{DROPOUT_FACTORS, E4M3, E5M2};
use half::{bf16, f16};

use super::{
    Kernel, Simd,
    panel::{self, PanelProduct},
    product::{self, Product},
    tile::{self, TileBlock},
};

/// NEON with FMA, as every aarch64 has it.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// Whether this machine has the instructions.
pub(crate) fn is_available() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

/// Runs `kernel` with NEON.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function has the features.
    unsafe { kernel.run::<Neon>() }
}

/// Eight floats.
type V = [float32x4_t; 2];

/// Applies an instruction to both halves.
macro_rules! both {
    ($of:ident, $($x:ident),+) => {
        // SAFETY: the caller's promise.
        unsafe { [$of($($x[0]),+), $of($($x[1]),+)] }
    };
}

/// The numbers whose f16 bits these are.
#[inline(always)]
unsafe fn widen_f16(bits: uint16x8_t) -> V {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: the caller's promise; stable Rust has no intrinsics for these two instructions.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {x:v}.4h",
            "fcvtl2 {high:v}.4s, {x:v}.8h",
            x = in(vreg) bits,
            low = out(vreg) low,
            high = lateout(vreg) high,
            options(pure, nomem, nostack),
        );
    }
    [low, high]
}

/// Rounds to bf16, ties to even; a NaN stays one.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> uint16x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
        // Rounding could carry a NaN's payload away; a quiet bit keeps it one.
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
    }
}

/// What half a vector keeps: see [`Simd::kept`].
#[inline(always)]
unsafe fn kept_half(
    x: float32x4_t,
    [first, second]: [float32x4_t; 2],
    offset: u32,
    threshold: u32,
) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let word = vaddq_u32(vreinterpretq_u32_f32(first), vdupq_n_u32(offset));
        let word = vmulq_n_u32(veorq_u32(word, vshrq_n_u32::<16>(word)), DROPOUT_FACTORS[0]);
        let word = veorq_u32(veorq_u32(word, vshrq_n_u32::<15>(word)), vreinterpretq_u32_f32(second));
        let stays = vcgeq_u32(vmulq_n_u32(word, DROPOUT_FACTORS[1]), vdupq_n_u32(threshold));
        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), stays))
    }
}

impl Simd for Neon {
    type V = V;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { [vdupq_n_f32(x); 2] }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4))] }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> V {
        // SAFETY: the caller's promise.
        unsafe { widen_f16(vld1q_u16(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            let x = vld1q_u16(p.cast());
            let (low, high) = (vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(low)), vreinterpretq_f32_u32(vshlq_n_u32::<16>(high))]
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const E4M3) -> V {
        // As an f16 an E4M3 is its 256th, and has no NaN of its own.
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = vreinterpretq_u16_s16(vmovl_s8(vld1_s8(p.cast())));
            let half = vandq_u16(vshlq_n_u16::<7>(bytes), vdupq_n_u16(0xbf80));
            let nan = vceqq_u16(vshlq_n_u16::<1>(half), vdupq_n_u16(0x7f00));
            widen_f16(vorrq_u16(half, nan)).map(|x| vmulq_n_f32(x, 256.0))
        }
    }

    #[inline(always)]
    unsafe fn load_e5m2(p: *const E5M2) -> V {
        // SAFETY: the caller's promise.
        unsafe { widen_f16(vshlq_n_u16::<8>(vmovl_u8(vld1_u8(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn fetch(p: *const u8) {
        // SAFETY: fetching ahead never faults.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, readonly, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: V) {
        // SAFETY: the caller's promise.
        unsafe {
            vst1q_f32(p, x[0]);
            vst1q_f32(p.add(4), x[1]);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(p: *mut f16, x: V) {
        // SAFETY: the caller's promise; as for `load_f16`.
        unsafe {
            let halves: uint16x8_t;
            asm!(
                "fcvtn {to:v}.4h, {low:v}.4s",
                "fcvtn2 {to:v}.8h, {high:v}.4s",
                low = in(vreg) x[0],
                high = in(vreg) x[1],
                to = out(vreg) halves,
                options(pure, nomem, nostack),
            );
            vst1q_u16(p.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(p: *mut bf16, x: V) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_u16(p.cast(), vcombine_u16(round_bf16(x[0]), round_bf16(x[1]))) }
    }

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        both!(vaddq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        both!(vsubq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        both!(vmulq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        both!(vdivq_f32, a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        both!(vfmaq_f32, c, a, b)
    }

    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        let larger = both!(vcgtq_f32, a, b);
        both!(vbslq_f32, larger, a, b)
    }

    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        let smaller = both!(vcltq_f32, a, b);
        both!(vbslq_f32, smaller, a, b)
    }

    #[inline(always)]
    unsafe fn exponent(x: V) -> V {
        let bits = both!(vreinterpretq_u32_f32, x);
        // SAFETY: the caller's promise.
        let shifted = unsafe { [vshlq_n_u32::<23>(bits[0]), vshlq_n_u32::<23>(bits[1])] };
        both!(vreinterpretq_f32_u32, shifted)
    }

    #[inline(always)]
    unsafe fn within(x: V, at: V, start: V, end: V) -> V {
        let (after, before) = (both!(vcgeq_f32, at, start), both!(vcltq_f32, at, end));
        let inside = both!(vandq_u32, after, before);
        // SAFETY: the caller's promise.
        let hidden = unsafe { [vdupq_n_f32(f32::NEG_INFINITY); 2] };
        both!(vbslq_f32, inside, x, hidden)
    }

    #[inline(always)]
    unsafe fn kept(x: V, [first, second]: [V; 2], offset: u32, threshold: u32) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            [
                kept_half(x[0], [first[0], second[0]], offset, threshold),
                kept_half(x[1], [first[1], second[1]], offset, threshold),
            ]
        }
    }

    #[inline(always)]
    unsafe fn sum(x: V) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { vaddvq_f32(vaddq_f32(x[0], x[1])) }
    }

    #[inline(always)]
    unsafe fn sums(x: [V; 4]) -> [f32; 4] {
        // SAFETY: the caller's promise; both are four numbers.
        unsafe {
            let [a, b] = [vaddq_f32(x[0][0], x[0][1]), vaddq_f32(x[1][0], x[1][1])];
            let [c, d] = [vaddq_f32(x[2][0], x[2][1]), vaddq_f32(x[3][0], x[3][1])];
            let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            std::mem::transmute::<float32x4_t, [f32; 4]>(sums)
        }
    }

    #[inline(always)]
    unsafe fn largest(x: V) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(x[0], x[1])) }
    }

    #[inline(always)]
    unsafe fn tile(block: &mut TileBlock<'_>) {
        // SAFETY: the caller's promise; 4 × 4 registers of sums leave room for the factors.
        unsafe {
            match block.rows / Self::LANES {
                1 => tile::attend::<Self, 1, 8>(block),
                _ => tile::attend::<Self, 2, 4>(block),
            }
        }
    }

    #[inline(always)]
    unsafe fn product(product: &mut Product<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe { product::multiply::<Self, f32, 2, 4>(product) }
    }

    #[inline(always)]
    unsafe fn panel(product: &mut PanelProduct<'_, f32>) {
        // SAFETY: the caller's promise; two registers to a vector, 24 of 32 hold sums.
        unsafe { panel::multiply::<Self, f32, 2, 6>(product) }
    }
}
