//! AVX2 with FMA: 16 registers of 8 floats.

use std::arch::x86_64::*;

use flashcore_core::{DROPOUT_FACTORS, E4M3, E5M2};
use half::{bf16, f16};

use super::{
    Kernel, MOST_LANES, Simd,
    panel::{self, PanelProduct},
    product::{self, Product},
    tile::{self, TileBlock},
};

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Whether this machine has the instructions.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Runs `kernel` with AVX2.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function has the features.
    unsafe { kernel.run::<Avx2>() }
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 16;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load_f16(p: *const f16) -> __m256 {
        // SAFETY: the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_bf16(p: *const bf16) -> __m256 {
        // SAFETY: the caller's promise.
        let wide = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(p.cast()) });
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load_e4m3(p: *const E4M3) -> __m256 {
        // As an f16 an E4M3 is its 256th, and has no NaN of its own.
        // SAFETY: the caller's promise.
        let bytes = _mm_cvtepi8_epi16(unsafe { _mm_loadl_epi64(p.cast()) });
        let half = _mm_and_si128(_mm_slli_epi16::<7>(bytes), _mm_set1_epi16(0xbf80_u16 as i16));
        let nan = _mm_cmpeq_epi16(_mm_slli_epi16::<1>(half), _mm_set1_epi16(0x7f00));
        _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load_e5m2(p: *const E5M2) -> __m256 {
        // SAFETY: the caller's promise.
        let bytes = _mm_cvtepu8_epi16(unsafe { _mm_loadl_epi64(p.cast()) });
        _mm256_cvtph_ps(_mm_slli_epi16::<8>(bytes))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    #[allow(unused_unsafe, reason = "safe in newer releases of Rust")]
    unsafe fn fetch(p: *const u8) {
        // SAFETY: fetching ahead never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, x) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store_f16(p: *mut f16, x: __m256) {
        let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), half) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store_bf16(p: *mut bf16, x: __m256) {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
        // Rounding could carry a NaN's payload away; a quiet bit keeps it one.
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)));
        let kept = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan));
        let high = _mm256_srli_epi32::<16>(kept);
        let packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), packed) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn exponent(x: __m256) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn within(x: __m256, at: __m256, start: __m256, end: __m256) -> __m256 {
        let after = _mm256_cmp_ps::<_CMP_GE_OQ>(at, start);
        let inside = _mm256_and_ps(after, _mm256_cmp_ps::<_CMP_LT_OQ>(at, end));
        _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, inside)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn kept(x: __m256, [first, second]: [__m256; 2], offset: u32, threshold: u32) -> __m256 {
        let [a, b] = DROPOUT_FACTORS.map(u32::cast_signed);
        let word = _mm256_add_epi32(_mm256_castps_si256(first), _mm256_set1_epi32(offset.cast_signed()));
        let word = _mm256_xor_si256(word, _mm256_srli_epi32::<16>(word));
        let word = _mm256_mullo_epi32(word, _mm256_set1_epi32(a));
        let word = _mm256_xor_si256(word, _mm256_srli_epi32::<15>(word));
        let hash = _mm256_xor_si256(word, _mm256_castps_si256(second));
        let hash = _mm256_mullo_epi32(hash, _mm256_set1_epi32(b));
        // There is no comparison without a sign; the larger of both is the hash where it stays.
        let larger = _mm256_max_epu32(hash, _mm256_set1_epi32(threshold.cast_signed()));
        _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(larger, hash)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sum(x: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sums([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // Both halves hold sums of four elements, one for each vector.
        let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        // SAFETY: both are four numbers.
        unsafe { std::mem::transmute::<__m128, [f32; 4]>(sums) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn largest(x: __m256) -> f32 {
        let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }

    #[inline(always)]
    unsafe fn tile(block: &mut TileBlock<'_>) {
        // SAFETY: the caller's promise.
        unsafe {
            match block.rows / Self::LANES {
                1 => tile::attend::<Self, 1, 4>(block),
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
        // SAFETY: the caller's promise; 12 sums, two vectors of B and one of A leave one of 16 registers.
        unsafe { panel::multiply::<Self, f32, 2, 6>(product) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transpose(square: &mut [__m256; MOST_LANES]) {
        let mut x = *square;
        for n in 0..4 {
            x[2 * n] = _mm256_unpacklo_ps(square[2 * n], square[2 * n + 1]);
            x[2 * n + 1] = _mm256_unpackhi_ps(square[2 * n], square[2 * n + 1]);
        }
        // Squares of four lie in halves then, and halves are exchanged.
        for m in 0..2 {
            let (a, b, c, d) = (x[m], x[m + 2], x[m + 4], x[m + 6]);
            let even = [_mm256_shuffle_ps::<0b01_00_01_00>(a, b), _mm256_shuffle_ps::<0b01_00_01_00>(c, d)];
            let odd = [_mm256_shuffle_ps::<0b11_10_11_10>(a, b), _mm256_shuffle_ps::<0b11_10_11_10>(c, d)];
            square[2 * m] = _mm256_permute2f128_ps::<0x20>(even[0], even[1]);
            square[2 * m + 1] = _mm256_permute2f128_ps::<0x20>(odd[0], odd[1]);
            square[2 * m + 4] = _mm256_permute2f128_ps::<0x31>(even[0], even[1]);
            square[2 * m + 5] = _mm256_permute2f128_ps::<0x31>(odd[0], odd[1]);
        }
    }
}
