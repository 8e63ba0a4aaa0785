//! Support for products of f32: operands split into TF32 numbers, and single words of a tile.
//!
//! Tensor cores multiply f32 as TF32, which has 11 bits of precision. An f32 has 24: it is the sum of the nearest
//! TF32 number and a remainder of at most 12 bits, of which a TF32 number keeps all but the last.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    element::CHUNK_BYTES,
    error::FaultKind,
    expr::Expr,
    memory::Shared,
    mma::Quad,
    smem::SmemTile,
    value::{B32, F32, Reg, U32},
};

/// Rows of the block that one [`WordView::load`] reads.
const BLOCK_ROWS: u32 = 8;
/// Its columns.
const BLOCK_COLS: u32 = 16;
/// The bits of an f32 that a TF32 number has.
const TF32_BITS: i64 = 0xffff_e000;
/// Half of the lowest of them.
const HALF_UNIT: i64 = 0x1000;
/// Bytes of a word.
const WORD: u32 = 4;
/// Bytes of the eight columns that the lanes of a warp read together.
const STEP_BYTES: u32 = 8 * WORD;

impl Builder {
    /// The bits of an f32.
    #[track_caller]
    pub fn bits(&mut self, value: Reg<F32>) -> Reg<B32> {
        let bits = self.fresh::<B32>(value.scope());
        self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [bits.operand(), value.operand()]);
        bits
    }

    /// An f32 as the sum of two TF32 numbers: the nearest one, and the rest. Tensor cores ignore bits that a TF32 number
    /// does not have, so that the rest need not be rounded. An infinity has a rest that is NaN.
    ///
    /// `cvt.rna.tf32.f32` would be five instructions, two of them for NaN, which the rest keeps anyway.
    #[track_caller]
    pub fn split(&mut self, value: Reg<B32>) -> [Reg<B32>; 2] {
        let [up, high, low] = [(); 3].map(|()| self.fresh::<B32>(value.scope()));
        let [u32, b32, f32] = [ScalarType::U32, ScalarType::B32, ScalarType::F32].map(Mod::Type);
        self.emit(Op::Add, &[u32], [up.operand(), value.operand(), Operand::int(HALF_UNIT)]);
        self.emit(Op::And, &[b32], [high.operand(), up.operand(), Operand::int(TF32_BITS)]);
        self.emit(Op::Sub, &[f32], [low.operand(), value.operand(), high.operand()]);
        [high, low]
    }
}

/// Where one lane's words lie in a tile of 32-bit elements whose rows run along the depth of a product.
///
/// The depth goes by the columns of accumulators: lane `l` reads rows `2 * (l % 4)` and `2 * (l % 4) + 1` of eight, so that
/// the values of an accumulator are a left operand as they lie.
#[derive(Clone, Copy, Debug)]
pub struct WordRows {
    tile: SmemTile,
    lane: [Reg<U32>; 2],
}

/// One copy of a tile of 32-bit elements, as a source of right operands.
#[derive(Clone, Debug)]
pub struct WordView {
    tile: SmemTile,
    /// For both rows of a lane, one address for each eight columns of a slab.
    starts: [Vec<Reg<U32>>; 2],
}

impl SmemTile {
    /// The tile as a source of right operands, word by word.
    #[track_caller]
    pub fn word_rows(&self, b: &mut Builder) -> WordRows {
        if self.element().bytes() != WORD || self.slab_cols() < BLOCK_COLS {
            b.fault(FaultKind::Tile("words are read from a swizzled tile of 32-bit elements".to_owned()));
        }
        let lane = b.lane();
        let (row, col) = (b.let_((lane & 3) << 1), b.let_(lane >> 2));
        let within = b.let_((col & 3) * WORD + b.shared_base());
        let chunk = b.let_(col / (CHUNK_BYTES / WORD));
        let lane = [0, 1].map(|odd| {
            let row = b.let_(row + odd);
            self.chunk(b, within, row, chunk)
        });
        WordRows { tile: *self, lane }
    }
}

impl WordRows {
    /// The tile `skip` bytes further on: another copy, or another group of eight rows.
    #[track_caller]
    pub fn at(&self, b: &mut Builder, skip: impl Into<Expr<U32>>) -> WordView {
        let skip = b.let_(skip.into());
        let starts = self.lane.map(|lane| {
            let start = b.add(lane, skip);
            // Swizzling flips bits of the chunk number, so that further chunks of a row are one XOR away.
            let further =
                (1..self.tile.slab_width() / STEP_BYTES).map(|step| b.xor(start, step * STEP_BYTES));
            std::iter::once(start).chain(further).collect()
        });
        WordView { tile: self.tile, starts }
    }
}

impl WordView {
    /// The block of 8 rows and 16 columns at `row`, `col`, as two right operands side by side.
    #[track_caller]
    pub fn load(&self, b: &mut Builder, row: u32, col: u32) -> Quad {
        let (rows, cols) = (self.tile.rows(), self.tile.cols());
        let aligned = row.is_multiple_of(BLOCK_ROWS) && col.is_multiple_of(BLOCK_COLS);
        if row + BLOCK_ROWS > rows || col + BLOCK_COLS > cols || !aligned {
            b.fault(FaultKind::Tile(format!("no 8x16 block starts at {row}, {col} of a {rows}x{cols} tile")));
        }
        std::array::from_fn(|i| self.word(b, i % 2, row, col + i as u32 / 2 * 8))
    }

    /// One of this lane's rows of the eight at `row`, in its column of the eight at `col`.
    #[track_caller]
    fn word(&self, b: &mut Builder, odd: usize, row: u32, col: u32) -> Reg<B32> {
        let (slab, step) = (col / self.tile.slab_cols(), col % self.tile.slab_cols() * WORD / STEP_BYTES);
        let within = slab * self.tile.slab_bytes() + row * self.tile.slab_width();
        let starts = &self.starts[odd];
        let base = starts.get(step as usize).copied().unwrap_or(starts[0]);
        let [word] = b.load_shared(Shared { base, offset: self.tile.offset() + within });
        word
    }
}
