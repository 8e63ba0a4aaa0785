//! Shared-memory tiles: from one declared layout come the TMA box, the wgmma descriptor, its k-advance and the
//! addresses for ldmatrix and stmatrix.
//!
//! A tile is stored as slabs of one swizzle width (64 columns of 16 bits for 128 bytes): slab after slab, each with
//! all rows, each row as wide as the swizzle. TMA writes it that way, one box per slab, and wgmma reads it that way.

use flashcore_ptx::{
    inst::{Operand, RegId},
    layout::Swizzle,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    barrier::{MBARRIER_BYTES, Mbarrier},
    builder::{Builder, shared_limit},
    element::{CHUNK_BYTES, Element},
    error::FaultKind,
    expr::Expr,
    memory::Shared,
    value::{Reg, U32},
};

/// Alignment of the kernel's shared memory, after which every swizzle pattern repeats.
const MAX_ALIGN: u32 = 1024;
/// Shared-memory addresses inside a cluster carry the CTA's rank above these bits.
const CTA_ADDRESS: u32 = 0x3_ffff;

/// A tile in shared memory, possibly in several copies (stages) one after another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmemTile {
    element: Element,
    offset: u32,
    rows: u32,
    cols: u32,
    swizzle: Swizzle,
    copies: u32,
}

/// Whether a matrix operand's rows run along the depth of the product or across it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Major {
    /// Rows run along the depth: Q and K in QKᵀ.
    K,
    /// Rows run across the depth: V in PV.
    Mn,
}

impl Builder {
    /// Reserves shared memory.
    #[track_caller]
    pub fn shared(&mut self, bytes: u32, align: u32) -> u32 {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            self.fault(FaultKind::Align { align, most: MAX_ALIGN });
        }
        let offset = self.shared_bytes.next_multiple_of(align.clamp(1, MAX_ALIGN));
        self.shared_bytes = offset.saturating_add(bytes).min(i32::MAX as u32);
        let most = shared_limit(self.target);
        if self.shared_bytes > most {
            self.fault(FaultKind::SharedMemory { bytes: self.shared_bytes, most });
        }
        offset
    }

    /// Reserves `copies` tiles of `rows` × `cols` elements.
    #[track_caller]
    pub fn smem_tile(
        &mut self,
        element: impl Into<Element>,
        [rows, cols]: [u32; 2],
        swizzle: Swizzle,
        copies: u32,
    ) -> SmemTile {
        let element = element.into();
        let tile = self.checked(SmemTile { element, offset: 0, rows, cols, swizzle, copies });
        // Every slab must start where the swizzle pattern starts.
        let offset = self.shared(copies.saturating_mul(tile.bytes()), MAX_ALIGN);
        SmemTile { offset, ..tile }
    }

    #[track_caller]
    fn checked(&mut self, tile: SmemTile) -> SmemTile {
        let SmemTile { rows, cols, swizzle, .. } = tile;
        let unit = tile.slab_cols();
        if rows == 0 || cols == 0 || !cols.is_multiple_of(unit) || !rows.is_multiple_of(8) {
            self.fault(FaultKind::Tile(format!(
                "a {rows}x{cols} tile with {swizzle:?} swizzle needs rows in eights and columns in {unit}s"
            )));
        }
        tile
    }

    /// A tile in memory that was reserved before, from `offset` on; its previous users must be done.
    #[track_caller]
    pub fn smem_tile_over(
        &mut self,
        offset: u32,
        element: impl Into<Element>,
        [rows, cols]: [u32; 2],
        swizzle: Swizzle,
    ) -> SmemTile {
        let element = element.into();
        let tile = self.checked(SmemTile { element, offset, rows, cols, swizzle, copies: 1 });
        let (end, most) = (offset + tile.bytes(), self.shared_bytes);
        if end > most || !offset.is_multiple_of(MAX_ALIGN) {
            self.fault(FaultKind::Tile(format!(
                "a {rows}x{cols} tile over bytes {offset} to {end} must start at a multiple of {MAX_ALIGN} and end by {most}"
            )));
        }
        tile
    }

    /// Reserves `count` mbarriers and returns the offset of the first.
    #[track_caller]
    pub fn mbarriers(&mut self, count: u32) -> u32 {
        self.shared(MBARRIER_BYTES * count, MBARRIER_BYTES)
    }

    /// The place `offset` bytes into the kernel's shared memory.
    #[track_caller]
    pub fn shared_at(&mut self, offset: u32) -> Shared {
        if offset >= self.shared_bytes {
            self.fault(FaultKind::NotReserved { offset, reserved: self.shared_bytes });
        }
        Shared { base: self.shared_base(), offset }
    }

    /// The mbarrier `offset` bytes into the kernel's shared memory.
    #[track_caller]
    pub fn mbarrier_at(&mut self, offset: u32) -> Mbarrier {
        Mbarrier { at: self.shared_at(offset) }
    }
}

