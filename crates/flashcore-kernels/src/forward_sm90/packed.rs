//! Packed sequences: the producer finds tiles in offsets that only the device knows.
//!
//! The host knows an upper bound of the number of tiles. A warp looks for the sequence of a tile's number among 32 sequences
//! at a time; as a CTA's numbers only increase, it resumes where the previous search ended. Its first lane then copies, and
//! the others wait for it; for small pages, several lanes copy keys. `producer.rs` calls this.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Pred, Reg, Scope, U32, Val, WARPGROUP, Warp};

use super::{
    Arguments, Config, Layout,
    keys::Keys,
    producer,
    schedule::Tile,
    spread::{self, Lanes},
};
use crate::parts::{
    search::{Progress, find_from},
    sections::Sections,
    share::{Share, short_queries},
};

const WARP: u32 = 32;

/// What is known of packed sequences, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    sequences: Reg<U32>,
    /// Most queries of a sequence that another kernel computes, if one does.
    short: Option<Reg<U32>>,
}

impl Packed {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Problem>, share: Share) -> Self {
        let short =
            (share == Share::Long).then(|| params.u32(b, "short_queries", |p| short_queries(p) as u32));
        Self { sequences: params.u32(b, "sequences", |p| p.sequences() as u32), short }
    }
}

/// Copies Q, K and V of every tile of this CTA, in the order in which consumers take them.
pub(super) fn produce(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, packed: Packed) {
    let warp = b.warp();
    let first = b.uniform::<Warp>((warp % (WARPGROUP / WARP)).eq(0));
    b.if_uniform(first, |b| {
        let walk = Walk::new(b, cfg, args, packed);
        let [done, copied] = [Scope::Warp, Scope::Lane].map(|scope| b.var_in(scope, 0));
        let mut last = None;
        b.do_while(|b| {
            let found = walk.find(b);
            let there = b.uniform::<Warp>(found.there);
            b.if_uniform(there, |b| {
                copy(b, &walk, layout, &found, [done, copied]);
                b.add_to(done, 1);
                walk.step(b);
            });
            last = Some(found.tiles);
            there
        });
        b.if_(walk.leads, |b| {
            last.iter().for_each(|&tiles| walk.leave(b, tiles));
            layout.q.stage(b, done).wait_empty(b);
            producer::end(b, cfg, layout, done);
        });
    });
}

/// Copies Q tile number `done` and its keys; `copied` key tiles came before them.
fn copy(b: &mut Builder, walk: &Walk<'_>, layout: &Layout, found: &FoundTile, [done, copied]: [Reg<U32>; 2]) {
    let (cfg, args, tile) = (walk.cfg, walk.args, &found.tile);
    let begin = |b: &mut Builder| {
        layout.q.stage(b, done).wait_empty(b);
        producer::begin(b, cfg, args, layout, done, tile);
        if let Some((_, ticket)) = producer::take(b, args) {
            b.set(walk.ticket, ticket);
        }
    };
    let Some(lanes) = walk.lanes else {
        return b.if_(walk.leads, |b| {
            begin(b);
            let tiles = tile.key_tiles(b, cfg, args);
            producer::load_kv(b, cfg, args, layout, copied, (tile, &tiles, found.keys));
        });
    };
    b.if_(walk.leads, begin);
    b.if_(lanes.copies, |b| {
        let tiles = tile.key_tiles(b, cfg, args);
        spread::load_kv(b, cfg, args, layout, copied, (tile, &tiles, found.keys));
    });
}

/// A tile, if there is one of its number.
struct FoundTile {
    tile: Tile,
    keys: Keys,
    there: Pred,
    /// How many tiles there are, where this is none.
    tiles: Reg<U32>,
}

/// The way of a CTA through the tiles.
struct Walk<'a> {
    cfg: Config,
    args: &'a Arguments,
    lane: Reg<U32>,
    /// The lane that copies, or the first of those that do.
    leads: Pred,
    /// The lanes that copy keys, where that is not one.
    lanes: Option<Lanes>,
    last_sequence: Reg<U32>,
    short: Option<Reg<U32>>,
    progress: Progress,
    /// Number of the next tile.
    index: Reg<U32>,
    /// The ticket that it was drawn with, in the lane that copies.
    ticket: Reg<U32>,
}

impl<'a> Walk<'a> {
    fn new(b: &mut Builder, cfg: Config, args: &'a Arguments, packed: Packed) -> Self {
        let (lane, cta) = (b.lane(), b.cta());
        Self {
            cfg,
            args,
            lane,
            leads: b.let_(lane.eq(0)),
            lanes: cfg.spreads().then(|| Lanes::new(b, cfg)),
            last_sequence: b.let_(packed.sequences - 1),
            short: packed.short,
            progress: Progress::new(b),
            index: b.var_in(Scope::Warp, cta),
            // Before the first ticket there is none that could be the last.
            ticket: b.var_in(Scope::Lane, u32::MAX),
        }
    }

    /// The tile that comes next. Tiles of a sequence are numbered one after another, all heads together.
    fn find(&self, b: &mut Builder) -> FoundTile {
        let (cfg, args) = (self.cfg, self.args);
        let number = b.let_(self.index / args.heads);
        let ends = (self.lane, self.last_sequence);
        let found = find_from(b, self.progress, number, ends, |b, sequence| self.row_tiles(b, sequence));
        let there = b.let_((number - found.before).lt(found.own));
        // Nobody looks at a tile that is not there, but it is numbered all the same.
        let row_tiles = b.let_(found.own.max(1));
        let numbering = Sections { heads: args.section, row_tiles, all: None, last_first: cfg.mask.right };
        let before = b.let_(found.before * args.heads);
        let within = b.let_(self.index - before);
        let (row, head) = numbering.find(b, within);
        let [queries, keys] = args.lengths.sequence(b, found.index);
        FoundTile {
            tile: Tile::packed(row, head, queries, keys.len),
            keys: Keys::of_sequence(args, found.index, keys.start),
            there,
            tiles: b.let_(found.own * args.heads + before),
        }
    }

    /// Row tiles of a head of a sequence: no more than the host knows of, whatever the offsets say.
    fn row_tiles(&self, b: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
        let queries = self.args.lengths.packed_queries(b, sequence);
        let rows = if self.cfg.pack == 1 { queries } else { b.let_(queries * self.cfg.pack) };
        let tiles = b.let_(rows.div_ceil(self.cfg.tile_m()).min(self.args.row_tiles));
        self.short.map_or(tiles, |short| b.let_(queries.gt(short).select(tiles, 0)))
    }

    /// Moves on to the next tile.
    fn step(&self, b: &mut Builder) {
        let ctas = b.ctas();
        if self.args.tile_counter.is_none() {
            return b.add_to(self.index, ctas);
        }
        let ticket = b.broadcast(self.ticket, Scope::Warp);
        b.set(self.index, ticket + ctas);
    }

    /// Leaves the counter as it was found: each tile has drawn one ticket, and who drew the last one is here.
    fn leave(&self, b: &mut Builder, tiles: Reg<U32>) {
        let Some(counter) = self.args.tile_counter else { return };
        let last = b.let_(tiles - 1);
        // Without tiles nobody has drawn any.
        b.predicated(self.ticket.eq(last) & tiles.ne(0), |b| {
            b.store_global::<U32>(counter, &[Val::Const(0)]);
        });
    }
}
