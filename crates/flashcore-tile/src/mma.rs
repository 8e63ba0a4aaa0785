//! Matrix products of one warp (`mma.sync`), and loading their operands from shared memory (`ldmatrix`).
//!
//! A lane's address in a swizzled tile is split once: [`MatrixRows`] is the part that depends on the lane,
//! [`MatrixView`] adds the copy of the tile and holds one register per 16 columns of a slab, so that every load of a
//! loop body is one of a few registers plus a constant.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op, shape},
    target::Target,
    types::ScalarType,
};

use crate::{
    builder::Builder,
    element::{CHUNK_BYTES, Element},
    error::FaultKind,
    expr::Expr,
    fragment::Acc,
    memory::Shared,
    scope::Scope,
    smem::SmemTile,
    value::{B32, Reg, U32},
};

/// Rows and columns of 16-bit elements that one load of four 8×8 matrices covers, and the depth of one product of them.
pub const MMA_K: u32 = 16;
/// Rows of one product.
pub const MMA_M: u32 = 16;

/// The four registers of one [`MatrixView::load`].
pub type Quad = [Reg<B32>; 4];

/// Which 8×8 matrix of a 16×16 block lands in which register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatrixOrder {
    /// Down the rows first: a left operand; with transposition, a right operand whose rows run along the depth.
    RowsFirst,
    /// Along the columns first: a right operand whose rows run across the depth.
    ColumnsFirst,
}

/// Where one lane's rows are in a tile, for `ldmatrix`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRows {
    tile: SmemTile,
    lane: Reg<U32>,
}

/// One copy of a tile, as a source of `ldmatrix`.
#[derive(Clone, Debug)]
pub struct MatrixView {
    tile: SmemTile,
    starts: Vec<Reg<U32>>,
}

impl SmemTile {
    /// The tile as a source of `ldmatrix`.
    #[track_caller]
    pub fn matrix_rows(&self, b: &mut Builder, order: MatrixOrder) -> MatrixRows {
        if self.slab_width() < 2 * CHUNK_BYTES {
            b.fault(FaultKind::Tile("ldmatrix over 16 columns needs a swizzled tile".to_owned()));
        }
        let lane = b.lane();
        let row = b.let_(lane & 7);
        let (matrix_low, matrix_high) = (b.let_(lane >> 3), b.let_(lane >> 4));
        let matrix_low = b.let_(matrix_low & 1);
        let (down, along) = match order {
            MatrixOrder::RowsFirst => (matrix_low, matrix_high),
            MatrixOrder::ColumnsFirst => (matrix_high, matrix_low),
        };
        let row = b.let_(down * 8 + row);
        // The tile's own offset is added as a constant by each load: tiles of one width share a lane's registers.
        let base = b.shared_base();
        MatrixRows { tile: *self, lane: self.chunk(b, base, row, along) }
    }
}

impl MatrixRows {
    /// The tile.
    pub const fn tile(&self) -> &SmemTile {
        &self.tile
    }

    /// The same rows from a column on that is known at run time: `bytes` into a slab, a multiple of 32 at which what is
    /// loaded next to each other starts.
    #[track_caller]
    #[must_use]
    pub fn from_column(&self, b: &mut Builder, bytes: impl Into<Expr<U32>>) -> Self {
        let lane = b.xor(self.lane, bytes);
        Self { tile: self.tile, lane }
    }

    /// The tile `skip` bytes further on: another copy, or another group of eight rows.
    #[track_caller]
    pub fn at(&self, b: &mut Builder, skip: impl Into<Expr<U32>>) -> MatrixView {
        let start = b.add(self.lane, skip);
        // Swizzling flips bits of the chunk number, so that further chunks of a row are one XOR away.
        let mut starts = vec![start];
        for step in 1..self.tile.slab_width() / (2 * CHUNK_BYTES) {
            starts.push(b.xor(start, step * 2 * CHUNK_BYTES));
        }
        MatrixView { tile: self.tile, starts }
    }
}

impl MatrixView {
    /// The block of 16 rows and 32 bytes (16 columns of 16 bits) at `row`, `col`.
    #[track_caller]
    pub fn load(&self, b: &mut Builder, row: u32, col: u32) -> Quad {
        self.ldmatrix(b, row, col, None)
    }

