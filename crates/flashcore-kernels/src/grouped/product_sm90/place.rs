//! Which tiles a CTA works on: producer and consumers walk them alike.

use flashcore_tile::{Builder, Params, Reg, Scope, U32};

use super::{
    super::{Divided, NONE, Work, index::IndexArgument},
    Config, TILE_M,
};
use crate::{moe::product_sm90::Shape, parts::lines::DEPTH};

/// Tiles of rows that CTAs work on at the same time, so that they meet in the cache over the same columns.
const GROUP: u32 = 8;
/// Stages that a tile has at least; those beyond its depth are zeros.
const LEAST: u32 = 2;

/// Tiles across the columns.
pub(super) fn blocks(shape: Shape, work: &Work) -> u32 {
    (work.columns.rows() as u32).div_ceil(shape.tile_n)
}

/// Tiles of the rows of one matrix.
fn tiles(work: &Work) -> u32 {
    (work.rows.rows() as u32).div_ceil(TILE_M)
}

/// Numbers that decide where a CTA works.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments {
    divided: Divided,
    tile_n: u32,
    index: Option<IndexArgument>,
    /// Tiles across the columns, and of the rows of one matrix.
    blocks: Reg<U32>,
    tiles: Reg<U32>,
    groups: Reg<U32>,
    rows: Reg<U32>,
    pub(super) columns: Reg<U32>,
    /// Elements of depth of all groups.
    pub(super) depth: Reg<U32>,
}

/// A tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Matrices of both factors and of the result.
    pub(super) matrices: [Reg<U32>; 2],
    pub(super) out: Reg<U32>,
    /// First row and end of the rows that are written.
    pub(super) rows: [Reg<U32>; 2],
    /// First column.
    pub(super) column: Reg<U32>,
    /// First element of depth and the end.
    pub(super) depth: [Reg<U32>; 2],
}

impl Place {
    /// Stages of the tile.
    pub(super) fn steps(&self, b: &mut Builder) -> Reg<U32> {
        let [from, to] = self.depth;
        let steps = b.let_((to - from).div_ceil(DEPTH));
        b.let_(steps.max(LEAST))
    }
}

impl Arguments {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Work>, cfg: &Config) -> Self {
        let shape = cfg.shape;
        Self {
            divided: cfg.divided,
            tile_n: shape.tile_n,
            index: (cfg.divided != Divided::Nothing).then(|| IndexArgument::declare(b, params)),
            blocks: params.u32(b, "blocks", move |work| blocks(shape, work)),
            tiles: params.u32(b, "tiles", tiles),
            groups: params.u32(b, "groups", |work| work.problem.groups() as u32),
            rows: params.u32(b, "rows_count", |work| work.rows.rows() as u32),
            columns: params.u32(b, "columns_count", |work| work.columns.rows() as u32),
            depth: params.u32(b, "depth", |work| work.rows.cols() as u32),
        }
    }

    /// Calls `visit` with each tile of this CTA; threads agree on tiles in `scope`.
    pub(super) fn each_tile(&self, b: &mut Builder, scope: Scope, visit: impl FnOnce(&mut Builder, Place)) {
        let tiles = match (self.divided, self.index) {
            (Divided::Rows, Some(index)) => b.load_global::<U32, 1>(index.count())[0],
            _ => b.let_(self.tiles * self.groups),
        };
        let (all, ctas) = (b.let_(tiles * self.blocks), b.ctas());
        let cta = b.cta();
        let index = b.var(cta);
        // What the index says of a tile is asked for while the one before it is worked on.
        let record = [(); 3].map(|()| b.var_in(scope, NONE));
        self.read(b, record, index, [tiles, all]);
        b.while_(
            |_| index.lt(all),
            |b| {
                let own = record.map(|part| b.var_in(scope, part));
                let place = self.place(b, index, tiles, own);
                b.add_to(index, ctas);
                self.read(b, record, index, [tiles, all]);
                visit(b, place);
            },
        );
    }

    /// Reads what the index says of tile number `index`, if there are such a tile and an index.
    fn read(&self, b: &mut Builder, record: [Reg<U32>; 3], index: Reg<U32>, [tiles, all]: [Reg<U32>; 2]) {
        let Some(records) = self.index else { return };
        let (tile, _) = self.tile(b, index, tiles);
        let there = b.let_(index.lt(all));
        let [first, second, third] = record;
        if self.divided == Divided::Depth {
            let matrix = b.let_(tile / self.tiles);
            let at = records.record(b, matrix);
            return b.predicated(there, |b| b.load_global_into([first, second], at));
        }
        let at = records.record(b, tile);
        b.predicated(there, |b| b.load_global_into([first, second], at));
        let at = b.let_(at + 8u64);
        b.predicated(there, |b| b.load_global_into([third], at));
    }

    /// Tile number `index` of all, where there are `tiles` of rows.
    fn place(&self, b: &mut Builder, index: Reg<U32>, tiles: Reg<U32>, record: [Reg<U32>; 3]) -> Place {
        let ((tile, column), zero) = (self.tile(b, index, tiles), b.var(0u32));
        if self.divided == Divided::Rows {
            let [number, row, end] = record;
            let nobody = b.let_(number.eq(NONE));
            let matrices = [zero, b.select(nobody, 0, number)];
            let depth = [zero, b.select(nobody, 0, self.depth)];
            return Place { matrices, out: zero, rows: [row, end], column, depth };
        }
        let matrix = b.let_(tile / self.tiles);
        let row = b.let_(tile % self.tiles * TILE_M);
        let rows = [row, self.rows];
        match self.divided {
            Divided::Depth => {
                let depth = [record[0], record[1]];
                Place { matrices: [zero; 2], out: matrix, rows, column, depth }
            }
            _ => Place { matrices: [matrix; 2], out: matrix, rows, column, depth: [zero, self.depth] },
        }
    }

    /// Number of a tile's rows among all, and its first column.
    fn tile(&self, b: &mut Builder, index: Reg<U32>, tiles: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let group = b.let_(self.blocks * GROUP);
        let before = b.let_(index / group * GROUP);
        let within = b.let_(index % group);
        let rows = b.let_((tiles - before).min(GROUP));
        (b.let_(before + within % rows), b.let_(within / rows * self.tile_n))
    }
}
