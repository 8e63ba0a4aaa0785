//! Small pages: a key tile takes many copies, which are spread over the lanes of the producer warp.
//!
//! Each lane looks up one page of a key tile, or a part of a page, and copies its keys and values; the first announces the
//! bytes of all. A lane holds the numbers of three key tiles: values come after the keys of the next tile, and the next
//! number is loaded before any wait. `producer.rs`, `packed.rs` and `single.rs` call this.

use flashcore_tile::{
    Builder, Pipeline, Pred, Reg, S32, Scope, TensorMap, U32, U64, Uniform, Val, WARPGROUP, Warp,
};

use super::{Arguments, Config, Layout, keys::Keys, producer, schedule::Tile};
use crate::parts::{mask::KeyTiles, pages::PageArguments};

const WARP: u32 = 32;

/// The producer's warp, seen by one of its lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    /// Number of this lane.
    own: Reg<U32>,
    /// Whether it is the first, which does what is done once.
    pub(super) leads: Pred,
    /// Whether it copies.
    pub(super) copies: Pred,
}

impl Lanes {
    pub(super) fn new(b: &mut Builder, cfg: Config) -> Self {
        let own = b.lane();
        let copies = cfg.tile_n() / cfg.copied_rows();
        Self { own, leads: b.let_(own.eq(0)), copies: b.let_(own.lt(copies)) }
    }
}

/// Whether this is the first warp of the producer.
pub(super) fn first_warp(b: &mut Builder) -> Uniform<Warp> {
    let warp = b.warp();
    b.uniform::<Warp>((warp % (WARPGROUP / WARP)).eq(0))
}

/// Copies Q, K and V of as many tiles as the host says.
pub(super) fn counted(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, tiles: Reg<U32>) {
    let first = first_warp(b);
    b.if_uniform(first, |b| {
        let (lanes, cta) = (Lanes::new(b, cfg), b.cta());
        let [index, done] = [b.var_in(Scope::Warp, cta), b.var_in(Scope::Warp, 0)];
        let [kv, ticket] = [(); 2].map(|()| b.var_in(Scope::Lane, 0));
        b.while_(
            |_| index.lt(tiles),
            |b| {
                let tile = Tile::numbered(b, cfg, args, index);
                b.if_(lanes.leads, |b| {
                    layout.q.stage(b, done).wait_empty(b);
                    producer::begin(b, cfg, args, layout, done, &tile);
                    if let Some((_, drawn)) = producer::take(b, args) {
                        b.set(ticket, drawn);
                    }
                });
                b.if_(lanes.copies, |b| {
                    let key_tiles = tile.key_tiles(b, cfg, args);
                    let keys = Keys::of_entry(args, &tile);
                    load_kv(b, cfg, args, layout, kv, (&tile, &key_tiles, keys));
                });
                b.add_to(done, 1);
                next(b, args, (index, tiles), (lanes, ticket));
            },
        );
        b.if_(lanes.leads, |b| {
            layout.q.stage(b, done).wait_empty(b);
            producer::end(b, cfg, layout, done);
        });
    });
}

