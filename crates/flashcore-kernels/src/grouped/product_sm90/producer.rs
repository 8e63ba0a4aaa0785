//! The producer: one thread loads tiles of both factors; if groups divide the depth, a warp clears the data beyond a
//! group before it is multiplied, so that not even NaN leaks from the next one.

use flashcore_tile::{
    Builder, CHUNK_BYTES, Mbarrier, Params, Pred, Reg, Scope, Shared, Stage, TensorMap, U32, Val, WARPGROUP,
    Warp,
};

use super::{
    super::Work,
    Config, Layout, maps,
    place::{Arguments, Place},
};
use crate::parts::lines::DEPTH;

/// Number of the warp that clears.
const CLEARING: u32 = 1;
/// Threads that share a row of 128 bytes, and rows of a warp.
const LANES: u32 = 8;
const ROWS: u32 = 32 / LANES;

/// Both factors as tensor copies see them.
pub(super) fn factors(b: &mut Builder, params: &mut Params<Work>, cfg: &Config) -> [TensorMap; 2] {
    let cfg = *cfg;
    [("rows", 0), ("columns", 1)]
        .map(|(name, which)| params.tensor_map(b, name, move |work| maps::factor(&cfg, work, which)))
}

/// Fills the ring with every tile of this CTA.
pub(super) fn run(b: &mut Builder, cfg: &Config, args: &Arguments, maps: [TensorMap; 2], layout: &Layout) {
    let (thread, warp) = (b.thread(), b.warp());
    let filling = Filling { cfg: *cfg, args: *args, maps, layout: *layout };
    let first: Pred = b.let_((thread % WARPGROUP).eq(0));
    b.if_(first, |b| {
        let count = b.var_in(Scope::Lane, 0u32);
        args.each_tile(b, Scope::Lane, |b, place| filling.tile(b, count, place));
    });
    if layout.landing.is_some() {
        let clears = b.uniform::<Warp>(warp.eq(CLEARING));
        b.if_uniform(clears, |b| {
            let count = b.var_in(Scope::Warp, 0u32);
            args.each_tile(b, Scope::Warp, |b, place| filling.clear_tile(b, count, place));
        });
    }
}

/// What the producer keeps for the whole launch.
struct Filling {
    cfg: Config,
    args: Arguments,
    maps: [TensorMap; 2],
    layout: Layout,
}

impl Filling {
    /// Loads all stages of a tile.
    fn tile(&self, b: &mut Builder, count: Reg<U32>, place: Place) {
        let [from, to] = place.depth;
        let (depth, steps) = (b.var_in(Scope::Lane, from), place.steps(b));
        let end = b.let_(count + steps);
        b.while_(
            |_| count.lt(end),
            |b| {
                let stage = self.layout.ring.stage(b, count);
                stage.wait_empty(b);
                // What starts beyond a tensor is zeros.
                let at = b.let_(depth.lt(to).select(depth, self.args.depth));
                self.copy(b, &stage, count, (place, at));
                b.add_to(count, 1);
                b.add_to(depth, DEPTH);
            },
        );
    }

    /// Loads the tiles of a stage.
    fn copy(&self, b: &mut Builder, stage: &Stage, count: Reg<U32>, (place, depth): (Place, Reg<U32>)) {
        let done: Mbarrier = match self.layout.landing {
            None => stage.full(),
            Some(landing) => landing.stage(b, count).full(),
        };
        done.arrive_expecting(b, self.layout.ring.tile().bytes());
        let start = stage.at(b);
        let lines = [place.rows[0], place.column];
        for (which, line) in lines.into_iter().enumerate() {
            let [line, depth, matrix] = [line, depth, place.matrices[which]].map(Val::from);
            let at = if self.cfg.along[which] { [depth, line, matrix] } else { [line, depth, matrix] };
            b.tma_load(self.maps[which], &self.layout.tiles[which], self.place_of(start, which), at, done);
        }
    }

    /// Where the tile of a factor lies in a stage.
    const fn place_of(&self, start: Shared, which: usize) -> Shared {
        start.at(self.layout.tiles[which].offset() - self.layout.tiles[0].offset())
    }

    /// Passes the stages of a tile on as they land, without what lies beyond the tile's depth.
    fn clear_tile(&self, b: &mut Builder, count: Reg<U32>, place: Place) {
        let Some(landing) = self.layout.landing else { return };
        let [from, to] = place.depth;
        let (steps, lane) = (place.steps(b), b.lane());
        let end = b.let_(count + steps);
        let left = b.var_in(Scope::Warp, to - from);
        b.while_(
            |_| count.lt(end),
            |b| {
                let stage = self.layout.ring.stage(b, count);
                landing.stage(b, count).wait_full(b);
                let partly = b.uniform::<Warp>(left.gt(0) & left.lt(DEPTH));
                b.if_uniform(partly, |b| {
                    self.clear(b, &stage, left);
                    b.fence_async();
                });
                b.sync_warp();
                b.predicated(lane.eq(0), |b| stage.publish(b));
                let next = b.let_(left.gt(DEPTH).select(left - DEPTH, 0));
                b.set(left, next);
                b.add_to(count, 1);
            },
        );
    }

    /// Clears the rows of a stage's tiles, which run across the depth, from row `from` on.
    fn clear(&self, b: &mut Builder, stage: &Stage, from: Reg<U32>) {
        let (start, lane) = (stage.at(b), b.lane());
        let row = b.var_in(Scope::Lane, from + lane / LANES);
        let chunk = b.let_(lane % LANES * CHUNK_BYTES);
        b.while_(
            |_| row.lt(DEPTH),
            |b| {
                for which in 0..2 {
                    let tile = &self.layout.tiles[which];
                    for slab in 0..tile.slabs() {
                        let to = self.place_of(start, which).at(slab * tile.slab_bytes());
                        let to = to.plus(b, row * tile.slab_width() + chunk);
                        b.store_shared(to, &[Val::<U32>::Const(0); 4]);
                    }
                }
                b.add_to(row, ROWS);
            },
        );
    }
}
