//! A consumer warpgroup: 64 rows of every tile.

use flashcore_tile::{Builder, Major, Reg, Scope, U32};

use super::{
    Config, Layout,
    epilogue::{Output, Writer},
    place::Arguments,
};
use crate::{moe::product_sm90::ROWS, parts::multiply::Multiplier};

/// Works through the tiles of this CTA.
pub(super) fn run(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    output: &Output,
    layout: &Layout,
    group: Reg<U32>,
) {
    let multiplier = multiplier(b, cfg, layout, group);
    let writer = Writer::new(b, layout, group);
    args.each_tile(b, Scope::Warpgroup, |b, place| {
        let steps = place.steps(b);
        let sums = multiplier.multiply(b, steps, 1);
        output.write(b, cfg, args, (&writer, place), &sums[0]);
    });
}

/// Rows and columns of a consumer's sums.
fn multiplier(b: &mut Builder, cfg: &Config, layout: &Layout, group: Reg<U32>) -> Multiplier {
    let ([left, right], lane) = (layout.tiles, b.lane());
    let major = |along: bool| if along { Major::K } else { Major::Mn };
    // 64 rows along the depth are as long as a slab of 64 columns over 64 elements of it.
    let own = b.let_(group * (ROWS * left.slab_width()));
    Multiplier {
        ring: layout.ring,
        rows: vec![left.operand(b, major(cfg.along[0]), own)],
        columns: right.operand(b, major(cfg.along[1]), 0),
        tile_n: cfg.shape.tile_n,
        count: b.var(0u32),
        leader: b.let_(lane.eq(0)),
        peer: None,
        turn: None,
    }
}
