//! One CTA's work: a unit, warp by warp, and its end.

use flashcore_tile::{Acc, Builder, MMA_M, Reg, S32, Warp};

use super::{
    Arguments, Config, Layout,
    config::{Copies, Order},
    end::{self, End},
    even,
    fold::Fold,
    load::QueryLoad,
    products::{self, Block, Queries},
    ring::{Ring, Stages, Which},
    unit::Unit,
    wait_for_predecessor,
};
use crate::parts::{
    lengths::LengthsKind,
    mask::{ThreadVisibility, thread_column},
    row_end::thread_rows,
    scale::Scale,
};

/// Computes this CTA's units.
pub(super) fn run(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout) {
    let stages = Stages::new(b, cfg, layout);
    if !waits_late(cfg) {
        wait_for_predecessor(b, cfg);
    }
    let work = |b: &mut Builder, unit: &Unit| compute(b, cfg, args, layout, (unit, stages));
    match cfg.shape.order {
        Order::Grid => {
            let unit = Unit::of_grid(b, cfg, args);
            work(b, &unit);
        }
        Order::Cluster { parts } => {
            b.cluster(parts);
            let unit = Unit::of_cluster(b, cfg, args, parts);
            layout.exchange.iter().for_each(|exchange| exchange.open(b, cfg, &unit));
            work(b, &unit);
        }
        Order::Even => even::each_unit(b, cfg, args, |b, unit| {
            work(b, unit);
            if cfg.shape.copies == Copies::Tensor {
                // Tensor copies of the next unit overwrite what threads wrote.
                b.fence_async();
            }
        }),
    }
}

/// Whether everything is prepared before the kernel before is waited for: where lengths are the same for all sequences, the
/// first thing that is read are queries.
fn waits_late(cfg: &Config) -> bool {
    cfg.lengths == LengthsKind::Uniform && cfg.shape.order != Order::Even
}

fn compute(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    layout: &Layout,
    (unit, stages): (&Unit, Stages),
) {
    let load = QueryLoad::new(b, cfg, args, layout, unit);
    let mut ring = Ring::new(b, cfg, args, layout, (unit, stages));
    let visible = rows_of_thread(b, cfg, args, unit);
    if waits_late(cfg) {
        wait_for_predecessor(b, cfg);
    }
    load.issue(b);
    ring.fill(b, args);
    // Queries came before the groups of the ring, if it has any.
    b.wait_copies(if cfg.shape.copies == Copies::Lanes { 2 * cfg.shape.stages } else { 0 });
    b.sync_cta();
    let queries = Queries::new(b, cfg, layout);
    let factors = args.factors.map(|factors| factors.at(b, unit.sequence.index, unit.head_kv));
    let scale = factors.map_or(args.scale, |[of_keys, _]| args.scale.times(b, of_keys));
    let blocks: Vec<_> = (0..cfg.shape.blocks).map(|_| Block::new(b, cfg, &scale)).collect();
    let keys = KeyLoop { cfg, scale, unit, ring, blocks: &blocks, queries, visible };
    let end = End { cfg, args, layout, unit, factor: factors.map(|[_, of_values]| of_values) };
    match unit.pieces {
        Some(pieces) => {
            let fold = Fold::new(b, end, pieces);
            fold.each_piece(b, &blocks, |b, tile| keys.run(b, tile));
            fold.close(b);
        }
        None => {
            keys.run(b, unit.end);
            end::run(b, &end, &blocks);
        }
    }
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
        unit.sequence.visible.of_thread(b, queries)
    };
    (0..cfg.shape.blocks).map(block).collect()
}

/// A warp's loop over its key tiles.
struct KeyLoop<'a> {
    cfg: &'a Config,
    scale: Scale,
    unit: &'a Unit,
    ring: Ring<'a>,
    blocks: &'a [Block],
    queries: Queries,
    visible: Vec<ThreadVisibility>,
}

impl KeyLoop<'_> {
    /// All tiles of the warp before `end`.
    fn run(&self, b: &mut Builder, end: Reg<S32>) {
        b.while_(|_| self.ring.tile.lt(end), |b| self.turn(b));
    }

    /// One key tile; what it no longer needs is overwritten by the tile that takes its place in the ring.
    fn turn(&self, b: &mut Builder) {
        let (cfg, ring) = (self.cfg, &self.ring);
        let (keys, skip) = ring.wait(b, Which::Keys);
        let scores = products::scores(b, cfg, &self.queries, keys, skip);
        ring.refill(b, Which::Keys);
        scores.iter().for_each(|tile| self.scale.cap(b, tile.regs()));
        self.hide(b, &scores);
        products::raise(b, self.blocks, &scores);
        let (values, skip) = ring.wait(b, Which::Values);
        products::outputs(b, cfg, self.blocks, &scores, values, skip);
        ring.refill(b, Which::Values);
        ring.advance(b);
    }

    /// Masks what rows do not see of a tile in which that may be.
    fn hide(&self, b: &mut Builder, scores: &[Acc]) {
        let tile = self.ring.tile;
        let cut = self.unit.sequence.tiles.hides(b, tile);
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
