//! The product of every group on Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent CTAs.
//!
//! ```text
//! producer    tiles of both factors by tensor copies, whichever way their lines run
//! consumers   128 rows × tile_n, 64 rows each
//! epilogue    rounded · shared memory · global memory, as far as a group has rows
//! ```
//! A stage holds a tile of rows followed by one of columns. If groups divide the depth, a producer warp clears data of the
//! next group from the last stage of a group. All walk the same tiles: the extents of groups come from the index.

mod config;
mod consumer;
mod epilogue;
mod maps;
mod place;
mod producer;

use flashcore_ptx::{layout::Swizzle, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, Params, Pipeline, Program, SmemTile};

pub use config::Config;

use super::{Divided, Work};
use crate::{
    moe::product_sm90::{CONSUMERS, PLACES, TILE_M, WARP_ROWS, WARPS},
    parts::lines::DEPTH,
};
use place::Arguments;

/// The launch for some work, which is `None` where the result has no elements; nothing where it has too many tiles.
pub fn extent(cfg: &Config, work: &Work, sms: u32) -> Option<Option<Extent>> {
    let tiles = work.tiles() * u64::from(place::blocks(cfg.shape, work));
    let tiles = u32::try_from(tiles).ok().filter(|&tiles| tiles <= i32::MAX as u32)?;
    let (grid, workspace) = ([tiles.min(sms), 1, 1], work.workspace());
    Some((tiles > 0).then_some(Extent { grid, workspace, dependent: true }))
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Stages with a tile of either factor.
    ring: Pipeline,
    /// Where copies land before the rest of a group's last stage is cleared, in the same memory.
    landing: Option<Pipeline>,
    /// Tiles of the first stage.
    tiles: [SmemTile; 2],
    /// Where each warp gathers its rows of the result.
    staging: Option<SmemTile>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let (tile_n, stages) = (cfg.shape.tile_n, cfg.shape.stages);
        let both = b.smem_tile(cfg.half, [TILE_M + tile_n, DEPTH], Swizzle::B128, stages);
        let tile = |b: &mut Builder, which: usize| {
            let (lines, above) = [(TILE_M, 0), (tile_n, TILE_M)][which];
            let extents = if cfg.along[which] { [lines, DEPTH] } else { [DEPTH, lines] };
            b.smem_tile_over(both.offset() + above * both.slab_width(), cfg.half, extents, Swizzle::B128)
        };
        let tiles = [tile(b, 0), tile(b, 1)];
        let places = CONSUMERS * WARPS * PLACES;
        let staging = (!cfg.turned).then(|| b.smem_tile(cfg.half, [WARP_ROWS, DEPTH], Swizzle::B128, places));
        let ring = Pipeline::new(b, both, stages, CONSUMERS * WARPS);
        let landing = (cfg.divided == Divided::Depth).then(|| Pipeline::new(b, both, stages, 1));
        Self { ring, landing, tiles, staging }
    }

    /// Initialises the barriers and makes them known to the CTA.
    fn init(&self, b: &mut Builder) {
        let thread = b.thread();
        b.if_(thread.eq(0), |b| {
            self.ring.init(b);
            self.landing.iter().for_each(|landing| landing.init(b));
            b.fence_mbarrier_init();
        });
        b.sync_cta();
    }
}

/// Builds the kernel.
pub fn product_sm90(cfg: &Config) -> Result<Program<Work>, BuildError> {
    let (name, roles) = (cfg.name(), cfg.shape.roles());
    let mut b = Builder::new(Target::Sm90a, &name, roles.threads(), 1);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let factors = producer::factors(&mut b, &mut params, cfg);
    let output = epilogue::Output::declare(&mut b, &mut params);
    let layout = Layout::new(&mut b, cfg);
    layout.init(&mut b);
    b.wait_for_predecessor();
    b.launch_dependents();
    b.specialise(
        roles,
        |b| producer::run(b, cfg, &args, factors, &layout),
        |b, group| consumer::run(b, cfg, &args, &output, &layout, group),
    );
    b.finish(&name, params)
}
