//! Which instructions the kernels may use: detected once, or forced by tests.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512, avx512bf16};
use crate::{
    Tiles,
    simd::{Simd, portable},
};

/// A set of vector instructions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SimdLevel {
    /// Whatever the compiler makes of plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of bf16 pairs, used for bf16 tensors.
    Avx512Bf16,
}

impl SimdLevel {
    /// Every level, slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The fastest level this machine has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|l| l.is_available()).unwrap_or(Self::Portable)
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
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The name used in kernel names and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Lanes of a vector and rows of a full tile, worked on in blocks of `tiles`.
    pub(crate) fn shape(self, tiles: Tiles) -> Shape {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Shape::of::<avx2::Avx2>(tiles),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Bf16 => Shape::of::<avx512::Avx512>(tiles),
            _ => Shape::of::<portable::Portable>(tiles),
        }
    }
}

/// Sizes that an instruction set gives its kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Elements of a vector.
    pub(crate) lanes: usize,
    /// Rows of a full tile.
    pub(crate) tile_rows: usize,
    /// Keys of a block and tiles of a chunk.
    pub(crate) tiles: Tiles,
}

impl Shape {
    const fn of<S: Simd>(tiles: Tiles) -> Self {
        Self { lanes: S::LANES, tile_rows: S::TILE_ROWS, tiles }
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