impl SmemTile {
    /// What it is made of.
    pub const fn element(&self) -> Element {
        self.element
    }

    /// Number of rows.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Number of columns.
    pub const fn cols(&self) -> u32 {
        self.cols
    }

    /// How rows are permuted.
    pub const fn swizzle(&self) -> Swizzle {
        self.swizzle
    }

    /// Where the first copy starts in the kernel's shared memory.
    pub const fn offset(&self) -> u32 {
        self.offset
    }

    /// How many copies were reserved.
    pub const fn copies(&self) -> u32 {
        self.copies
    }

    /// Bytes of one copy.
    pub const fn bytes(&self) -> u32 {
        self.rows.saturating_mul(self.cols).saturating_mul(self.element.bytes())
    }

    /// Bytes of one row of a slab.
    pub const fn slab_width(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Columns of one slab.
    pub const fn slab_cols(&self) -> u32 {
        self.slab_width() / self.element.bytes()
    }

    /// Number of slabs.
    pub const fn slabs(&self) -> u32 {
        self.cols / self.slab_cols()
    }

    /// Bytes of one slab.
    pub const fn slab_bytes(&self) -> u32 {
        self.rows * self.slab_width()
    }

    /// The box that one tensor copy moves: columns and rows of a slab.
    pub const fn tma_box(&self) -> [u32; 2] {
        [self.slab_cols(), self.rows]
    }

    /// Where the first copy starts.
    #[track_caller]
    pub fn at(&self, b: &mut Builder) -> Shared {
        b.shared_at(self.offset)
    }

    /// The tile as an operand of a wgmma product, starting `skip` bytes into the first copy.
    #[track_caller]
    pub fn operand(&self, b: &mut Builder, major: Major, skip: impl Into<Expr<U32>>) -> MatrixOperand {
        let skip = b.arg(skip);
        let address = (b.shared_base() + self.offset + skip) & CTA_ADDRESS;
        let low = b.let_((address >> 4) | (self.leading_offset(major) << 16));
        let high = b.var(self.descriptor_high());
        MatrixOperand { low, high, major, tile: *self }
    }

    /// Distance between slabs across the depth, in units of 16 bytes; along it the hardware ignores the field.
    const fn leading_offset(&self, major: Major) -> u32 {
        match major {
            Major::K => 1,
            Major::Mn => self.slab_bytes() >> 4,
        }
    }

    /// Distance between groups of eight rows, and the swizzle mode (PTX ISA, "Matrix descriptor").
    const fn descriptor_high(&self) -> u32 {
        let mode = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        };
        ((8 * self.slab_width()) >> 4) | mode << 30
    }

