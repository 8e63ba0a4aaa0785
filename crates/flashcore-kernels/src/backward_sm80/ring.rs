//! The ring of streamed tiles in shared memory, and the loads that keep it full.

use flashcore_tile::{
    Builder, Cta, MatrixOrder, MatrixRows, Reg, S32, Scope, SmemTile, U32, U64, Uniform, Val,
};

use super::{Arguments, Config, Layout, terms::StreamedTerms};
use crate::parts::{
    load::{self, RowSource, TileLoad},
    mask::{KeyTiles, Visibility},
    operand::{Across, Along, AlongView},
    schedule::{Side, Tile},
};

/// The streamed tensors of one head.
pub(super) struct Ring {
    stages: u32,
    loads: [Stream; 2],
    pub(super) terms: Option<StreamedTerms>,
    /// Where the terms of the head's first row to be loaded lie.
    terms_start: Reg<U64>,
    /// The tiles that the row tile needs.
    pub(super) tiles: KeyTiles,
    /// The tile of this turn.
    pub(super) tile: Reg<S32>,
    /// The stage that is read in this turn.
    pub(super) read: Reg<U32>,
    /// The last tile, and rows of it that are there.
    last: Reg<S32>,
    rows_there: Reg<S32>,
}

/// One streamed tensor.
struct Stream {
    load: TileLoad,
    /// Where the load of the next head starts.
    next_head: Reg<U64>,
    /// Bytes between heads.
    head: Reg<U64>,
    /// As right operands whose rows run across the depth, and along it.
    across: MatrixRows,
    along: Along,
    tile: SmemTile,
}

impl Stream {
    fn new(
        b: &mut Builder,
        cfg: &Config,
        tile: &SmemTile,
        dim: u32,
        from: Reg<U64>,
        [row, head]: [Reg<U64>; 2],
    ) -> Self {
        let load = TileLoad::new(b, cfg.copies(), tile, dim, RowSource::Strided(from, row));
        Self {
            next_head: b.var_in(Scope::Lane, load.from() + head),
            head,
            across: tile.matrix_rows(b, MatrixOrder::ColumnsFirst),
            along: Along::new(b, tile),
            tile: *tile,
            load,
        }
    }
}

impl Ring {
    /// The loads of the first head, none of them started.
    pub(super) fn new(
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        layout: &Layout,
        tile: &Tile,
        visible: &Visibility,
    ) -> Self {
        let (start, len, head, used) = match cfg.side {
            Side::Queries => (tile.kv_start, tile.kv_len, tile.head_kv, tile.q_len),
            Side::Keys => (tile.q_start, tile.q_len, tile.head, tile.kv_len),
        };
        let tiles = streamed_tiles(b, cfg, tile.first_row, used, visible);
        let last = b.let_(tiles.end - 1);
        let first_row = b.let_(last * cfg.shape.tile as i32);
        let row = b.let_(start + first_row.unsigned());
        let mut stream = |n: usize, dim: u32| {
            let tensor = &args.streamed[n];
            let from = tensor.at(b, tile.batch, head, row);
            Stream::new(b, cfg, &layout.streamed[n], dim, from, [tensor.row, tensor.head])
        };
        let loads = [stream(0, cfg.dim_qk), stream(1, cfg.dim_v)];
        let terms_start = args.terms.at(b, tile.batch, head, row);
        let terms_start = b.var_in(Scope::Cta, terms_start);
        Self {
            stages: cfg.shape.stages,
            loads,
            terms: StreamedTerms::new(b, cfg, layout, terms_start),
            terms_start,
            tiles,
            tile: b.var_in(Scope::Cta, last),
            read: b.var_in(Scope::Cta, 0),
            last,
            rows_there: b.let_(len.signed() - first_row),
        }
    }

    /// Fills all stages but one; only the first tile may end beyond the sequence.
    pub(super) fn fill(&self, b: &mut Builder) {
        for stage in 0..self.stages - 1 {
            let there = (stage == 0).then_some(self.rows_there);
            self.load(b, stage, stage.into(), there);
        }
    }

