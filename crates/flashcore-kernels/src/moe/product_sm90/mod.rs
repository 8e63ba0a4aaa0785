//! One product of every expert with its rows on Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent CTAs.
//!
//! ```text
//! producer    weights by tensor copies straight from the checkpoint; rows gathered from the tokens by copies of 16 bytes
//!             (up), or by tensor copies (down)
//! consumers   128 rows × tile_n; gate and up of a feature are sums of the same thread
//! epilogue    bias · gate and up joined · rounded · shared memory · tensor copies to global memory
//! ```
//! A stage holds the rows followed by the weights, gates before ups. Padding rows are zeros, never read. Both sides walk
//! the same tiles: tile numbers come from the index that sorting made, and nothing else is exchanged.
//!
//! Experts with few tokens use the same kernel with the factors of its products swapped: see [`Shape::rows`].

mod config;
mod consumer;
mod epilogue;
mod maps;
mod place;
mod producer;
mod turned;

use flashcore_ptx::{layout::Swizzle, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, Params, Pipeline, Program, SmemTile};

pub(crate) use config::{CONSUMERS, PLACES, ROWS, WARP_ROWS, WARPS};
pub use config::{Config, Shape, TILE_M};

use super::{Layer, product::DEPTH};
use crate::parts::turns::Turns;
use place::Arguments;

/// The launch for a layer, which is `None` where there are no tokens; nothing where it has too many tiles.
pub fn extent(cfg: &Config, layer: &Layer, sms: u32) -> Option<Option<Extent>> {
    let tiles = layer.tiles() * u64::from(place::blocks(cfg, layer));
    let tiles = u32::try_from(tiles).ok().filter(|&tiles| tiles <= i32::MAX as u32)?;
    let ctas = cfg.shape.ctas();
    let most = sms * cfg.shape.ctas_per_sm();
    let (grid, workspace) = ([tiles.min(most).next_multiple_of(ctas), 1, 1], layer.workspace.clone());
    Some((tiles > 0).then_some(Extent { grid, workspace, dependent: true }))
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Rows and, below them, weights.
    ring: Pipeline,
    /// Where each warp gathers its rows of the result.
    staging: Option<SmemTile>,
    /// Where consumers say whose turn it is, if they multiply in turn.
    turns: Option<Turns>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let Shape { tile_n, turns, stages, rows, .. } = cfg.shape;
        let tile = b.smem_tile(cfg.half, [rows + tile_n, DEPTH], Swizzle::B128, stages);
        let swizzle = if cfg.staged() == 64 { Swizzle::B128 } else { Swizzle::B64 };
        let places = CONSUMERS * WARPS * PLACES;
        let staging =
            (!cfg.shape.turned()).then(|| b.smem_tile(cfg.half, [WARP_ROWS, cfg.staged()], swizzle, places));
        let readers = cfg.shape.ctas() * if turns { WARPS } else { cfg.shape.consumers() * WARPS };
        let ring = Pipeline::new(b, tile, stages, readers).filled_by(producer::arrivals(cfg));
        Self { ring, staging, turns: turns.then(|| Turns::reserve(b, CONSUMERS)) }
    }

    /// Initialises the barriers and makes them known to the CTA, and to the other of a pair.
    fn init(&self, b: &mut Builder, cfg: &Config) {
        let thread = b.thread();
        b.if_(thread.eq(0), |b| {
            self.ring.init(b);
            self.turns.iter().for_each(|turns| turns.init(b));
            b.fence_mbarrier_init();
        });
        match cfg.shape.pair {
            true => b.sync_cluster(),
            false => b.sync_cta(),
        }
    }
}

/// Builds the kernel.
pub fn product_sm90(cfg: &Config) -> Result<Program<Layer>, BuildError> {
    let (name, roles) = (cfg.name(), cfg.roles());
    let mut b = Builder::new(Target::Sm90a, &name, roles.threads(), cfg.shape.ctas_by_registers());
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let rows = producer::Rows::declare(&mut b, &mut params, cfg);
    let output = epilogue::Output::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    if cfg.shape.pair {
        b.cluster(cfg.shape.ctas());
    }
    layout.init(&mut b, cfg);
    if !cfg.early() {
        b.wait_for_predecessor();
    }
    b.launch_dependents();
    b.specialise(
        roles,
        |b| producer::run(b, cfg, &args, &rows, &layout),
        |b, group| consumer::run(b, cfg, &args, &output, &layout, group),
    );
    if cfg.shape.pair {
        // The other one may still copy into this CTA, and arrive at its barriers. Lanes that did nothing must not arrive here
        // before the one that worked for them.
        b.sync_warp();
        b.sync_cluster();
    }
    b.finish(&name, params)
}
