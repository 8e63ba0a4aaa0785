//! The producer: one warp that walks the tiles; its first lane issues every copy.
//!
//! Unused rows of a batch entry may hold anything, and 0 · NaN is NaN: if the last streamed tile has such rows, the warp
//! overwrites them with zeros before it signals to consumers that the tile is there.

use flashcore_tile::{
    Builder, CHUNK_BYTES, Mbarrier, Pipeline, Pred, Reg, S32, Scope, Shared, Stage, TensorMap, U32, U64, Val,
    Warp,
};

use super::{
    Arguments, Config, Layout, Order, Side, TERM_BYTES,
    schedule::{INFO_BYTES, Tile},
    writer::Writer,
};

/// Lanes of a warp.
pub(super) const LANES: u32 = 32;

/// Copies everything that the tiles of this CTA need, in the order in which consumers take it.
pub(super) fn run(
    b: &mut Builder,
    cfg: Config,
    args: &Arguments,
    layout: &Layout,
    writer: Option<&Writer<'_>>,
) {
    let warp = b.warp();
    let first = b.uniform::<Warp>(warp.eq(0));
    b.if_uniform(first, |b| Producer::new(b, cfg, args, layout).tiles(b));
    if let Some(writer) = writer {
        let second = b.uniform::<Warp>(warp.eq(1));
        b.if_uniform(second, |b| writer.run(b));
    }
}

/// What the producer keeps for the whole launch.
pub(super) struct Producer<'a> {
    pub(super) cfg: Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
    pub(super) lane: Reg<U32>,
    pub(super) leader: Pred,
    /// Held and streamed tiles passed.
    pub(super) held: Reg<U32>,
    streamed: Reg<U32>,
    /// Tiles whose unused rows were cleared.
    cleared: Reg<U32>,
}

/// A streamed tile: which rows of which head.
#[derive(Clone, Copy)]
struct Source {
    head: Reg<U32>,
    batch: Reg<U32>,
    row: Reg<U32>,
    /// Rows of it that are used, where that may be fewer than it has.
    used: Option<Reg<U32>>,
}

impl<'a> Producer<'a> {
    fn new(b: &mut Builder, cfg: Config, args: &'a Arguments, layout: &'a Layout) -> Self {
        let lane = b.lane();
        let leader = b.let_(lane.eq(0));
        let [held, streamed, cleared] = [(); 3].map(|()| b.var(0));
        Self { cfg, args, layout, lane, leader, held, streamed, cleared }
    }

    fn tiles(&self, b: &mut Builder) {
        match self.args.packed {
            Some(packed) => self.packed_tiles(b, packed),
            None => self.counted_tiles(b),
        }
        let info = info(b, self.layout, self.held);
        let stage = self.layout.held[0].stage(b, self.held);
        b.predicated(self.leader, |b| {
            Tile::post_end(b, self.cfg, info);
            stage.publish(b);
        });
    }

    /// As many tiles as the host says.
    fn counted_tiles(&self, b: &mut Builder) {
        let (cfg, args, layout) = (self.cfg, self.args, self.layout);
        let index = self.first_tile(b);
        b.while_(
            |b| {
                let stage = layout.held[0].stage(b, self.held);
                Self::wait_empty(b, &stage);
                index.lt(args.tiles)
            },
            |b| {
                let tile = Tile::numbered(b, cfg, args, index);
                self.begin(b, &tile);
                self.next(b, index);
            },
        );
    }

    /// Posts a tile in a place that is empty, and copies what it needs.
    pub(super) fn begin(&self, b: &mut Builder, tile: &Tile) {
        let info = info(b, self.layout, self.held);
        b.predicated(self.leader, |b| tile.post(b, self.cfg, info));
        self.tile(b, tile);
        b.add_to(self.held, 1);
    }

