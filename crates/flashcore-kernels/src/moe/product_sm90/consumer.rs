//! A consumer warpgroup: multiplies the stages of its tiles, issuing the next product while one is in flight.

use flashcore_tile::{Builder, Major, Reg, U32, Uniform, Warpgroup};

use super::{
    super::NONE,
    Layout, TILE_M,
    config::{CONSUMERS, Config, ROWS},
    epilogue::{Output, Staging},
    place::Arguments,
};
use crate::parts::multiply::Multiplier;

/// Works through the tiles of this CTA: all of them, or every second.
pub(super) fn run(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    output: &Output,
    layout: &Layout,
    group: Reg<U32>,
) {
    if cfg.shape.turned() {
        return run_turned(b, cfg, args, output, layout);
    }
    let steps = args.steps(b);
    let peer = args.peer(b);
    let consumer = multiplier(b, cfg, layout, (group, steps), peer);
    let staging = Staging::new(b, cfg, layout, group);
    let [tiles, all] = args.count(b);
    let [cta, ctas] = args.walkers(b);
    let (first, stride) = match cfg.shape.turns {
        true => (b.let_(group * ctas + cta), b.let_(ctas * CONSUMERS)),
        false => (cta, ctas),
    };
    let index = b.var(first);
    // What decides about a tile is asked for while the one before it is multiplied.
    let half = args.second_half(b, index, [tiles, all]);
    b.while_(
        |_| index.lt(all),
        |b| {
            let whole = is_whole(b, cfg, half, group);
            let following = b.let_(index + stride);
            let next = args.second_half(b, following, [tiles, all]);
            let tile = |b: &mut Builder, blocks: usize| {
                let sums = consumer.multiply(b, steps, blocks);
                let place = args.place(b, index, tiles);
                output.write(b, cfg, args, (&staging, place), &sums);
            };
            let blocks = consumer.rows.len();
            b.if_else(whole, |b| tile(b, blocks), |b| tile(b, blocks - 1));
            if cfg.shape.turns {
                b.add_to(consumer.count, steps);
            }
            b.set(half, next);
            b.set(index, following);
        },
    );
    staging.drain(b);
}

/// Works through the tiles of this CTA with weights as rows of products.
fn run_turned(b: &mut Builder, cfg: &Config, args: &Arguments, output: &Output, layout: &Layout) {
    let (tile, lane, steps) = (layout.ring.tile(), b.lane(), args.steps(b));
    let start = cfg.shape.rows * tile.slab_width();
    let block = ROWS * tile.slab_width();
    let weights = (0..cfg.shape.blocks()).map(|n| tile.operand(b, Major::K, start + n * block));
    let multiplier = Multiplier {
        ring: layout.ring,
        rows: weights.collect(),
        columns: tile.operand(b, Major::K, 0),
        tile_n: cfg.shape.rows,
        count: b.var(0u32),
        leader: b.let_(lane.eq(0)),
        peer: None,
        turn: None,
    };
    let ([tiles, all], [cta, ctas]) = (args.count(b), args.walkers(b));
    let index = b.var(cta);
    b.while_(
        |_| index.lt(all),
        |b| {
            let sums = multiplier.multiply(b, steps, multiplier.rows.len());
            let place = args.place(b, index, tiles);
            output.write_turned(b, cfg, args, place, &sums);
            b.add_to(index, ctas);
        },
    );
}

/// Rows of each of a consumer's sums, and weights.
fn multiplier(
    b: &mut Builder,
    cfg: &Config,
    layout: &Layout,
    (group, steps): (Reg<U32>, Reg<U32>),
    peer: Option<Reg<U32>>,
) -> Multiplier {
    let (tile, lane) = (layout.ring.tile(), b.lane());
    let block = ROWS * tile.slab_width();
    let own = if cfg.shape.turns { b.var(0u32) } else { b.let_(group * block) };
    let rows = (0..cfg.shape.blocks()).map(|n| tile.operand(b, Major::K, own + n * block));
    Multiplier {
        ring: layout.ring,
        rows: rows.collect(),
        columns: tile.operand(b, Major::K, TILE_M * tile.slab_width()),
        tile_n: cfg.shape.tile_n,
        count: if cfg.shape.turns { b.var(group * steps) } else { b.var(0u32) },
        leader: b.let_(lane.eq(0)),
        peer,
        turn: layout.turns.map(|turns| turns.of(b, group)),
    }
}

/// Whether the last 64 rows of a consumer are not all padding, by the entry of a tile's 65th row.
fn is_whole(b: &mut Builder, cfg: &Config, half: Reg<U32>, group: Reg<U32>) -> Uniform<Warpgroup> {
    match cfg.shape.turns {
        true => b.uniform::<Warpgroup>(half.ne(NONE)),
        false => b.uniform::<Warpgroup>(half.ne(NONE) | group.eq(0)),
    }
}
