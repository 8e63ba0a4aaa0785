//! Matrix tiles in registers, in the layout of `mma.sync` and `wgmma`.
//!
//! Both use one layout: a warp holds 16 rows, a thread holds values of two of them, eight rows apart, in pairs of
//! neighbouring columns. Code over accumulators (softmax, masks, epilogue) therefore serves both.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op, shape},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    control::Carried,
    element::Element,
    error::FaultKind,
    memory::Shared,
    scalar::Half,
    scope::Scope,
    value::{B32, F32, Reg},
};

/// Rows of a tile of which one thread holds values.
pub const ROWS_PER_THREAD: usize = 2;

/// An f32 tile of 16 rows per warp and `cols` columns.
#[derive(Debug)]
pub struct Acc {
    regs: Vec<Reg<F32>>,
}

impl Acc {
    /// An unwritten tile.
    pub fn new(b: &mut Builder, cols: usize) -> Self {
        Self { regs: (0..cols / 2).map(|_| b.fresh(Scope::Lane)).collect() }
    }

    /// A tile in registers that hold something else at other times.
    pub const fn over(regs: Vec<Reg<F32>>) -> Self {
        Self { regs }
    }

    /// A tile of zeros.
    #[track_caller]
    pub fn zero(b: &mut Builder, cols: usize) -> Self {
        let tile = Self::new(b, cols);
        tile.fill(b, 0.0);
        tile
    }

    /// Sets every value.
    #[track_caller]
    pub fn fill(&self, b: &mut Builder, value: f32) {
        for &reg in &self.regs {
            b.set(reg, value);
        }
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.regs.len() * 2
    }

    /// The registers of this thread, in the order of the hardware.
    pub fn regs(&self) -> &[Reg<F32>] {
        &self.regs
    }

    /// Which of the thread's two rows value `i` belongs to.
    pub const fn row(i: usize) -> usize {
        (i >> 1) & 1
    }

    /// Column of value `i` in lane 0; lane `l` lies `2 * (l % 4)` further right.
    pub const fn col(i: usize) -> usize {
        8 * (i >> 2) + (i & 1)
    }

    /// The values of one of the thread's rows.
    pub fn row_values(&self, row: usize) -> impl Iterator<Item = Reg<F32>> + '_ {
        self.regs.iter().enumerate().filter(move |(i, _)| Self::row(*i) == row).map(|(_, &reg)| reg)
    }

    /// Multiplies each row by its factor.
    #[track_caller]
    pub fn scale_rows(&self, b: &mut Builder, factors: [Reg<F32>; ROWS_PER_THREAD]) {
        for (i, &reg) in self.regs.iter().enumerate() {
            b.mul_into(reg, reg, factors[Self::row(i)]);
        }
    }

    /// Rounds to 16 bits into `into`, which then serves as a matrix operand: the layouts are the same.
    #[track_caller]
    pub fn pack_into(&self, b: &mut Builder, half: Half, into: &Fragment) {
        if self.regs.len() != 2 * into.regs.len() {
            let (cols, room) = (self.cols(), 4 * into.regs.len());
            b.fault(FaultKind::Tile(format!(
                "{cols} columns are packed into a fragment with room for {room}"
            )));
        }
        for (pair, &dst) in self.regs.chunks_exact(2).zip(&into.regs) {
            b.pack_into(dst, half, pair[0], pair[1]);
        }
    }
}

impl Carried for Acc {
    fn identity(&self, _: &Builder) -> Vec<u64> {
        self.regs.iter().map(|reg| u64::from(reg.id().index)).collect()
    }

    fn twin(&self) -> Self {
        Self { regs: self.regs.clone() }
    }
}

impl Carried for Fragment {
    fn identity(&self, _: &Builder) -> Vec<u64> {
        self.regs.iter().map(|reg| u64::from(reg.id().index)).collect()
    }

    fn twin(&self) -> Self {
        Self { regs: self.regs.clone() }
    }
}

impl Builder {
    /// Writes four 8×8 matrices of 16-bit values; lane `l` gives the address of row `l % 8` of matrix `l / 8`.
    #[track_caller]
    pub fn stmatrix(&mut self, to: Shared, values: [Reg<B32>; 4]) {
        self.require("stmatrix", Scope::Warp);
        let mods = [
            Mod::Sync,
            Mod::Aligned,
            Mod::Shape(shape(8, 8, 0)),
            Mod::X4,
            Mod::Shared,
            Mod::Type(ScalarType::B16),
        ];
        self.emit(Op::Stmatrix, &mods, [to.operand(), Operand::regs(values.map(Reg::id))]);
    }
}

/// A tile of 16 rows per warp, of 16-bit elements unless said otherwise, ready to be the left operand of a matrix
/// product.
#[derive(Debug)]
pub struct Fragment {
    regs: Vec<Reg<B32>>,
}

impl Fragment {
    /// An unwritten tile of `cols` columns.
    pub fn new(b: &mut Builder, cols: usize) -> Self {
        Self { regs: (0..cols / 4).map(|_| b.fresh(Scope::Lane)).collect() }
    }

    /// An unwritten tile of `cols` columns of other elements.
    pub fn of(b: &mut Builder, element: Element, cols: usize) -> Self {
        Self { regs: (0..cols * element.bytes() as usize / 8).map(|_| b.fresh(Scope::Lane)).collect() }
    }

    /// The registers of this thread, in the order of the hardware.
    pub fn regs(&self) -> &[Reg<B32>] {
        &self.regs
    }

    /// The registers of columns `16 * k .. 16 * k + 16`.
    pub fn slice(&self, k: usize) -> [Reg<B32>; 4] {
        std::array::from_fn(|i| self.regs[4 * k + i])
    }
}