/// Moves all lanes on to the next tile, whose ticket the first has drawn.
fn next(
    b: &mut Builder,
    args: &Arguments,
    (index, tiles): (Reg<U32>, Reg<U32>),
    (lanes, ticket): (Lanes, Reg<U32>),
) {
    let ctas = b.ctas();
    let Some(counter) = args.tile_counter else {
        return b.add_to(index, ctas);
    };
    let drawn = b.broadcast(ticket, Scope::Warp);
    // One ticket is drawn per tile; whoever draws the last leaves the counter as it was found.
    let last = b.let_(tiles - 1);
    b.predicated(drawn.eq(last) & lanes.leads, |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
    b.set(index, drawn + ctas);
}

/// What a lane copies of every key tile.
struct Part {
    cfg: Config,
    pages: PageArguments,
    leads: Pred,
    /// The first key of its rows in a key tile.
    first: Reg<U32>,
    /// Bytes of a slab before them.
    bytes: Reg<U32>,
    /// Where the page numbers of the sequence start.
    row: Reg<U64>,
    /// Keys of the sequence.
    keys: Reg<U32>,
    head: Reg<U32>,
}

/// Copies K and V from the last key tile to the first, K one ahead; executed by the lanes that copy.
pub(super) fn load_kv(
    b: &mut Builder,
    cfg: Config,
    args: &Arguments,
    layout: &Layout,
    count: Reg<U32>,
    (tile, tiles, keys): (&Tile, &KeyTiles, Keys),
) {
    let Keys::Paged { pages, sequence } = keys else { return };
    let head = b.let_(tile.head / args.group);
    let part = Part::new(b, cfg, layout, (pages, sequence), (tile.kv_len, head));
    let block = b.var_in(Scope::Lane, tiles.end - 1);
    let [held, next] = [(); 2].map(|()| b.var_in(Scope::Lane, u32::MAX));
    part.ask(b, block, held);
    let below = b.let_(block - 1);
    part.ask(b, below, next);
    part.copy(b, (&layout.k, args.k), count, (block, held));
    b.while_(
        |_| block.gt(tiles.first()),
        |b| {
            let (ahead, below) = (b.let_(count + 1), b.let_(block - 1));
            part.copy(b, (&layout.k, args.k), ahead, (below, next));
            let (after, further) = (b.var_in(Scope::Lane, u32::MAX), b.let_(below - 1));
            part.ask(b, further, after);
            part.copy(b, (&layout.v, args.v), count, (block, held));
            for (var, value) in [(held, next), (next, after), (count, ahead)] {
                b.set(var, value);
            }
            b.set(block, below);
        },
    );
    part.copy(b, (&layout.v, args.v), count, (block, held));
    b.add_to(count, 1);
}

impl Part {
    fn new(
        b: &mut Builder,
        cfg: Config,
        layout: &Layout,
        (pages, sequence): (PageArguments, Reg<U32>),
        (keys, head): (Reg<U32>, Reg<U32>),
    ) -> Self {
        let Lanes { own, leads, .. } = Lanes::new(b, cfg);
        let first = b.let_(own * cfg.copied_rows());
        let bytes = b.let_(first * layout.k.tile().slab_width());
        Self { cfg, pages, leads, first, bytes, row: pages.row(b, sequence), keys, head }
    }

    /// The first key of this part of key tile `block`.
    fn key(&self, b: &mut Builder, block: Reg<S32>) -> Reg<U32> {
        b.let_(block.unsigned() * self.cfg.tile_n() + self.first)
    }

    /// Asks the table for the page of key tile `block`. What it says beyond the keys, or before the first, is never looked
    /// at: `number` then stays as it is.
    fn ask(&self, b: &mut Builder, block: Reg<S32>, number: Reg<U32>) {
        let key = self.key(b, block);
        let (column, _) = self.pages.find(b, key);
        let at = b.let_(self.row + column.mul_wide(4));
        b.predicated(key.lt(self.keys), |b| b.load_global_into([number], at));
    }

    /// Copies the rows of page `number` that belong to key tile `block`, into the place of tile number `count`.
    fn copy(
        &self,
        b: &mut Builder,
        (pipeline, map): (&Pipeline, TensorMap),
        count: Reg<U32>,
        (block, number): (Reg<S32>, Reg<U32>),
    ) {
        let stage = pipeline.stage(b, count);
        stage.wait_empty(b);
        b.predicated(self.leads, |b| stage.expect_tile(b));
        let key = self.key(b, block);
        let (_, within) = self.pages.find(b, key);
        let page = self.pages.clamp(b, number);
        let to = stage.at(b).plus(b, self.bytes);
        let at = [Val::Const(0), within.into(), self.head.into(), page.into()];
        b.tma_load(map, pipeline.tile(), to, at, stage.full());
    }
}
