//! Which instruction set the kernels may use: detected once, or forced by tests.

use std::fmt;

#[cfg(target_arch = "aarch64")]
use crate::simd::neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{amx, avx2, avx512, avx512bf16};
use crate::{
    Tiles,
    simd::{Simd, portable},
};

/// A set of vector instructions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SimdLevel {
    /// Whatever the compiler generates from plain Rust.
    Portable,
    /// NEON of aarch64.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of bf16 pairs, used for bf16 tensors.
    Avx512Bf16,
    /// AVX-512 with matrix products of bf16 (AMX).
    Amx,
}

impl SimdLevel {
    /// Every level, those with more instructions last.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The fastest level this machine has.
    pub fn detect() -> Self {
        preferred().iter().copied().find(|level| level.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this machine has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => avx512bf16::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::is_available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::is_available(),
            #[allow(unreachable_patterns, reason = "levels of other processors")]
            _ => false,
        }
    }

    /// The name used in kernel names and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// The sizes of blocks that suit the level.
    pub(crate) const fn usual_tiles(self) -> Tiles {
        match self {
            Self::Amx => Tiles::MATRIX,
            _ => Tiles::USUAL,
        }
    }

    /// Lanes of a vector and rows of a full tile, worked on in blocks of `tiles`.
    pub(crate) fn shape(self, tiles: Tiles) -> Shape {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Shape::of::<avx2::Avx2>(tiles),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Bf16 | Self::Amx => Shape::of::<avx512::Avx512>(tiles),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Shape::of::<neon::Neon>(tiles),
            _ => Shape::of::<portable::Portable>(tiles),
        }
    }
}

/// Levels by how fast they are, measured and not guessed from what a processor offers: GFLOP/s of prefill at
/// 2048 × 128.
///
/// | processor | dtype | avx512 | avx512bf16 | amx |
/// | --- | --- | --- | --- | --- |
/// | Intel Emerald Rapids, one core among busy ones | bf16 | 131 | | 434 |
/// | | f16 | 137 | | 235 |
/// | | f32 | 131 | | 136 |
/// | the same, two quiet cores | bf16 | 350 | 190 | |
/// | AMD EPYC with AVX-512 | bf16 | 194 | 365 | |
/// | AMD EPYC (Zen 5), two quiet cores | bf16 | 501 | 928 | |
///
/// Intel's dot products of bf16 pairs run at half the rate of its multiply-adds, AMD's at twice the rate. f32 is multiplied by
/// vectors with AMX, too.
fn preferred() -> &'static [SimdLevel] {
    use SimdLevel::{Amx, Avx2, Avx512, Avx512Bf16, Neon};
    if is_intel() { &[Amx, Avx512, Avx2] } else { &[Amx, Avx512Bf16, Avx512, Avx2, Neon] }
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    crate::simd::maker() == *b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
const fn is_intel() -> bool {
    false
}

/// Sizes that an instruction set gives its kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Elements of a vector.
    pub(crate) lanes: usize,
    /// Rows of a full tile.
    pub(crate) tile_rows: usize,
    /// Rows of a sequence that are worth laying out its keys for matrix units.
    pub(crate) many: usize,
    /// Keys of a block and tiles of a chunk.
    pub(crate) tiles: Tiles,
}

impl Shape {
    const fn of<S: Simd>(tiles: Tiles) -> Self {
        Self { lanes: S::LANES, tile_rows: S::TILE_ROWS, many: 0, tiles }
    }

    /// Rows of the smallest tile that holds `rows` rows, at most a full tile.
    pub(crate) fn tile_for(self, rows: usize) -> usize {
        rows.next_multiple_of(self.lanes).min(self.tile_rows)
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
