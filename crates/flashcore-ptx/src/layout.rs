//! Where things lie: swizzles, fragments, descriptors, tiles and boxes, as pure functions.
//!
//! Used by `flashcore-tile` to emit addresses and by `flashcore-sim` to execute them, so both share one
//! definition. The formulas are those of the PTX ISA (shared-memory swizzling; matrix fragments; wgmma
//! descriptors); the tests check every element.
//!
//! | idea | function |
//! | --- | --- |
//! | 16-byte chunks of a 128-byte line are permuted by the line number | [`Swizzle::apply`] |
//! | which element a lane's register holds | [`fragment_a`], [`fragment_b`], [`fragment_home`] |
//! | the same for the 128 threads of a warpgroup | [`warpgroup_fragment`] |
//! | rows and elements of `ldmatrix`/`stmatrix` | [`ldmatrix_row`], [`ldmatrix_element`] |
//! | how wgmma finds an element in shared memory | [`MatrixDescriptor::element_address`] |
//! | how a tile lies in shared memory: slabs of one swizzle row each | [`Tile`] |
//! | where TMA puts an element of a box | [`box_address`], [`box_bytes`] |

use crate::launch::TensorElement;

/// How 16-byte chunks of a 128-byte line are permuted in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Swizzle {
    /// As written.
    None,
    /// Pattern over 32-byte rows, repeating every 256 bytes.
    B32,
    /// Pattern over 64-byte rows, repeating every 512 bytes.
    B64,
    /// Pattern over 128-byte rows, repeating every 1024 bytes.
    B128,
}

impl Swizzle {
    /// Every mode, narrowest first.
    pub const ALL: [Self; 4] = [Self::None, Self::B32, Self::B64, Self::B128];

    /// How many bits of the line number take part.
    pub const fn bits(self) -> u32 {
        match self {
            Self::None => 0,
            Self::B32 => 1,
            Self::B64 => 2,
            Self::B128 => 3,
        }
    }

    /// Bytes of one row of the pattern: 16, 32, 64 or 128.
    #[inline]
    pub const fn row_bytes(self) -> u32 {
        16 << self.bits()
    }

    /// Bytes after which the pattern repeats; tiles start at multiples of it.
    #[inline]
    pub const fn repeat_bytes(self) -> u32 {
        128 << self.bits()
    }

    /// The swizzled form of a shared-memory byte address. It is its own inverse.
    #[inline]
    pub const fn apply(self, address: u32) -> u32 {
        address ^ (((address >> 7) & ((1 << self.bits()) - 1)) << 4)
    }

    /// The value of `CUtensorMapSwizzle`.
    pub const fn tma_code(self) -> u32 {
        self.bits()
    }

    /// The value in bits 62–63 of a wgmma descriptor, whose order is the reverse of TMA's.
    pub const fn wgmma_code(self) -> u64 {
        match self {
            Self::None => 0,
            Self::B128 => 1,
            Self::B64 => 2,
            Self::B32 => 3,
        }
    }

    /// The mode of a wgmma code.
    pub const fn from_wgmma_code(code: u64) -> Self {
        match code & 3 {
            0 => Self::None,
            1 => Self::B128,
            2 => Self::B64,
            _ => Self::B32,
        }
    }

    /// The widest mode whose row divides `row_bytes`, for tiles whose rows are that long.
    pub fn widest_for(row_bytes: u32) -> Self {
        let fits = |mode: &Self| row_bytes.is_multiple_of(mode.row_bytes());
        Self::ALL.into_iter().rev().find(fits).unwrap_or(Self::None)
    }
}

/// A place in a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Row.
    pub row: u32,
    /// Column.
    pub col: u32,
}

/// Rows of a warp's fragment.
pub const FRAGMENT_ROWS: u32 = 16;

/// Element `i` of a lane's A fragment (16 rows) with `per_register` elements in 32 bits: 2 for f16 and bf16, 4 for
/// 8-bit, 1 for tf32. An f32 accumulator (C, D) lies as a 16-bit A does, so `per_register` is 2 for it as well.
#[inline]
pub const fn fragment_a(lane: u32, i: u32, per_register: u32) -> Place {
    let (group, thread) = (lane >> 2, lane & 3);
    Place {
        row: group + 8 * ((i / per_register) & 1),
        col: per_register * thread + i % per_register + 4 * per_register * (i / (2 * per_register)),
    }
}

/// Element `i` of a lane's B fragment: `row` is k, `col` is n.
#[inline]
pub const fn fragment_b(lane: u32, i: u32, per_register: u32) -> Place {
    let (group, thread) = (lane >> 2, lane & 3);
    Place {
        row: per_register * thread + i % per_register + 4 * per_register * (i / per_register),
        col: group,
    }
}

/// The accumulator element `i` of a lane (C and D of `mma.sync`).
#[inline]
pub const fn fragment_c(lane: u32, i: u32) -> Place {
    fragment_a(lane, i, 2)
}

