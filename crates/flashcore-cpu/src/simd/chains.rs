//! Chains of dependent multiply-adds that touch registers only: their speed is the roof for kernels. Called by
//! `peak`.

use std::hint::black_box;

use super::{Kernel, Simd};

/// Chains side by side: enough to hide the latency of one, few enough for the registers.
pub(crate) const CHAINS: usize = 12;

/// Multiply-adds in f32.
pub(crate) struct Chains {
    /// Links of each chain.
    pub(crate) links: usize,
}

impl Kernel for Chains {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: the caller's promise; nothing but registers is touched.
        unsafe {
            let (factor, term) = (S::splat(black_box(0.999)), S::splat(black_box(0.001)));
            let mut chains = [S::splat(0.5); CHAINS];
            for _ in 0..self.links {
                for chain in &mut chains {
                    *chain = S::fma(*chain, factor, term);
                }
            }
            let mut total = S::splat(0.0);
            for chain in chains {
                total = S::add(total, chain);
            }
            S::sum(total)
        }
    }
}
