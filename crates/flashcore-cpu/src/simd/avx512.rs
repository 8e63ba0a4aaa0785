//! AVX-512: 32 registers of 16 floats.

use std::arch::x86_64::*;

use flashcore_core::{DROPOUT_FACTORS, E4M3, E5M2};
use half::{bf16, f16};

use super::{
    Kernel, MOST_LANES, Simd,
    panel::{self, PanelProduct},
    product::{self, Product},
    tile::{self, TileBlock},
};

/// AVX-512 F, BW, DQ and VL with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Whether this machine has the instructions.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && super::avx2::is_available()
}

/// Runs `kernel` with AVX-512.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function has the features.
    unsafe { kernel.run::<Avx512>() }
}

/// Adds quarters of each vector, those of the first to the low half.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_quarters(a: __m512, b: __m512) -> __m512 {
    let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
    _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const TILE_ROWS: usize = 32;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f16(p: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(p: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        let wide = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(p.cast()) });
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_e4m3(p: *const E4M3) -> __m512 {
        // As an f16 an E4M3 is its 256th, and has no NaN of its own.
        // SAFETY: the caller's promise.
        let bytes = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(p.cast()) });
        let half = _mm256_and_si256(_mm256_slli_epi16::<7>(bytes), _mm256_set1_epi16(0xbf80_u16 as i16));
        let nan = _mm256_cmpeq_epi16(_mm256_slli_epi16::<1>(half), _mm256_set1_epi16(0x7f00));
        _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(256.0))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_e5m2(p: *const E5M2) -> __m512 {
        // SAFETY: the caller's promise.
        let bytes = _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(p.cast()) });
        _mm512_cvtph_ps(_mm256_slli_epi16::<8>(bytes))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    #[allow(unused_unsafe, reason = "safe in newer releases of Rust")]
    unsafe fn fetch(p: *const u8) {
        // SAFETY: fetching ahead never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, x) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_f16(p: *mut f16, x: __m512) {
        let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), half) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_bf16(p: *mut bf16, x: __m512) {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
        // Rounding could carry a NaN's payload away; a quiet bit keeps it one.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let high = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, nan, quiet));
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn exponent(x: __m512) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn within(x: __m512, at: __m512, start: __m512, end: __m512) -> __m512 {
        let after = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(at, start);
        let inside = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(after, at, end);
        _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), inside, x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn kept(x: __m512, [first, second]: [__m512; 2], offset: u32, threshold: u32) -> __m512 {
        let [a, b] = DROPOUT_FACTORS.map(u32::cast_signed);
        let word = _mm512_add_epi32(_mm512_castps_si512(first), _mm512_set1_epi32(offset.cast_signed()));
        let word = _mm512_xor_si512(word, _mm512_srli_epi32::<16>(word));
        let word = _mm512_mullo_epi32(word, _mm512_set1_epi32(a));
        let word = _mm512_xor_si512(word, _mm512_srli_epi32::<15>(word));
        let hash = _mm512_xor_si512(word, _mm512_castps_si512(second));
        let hash = _mm512_mullo_epi32(hash, _mm512_set1_epi32(b));
        let stays = _mm512_cmpge_epu32_mask(hash, _mm512_set1_epi32(threshold.cast_signed()));
        _mm512_maskz_mov_ps(stays, x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sum(x: __m512) -> f32 {
        _mm512_reduce_add_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sums([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        let quarters = add_quarters(add_quarters(a, b), add_quarters(c, d));
        let pairs = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
        let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0b10_11_00_01>(pairs));
        let first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        let sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(first, sums));
        // SAFETY: both are four numbers.
        unsafe { std::mem::transmute::<__m128, [f32; 4]>(sums) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn largest(x: __m512) -> f32 {
        _mm512_reduce_max_ps(x)
    }

    #[inline(always)]
    unsafe fn tile(block: &mut TileBlock<'_>) {
        // 2 × 8 keeps the multiply-add units of a Zen 4 busy: 2 × 4, 3 × 8 and 4 × 6 were equal within 1.5 %, 2 × 12
        // 5 % slower.
        // SAFETY: the caller's promise.
        unsafe {
            match block.rows / Self::LANES {
                1 => tile::attend::<Self, 1, 8>(block),
                _ => tile::attend::<Self, 2, 8>(block),
            }
        }
    }

    #[inline(always)]
    unsafe fn product(product: &mut Product<'_, f32>) {
        // SAFETY: the caller's promise.
        unsafe { product::multiply::<Self, f32, 2, 8>(product) }
    }

    #[inline(always)]
    unsafe fn panel(product: &mut PanelProduct<'_, f32>) {
        // SAFETY: the caller's promise; 24 sums, 4 vectors of B and one of A leave three of 32 registers.
        unsafe { panel::multiply::<Self, f32, 4, 6>(product) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose(square: &mut [__m512; MOST_LANES]) {
        let mut from = [_mm512_setzero_si512(); MOST_LANES];
        for n in 0..MOST_LANES {
            from[n] = _mm512_castps_si512(square[n]);
        }
        let mut x = from;
        for n in 0..8 {
            x[2 * n] = _mm512_unpacklo_epi32(from[2 * n], from[2 * n + 1]);
            x[2 * n + 1] = _mm512_unpackhi_epi32(from[2 * n], from[2 * n + 1]);
        }
        let from = x;
        for n in 0..4 {
            for m in 0..2 {
                let [a, b] = [from[4 * n + m], from[4 * n + m + 2]];
                x[4 * n + 2 * m] = _mm512_unpacklo_epi64(a, b);
                x[4 * n + 2 * m + 1] = _mm512_unpackhi_epi64(a, b);
            }
        }
        // Squares of four lie in quarters now, and quarters are exchanged.
        let from = x;
        for n in 0..4 {
            for m in [0, 8] {
                let [a, b] = [from[m + n], from[m + n + 4]];
                x[m + n] = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                x[m + n + 4] = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
            }
        }
        for n in 0..8 {
            let [a, b] = [x[n], x[n + 8]];
            square[n] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b));
            square[n + 8] = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0b11_01_11_01>(a, b));
        }
    }
}
