//! A warp's ring of K and V tiles, and the copies that keep it full.

use flashcore_tile::{
    Builder, MatrixOrder, MatrixRows, Mbarrier, Reg, S32, Scope, Shared, SmemTile, U32, Warp,
};

use super::{
    Arguments, Config, Layout,
    config::Copies,
    pages::{Entry, Pages},
    source::{Source, Tensor, Wanted, clear_rows},
    unit::Unit,
};

/// Keys or values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Keys,
    Values,
}

/// The ring of keys, or of values.
struct Side {
    tile: SmemTile,
    source: Source,
    rows: MatrixRows,
    /// Where the ring starts among those of all warps, and in shared memory.
    skip: Reg<U32>,
    ring: Shared,
    barriers: Option<Mbarrier>,
}

/// Both rings of a warp.
pub(super) struct Ring<'a> {
    cfg: &'a Config,
    unit: &'a Unit,
    keys: Side,
    values: Side,
    stages: Stages,
    /// The key tile of this turn.
    pub(super) tile: Reg<S32>,
    /// Where keys lie in pages: those, and the entry of the tile that is loaded next.
    paging: Option<(Pages, Entry)>,
}

impl<'a> Ring<'a> {
    /// Prepares the copies of this warp's tiles.
    pub(super) fn new(
        b: &mut Builder,
        cfg: &'a Config,
        args: &Arguments,
        layout: &Layout,
        (unit, stages): (&'a Unit, Stages),
    ) -> Self {
        let warp = b.warp();
        let warp = b.uniform_register(warp);
        let first = b.let_(unit.begin + warp.signed());
        let first = if unit.pieces.is_some() { skip_unseen(b, cfg, unit, first) } else { first };
        let row = tile_row(b, cfg, unit, first);
        let mut side = |tensor: (Tensor, u32), tile: &SmemTile, order: MatrixOrder, barriers| {
            let skip = b.let_(warp * (cfg.shape.stages * tile.bytes()));
            let ring = tile.at(b).plus(b, skip);
            let source = Source::new(b, cfg, unit, tensor, (tile, ring), row, barriers);
            Side { tile: *tile, source, rows: tile.matrix_rows(b, order), skip, ring, barriers }
        };
        let of = |n: usize| stages.barriers.map(|both| both[n]);
        let keys = side((args.k, tile_dim(cfg, cfg.dim_qk)), &layout.k, MatrixOrder::ColumnsFirst, of(0));
        let values = side((args.v, tile_dim(cfg, cfg.dim_v)), &layout.v, MatrixOrder::RowsFirst, of(1));
        let tile = b.var_in(Scope::Warp, first);
        Self { cfg, unit, keys, values, stages, tile, paging: None }
    }

    /// Starts the copies into all stages, and fetches the pages of the tile after them.
    pub(super) fn fill(&mut self, b: &mut Builder, args: &Arguments) {
        let (cfg, unit, stages) = (self.cfg, self.unit, self.cfg.shape.stages);
        let pages = args.pages.map(|args| Pages::new(b, cfg, args, unit));
        // All entries are asked for before any is needed.
        let entry = |b: &mut Builder, ahead: u32| {
            let tile = self.tile_ahead(b, ahead);
            pages.map(|pages| (pages, pages.fetch(b, cfg, unit, tile)))
        };
        let entries: Vec<_> = (0..=stages).map(|ahead| entry(b, ahead)).collect();
        for (ahead, paging) in (0..stages).zip(&entries) {
            let stage = self.stages.ahead(b, cfg, ahead);
            self.paging = *paging;
            self.load(b, Which::Keys, (ahead, stage));
            self.load(b, Which::Values, (ahead, stage));
        }
        self.paging = entries[stages as usize];
    }

    /// The warp's tile so many turns from this one.
    fn tile_ahead(&self, b: &mut Builder, turns: u32) -> Reg<S32> {
        b.let_(self.tile + (turns * self.cfg.shape.warps) as i32)
    }

    const fn side(&self, which: Which) -> &Side {
        match which {
            Which::Keys => &self.keys,
            Which::Values => &self.values,
        }
    }

    /// Starts the copies of the warp's tile `ahead` turns from this one, if there is one: a group of their own.
    fn load(&self, b: &mut Builder, which: Which, (ahead, stage): (u32, Reg<U32>)) {
        let (cfg, unit) = (self.cfg, self.unit);
        let tile = self.tile_ahead(b, ahead);
        let needed = b.uniform::<Warp>(tile.lt(unit.end));
        b.if_uniform(needed, |b| {
            let there = self.there(b, tile);
            let row = tile_row(b, cfg, unit, tile);
            let entry = self.paging.map(|(pages, entry)| Entry { page: pages.page(b, entry), ..entry });
            self.side(which).source.issue(b, stage, Wanted { row, there, entry });
        });
        if cfg.shape.copies == Copies::Lanes {
            b.commit_copies();
        }
    }

    /// Rows of a tile, from its first on, that are keys.
    fn there(&self, b: &mut Builder, tile: Reg<S32>) -> Reg<S32> {
        b.let_(self.unit.sequence.keys.signed() - tile * self.cfg.shape.tile_n as i32)
    }

    /// Releases this turn's tile: the one that takes its place is in flight.
    pub(super) fn refill(&self, b: &mut Builder, which: Which) {
        b.sync_warp();
        self.load(b, which, (self.cfg.shape.stages, self.stages.stage));
    }

    /// Waits for this turn's tile; returns its rows, and where it lies among them.
    pub(super) fn wait(&self, b: &mut Builder, which: Which) -> (&MatrixRows, Reg<U32>) {
        let side = self.side(which);
        match side.barriers {
            Some(barriers) => {
                barriers.number(b, self.stages.stage).wait(b, self.stages.parity);
                if which == Which::Values && self.cfg.lengths.has_keys() {
                    self.clear(b, side);
                }
            }
            None => {
                b.wait_copies(2 * self.cfg.shape.stages - 1);
                b.sync_warp();
            }
        }
        (&side.rows, b.let_(self.stages.stage * side.tile.bytes() + side.skip))
    }

    /// Clears what tensor copies brought from beyond the sequence.
    fn clear(&self, b: &mut Builder, side: &Side) {
        let there = self.there(b, self.tile);
        let cut = b.uniform::<Warp>(there.lt(self.cfg.shape.tile_n as i32));
        b.if_uniform(cut, |b| {
            let start = side.ring.plus(b, self.stages.stage * side.tile.bytes());
            clear_rows(b, &side.tile, start, there);
            b.sync_warp();
        });
    }

    /// Moves on to the warp's next tile.
    pub(super) fn advance(&self, b: &mut Builder) {
        if let Some((pages, entry)) = self.paging {
            let tile = self.tile_ahead(b, self.cfg.shape.stages + 1);
            pages.fetch_into(b, self.cfg, self.unit, (tile, entry));
        }
        b.set(self.tile, self.tile + self.cfg.shape.warps as i32);
        self.stages.advance(b, self.cfg);
    }
}

/// Features as columns of 16 bits, two of 8 bits in one.
const fn tile_dim(cfg: &Config, dim: u32) -> u32 {
    dim * cfg.cache.bytes() / 2
}

/// The warp's first tile from `tile` on that rows see: pieces begin where they are cut, not where a window does.
fn skip_unseen(b: &mut Builder, cfg: &Config, unit: &Unit, tile: Reg<S32>) -> Reg<S32> {
    let warps = cfg.shape.warps;
    let turns = b.let_((unit.sequence.first - tile).max(0).unsigned().div_ceil(warps));
    b.let_(tile + (turns * warps).signed())
}

/// First row of a key tile in K and V.
fn tile_row(b: &mut Builder, cfg: &Config, unit: &Unit, tile: Reg<S32>) -> Reg<U32> {
    b.let_(unit.sequence.kv_start + (tile * cfg.shape.tile_n as i32).unsigned())
}

/// Where a warp stands in its ring; it goes on from there with its next unit, so that barriers count on.
#[derive(Clone, Copy)]
pub(super) struct Stages {
    /// The stage of this turn, and the last bit of how often the ring has been round.
    stage: Reg<U32>,
    parity: Reg<U32>,
    /// Barriers of the stages of keys and of values, where tensor copies fill them.
    barriers: Option<[Mbarrier; 2]>,
}

impl Stages {
    /// The first stage; only their own warp meets its barriers.
    pub(super) fn new(b: &mut Builder, cfg: &Config, layout: &Layout) -> Self {
        let [stage, parity] = [(); 2].map(|()| b.var_in(Scope::Warp, 0));
        let barriers = layout.barriers.map(|first| {
            let (stages, warp, lane) = (cfg.shape.stages, b.warp(), b.lane());
            let number = b.let_(warp * (2 * stages));
            let keys = b.mbarrier_at(first).number(b, number);
            b.if_(lane.eq(0), |b| {
                (0..2 * stages).for_each(|n| keys.nth(n).init(b, 1));
                b.fence_mbarrier_init();
            });
            b.sync_warp();
            [keys, keys.nth(stages)]
        });
        Self { stage, parity, barriers }
    }

    /// The stage so many turns from this one: less than there are stages.
    fn ahead(&self, b: &mut Builder, cfg: &Config, turns: u32) -> Reg<U32> {
        let stage = b.let_(self.stage + turns);
        b.let_(stage.ge(cfg.shape.stages).select(stage - cfg.shape.stages, stage))
    }

    /// Moves on by one.
    fn advance(&self, b: &mut Builder, cfg: &Config) {
        let next = b.let_(self.stage + 1);
        let round = b.let_(next.eq(cfg.shape.stages));
        b.select_into(self.stage, round, 0, next);
        if self.barriers.is_some() {
            b.select_into(self.parity, round, self.parity ^ 1, self.parity);
        }
    }
}