    /// Copies one held tile, and the streamed ones that it needs of each of its heads.
    fn tile(&self, b: &mut Builder, tile: &Tile) {
        let row = tile.first_row(b, self.cfg);
        // Keys of others would be multiplied with slopes of 0 where dQ is summed over all keys of the tile.
        let cuts = self.cfg.hides_others();
        let used = cuts.then(|| b.let_(tile.held_len(self.cfg) - row));
        let row = tile.held_place(b, self.cfg, row);
        let of = Source { head: tile.head, batch: tile.batch, row, used };
        self.held_tile(b, 0, of);
        let streamed = tile.streamed(b, self.cfg, self.args);
        let (heads, first_head) = self.streamed_heads(b, tile);
        let second = b.var(0);
        streamed.each(b, self.cfg, heads, |b, member, block| {
            let head = b.let_(first_head + member);
            let source = self.source(b, tile, head, block);
            self.first(b, source);
            // The second held tile is needed after the first product.
            let once = b.uniform::<Warp>(second.eq(0));
            b.if_uniform(once, |b| self.held_tile(b, 1, of));
            b.set(second, 1);
            self.second(b, source);
            b.add_to(self.streamed, 1);
        });
        let never = b.uniform::<Warp>(second.eq(0));
        b.if_uniform(never, |b| self.held_tile(b, 1, of));
    }

    /// How many streamed heads belong to a held one, and the first of them.
    fn streamed_heads(&self, b: &mut Builder, tile: &Tile) -> (Reg<U32>, Reg<U32>) {
        match self.cfg.side {
            Side::Keys => (self.args.group, b.let_(tile.head * self.args.group)),
            Side::Queries => (b.var(1), b.let_(tile.head / self.args.group)),
        }
    }

    fn source(&self, b: &mut Builder, tile: &Tile, head: Reg<U32>, block: Reg<S32>) -> Source {
        let row = b.let_(block.unsigned() * self.cfg.shape.step);
        let used = self.cfg.cuts_streamed().then(|| b.let_(tile.streamed_len(self.cfg) - row));
        let row = tile.streamed_place(b, self.cfg, row);
        Source { head, batch: tile.batch, row, used }
    }

    /// Waits for a place with all lanes, which then go on together: else the leader could fill a place twice while another
    /// lane still looks for the phase between.
    #[track_caller]
    pub(super) fn wait_empty(b: &mut Builder, stage: &Stage) {
        stage.wait_empty(b);
        b.sync_warp();
    }

    /// Copies a held tile once its predecessor has been released.
    fn held_tile(&self, b: &mut Builder, which: usize, of: Source) {
        let (pipeline, map) = (self.layout.held[which], self.args.held[which]);
        let stage = pipeline.stage(b, self.held);
        Self::wait_empty(b, &stage);
        self.cleared_tile(b, (&pipeline, map), &stage, of, None);
    }

    /// Copies a streamed tile of queries, with the terms of their rows, or of keys.
    fn first(&self, b: &mut Builder, of: Source) {
        let (pipeline, map) = (self.layout.streamed[0], self.args.streamed[0]);
        let stage = pipeline.stage(b, self.streamed);
        Self::wait_empty(b, &stage);
        let terms = self.layout.terms.map(|terms| {
            let slot = pipeline.slot(b, self.streamed);
            let to = terms.at(b, slot);
            let from = match self.cfg.packed() {
                true => self.args.terms.bulk_at(b, of.head, of.row),
                false => self.args.terms.at(b, of.batch, of.head, of.row),
            };
            (from, to)
        });
        self.cleared_tile(b, (&pipeline, map), &stage, of, terms);
    }

    /// Copies a streamed tile of dO or of values.
    fn second(&self, b: &mut Builder, of: Source) {
        let (pipeline, map) = (self.layout.streamed[1], self.args.streamed[1]);
        let stage = pipeline.stage(b, self.streamed);
        Self::wait_empty(b, &stage);
        self.cleared_tile(b, (&pipeline, map), &stage, of, None);
    }

