//! One CTA's work: a unit, warp by warp, and its end.

use flashcore_tile::{Acc, Builder, MMA_M, MatrixOrder, MatrixRows, Reg, S32, Scope, U32, Warp};

use super::{
    Arguments, Config, Layout, end,
    load::{self, WarpLoad},
    products::{self, Block, Queries},
    unit::Unit,
};
use crate::parts::{
    mask::{ThreadVisibility, thread_column},
    row_end::thread_rows,
};

/// Computes this CTA's unit.
pub(super) fn unit(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout) {
    let unit = Unit::find(b, cfg, args);
    load::queries(b, cfg, args, layout, &unit);
    let ring = Ring::start(b, cfg, args, layout, &unit);
    // Queries came before the groups of the ring.
    b.wait_copies(2 * cfg.shape.stages);
    b.sync_cta();
    let queries = Queries::new(b, cfg, layout);
    let blocks: Vec<_> = (0..cfg.shape.blocks).map(|_| Block::new(b, cfg, args)).collect();
    let visible = rows_of_thread(b, cfg, args, &unit);
    KeyLoop { cfg, args, unit: &unit, ring, blocks: &blocks, queries, visible }.run(b);
    end::run(b, cfg, args, layout, &unit, &blocks);
}

/// What this thread's rows of each block see.
fn rows_of_thread(b: &mut Builder, cfg: &Config, args: &Arguments, unit: &Unit) -> Vec<ThreadVisibility> {
    let (lane, zero) = (b.lane(), b.var(0));
    let rows = thread_rows(b, zero, lane);
    let block = |n: u32| {
        let queries = rows.map(|row| {
            let row = b.let_(row + n * MMA_M);
            unit.query_of(b, args, row).signed()
        });
        unit.visible.of_thread(b, queries)
    };
    (0..cfg.shape.blocks).map(block).collect()
}

/// A warp's ring of K and V tiles, and the copies that keep it full.
struct Ring {
    load_k: WarpLoad,
    load_v: WarpLoad,
    keys: MatrixRows,
    values: MatrixRows,
    /// Where the warp's rings start.
    start: [Reg<U32>; 2],
    stage_bytes: [u32; 2],
    /// The stage of this turn.
    stage: Reg<U32>,
    /// The key tile of this turn.
    tile: Reg<S32>,
}

impl Ring {
    /// Starts the copies into all stages.
    fn start(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout, unit: &Unit) -> Self {
        let warp = b.warp();
        let warp = b.uniform_register(warp);
        let first = b.let_(unit.begin + warp.signed());
        let row = b.let_(unit.kv_start + (first * cfg.shape.tile_n as i32).unsigned());
        let sides = [(&args.k, &layout.k, cfg.dim_qk), (&args.v, &layout.v, cfg.dim_v)];
        let [load_k, load_v] = sides.map(|side| WarpLoad::new(b, cfg, unit, side, (warp, row)));
        let stage_bytes = [layout.k.bytes(), layout.v.bytes()];
        let ring = Self {
            load_k,
            load_v,
            keys: layout.k.matrix_rows(b, MatrixOrder::ColumnsFirst),
            values: layout.v.matrix_rows(b, MatrixOrder::RowsFirst),
            start: stage_bytes.map(|bytes| b.let_(warp * (cfg.shape.stages * bytes))),
            stage_bytes,
            stage: b.var_in(Scope::Warp, 0),
            tile: b.var_in(Scope::Warp, first),
        };
        for ahead in 0..cfg.shape.stages {
            let stage = b.var(ahead);
            ring.load(b, cfg, unit, &ring.load_k, (ahead, stage));
            ring.load(b, cfg, unit, &ring.load_v, (ahead, stage));
        }
        ring
    }

    /// Starts the copies of the warp's tile `ahead` turns from this one, if there is one: a group of their own.
    fn load(&self, b: &mut Builder, cfg: &Config, unit: &Unit, load: &WarpLoad, (ahead, stage): (u32, Reg<U32>)) {
        let tile = b.let_(self.tile + (ahead * cfg.shape.warps) as i32);
        let needed = b.uniform::<Warp>(tile.lt(unit.end));
        b.if_uniform(needed, |b| {
            let there = b.let_(unit.keys.signed() - tile * cfg.shape.tile_n as i32);
            load.issue(b, stage, there);
        });
        b.commit_copies();
    }

    /// Where the stage of this turn lies in the rings of keys and values.
    fn places(&self, b: &mut Builder) -> [Reg<U32>; 2] {
        std::array::from_fn(|n| b.let_(self.stage * self.stage_bytes[n] + self.start[n]))
    }

    /// Waits until the oldest group of copies is there for all lanes.
    fn wait(&self, b: &mut Builder, cfg: &Config) {
        b.wait_copies(2 * cfg.shape.stages - 1);
        b.sync_warp();
    }

    /// Moves on to the warp's next tile.
    fn advance(&self, b: &mut Builder, cfg: &Config) {
        b.set(self.tile, self.tile + cfg.shape.warps as i32);
        let next = b.let_(self.stage + 1);
        b.set(self.stage, next.eq(cfg.shape.stages).select(0, next));
    }
}

/// A warp's loop over its key tiles.
struct KeyLoop<'a> {
    cfg: &'a Config,
    args: &'a Arguments,
    unit: &'a Unit,
    ring: Ring,
    blocks: &'a [Block],
    queries: Queries,
    visible: Vec<ThreadVisibility>,
}

impl KeyLoop<'_> {
    fn run(&self, b: &mut Builder) {
        b.while_(|_| self.ring.tile.lt(self.unit.end), |b| self.turn(b));
    }

    /// One key tile; what it no longer needs is overwritten by the tile that takes its place in the ring.
    fn turn(&self, b: &mut Builder) {
        let (cfg, ring) = (self.cfg, &self.ring);
        let [k, v] = ring.places(b);
        ring.wait(b, cfg);
        let scores = products::scores(b, cfg, &self.queries, &ring.keys, k);
        b.sync_warp();
        ring.load(b, cfg, self.unit, &ring.load_k, (cfg.shape.stages, ring.stage));
        scores.iter().for_each(|tile| self.args.scale.cap(b, tile.regs()));
        self.hide(b, &scores);
        products::raise(b, self.blocks, &scores);
        ring.wait(b, cfg);
        products::outputs(b, cfg, self.blocks, &scores, &ring.values, v);
        b.sync_warp();
        ring.load(b, cfg, self.unit, &ring.load_v, (cfg.shape.stages, ring.stage));
        ring.advance(b, cfg);
    }

    /// Hides what rows do not see of a tile in which that may be.
    fn hide(&self, b: &mut Builder, scores: &[Acc]) {
        let tile = self.ring.tile;
        let cut = self.unit.tiles.hides(b, tile);
        let cut = b.uniform::<Warp>(cut);
        b.if_uniform(cut, |b| {
            let lane = b.lane();
            let column = thread_column(b, lane);
            let key = b.let_(tile * self.cfg.shape.tile_n as i32 + column);
            for (visible, scores) in self.visible.iter().zip(scores) {
                visible.hide(b, scores, key);
            }
        });
    }
}
