//! The ring of key tiles in shared memory: loads that run ahead of what is multiplied.

use flashcore_tile::{Builder, Cta, MatrixOrder, MatrixRows, Reg, S32, Scope, U32, Uniform, Val};

use super::{Arguments, Config, Layout, work::Rows};
use crate::parts::{
    entries::TableReader,
    load::{self, RowSource, TileLoad},
    mask::KeyTiles,
    operand::Along,
    schedule::Tile,
    staged::columns_at,
    widen::Widening,
};

/// The ring of K and V tiles in shared memory, and the loads that keep it full.
pub(super) struct Ring {
    stages: u32,
    /// What finds keys in pages.
    table: Option<TableReader>,
    load_k: TileLoad,
    load_v: TileLoad,
    /// How keys and values of 8 bits become such as are multiplied.
    widening: Option<[Widening; 2]>,
    pub(super) keys: MatrixRows,
    pub(super) values: Along,
    /// Where the warp's columns of values start, where it does not have all.
    pub(super) columns_at: Option<Reg<U32>>,
    /// Bytes of a stage, and between rows, of K and V.
    stage_bytes: [u32; 2],
    pub(super) row_bytes: [u32; 2],
    pub(super) tiles: KeyTiles,
    /// The key tile of this turn.
    pub(super) tile: Reg<S32>,
    /// The stage that is read in this turn.
    read: Reg<U32>,
}

impl Ring {
    /// Starts the loads of Q and of all stages but one.
    pub(super) fn start(
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        layout: &Layout,
        tile: &Tile,
        rows: &Rows,
        tiles: KeyTiles,
    ) -> Self {
        let last = b.let_(tiles.end - 1);
        let first_key = b.let_(last * cfg.shape.tile_n as i32);
        let table =
            args.pages.zip(layout.entries).map(|(pages, entries)| TableReader::new(b, pages, entries, tile));
        let [k, v] = key_rows(b, args, tile, table, first_key);
        let loaded = layout.stored.unwrap_or([layout.k, layout.v]);
        // Two elements of 8 bits count as one of 16.
        let [dim_qk, dim_v] = [cfg.dim_qk, cfg.dim_v].map(|dim| dim * cfg.cache.bytes() / cfg.input.bytes());
        let ring = Self {
            stages: cfg.shape.stages,
            table,
            load_k: TileLoad::new(b, cfg.copies(), &loaded[0], dim_qk, k),
            load_v: TileLoad::new(b, cfg.copies(), &loaded[1], dim_v, v),
            widening: layout.stored.zip(cfg.widened()).map(|([k, v], half)| {
                [Widening::new(b, half, (&k, &layout.k)), Widening::new(b, half, (&v, &layout.v))]
            }),
            keys: layout.k.matrix_rows(b, MatrixOrder::ColumnsFirst),
            values: Along::new(b, &layout.v),
            columns_at: rows.share.map(|share| columns_at(b, &layout.v, share, cfg.columns().each)),
            stage_bytes: loaded.map(|tile| tile.bytes()),
            row_bytes: [layout.k.slab_width(), layout.v.slab_width()],
            tiles,
            tile: b.var(last),
            read: b.var_in(Scope::Cta, 0),
        };
        let keys_there = b.let_(tile.kv_len.signed() - first_key);
        ring.fill(b, keys_there);
        ring
    }

    /// Fills all stages but one; only the first key tile may end beyond the sequence.
    fn fill(&self, b: &mut Builder, keys_there: Reg<S32>) {
        if let Some(table) = &self.table {
            for stage in 0..self.stages - 1 {
                let tile = b.let_(self.tile - stage as i32);
                table.fetch(b, tile, stage.into());
            }
            load::commit(b);
            load::wait(b, 0);
            b.sync_cta();
        }
        for stage in 0..self.stages - 1 {
            let there = (stage == 0).then_some(keys_there);
            // Others may still read the entries that are overwritten now.
            if self.table.is_some() && stage > 0 {
                b.sync_cta();
            }
            self.load(b, stage, stage.into(), there);
        }
    }

    /// Starts the load of the tile `ahead` turns from this one into `stage`, if there is one.
    fn load(&self, b: &mut Builder, ahead: u32, stage: Val<U32>, keys_there: Option<Reg<S32>>) {
        let tile = b.let_(self.tile - ahead as i32);
        let needed = self.not_below_begin(b, tile);
        b.if_uniform(needed, |b| {
            let entries = self.table.map(|table| table.entries.of_stage(b, stage));
            for (load, bytes) in [&self.load_k, &self.load_v].into_iter().zip(self.stage_bytes) {
                let skip = b.let_(stage * bytes);
                load.issue(b, skip, keys_there, entries);
                load.step_back(b);
            }
        });
        self.fetch_entries(b, tile, stage);
        load::commit(b);
    }

    /// Starts to fetch the entries of the tile that will be loaded when the copies of `tile`, into `stage`, have arrived.
    fn fetch_entries(&self, b: &mut Builder, tile: Reg<S32>, stage: Val<U32>) {
        let Some(table) = &self.table else { return };
        let later = b.let_(tile - (self.stages as i32 - 1));
        let before = table.entries.before(b, stage);
        table.fetch(b, later, before.into());
    }

    /// Whether key tile `tile` is one that the row tile needs.
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

    /// Where the tiles of this turn lie: bytes into K and V in shared memory.
    pub(super) fn tiles_of_turn(&self, b: &mut Builder) -> [Reg<U32>; 2] {
        let skips = self.stage_bytes.map(|bytes| b.let_(self.read * bytes));
        let Some(widening) = &self.widening else { return skips };
        // All are done with the tiles of the turn before, which the barrier of this one has seen to.
        widening.iter().zip(skips).for_each(|(widening, skip)| widening.run(b, skip));
        b.sync_cta();
        [(); 2].map(|()| b.var(0))
    }

    /// Moves on to the next turn.
    pub(super) fn advance(&self, b: &mut Builder) {
        b.set(self.tile, self.tile - 1);
        let next = b.let_(self.read + 1);
        b.set(self.read, next.eq(self.stages).select(0, next));
    }
}

/// Where the rows of K and V from `first_key` on lie.
fn key_rows(
    b: &mut Builder,
    args: &Arguments,
    tile: &Tile,
    table: Option<TableReader>,
    first_key: Reg<S32>,
) -> [RowSource; 2] {
    if let Some(table) = table {
        return [args.k, args.v]
            .map(|tensor| RowSource::Paged(tensor.of_head(b, tile.head_kv), tensor, table));
    }
    let row = b.let_(tile.kv_start + first_key.unsigned());
    [args.k, args.v]
        .map(|tensor| RowSource::Strided(tile.row_address(b, &tensor, tile.head_kv, row), tensor.row))
}