    /// Copies a tile, with the terms of its rows where they come with it; clears rows that are not used.
    fn cleared_tile(
        &self,
        b: &mut Builder,
        what: (&Pipeline, TensorMap),
        stage: &Stage,
        of: Source,
        terms: Option<(Reg<U64>, Shared)>,
    ) {
        let more = terms.map_or(0, |_| self.cfg.shape.step * TERM_BYTES);
        let others = |b: &mut Builder, done: Mbarrier| {
            if let Some((from, to)) = terms {
                b.bulk_load(from, to, more, done);
            }
        };
        let straight = |b: &mut Builder| {
            self.copy(b, what, stage, of, stage.full(), |b| {
                stage.expect_tile_and(b, more);
                others(b, stage.full());
            });
        };
        let Some((used, landed)) = of.used.zip(self.layout.landed) else { return straight(b) };
        let whole = b.uniform::<Warp>(used.ge(what.0.tile().rows()));
        b.if_else(whole, straight, |b| {
            let landed = b.mbarrier_at(landed);
            self.copy(b, what, stage, of, landed, |b| {
                landed.arrive_expecting(b, what.0.tile().bytes() + more);
                others(b, landed);
            });
            landed.wait(b, self.cleared & 1);
            b.add_to(self.cleared, 1);
            let rows = stage.at(b);
            self.clear(b, what.0, rows, used);
            terms.iter().for_each(|&(_, terms)| self.clear_terms(b, terms, used));
            b.fence_async();
            b.sync_warp();
            b.predicated(self.leader, |b| stage.publish(b));
        });
    }

    /// Issues the copy of a tile after what announces it.
    fn copy(
        &self,
        b: &mut Builder,
        (pipeline, map): (&Pipeline, TensorMap),
        stage: &Stage,
        of: Source,
        done: Mbarrier,
        announce: impl FnOnce(&mut Builder),
    ) {
        let to = stage.at(b);
        let at = [Val::Const(0), of.row.into(), of.head.into(), of.batch.into()];
        b.predicated(self.leader, |b| {
            announce(b);
            b.tma_load(map, pipeline.tile(), to, at, done);
        });
    }

    /// Zeros from row `used` to the end of every slab.
    fn clear(&self, b: &mut Builder, pipeline: &Pipeline, tile: Shared, used: Reg<U32>) {
        let shape = pipeline.tile();
        let start = b.let_(used * shape.slab_width());
        let at = b.var(self.lane * CHUNK_BYTES + start);
        b.while_(
            |_| at.lt(shape.slab_bytes()),
            |b| {
                let row = tile.plus(b, at);
                for slab in 0..shape.slabs() {
                    b.store_shared::<U32>(row.at(slab * shape.slab_bytes()), &[Val::Const(0); 4]);
                }
                b.add_to(at, LANES * CHUNK_BYTES);
            },
        );
        b.sync_warp();
    }

    /// The CTA's first tile.
    fn first_tile(&self, b: &mut Builder) -> Reg<U32> {
        let index = b.cta();
        let index = b.var(index);
        if self.cfg.shape.order == Order::Drawn {
            self.next(b, index);
        }
        index
    }

    /// Moves on to the next tile.
    fn next(&self, b: &mut Builder, index: Reg<U32>) {
        let ctas = b.ctas();
        let Some(counter) = self.args.tile_counter else { return b.add_to(index, ctas) };
        let drawn = self.cfg.shape.order == Order::Drawn;
        let ticket = b.var_in::<U32>(Scope::Lane, 0);
        b.predicated(self.leader, |b| {
            let drawn = b.atomic_add(counter, 1);
            b.set(ticket, drawn);
        });
        let ticket = b.broadcast(ticket, Scope::Warp);
        // One ticket is drawn per tile, and where CTAs start without one, another by each; whoever draws the last leaves
        // the counter as it was found.
        let tickets = if drawn { b.let_(self.args.tiles + ctas) } else { self.args.tiles };
        let last = b.let_((tickets - 1).eq(ticket) & self.leader);
        b.predicated(last, |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
        if drawn {
            b.set(index, ticket);
        } else {
            b.set(index, ticket + ctas);
        }
    }
}

/// Where the tile of held tile number `count` is posted.
pub(super) fn info(b: &mut Builder, layout: &Layout, count: Reg<U32>) -> Shared {
    let slot = layout.held[0].slot(b, count);
    let bytes = b.let_(slot * INFO_BYTES);
    b.shared_at(layout.tile_info).plus(b, bytes)
}
