//! Attention forward for Hopper (sm_90a): TMA, wgmma, warp specialisation, a persistent tile schedule.
//!
//! One producer thread keeps the tensor-copy engine busy; each consumer warpgroup owns 64 query rows of a tile. A
//! consumer issues the next tile's QKᵀ together with this tile's PV and does its softmax while the tensor cores work;
//! the first QKᵀ of the next tile is issued right after the last PV of this one, to overlap the epilogue too.
//!
//! Features are padded inside the kernel: tensor copies fill columns beyond the tensor with zeros and clip them on the
//! way out, and products run over no more than the features there are.

mod blocks;
mod config;
mod consumer;
mod epilogue;
mod keys;
mod merge;
mod output;
mod packed;
mod parts;
mod passing;
mod producer;
mod reports;
mod rows;
mod schedule;
mod single;
mod spread;
mod step;
mod tiles;
mod values;

use flashcore_core::Problem;
use flashcore_ptx::{launch::Workspace, layout::Swizzle, target::Target};
use flashcore_tile::{
    BuildError, Builder, Extent, NamedBarrier, Params, Pipeline, Program, Reg, SmemTile, TensorMap, U32, U64,
    WARPGROUP,
};

pub use config::{Config, Order, Policy, Settles, Shape, Staging};

use crate::{
    parts::{
        factors::{BlockArguments, FactorArguments},
        lengths::LengthArguments,
        maps::{map, packed_map},
        mask::Mask,
        pages::PageArguments,
        scale::Scale,
        sections::{Sections, full_sections, sections_of_sequence},
        sinks::SinkArgument,
        tensor::TensorArgument,
        turns::Turns,
    },
    slots, turn_values,
};

/// Rows that one consumer warpgroup owns.
pub(crate) const ROWS_PER_GROUP: u32 = 64;
/// Warps of a warpgroup; each releases a stage for itself.
const WARPS_PER_GROUP: u32 = 4;
/// Rows of the output that one warp writes.
const ROWS_PER_WARP: u32 = 16;

/// What the host passes, as registers.
#[derive(Debug)]
pub(crate) struct Arguments {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    /// The output, unless it is f32.
    out: Option<TensorMap>,
    lse: Reg<U64>,
    tile_counter: Option<Reg<U64>>,
    /// The output by address: where it is f32, for tiles whose keys are split over a cluster, and for the ends of packed
    /// sequences.
    out_rows: Option<TensorArgument>,
    heads: Reg<U32>,
    group: Reg<U32>,
    row_tiles: Reg<U32>,
    tiles: Tiles,
    section: Reg<U32>,
    scale: Scale,
    factors: Option<FactorArguments>,
    /// Factors of blocks and features, where those have them.
    blocks: Option<BlockArguments>,
    sinks: Option<SinkArgument>,
    lengths: LengthArguments,
    mask: Mask,
    /// The page table, where keys lie in pages.
    pages: Option<PageArguments>,
}