/// Which lane holds a place of an A fragment (or accumulator), and as which element: the inverse of [`fragment_a`].
pub const fn fragment_home(place: Place, per_register: u32) -> (u32, u32) {
    let inside = place.col % (4 * per_register);
    let lane = (place.row % 8) * 4 + inside / per_register;
    let block = place.col / (4 * per_register);
    (lane, block * 2 * per_register + (place.row / 8 % 2) * per_register + inside % per_register)
}

/// Element `i` of a thread's wgmma fragment (A in registers or D): warp `w` of the warpgroup holds rows 16w and up.
#[inline]
pub const fn warpgroup_fragment(thread: u32, i: u32, per_register: u32) -> Place {
    let place = fragment_a(thread % 32, i, per_register);
    Place { row: place.row + FRAGMENT_ROWS * (thread / 32), col: place.col }
}

/// Whose row address a lane supplies to `ldmatrix`/`stmatrix`: (matrix, row).
#[inline]
pub const fn ldmatrix_row(lane: u32) -> (u32, u32) {
    (lane / 8, lane % 8)
}

/// Which element of an 8×8 matrix lies in half `half` of a lane's register.
#[inline]
pub const fn ldmatrix_element(lane: u32, half: u32, transposed: bool) -> Place {
    let (major, minor) = (lane / 4, 2 * (lane % 4) + half);
    if transposed { Place { row: minor, col: major } } else { Place { row: major, col: minor } }
}

/// Which dimension of a wgmma operand lies contiguously in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Major {
    /// The depth of the product (`trans` 0).
    K,
    /// M of A or N of B (`trans` 1).
    Mn,
}

/// How wgmma finds an operand in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MatrixDescriptor {
    /// Byte address of the first element.
    pub start: u32,
    /// Leading byte offset.
    pub leading: u32,
    /// Stride byte offset.
    pub stride: u32,
    /// Phase of the pattern at the start; 0 for tiles that begin at a multiple of the repeat.
    pub base_offset: u32,
    /// The pattern.
    pub swizzle: Swizzle,
}

/// The part of a shared-memory address that a descriptor keeps; above it lies the CTA's rank in its cluster.
pub const DESCRIPTOR_ADDRESS_MASK: u32 = 0x3FFFF;

impl MatrixDescriptor {
    /// The 64 bits that wgmma reads.
    pub const fn encode(self) -> u64 {
        (field(self.start))
            | field(self.leading) << 16
            | field(self.stride) << 32
            | ((self.base_offset & 7) as u64) << 49
            | self.swizzle.wgmma_code() << 62
    }

    /// Reads the 64 bits.
    pub const fn decode(bits: u64) -> Self {
        Self {
            start: bytes(bits),
            leading: bytes(bits >> 16),
            stride: bytes(bits >> 32),
            base_offset: (bits >> 49) as u32 & 7,
            swizzle: Swizzle::from_wgmma_code(bits >> 62),
        }
    }

    /// Byte address of element (`mn`, `k`) of the operand of one instruction.
    #[inline]
    pub const fn element_address(self, major: Major, element_bytes: u32, mn: u32, k: u32) -> u32 {
        let chunk = 16 / element_bytes;
        let row = self.swizzle.row_bytes();
        let across = row / element_bytes;
        let linear = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => {
                (mn % 8) * 16
                    + (mn / 8) * self.stride
                    + (k % chunk) * element_bytes
                    + (k / chunk) * self.leading
            }
            (Major::K, _) => (mn % 8) * row + (mn / 8) * self.stride + k * element_bytes,
            (Major::Mn, Swizzle::None) => {
                (mn % chunk) * element_bytes
                    + (mn / chunk) * self.stride
                    + (k % 8) * 16
                    + (k / 8) * self.leading
            }
            (Major::Mn, _) => {
                (mn % across) * element_bytes
                    + (mn / across) * self.leading
                    + (k % 8) * row
                    + (k / 8) * self.stride
            }
        };
        self.swizzle.apply(self.start + linear)
    }
}

/// A byte count or address as a descriptor field.
const fn field(bytes: u32) -> u64 {
    ((bytes & DESCRIPTOR_ADDRESS_MASK) >> 4) as u64
}

/// A descriptor field as bytes.
const fn bytes(field: u64) -> u32 {
    ((field & 0x3FFF) as u32) << 4
}

/// A matrix in shared memory: slabs of one swizzle row's width, one behind the other, each `[rows][row_bytes]`.
/// That is what TMA boxes one slab wide leave behind, and what one wgmma descriptor can walk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tile {
    rows: u32,
    cols: u32,
    element_bytes: u32,
    swizzle: Swizzle,
}

/// A tile that shared memory, TMA or wgmma cannot hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TileError {
    /// Rows do not fill slabs.
    #[error(
        "a row of {row_bytes} bytes is not a multiple of the {slab_bytes}-byte row of swizzle {swizzle:?}"
    )]
    Row {
        /// Bytes of a row.
        row_bytes: u32,
        /// Bytes of a slab's row.
        slab_bytes: u32,
        /// The mode.
        swizzle: Swizzle,
    },
    /// The rows are not a multiple of eight, so the pattern does not fit.
    #[error("a swizzled tile has a multiple of 8 rows, not {rows}")]
    Rows {
        /// The rows.
        rows: u32,
    },
    /// Empty, or beyond the address range of a descriptor.
    #[error("a tile of {rows} rows of {row_bytes} bytes does not fit in shared memory")]
    Size {
        /// The rows.
        rows: u32,
        /// Bytes of a row.
        row_bytes: u32,
    },
}

