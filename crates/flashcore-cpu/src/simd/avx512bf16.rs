//! AVX-512 with dot products of bf16 pairs: twice the multiplications per instruction.

use std::arch::x86_64::*;

use half::bf16;

use super::{
    Simd,
    avx512::{self, Avx512},
    chains::CHAINS,
    dots::{self, Dots, Paired},
    pairs::{self, PairBlock, Pairs},
    panel::{self, PanelProduct},
    product::{self, Pair, Product},
    slopes::PairSlopes,
};

/// Whether this machine has the instructions.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512bf16") && avx512::is_available()
}

/// Folds a block of bf16 keys into a tile.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn tile(block: &mut PairBlock<'_>) {
    // SAFETY: this function has the features.
    unsafe {
        match block.rows / Avx512::LANES {
            1 => pairs::attend::<Avx512, 1, 8>(block),
            _ => pairs::attend::<Avx512, 2, 8>(block),
        }
    }
}

/// Computes a product of pairs.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn product(product: &mut Product<'_, Pair>) {
    // SAFETY: this function has the features.
    unsafe { product::multiply::<Avx512, Pair, 2, 8>(product) }
}

/// Computes a product of packed pairs.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn panel(product: &mut PanelProduct<'_, Pair>) {
    // SAFETY: this function has the features; as for f32.
    unsafe { panel::multiply::<Avx512, Pair, 4, 6>(product) }
}

/// Computes dot products of bf16 rows.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn dots(dots: &mut Dots<'_, bf16, bf16>) {
    // SAFETY: this function has the features.
    unsafe { dots::dots::<Avx512, Paired>(dots) }
}

/// Turns dot products into rounded weights and gradients.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn slopes(mut slopes: PairSlopes<'_>) {
    // SAFETY: this function has the features.
    unsafe { slopes.run::<Avx512>() }
}

/// Chains of dependent dot products that touch registers only; how fast they run is the roof for bf16.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn chains(links: usize) -> f32 {
    let pair = std::hint::black_box(0x3c00_3c00); // twice 0.0078125 as bf16
    // SAFETY: this function has the features.
    unsafe {
        let (a, b) = (Avx512::splat_pair(pair), Avx512::splat_pair(pair));
        let mut chains = [Avx512::splat(0.5); CHAINS];
        for _ in 0..links {
            for chain in &mut chains {
                *chain = Avx512::dot(a, b, *chain);
            }
        }
        chains.into_iter().fold(0.0, |total, chain| total + Avx512::sum(chain))
    }
}

impl Pairs for Avx512 {
    type P = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat_pair(bits: u32) -> __m512i {
        _mm512_set1_epi32(bits.cast_signed())
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_pairs(p: *const u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_pairs(p: *mut u32, x: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn dot(a: __m512i, b: __m512i, c: __m512) -> __m512 {
        // SAFETY: the same bits, seen as bf16.
        let [a, b] = unsafe { std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([a, b]) };
        _mm512_dpbf16_ps(c, a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn round_pairs(first: __m512, second: __m512) -> __m512i {
        // SAFETY: the same bits, seen as integers.
        let halves: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) };
        // Lane i takes the i-th element of both halves.
        let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        let from_second = _mm512_add_epi32(lanes, _mm512_set1_epi32(16));
        let zip = _mm512_or_si512(lanes, _mm512_slli_epi32::<16>(from_second));
        _mm512_permutexvar_epi16(zip, halves)
    }
}