    /// Address of a 16-byte chunk of the slab at `slab`, as ldmatrix, stmatrix and cp.async want it.
    #[track_caller]
    pub fn chunk(
        &self,
        b: &mut Builder,
        slab: Reg<U32>,
        row: Reg<U32>,
        chunk: impl Into<Expr<U32>>,
    ) -> Reg<U32> {
        let chunk = b.arg(chunk);
        let line = b.let_(row << self.slab_width().trailing_zeros());
        let line_in_pattern = match self.swizzle {
            Swizzle::None => return b.let_(slab + line),
            Swizzle::B128 => row.into(),
            Swizzle::B64 => row >> 1,
            Swizzle::B32 => row >> 2,
        };
        let turned = b.let_((line_in_pattern & (self.slab_width() / CHUNK_BYTES - 1)) ^ chunk);
        let byte = b.let_(turned << CHUNK_BYTES.trailing_zeros());
        b.let_(slab + line + byte)
    }
}

/// A shared-memory operand of a wgmma product: its descriptor, and how to move it along the depth.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOperand {
    low: Reg<U32>,
    high: Reg<U32>,
    major: Major,
    tile: SmemTile,
}

impl MatrixOperand {
    /// The same operand `bytes` further on: another copy of the tile.
    #[track_caller]
    #[must_use]
    pub fn plus(&self, b: &mut Builder, bytes: Reg<U32>) -> Self {
        Self { low: b.let_((bytes >> 4) + self.low), ..*self }
    }

    /// The same operand from row `row` of the tile on, a multiple of eight: there the swizzle pattern starts again.
    #[track_caller]
    #[must_use]
    pub fn from_row(&self, b: &mut Builder, row: u32) -> Self {
        let SmemTile { rows, .. } = self.tile;
        if row >= rows || !row.is_multiple_of(8) || self.major != Major::K {
            let major = self.major;
            b.fault(FaultKind::Tile(format!("row {row} of {rows} begins no {major:?}-major operand")));
        }
        Self { low: b.add(self.low, (row * self.tile.slab_width()) >> 4), ..*self }
    }

    /// What it is made of.
    pub(crate) const fn element(&self) -> Element {
        self.tile.element
    }

    /// Bytes from the depth of the first instruction to that of number `step`.
    const fn advance(&self, step: u32) -> u32 {
        let depth = step * self.tile.element.depth();
        match self.major {
            Major::K => {
                let byte = depth * self.tile.element.bytes();
                byte / self.tile.slab_width() * self.tile.slab_bytes() + byte % self.tile.slab_width()
            }
            Major::Mn => depth * self.tile.slab_width(),
        }
    }

    /// Refuses a product over `depth` elements with `across` rows or columns that the tile does not hold.
    #[track_caller]
    pub(crate) fn check(&self, b: &mut Builder, depth: u32, across: u32) {
        let SmemTile { rows, cols, swizzle, .. } = self.tile;
        let (deep, wide) = match self.major {
            Major::K => (cols, rows),
            Major::Mn => (rows, cols),
        };
        // Elements of other widths are read along the depth only (PTX ISA, wgmma: imm-trans).
        let readable = self.major == Major::K || self.tile.element.half().is_some();
        if depth > deep || across > wide || swizzle == Swizzle::None || !readable {
            let major = self.major;
            b.fault(FaultKind::Product(format!(
                "a {rows}x{cols} tile with {swizzle:?} swizzle is no {major:?}-major operand of depth {depth} and \
                 extent {across}"
            )));
        }
    }

    #[track_caller]
    pub(crate) fn descriptor(&self, b: &mut Builder, step: u32) -> RegId {
        let low = b.add(self.low, self.advance(step) >> 4);
        let dst = b.fresh_id(ScalarType::B64);
        let halves = Operand::regs([low.id(), self.high.id()]);
        b.emit(Op::Mov, &[Mod::Type(ScalarType::B64)], [Operand::Reg(dst), halves]);
        dst
    }

    pub(crate) const fn transposed(&self) -> i64 {
        match self.major {
            Major::K => 0,
            Major::Mn => 1,
        }
    }
}