    /// The 16×16 block at `row`, `col`, each 8×8 matrix transposed.
    #[track_caller]
    pub fn load_transposed(&self, b: &mut Builder, row: u32, col: u32) -> Quad {
        self.ldmatrix(b, row, col, Some(Mod::Trans))
    }

    #[track_caller]
    fn ldmatrix(&self, b: &mut Builder, row: u32, col: u32, trans: Option<Mod>) -> Quad {
        b.require("ldmatrix", Scope::Warp);
        self.check_block(b, row, col);
        let (slab, step) =
            (col / self.tile.slab_cols(), col % self.tile.slab_cols() / self.tile.element().depth());
        let within = slab * self.tile.slab_bytes() + row * self.tile.slab_width();
        let base = self.starts.get(step as usize).copied().unwrap_or(self.starts[0]);
        let from = Shared { base, offset: self.tile.offset() + within };
        let dst: Quad = std::array::from_fn(|_| b.fresh(Scope::Lane));
        let mods = [Mod::Sync, Mod::Aligned, Mod::Shape(shape(8, 8, 0)), Mod::X4];
        let tail = [Mod::Shared, Mod::Type(ScalarType::B16)];
        let mods: Vec<_> = mods.into_iter().chain(trans).chain(tail).collect();
        b.emit(Op::Ldmatrix, &mods, [Operand::regs(dst.map(|r| r.id())), from.operand()]);
        dst
    }
}

impl MatrixView {
    #[track_caller]
    fn check_block(&self, b: &mut Builder, row: u32, col: u32) {
        let (rows, cols, depth) = (self.tile.rows(), self.tile.cols(), self.tile.element().depth());
        if row + MMA_M > rows || col + depth > cols || !row.is_multiple_of(8) || !col.is_multiple_of(depth) {
            b.fault(FaultKind::Tile(format!(
                "no 16x{depth} block starts at {row}, {col} of a {rows}x{cols} tile"
            )));
        }
    }
}

impl Builder {
    /// Adds a product to columns `8 * n .. 8 * n + 8` of `d`: `left` is 16×16, `right` 16×8.
    #[track_caller]
    pub fn mma(&mut self, element: impl Into<Element>, d: &Acc, n: usize, left: Quad, right: [Reg<B32>; 2]) {
        let (element, [l0, l1, l2, l3], [r0, r1]) = (element.into(), left, right);
        if self.target.includes(Target::Sm80) {
            return self.mma_over(element, d, n, element.depth(), &left, &right);
        }
        // Older tensor cores go half as deep; the registers of a half are neighbours.
        self.mma_over(element, d, n, element.depth() / 2, &[l0, l1], &[r0]);
        self.mma_over(element, d, n, element.depth() / 2, &[l2, l3], &[r1]);
    }

    /// Adds a product over `depth` elements.
    #[track_caller]
    fn mma_over(
        &mut self,
        element: Element,
        d: &Acc,
        n: usize,
        depth: u32,
        left: &[Reg<B32>],
        right: &[Reg<B32>],
    ) {
        self.require("mma.sync", Scope::Warp);
        let ab = Mod::Type(element.ptx());
        let cd = Mod::Type(ScalarType::F32);
        let shape = Mod::Shape(shape(MMA_M as u16, 8, depth as u16));
        let mods = [Mod::Aligned, shape, Mod::RowMajor, Mod::ColMajor, cd, ab, ab, cd];
        let Some(sums) = d.regs().get(4 * n..4 * n + 4) else {
            let cols = d.cols();
            return self.fault(FaultKind::Product(format!(
                "column {} is beyond an accumulator of {cols} columns",
                8 * n
            )));
        };
        let sums = Operand::regs(sums.iter().map(|r| r.id()));
        let [left, right] = [left, right].map(|regs| Operand::regs(regs.iter().map(|r| r.id())));
        self.emit(Op::MmaSync, &mods, [sums.clone(), left, right, sums]);
    }

    /// Adds a product to columns `16 * n .. 16 * n + 16` of `d`: both operands are 16×16.
    #[track_caller]
    pub fn mma_pair(&mut self, element: impl Into<Element>, d: &Acc, n: usize, left: Quad, right: Quad) {
        let (element, [r0, r1, r2, r3]) = (element.into(), right);
        self.mma(element, d, 2 * n, left, [r0, r1]);
        self.mma(element, d, 2 * n + 1, left, [r2, r3]);
    }
}
