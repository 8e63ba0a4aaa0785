//! Tiles in shared memory as operands of the general kernels' products, whatever the width of an element.
//!
//! Rows across the depth are read by `ldmatrix`, 32 bytes of depth at a time. Rows along the depth are turned on their way to
//! registers: 16-bit elements by `ldmatrix`, f32, which it does not turn, word by word.

use flashcore_tile::{
    Builder, Element, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, SmemTile, U32, WordRows, WordView,
};

/// Rows of a tile whose features are the depth: some bytes into it, and if need be some slabs.
pub(crate) struct Across {
    rows: MatrixRows,
    skip: Reg<U32>,
    view: MatrixView,
}

impl Across {
    pub(crate) fn new(b: &mut Builder, rows: MatrixRows, skip: Reg<U32>) -> Self {
        Self { rows, skip, view: rows.at(b, skip) }
    }

    /// From the first slab on, or from the given one.
    pub(crate) fn at_slab(&self, b: &mut Builder, slab: Option<Reg<U32>>) -> MatrixView {
        match slab {
            Some(slab) => self.rows.at(b, slab * self.rows.tile().slab_bytes() + self.skip),
            None => self.view.clone(),
        }
    }
}

/// The tiles of a ring, as right operands whose rows are the depth.
pub(crate) enum Along {
    /// 16-bit elements, transposed on their way to registers.
    Matrices(MatrixRows),
    /// f32, which nothing transposes.
    Words(WordRows),
}

impl Along {
    pub(crate) fn new(b: &mut Builder, tile: &SmemTile) -> Self {
        match tile.element() {
            Element::F32 => Self::Words(tile.word_rows(b)),
            _ => Self::Matrices(tile.matrix_rows(b, MatrixOrder::RowsFirst)),
        }
    }

    /// Prepares the addresses of a step whose rows lie `skip` bytes on.
    pub(crate) fn at(&self, b: &mut Builder, skip: Reg<U32>) -> AlongView {
        match self {
            Self::Matrices(rows) => AlongView::Matrices(rows.at(b, skip)),
            Self::Words(rows) => AlongView::Words(rows.at(b, skip)),
        }
    }
}

/// The rows of one step.
pub(crate) enum AlongView {
    Matrices(MatrixView),
    Words(WordView),
}

impl AlongView {
    /// 16 columns from `col` on, as deep as one instruction goes from row `row` on.
    pub(crate) fn load(&self, b: &mut Builder, row: u32, col: u32) -> Quad {
        match self {
            Self::Matrices(view) => view.load_transposed(b, row, col),
            Self::Words(view) => view.load(b, row, col),
        }
    }
}
