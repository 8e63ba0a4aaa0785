//! The entry to the kernels: an instruction set that the machine is known to have.

use half::bf16;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{
    Kernel,
    dots::Dots,
    matrix::MatrixBlock,
    pairs::PairBlock,
    panel::PanelProduct,
    portable,
    product::{Pair, Product},
    slopes::PairSlopes,
};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512bf16};
use crate::SimdLevel;

/// A level that this machine is known to have.
///
/// **Invariant:** made by [`Runner::new`] only, so that running a kernel is safe.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Runner(SimdLevel);

impl Runner {
    /// `None` where the machine lacks the instructions.
    pub(crate) fn new(level: SimdLevel) -> Option<Self> {
        level.is_available().then_some(Self(level))
    }

    /// The fastest level this machine has.
    pub(crate) fn detect() -> Self {
        Self(SimdLevel::detect())
    }

    /// The level.
    pub(crate) fn level(self) -> SimdLevel {
        self.0
    }

    /// Whether [`Self::run_matrix`] and [`Self::turn`] may be called.
    pub(crate) fn has_matrix(self) -> bool {
        self.0 == SimdLevel::Amx
    }

    /// Folds a block of keys into a tile; only where [`Self::has_matrix`].
    #[inline]
    pub(crate) fn run_matrix(self, block: &mut MatrixBlock<'_>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Amx => unsafe { amx::tile(block) },
            level => unreachable!("{level} has no matrix unit, and {} keys need one", block.keys),
        }
    }

    /// Turns 16 rows of `width` numbers round, `[number][row]`, square by square: from one row of a square to the next, and
    /// from one square to the next, there are so many numbers. Only where [`Self::has_matrix`].
    #[inline]
    pub(crate) fn turn(self, from: &[u32], width: usize, to: &mut [u32], strides: [usize; 2]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Amx => unsafe { amx::turn(from, width, to, strides) },
            level => {
                unreachable!("{level} has no matrix unit: {width} × {strides:?} {} {}", from.len(), to.len())
            }
        }
    }

    /// Whether [`Self::run_pairs`] may be called.
    pub(crate) fn has_pairs(self) -> bool {
        self.0 == SimdLevel::Avx512Bf16
    }

    /// Folds a block of bf16 keys into a tile; only where [`Self::has_pairs`].
    #[inline]
    pub(crate) fn run_pairs(self, block: &mut PairBlock<'_>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::tile(block) },
            level => unreachable!("{level} has no pairs, and {} keys need them", block.keys),
        }
    }

    /// Computes a product of pairs; only where [`Self::has_pairs`].
    #[inline]
    pub(crate) fn run_pair_product(self, product: &mut Product<'_, Pair>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::product(product) },
            level => unreachable!("{level} has no pairs, and {} rows need them", product.size.rows),
        }
    }

    /// Computes a product of packed pairs; only where [`Self::has_pairs`].
    #[inline]
    pub(crate) fn run_pair_panel(self, product: &mut PanelProduct<'_, Pair>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::panel(product) },
            level => unreachable!("{level} has no pairs, and {} rows need them", product.rows),
        }
    }

    /// Computes dot products of bf16 rows; only where [`Self::has_pairs`].
    #[inline]
    pub(crate) fn run_pair_dots(self, dots: &mut Dots<'_, bf16, bf16>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::dots(dots) },
            level => unreachable!("{level} has no pairs, and {} rows need them", dots.rows),
        }
    }

    /// Turns dot products into rounded weights and gradients; only where [`Self::has_pairs`].
    #[inline]
    pub(crate) fn run_pair_slopes(self, slopes: PairSlopes<'_>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::slopes(slopes) },
            level => unreachable!("{level} has no pairs, and {} rows need them", slopes.size.rows),
        }
    }

    /// Runs chains of pair dot products; only where [`Self::has_pairs`].
    pub(crate) fn run_pair_chains(self, links: usize) -> f32 {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512Bf16 => unsafe { avx512bf16::chains(links) },
            level => unreachable!("{level} has no pairs, and {links} links need them"),
        }
    }

    /// Runs `kernel` with the level's instructions.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Avx512 | SimdLevel::Avx512Bf16 | SimdLevel::Amx => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `new` saw the instructions.
            SimdLevel::Neon => unsafe { neon::run(kernel) },
            _ => portable::run(kernel),
        }
    }
}