impl Tile {
    /// A tile of `rows` × `cols` elements.
    pub fn new(rows: u32, cols: u32, element: TensorElement, swizzle: Swizzle) -> Result<Self, TileError> {
        let element_bytes = element.bytes();
        let row_bytes = cols.saturating_mul(element_bytes);
        if u64::from(rows) * u64::from(row_bytes) > DESCRIPTOR_ADDRESS_MASK.into() || rows == 0 || cols == 0 {
            return Err(TileError::Size { rows, row_bytes });
        }
        if !rows.is_multiple_of(8) {
            return Err(TileError::Rows { rows });
        }
        if !row_bytes.is_multiple_of(swizzle.row_bytes()) {
            return Err(TileError::Row { row_bytes, slab_bytes: swizzle.row_bytes(), swizzle });
        }
        Ok(Self { rows, cols, element_bytes, swizzle })
    }

    /// Rows.
    pub const fn rows(self) -> u32 {
        self.rows
    }

    /// Columns: the contiguous dimension.
    pub const fn cols(self) -> u32 {
        self.cols
    }

    /// Bytes of an element.
    pub const fn element_bytes(self) -> u32 {
        self.element_bytes
    }

    /// The pattern.
    pub const fn swizzle(self) -> Swizzle {
        self.swizzle
    }

    /// Columns of one slab.
    pub const fn slab_cols(self) -> u32 {
        self.swizzle.row_bytes() / self.element_bytes
    }

    /// Bytes of one slab.
    pub const fn slab_bytes(self) -> u32 {
        self.rows * self.swizzle.row_bytes()
    }

    /// How many slabs there are, each one TMA box wide.
    pub const fn slabs(self) -> u32 {
        self.cols / self.slab_cols()
    }

    /// Bytes of the whole tile.
    pub const fn bytes(self) -> u32 {
        self.slab_bytes() * self.slabs()
    }

    /// What the tile's base must be a multiple of: the pattern's repeat, and at least TMA's 128 bytes.
    pub const fn alignment(self) -> u32 {
        self.swizzle.repeat_bytes()
    }

    /// Byte offset of an element from the (aligned) base, swizzled.
    pub const fn offset(self, row: u32, col: u32) -> u32 {
        let (slab, inside) = (col / self.slab_cols(), col % self.slab_cols());
        let linear = row * self.swizzle.row_bytes() + inside * self.element_bytes;
        slab * self.slab_bytes() + self.swizzle.apply(linear)
    }

    /// Columns and rows of the TMA box that fills one slab.
    pub const fn box_dims(self) -> [u32; 2] {
        [self.slab_cols(), self.rows]
    }

    /// The descriptor of the tile (or of a part that begins at `start`) as a wgmma operand: rows are M or N for
    /// [`Major::K`], K for [`Major::Mn`].
    pub const fn descriptor(self, start: u32, major: Major) -> MatrixDescriptor {
        let (eight_rows, slab) = (8 * self.swizzle.row_bytes(), self.slab_bytes());
        let (leading, stride) = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => (slab, eight_rows),
            (Major::K, _) => (16, eight_rows),
            (Major::Mn, Swizzle::None) => (eight_rows, slab),
            (Major::Mn, _) => (slab, eight_rows),
        };
        MatrixDescriptor { start, leading, stride, base_offset: 0, swizzle: self.swizzle }
    }

    /// Elements along K that one wgmma consumes: 32 bytes.
    pub const fn k_step(self) -> u32 {
        32 / self.element_bytes
    }

    /// How far `start` moves for the `step`-th wgmma along K.
    pub const fn k_advance(self, major: Major, step: u32) -> u32 {
        match major {
            Major::K => {
                let along = 32 * step;
                (along / self.swizzle.row_bytes()) * self.slab_bytes() + along % self.swizzle.row_bytes()
            }
            Major::Mn => step * self.k_step() * self.swizzle.row_bytes(),
        }
    }
}

/// Bytes that a tensor copy moves, and counts on its barrier even where the box lies out of bounds.
pub fn box_bytes(box_dims: &[u32], element_bytes: u32) -> u64 {
    box_dims.iter().map(|&d| u64::from(d)).product::<u64>() * u64::from(element_bytes)
}

/// Shared-memory address of one element of a box that a tensor copy puts at `base`; innermost index first.
pub fn box_address(base: u32, box_dims: &[u32], index: &[u32], element_bytes: u32, swizzle: Swizzle) -> u32 {
    let linear = box_dims.iter().zip(index).rev().fold(0, |acc, (&extent, &i)| acc * extent + i);
    swizzle.apply(base + linear * element_bytes)
}
