//! Few tiles: each has its own CTA, or a cluster whose CTAs split its keys and merge their parts at the end.
//!
//! Nothing is persistent here: the grid assigns the tiles, so producer and consumers find theirs independently.

use flashcore_tile::{Acc, Builder, Fragment, Pred, Reg, U32, Uniform, Warpgroup};

use super::{
    Arguments, Config, Layout,
    consumer::Consumer,
    epilogue::Epilogue,
    keys::Keys,
    merge,
    output::Output,
    producer,
    schedule::Tile,
    spread::{self, Lanes},
};
use crate::parts::mask::KeyTiles;

/// Copies Q and this CTA's part of K and V.
pub(super) fn producer(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout) {
    if cfg.spreads() {
        return spread_producer(b, cfg, args, layout);
    }
    let first = producer::first_thread(b);
    b.if_(first, |b| {
        let tile = own_tile(b, cfg, args);
        let (tiles, some) = own_part(b, cfg, args, &tile);
        b.if_(some, |b| {
            if cfg.policy.producer_waits {
                b.wait_for_predecessor();
            }
            let zero = b.var(0);
            producer::load_q(b, cfg, args, layout, zero, &tile);
            let count = b.var(0);
            let keys = Keys::of_entry(args, &tile);
            producer::load_kv(b, cfg, args, layout, count, (&tile, &tiles, keys));
        });
    });
}

/// The same, where lanes of a warp share the copies of keys.
fn spread_producer(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout) {
    let (first, lanes) = (spread::first_warp(b), Lanes::new(b, cfg));
    b.if_(first.pred() & lanes.copies, |b| {
        let tile = own_tile(b, cfg, args);
        let (tiles, some) = own_part(b, cfg, args, &tile);
        b.if_(some, |b| {
            if cfg.policy.producer_waits {
                b.wait_for_predecessor();
            }
            let [zero, count] = [(); 2].map(|()| b.var(0));
            b.if_(lanes.leads, |b| producer::load_q(b, cfg, args, layout, zero, &tile));
            let keys = Keys::of_entry(args, &tile);
            spread::load_kv(b, cfg, args, layout, count, (&tile, &tiles, keys));
        });
    });
}

/// Computes this CTA's part of the tile and merges it with the others.
pub(super) fn consumer(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, group: Reg<U32>) {
    let consumer = Consumer::new(b, cfg, args, layout, group);
    let tile = own_tile(b, cfg, args);
    let (tiles, some) = own_part(b, cfg, args, &tile);
    let some = b.uniform::<Warpgroup>(some);
    let output = Output::new(b, cfg);
    output.clear(b);
    let output = compute(b, &consumer, &tile, &tiles, some, output);
    let (output, counted) = output.settle(b);
    let Some(exchange) = layout.exchange else {
        let epilogue = Epilogue::new(b, &consumer);
        let sinks = consumer.sinks(b, &tile);
        let finished = consumer.softmax.finish(b, sinks, counted);
        let ended = consumer.end_rows(b, &tile, finished);
        consumer.write_lse(b, &tile, ended.lse);
        epilogue.write(b, &consumer, &tile, output, ended);
        return epilogue.drain(b);
    };
    merge::merge(b, &consumer, exchange, &tile, output);
}

/// The tile of this cluster.
fn own_tile(b: &mut Builder, cfg: Config, args: &Arguments) -> Tile {
    let [x, head, batch] = b.cta_xyz();
    let row = b.let_(x / cfg.shape.order.parts());
    Tile::of_head(b, cfg, args, row, [head, batch])
}

/// The key tiles of this CTA, and whether there are any.
fn own_part(b: &mut Builder, cfg: Config, args: &Arguments, tile: &Tile) -> (KeyTiles, Pred) {
    let tiles = tile.key_tiles(b, cfg, args);
    let parts = cfg.shape.order.parts();
    let begin = tiles.first();
    let share = b.let_(((tiles.end - begin + (parts as i32 - 1)).unsigned() / parts).signed());
    let rank = b.cluster_rank().signed();
    let first = b.let_(rank * share + begin);
    let end = b.let_((first + share).min(tiles.end));
    let clean_begin = tiles.clean_begin.map(|clean| b.let_(clean.max(first)));
    let some = b.let_(first.lt(end));
    (KeyTiles { end, begin: Some(first), clean_begin, ..tiles }, some)
}

/// The output of this CTA's part, not yet divided by the sums; what `output` holds already if there are no keys.
fn compute(
    b: &mut Builder,
    consumer: &Consumer<'_>,
    tile: &Tile,
    tiles: &KeyTiles,
    some: Uniform<Warpgroup>,
    output: Output,
) -> Output {
    let tile_n = consumer.cfg.tile_n() as usize;
    b.if_carrying(some, output, |b, output| {
        let (scores, probs) = (Acc::new(b, tile_n), Fragment::of(b, consumer.cfg.input, tile_n));
        consumer.layout.q.stage(b, consumer.q_count).wait_full(b);
        let k = consumer.layout.k.stage(b, consumer.kv_count);
        k.wait_full(b);
        let q = consumer.q_operand(b, consumer.q_count);
        let opening = consumer.qk(b, scores, &q, &k);
        let (_, output, probs) = consumer.body(b, tile, tiles, opening, output, probs);
        let (output, _) = consumer.last_pv(b, output, probs);
        output.wait(b).0
    })
}