/// How many tiles there are.
#[derive(Clone, Copy, Debug)]
enum Tiles {
    /// As the host says.
    Counted(Reg<U32>),
    /// As lengths say when the kernel runs.
    Packed(packed::Packed),
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: Config) -> Self {
        let (input, tile_m, tile_n, rows) = (cfg.input, cfg.tile_m(), cfg.tile_n(), cfg.copied_rows());
        let q = params.tensor_map(b, "q", move |p| packed_map(p.q(), input, slots::Q, tile_m, cfg.pack));
        let k = params.tensor_map(b, "k", move |p| map(p.k(), input, slots::K, rows));
        let v = params.tensor_map(b, "v", move |p| match cfg.narrow() {
            true => turn_values::turned_map(p, tile_n),
            false => map(p.v(), input, slots::V, rows),
        });
        let out = (!cfg.wide()).then(|| {
            params.tensor_map(b, "out", move |p| {
                packed_map(p.out(), cfg.output, slots::OUT, ROWS_PER_WARP, cfg.pack)
            })
        });
        let lse = params.buffer(b, "lse", slots::LSE);
        let tile_counter =
            (cfg.shape.order == Order::Atomic).then(|| params.buffer(b, "tile_counter", slots::TILE_COUNTER));
        let packed = cfg.lengths.packs_queries();
        let by_address = cfg.wide() || cfg.shape.order.parts() > 1 || packed;
        let out_rows = by_address.then(|| {
            TensorArgument::declare(b, params, "out_rows", slots::OUT, |p| (p.out(), p.out_dtype()))
        });
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        Self {
            q,
            k,
            v,
            out,
            lse,
            tile_counter,
            out_rows,
            heads: params.u32(b, "heads", move |p| packed_heads(p, cfg)),
            group: params.u32(b, "group", move |p| p.group() as u32 / cfg.pack),
            row_tiles: params.u32(b, "row_tiles", move |p| row_tiles(p, cfg)),
            tiles: match packed {
                true => Tiles::Packed(packed::Packed::declare(b, params, cfg.share)),
                false => Tiles::Counted(params.u32(b, "tiles", move |p| tiles(p, cfg))),
            },
            section: params.u32(b, "section", move |p| section(p, cfg)),
            scale: Scale::declare(b, params, cfg.softcap, cfg.input),
            factors: cfg.posts_factors().then(|| FactorArguments::declare(b, params)),
            blocks: cfg.blocks.then(|| BlockArguments::declare(b, params, tile_n)),
            sinks: SinkArgument::declare(b, params, cfg.sinks),
            lengths: LengthArguments::declare(b, params, cfg.lengths, [seq_q, seq_kv]),
            mask: Mask::declare(b, params, cfg.mask),
            pages: cfg.page_rows.map(|_| PageArguments::declare(b, params)),
        }
    }

    /// How tiles are numbered: the longest first, where rows further down see more keys.
    const fn sections(&self, cfg: Config) -> Sections {
        Sections { heads: self.section, row_tiles: self.row_tiles, all: None, last_first: cfg.mask.right }
    }
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    q: Pipeline,
    k: Pipeline,
    v: Pipeline,
    /// Where each warp gathers its rows of the output.
    staging: SmemTile,
    /// Which tile each Q stage belongs to.
    tile_info: u32,
    /// Where consumers say how their tiles went, if there are several.
    reports: Option<reports::Reports>,
    /// Where consumers wait for each other.
    consumers: NamedBarrier,
    /// Where the CTAs of a cluster exchange their parts of a tile, if there are several.
    exchange: Option<merge::Exchange>,
    /// Where consumers say whose turn it is, if they multiply in turn.
    turns: Option<Turns>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: Config) -> Self {
        let Shape { consumers, tile_n, stages, q_stages, staging, .. } = cfg.shape;
        let warps = consumers * WARPS_PER_GROUP;
        let places = if cfg.stages_output() { warps * staging.places } else { 0 };
        let (qk, v) = (cfg.padded(cfg.dim_qk), cfg.padded(cfg.dim_v));
        let q = b.smem_tile(cfg.input, [cfg.tile_m(), qk], Swizzle::B128, q_stages);
        let k = b.smem_tile(cfg.input, [tile_n, qk], Swizzle::B128, stages);
        let v = match cfg.narrow() {
            true => b.smem_tile(
                cfg.input,
                [cfg.dim_v + cfg.counted_cols(), tile_n],
                cfg.input.swizzle(tile_n),
                stages,
            ),
            false => b.smem_tile(cfg.input, [tile_n, v], Swizzle::B128, stages),
        };
        let staging = b.smem_tile(cfg.output, [ROWS_PER_WARP, staging.cols], Swizzle::B128, places);
        Self {
            q: Pipeline::new(b, q, q_stages, warps),
            k: Pipeline::new(b, k, stages, warps),
            v: Pipeline::new(b, v, stages, warps),
            staging,
            tile_info: b.shared(q_stages * schedule::INFO_BYTES, 16),
            reports: reports::Reports::reserve(b, cfg),
            consumers: b.named_barrier(consumers * WARPGROUP),
            exchange: merge::Exchange::reserve(b, cfg),
            turns: cfg.policy.in_turn.then(|| Turns::reserve(b, consumers)),
        }
    }

    /// Initialises the barriers and makes them known to the CTA, and to the cluster by the time it is waited for.
    fn init(&self, b: &mut Builder, cfg: Config) {
        let thread = b.thread();
        b.if_(thread.eq(0), |b| {
            [self.q, self.k, self.v].iter().for_each(|pipeline| pipeline.init(b));
            self.exchange.iter().for_each(|exchange| exchange.init(b, cfg));
            self.turns.iter().for_each(|turns| turns.init(b));
            self.reports.iter().for_each(|reports| reports.init(b));
            b.fence_mbarrier_init();
        });
        if cfg.shape.order.parts() > 1 {
            b.arrive_cluster_relaxed();
        }
        b.sync_cta();
    }
}