    /// Goes on with the next head, whose terms lie `terms_step` bytes further on, once everybody has read the last one.
    pub(super) fn next_head(&self, b: &mut Builder, terms_step: Reg<U64>) {
        b.sync_cta();
        b.set(self.tile, self.last);
        b.set(self.read, 0);
        for stream in &self.loads {
            b.set(stream.load.from(), stream.next_head);
            b.add_to(stream.next_head, stream.head);
        }
        b.add_to(self.terms_start, terms_step);
        if let Some(terms) = &self.terms {
            terms.restart(b, self.terms_start);
        }
        self.fill(b);
    }

    /// Starts the load of the tile `ahead` turns from this one into `stage`, if there is one.
    fn load(&self, b: &mut Builder, ahead: u32, stage: Val<U32>, there: Option<Reg<S32>>) {
        let tile = b.let_(self.tile - ahead as i32);
        let needed = self.not_below_begin(b, tile);
        b.if_uniform(needed, |b| {
            for stream in &self.loads {
                let skip = b.let_(stage * stream.tile.bytes());
                stream.load.issue(b, skip, there, None);
                stream.load.step_back(b);
            }
            if let Some(terms) = &self.terms {
                let stage = b.var(stage);
                terms.issue(b, stage, there);
            }
        });
        load::commit(b);
    }

    /// Whether `tile` is one that the row tile needs.
    pub(super) fn not_below_begin(&self, b: &mut Builder, tile: Reg<S32>) -> Uniform<Cta> {
        b.uniform(tile.ge(self.tiles.first()))
    }

    /// Waits for the stage of this turn, and starts the load into the one that the last turn read.
    pub(super) fn turn(&self, b: &mut Builder) {
        load::wait(b, self.stages - 2);
        b.sync_cta();
        let free = b.let_(self.read.eq(0).select(self.stages - 1, self.read - 1));
        self.load(b, self.stages - 1, free.into(), None);
    }

    /// Moves on to the next turn.
    pub(super) fn advance(&self, b: &mut Builder) {
        b.set(self.tile, self.tile - 1);
        let next = b.let_(self.read + 1);
        b.set(self.read, next.eq(self.stages).select(0, next));
    }

    /// Streamed tensor `n` from row `first` of this turn's tile on, as a right operand across the depth.
    pub(super) fn across(&self, b: &mut Builder, n: usize, first: Reg<U32>) -> Across {
        let skip = self.skip(b, n, first);
        Across::new(b, self.loads[n].across, skip)
    }

    /// The same along the depth, from a column on that lies `columns_at` bytes further.
    pub(super) fn along(
        &self,
        b: &mut Builder,
        n: usize,
        first: Reg<U32>,
        columns_at: Option<Reg<U32>>,
    ) -> AlongView {
        let skip = self.skip(b, n, first);
        let skip = columns_at.map_or(skip, |at| b.let_(skip + at));
        self.loads[n].along.at(b, skip)
    }

    fn skip(&self, b: &mut Builder, n: usize, first: Reg<U32>) -> Reg<U32> {
        let tile = &self.loads[n].tile;
        let stage = b.let_(self.read * tile.bytes());
        b.let_(first * tile.slab_width() + stage)
    }
}

/// The streamed tiles that the row tile needs; none for rows beyond the used ones.
fn streamed_tiles(
    b: &mut Builder,
    cfg: &Config,
    first_row: Reg<U32>,
    used: Reg<U32>,
    visible: &Visibility,
) -> KeyTiles {
    let end = b.let_(first_row + cfg.tile_rows());
    let last = b.let_((end.min(used) - 1).signed());
    let tiles = visible.key_tiles(b, [first_row.signed(), last], cfg.shape.tile);
    KeyTiles { end: b.let_(first_row.ge(used).select(0, tiles.end)), ..tiles }
}
