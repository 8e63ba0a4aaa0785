//! The producer: one thread that walks the tiles and issues every tensor copy; for small pages, several (`spread.rs`).

use flashcore_tile::{Builder, Pipeline, Pred, Reg, S32, Scope, Shared, TensorMap, U32, U64, Val, WARPGROUP};

use super::{
    Arguments, Config, Layout, Tiles,
    keys::{Destination, Keys},
    packed,
    schedule::{INFO_BYTES, Tile},
    spread,
};
use crate::{parts::mask::KeyTiles, turn_values};

/// Copies Q, K and V of every tile of this CTA, in the order in which consumers take them.
pub(super) fn run(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout) {
    match args.tiles {
        Tiles::Counted(tiles) if cfg.spreads() => spread::counted(b, cfg, args, layout, tiles),
        Tiles::Counted(tiles) => counted(b, cfg, args, layout, tiles),
        Tiles::Packed(packed) => packed::produce(b, cfg, args, layout, packed),
    }
}

/// As many tiles as the host says.
fn counted(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, tiles: Reg<U32>) {
    let first = first_thread(b);
    b.if_(first, |b| {
        let index = b.cta();
        let index = b.var(index);
        let done = b.var(0);
        let kv = b.var(0);
        b.while_(
            |b| {
                let stage = layout.q.stage(b, done);
                stage.wait_empty(b);
                index.lt(tiles)
            },
            |b| {
                let tile = Tile::numbered(b, cfg, args, index);
                begin(b, cfg, args, layout, done, &tile);
                let taken = take(b, args);
                let key_tiles = tile.key_tiles(b, cfg, args);
                let keys = Keys::of_entry(args, &tile);
                load_kv(b, cfg, args, layout, kv, (&tile, &key_tiles, keys));
                b.add_to(done, 1);
                next(b, index, tiles, taken);
            },
        );
        end(b, cfg, layout, done);
    });
}

/// Posts Q tile number `done`, whose place is empty, and copies it.
pub(super) fn begin(
    b: &mut Builder,
    cfg: Config,
    args: &Arguments,
    layout: &Layout,
    done: Reg<U32>,
    tile: &Tile,
) {
    let restless = layout.reports.map(|reports| reports.read(b, layout, done));
    let info = info(b, layout, done);
    tile.post(b, cfg, info, restless);
    tile.post_factors(b, args, info);
    load_q(b, cfg, args, layout, done, tile);
}

/// Posts the end in the place of Q tile number `count`, which is empty.
pub(super) fn end(b: &mut Builder, cfg: Config, layout: &Layout, count: Reg<U32>) {
    let stage = layout.q.stage(b, count);
    let info = info(b, layout, count);
    Tile::post_end(b, cfg, info);
    stage.publish(b);
}

/// The thread that issues all copies: the first of the producer, whether that is a warp or a warpgroup.
pub(super) fn first_thread(b: &mut Builder) -> Pred {
    let thread = b.thread();
    b.let_((thread % WARPGROUP).eq(0))
}

/// Where the tile of Q tile number `count` is posted.
pub(super) fn info(b: &mut Builder, layout: &Layout, count: Reg<U32>) -> Shared {
    let slot = layout.q.slot(b, count);
    let bytes = b.let_(slot * INFO_BYTES);
    b.shared_at(layout.tile_info).plus(b, bytes)
}

/// Copies the Q tile.
pub(super) fn load_q(
    b: &mut Builder,
    cfg: Config,
    args: &Arguments,
    layout: &Layout,
    done: Reg<U32>,
    tile: &Tile,
) {
    let stage = layout.q.stage(b, done);
    stage.expect_tile(b);
    let row = tile.first_row(b, cfg);
    let to = stage.at(b);
    let at = tile.coordinates(b, cfg, 0, row);
    b.tma_load(args.q, layout.q.tile(), to, at, stage.full());
}

/// Copies K and V from the last key tile to the first: K runs one ahead, because consumers issue QKᵀ of the next key
/// tile before PV of this one.
pub(super) fn load_kv(
    b: &mut Builder,
    cfg: Config,
    args: &Arguments,
    layout: &Layout,
    count: Reg<U32>,
    (tile, tiles, keys): (&Tile, &KeyTiles, Keys),
) {
    let head = b.let_(tile.head / args.group);
    let load = |b: &mut Builder,
                pipeline: &Pipeline,
                map: TensorMap,
                count: Reg<U32>,
                block: Reg<S32>,
                turned: bool| {
        let stage = pipeline.stage(b, count);
        stage.wait_empty(b);
        stage.expect_tile(b);
        let key = b.let_(block.unsigned() * cfg.tile_n());
        let to = Destination { map, tile: pipeline.tile(), at: stage.at(b), done: stage.full() };
        if turned {
            let (count, rows) = turn_values::copies(cfg.dim_v);
            for first in (0..count).map(|n| n * rows) {
                let at = [key.into(), Val::Const(first), head.into(), tile.batch()];
                b.tma_load(map, to.tile, to.at.at(first * to.tile.slab_width()), at, to.done);
            }
            return;
        }
        keys.copy(b, cfg, (tile, head), key, &to);
    };
    let block = b.var_in(Scope::Lane, tiles.end - 1);
    let turned = cfg.narrow();
    load(b, &layout.k, args.k, count, block, false);
    b.while_(
        |_| block.gt(tiles.first()),
        |b| {
            let (ahead, below) = (b.let_(count + 1), b.let_(block - 1));
            load(b, &layout.k, args.k, ahead, below, false);
            load(b, &layout.v, args.v, count, block, turned);
            b.set(block, below);
            b.set(count, ahead);
        },
    );
    load(b, &layout.v, args.v, count, block, turned);
    b.add_to(count, 1);
}

/// Takes a ticket for the next tile early, so that the result is there when needed.
pub(super) fn take(b: &mut Builder, args: &Arguments) -> Option<(Reg<U64>, Reg<U32>)> {
    args.tile_counter.map(|counter| (counter, b.atomic_add(counter, 1)))
}

/// Moves on to the next tile.
fn next(b: &mut Builder, index: Reg<U32>, tiles: Reg<U32>, taken: Option<(Reg<U64>, Reg<U32>)>) {
    let ctas = b.ctas();
    let Some((counter, ticket)) = taken else {
        b.add_to(index, ctas);
        return;
    };
    // One ticket is drawn per tile; whoever draws the last leaves the counter as it was found.
    let last = b.let_(tiles - 1);
    b.predicated(ticket.eq(last), |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
    b.set(index, ticket + ctas);
}