/// Builds the kernel.
pub fn forward_sm90(cfg: Config) -> Result<Program<Problem>, BuildError> {
    let (name, roles) = (cfg.name(), cfg.roles());
    let mut b = Builder::new(Target::Sm90a, &name, roles.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    layout.init(&mut b, cfg);
    // What lies before the predecessor's results are waited for overlaps with its end.
    b.launch_dependents();
    prefetch_maps(&mut b, &args);
    if !cfg.policy.producer_waits {
        b.wait_for_predecessor();
    }
    if let Order::Single { parts } = cfg.shape.order {
        b.cluster(parts);
    }
    b.specialise(
        roles,
        |b| match cfg.shape.order {
            Order::Single { .. } => single::producer(b, cfg, &args, &layout),
            _ => producer::run(b, cfg, &args, &layout),
        },
        |b, group| match cfg.shape.order {
            Order::Single { .. } => single::consumer(b, cfg, &args, &layout, group),
            _ => consumer::run(b, cfg, &args, &layout, group),
        },
    );
    b.finish(&name, params)
}

/// Fetches the tensor maps ahead of their first use.
fn prefetch_maps(b: &mut Builder, args: &Arguments) {
    let thread = b.thread();
    b.if_(thread.eq(0), |b| {
        [args.q, args.k, args.v].into_iter().chain(args.out).for_each(|map| b.tma_prefetch(map))
    });
}

/// The launch that computes `problem` on a GPU of `sms` multiprocessors.
pub fn extent(cfg: Config, problem: &Problem, sms: u32) -> Extent {
    let ctas = tiles(problem, cfg).min(sms * cfg.shape.ctas_per_sm);
    let counter = Workspace { slot: slots::TILE_COUNTER, bytes: 4, zeroed: true };
    let (grid, workspace) = match cfg.shape.order {
        Order::Static => ([ctas, 1, 1], Vec::new()),
        Order::Atomic => ([ctas, 1, 1], vec![counter]),
        Order::Single { parts } => {
            let grid = [row_tiles(problem, cfg) * parts, packed_heads(problem, cfg), problem.batch() as u32];
            (grid, Vec::new())
        }
    };
    Extent { grid, workspace, dependent: true }
}

/// Row tiles of a head, or of as many heads as share a tile: those of the longest sequence.
fn row_tiles(problem: &Problem, cfg: Config) -> u32 {
    (problem.longest_q() as u32 * cfg.pack).div_ceil(cfg.tile_m())
}

/// Heads of a section, in which row tiles further down come first where they see more keys.
fn section(problem: &Problem, cfg: Config) -> u32 {
    match (cfg.mask.right, cfg.lengths.packs_queries()) {
        (false, _) => 1,
        (true, false) => full_sections(problem),
        (true, true) => sections_of_sequence(problem, packed_heads(problem, cfg)),
    }
}

/// Query heads, or groups of them that share a tile.
fn packed_heads(problem: &Problem, cfg: Config) -> u32 {
    problem.heads_q() as u32 / cfg.pack
}

/// Tiles; where sequences are packed, an upper bound.
fn tiles(problem: &Problem, cfg: Config) -> u32 {
    let sequences = problem.sequences() as u32;
    let each = row_tiles(problem, cfg) * sequences;
    let row_tiles = match cfg.lengths.packs_queries() {
        // One that is not full for each sequence.
        true => each.min(problem.seq_q() as u32 * cfg.pack / cfg.tile_m() + sequences),
        false => each,
    };
    row_tiles * packed_heads(problem, cfg)
}
