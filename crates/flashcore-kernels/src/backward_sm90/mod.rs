//! The gradients of attention for Hopper (sm_90a): TMA, wgmma, warp specialisation, a persistent tile schedule.
//!
//! Two kernels from one source. Each CTA holds a pair of tiles (K and V, or Q and dO) while the pairs of the other side
//! are streamed; each consumer warpgroup owns 64 held rows. For every streamed pair it computes scores and slopes by
//! two products, P and dS from these in registers, and multiplies them with the streamed tiles again:
//!
//! | side | held | streamed | sums in registers |
//! | --- | --- | --- | --- |
//! | [`Side::Keys`] | K, V | Q, dO | dK += dSᵀ·Q, dV += Pᵀ·dO |
//! | [`Side::Queries`] | Q, dO | K, V | dQ += dS·K |
//!
//! Or one kernel does everything: keys are held, and consumers pass dS to a `mover`, which multiplies it with K and adds dQ
//! to f32 sums in memory, tile after tile in a fixed order; [`crate::backward_sums`] rounds the sums. That is five products
//! per pair instead of seven, at the cost of the traffic of the sums.
//!
//! For wide heads, a pair of consumers holds the keys (`paired`), one for each of their gradients.
//!
//! Either way results are bitwise reproducible. Row terms (`−lse` in powers of two, minus
//! the row sums) come from [`crate::backward_rows`]. `docs/hopper-gradients.md` explains the design.

mod config;
mod consumer;
mod mover;
pub(crate) mod packed;
mod paired;
mod producer;
mod ranges;
mod schedule;
mod step;
mod store;
mod terms;
mod tiles;
mod values;
mod writer;

use flashcore_core::{BackwardProblem, DType};
use flashcore_ptx::{launch::Workspace, layout::Swizzle, target::Target};
use flashcore_tile::{
    BuildError, Builder, Element, Extent, F32, Params, Pipeline, Program, Reg, Shared, SmemTile, TensorMap,
    U32, U64,
};

pub use config::{Config, Ending, Order, Shape};

use crate::{
    backward_rows::{ROW_BYTES as TERM_BYTES, TermsArgument},
    parts::{
        lengths::LengthArguments,
        maps::map,
        mask::Mask,
        scale::Scale,
        schedule::Side,
        sections::{Sections, full_section},
        tensor::TensorArgument,
    },
    slots::{Slot, backward as slots},
};
use mover::{Mover, PART, PLACES};
use packed::Packed;
use ranges::Ranges;
use writer::{SumsArgument, Writer};

/// Rows that one consumer warpgroup owns.
pub(crate) const ROWS_PER_GROUP: u32 = 64;
/// Warps of a warpgroup; each releases a stage for itself.
const WARPS_PER_GROUP: u32 = 4;
/// Rows of a gradient that one warp writes.
const ROWS_PER_WARP: u32 = 16;
/// Tiles of dS between consumers and the mover: so far may consumers run ahead.
const HANDED: u32 = 2;
/// Tiles of weights between two paired consumers.
const PASSED: u32 = 2;

/// What the host passes, as registers.
#[derive(Debug)]
struct Arguments {
    /// K and V, or Q and dO.
    held: [TensorMap; 2],
    /// Q and dO, or K and V.
    streamed: [TensorMap; 2],
    /// The gradients of what is held: dK and dV, or dQ.
    grads: Gradients,
    /// Where dQ is summed.
    sums: Option<SumsArgument>,
    terms: TermsArgument,
    tile_counter: Option<Reg<U64>>,
    /// Held heads of a batch entry.
    heads: Reg<U32>,
    /// Query heads of a key head.
    group: Reg<U32>,
    /// Held tiles of a head.
    blocks: Reg<U32>,
    tiles: Reg<U32>,
    packed: Option<Packed>,
    section: Reg<U32>,
    scale: Scale,
    /// The factor on scores, and on the gradients of queries and keys.
    factor: Reg<F32>,
    lengths: LengthArguments,
    mask: Mask,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: Config) -> Self {
        let (input, held, step) = (cfg.input.element(), cfg.held(), cfg.shape.step);
        let (q_rows, kv_rows) = match cfg.side {
            Side::Keys => (step, held),
            Side::Queries => (held, step),
        };
        let q = params.tensor_map(b, "q", move |p| map(p.forward().q(), input, slots::Q, q_rows));
        let d_out = params.tensor_map(b, "d_out", move |p| map(p.d_out(), input, slots::D_OUT, q_rows));
        let k = params.tensor_map(b, "k", move |p| map(p.forward().k(), input, slots::K, kv_rows));
        let v = params.tensor_map(b, "v", move |p| map(p.forward().v(), input, slots::V, kv_rows));
        let (held, streamed) = match cfg.side {
            Side::Keys => ([k, v], [q, d_out]),
            Side::Queries => ([q, d_out], [k, v]),
        };
        let tile_counter =
            (cfg.shape.order != Order::Static).then(|| params.buffer(b, "tile_counter", slots::TILE_COUNTER));
        let seq_q = params.u32(b, "seq_q", |p| p.forward().seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.forward().seq_kv() as u32);
        Self {
            held,
            streamed,
            grads: Gradients::declare(b, params, cfg),
            sums: cfg.fused().then(|| SumsArgument::declare(b, params, cfg)),
            terms: TermsArgument::declare(b, params),
            tile_counter,
            heads: params.u32(b, "heads", move |p| held_heads(p, cfg.side)),
            group: params.u32(b, "group", |p| p.forward().group() as u32),
            blocks: params.u32(b, "blocks", move |p| blocks(p, cfg)),
            tiles: params.u32(b, "tiles", move |p| tiles(p, cfg)),
            packed: Packed::declare(b, params, cfg),
            section: params.u32(b, "section", move |p| section(p, cfg)),
            scale: Scale::declare(b, params, cfg.softcap, cfg.input),
            factor: params.f32(b, "factor", |p| p.forward().scale()),
            lengths: LengthArguments::declare(b, params, cfg.lengths, [seq_q, seq_kv]),
            mask: Mask::declare(b, params, cfg.mask),
        }
    }

    /// How tiles are numbered: the longest first. Under a diagonal, rows further down see more keys, and keys further up
    /// are seen by more rows.
    const fn sections(&self, cfg: Config) -> Sections {
        let last_first = matches!(cfg.side, Side::Queries) && cfg.mask.right;
        Sections { heads: self.section, row_tiles: self.blocks, all: None, last_first }
    }
}

/// The gradients that a kernel writes.
#[derive(Debug)]
enum Gradients {
    /// By tensor copies, 16 rows at a time.
    Rounded(Vec<To>),
    /// From registers, in f32.
    Tensors(Vec<TensorArgument>),
}

/// Where a gradient goes.
#[derive(Clone, Copy, Debug)]
struct To {
    map: TensorMap,
    /// The same by address, for the last rows of packed sequences.
    rows: Option<TensorArgument>,
}

impl Gradients {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: Config) -> Self {
        type Of = fn(&BackwardProblem) -> &flashcore_core::Layout;
        let element = cfg.input.element();
        let all: &[(&str, Slot, Of)] = match cfg.side {
            Side::Keys => &[("dk", slots::DK, |p| p.dk()), ("dv", slots::DV, |p| p.dv())],
            Side::Queries => &[("dq", slots::DQ, |p| p.dq())],
        };
        if cfg.ending == Ending::Rounded {
            let to = |&(name, slot, of): &(&str, Slot, Of)| To {
                map: params.tensor_map(b, name, move |p| map(of(p), element, slot, ROWS_PER_WARP)),
                rows: cfg.packed().then(|| {
                    let name = format!("{name}_rows");
                    TensorArgument::declare_by(b, params, &name, slot, move |p| (of(p), p.grad_dtype()))
                }),
            };
            return Self::Rounded(all.iter().map(to).collect());
        }
        let wide = |&(name, slot, of): &(&str, Slot, Of)| {
            TensorArgument::declare_by(b, params, name, slot, move |p| (of(p), DType::F32))
        };
        Self::Tensors(all.iter().map(wide).collect())
    }

    fn maps(&self) -> impl Iterator<Item = TensorMap> {
        let to: &[To] = match self {
            Self::Rounded(to) => to,
            Self::Tensors(_) => &[],
        };
        to.iter().map(|to| to.map)
    }
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    held: [Pipeline; 2],
    streamed: [Pipeline; 2],
    /// The terms of streamed rows, one place for each stage of queries.
    terms: Option<Terms>,
    /// Where each warp gathers its rows of a gradient.
    staging: SmemTile,
    /// Which tile is held.
    tile_info: u32,
    /// Where tiles arrive that have rows to be cleared.
    landed: Option<u32>,
    /// What each thread of a consumer sets aside while pairs stream past.
    aside: Option<u32>,
    /// dSᵀ in flight to the mover.
    handed: Option<Pipeline>,
    /// The factor of dS in flight to the mover.
    ranges: Option<Ranges>,
    /// Weights in flight from one of a pair of consumers to the other.
    passed: Option<Pipeline>,
    /// Parts of dQ in flight from the mover to the writer.
    parts: Option<Pipeline>,
}

/// Places for the terms of streamed rows.
#[derive(Clone, Copy, Debug)]
struct Terms {
    offset: u32,
    bytes: u32,
}

impl Terms {
    /// Where the terms of stage `slot` lie.
    fn at(self, b: &mut Builder, slot: Reg<U32>) -> Shared {
        let bytes = b.let_(slot * self.bytes);
        b.shared_at(self.offset).plus(b, bytes)
    }
}

impl Layout {
    fn new(b: &mut Builder, cfg: Config) -> Self {
        let Shape { consumers, step, stages, places, .. } = cfg.shape;
        let warps = consumers * WARPS_PER_GROUP;
        let mover = if cfg.fused() { WARPS_PER_GROUP } else { 0 };
        let [qk, v] = cfg.dims();
        // The mover multiplies with K, too, and the writer reads which tile it is.
        let others = if cfg.fused() { mover + 1 } else { 0 };
        // Of a pair, one consumer alone multiplies with V.
        let second = if cfg.shape.paired { WARPS_PER_GROUP } else { warps };
        // Tiles first: each starts at a multiple of what swizzles repeat after.
        let passed = cfg.shape.paired.then(|| Self::passed_tile(b, cfg));
        let [first_held, second_held, first, other] = Self::rings(
            b,
            cfg,
            [
                (cfg.held(), qk, 1, warps + others),
                (cfg.held(), v, 1, second),
                (step, qk, stages[0], warps),
                (step, v, stages[1], warps),
            ],
        );
        let bytes = step * TERM_BYTES;
        let terms = cfg.side == Side::Keys;
        Self {
            held: [first_held, second_held],
            streamed: [first, other],
            passed: passed
                .map(|tile| Pipeline::new(b, tile, PASSED, WARPS_PER_GROUP).filled_by(WARPS_PER_GROUP)),
            staging: Self::staging(b, cfg, warps * places, &second_held),
            terms: terms.then(|| Terms { offset: b.shared(stages[0] * bytes, 128), bytes }),
            tile_info: b.shared(schedule::INFO_BYTES, 16),
            landed: cfg.cuts_streamed().then(|| b.mbarriers(1)),
            aside: cfg.fused().then(|| b.shared(consumers * tiles::aside_bytes(cfg), 16)),
            handed: cfg.fused().then(|| Self::handed(b, cfg, [warps, mover])),
            ranges: Ranges::of(b, cfg),
            parts: cfg.fused().then(|| {
                let tile = b.smem_tile(Element::F32, [ROWS_PER_GROUP, PART], Swizzle::None, PLACES);
                Pipeline::new(b, tile, PLACES, 1).filled_by(mover)
            }),
        }
    }

    /// Rings of so many rows, features and stages, each stage released by so many warps. Wide tiles lie next to each
    /// other, with all barriers behind them.
    fn rings(b: &mut Builder, cfg: Config, rings: [(u32, u32, u32, u32); 4]) -> [Pipeline; 4] {
        let tile = |b: &mut Builder, (rows, dim, stages, _)| {
            b.smem_tile(cfg.input, [rows, cfg.padded(dim)], Swizzle::B128, stages)
        };
        let tiles = cfg.is_wide().then(|| rings.map(|ring| tile(b, ring)));
        [0, 1, 2, 3].map(|n| {
            let (ring, tiles) = (rings[n], tiles.as_ref());
            let tile = tiles.map_or_else(|| tile(b, ring), |tiles| tiles[n]);
            Pipeline::new(b, tile, ring.2, ring.3)
        })
    }

    /// Where warps gather rows of gradients.
    fn staging(b: &mut Builder, cfg: Config, places: u32, second_held: &Pipeline) -> SmemTile {
        let extents = [ROWS_PER_WARP, cfg.input.element().slab_cols()];
        if places == 0 {
            return b.smem_tile_over(second_held.tile().offset(), cfg.input, extents, Swizzle::B128);
        }
        b.smem_tile(cfg.input, extents, Swizzle::B128, places)
    }

    /// Where one of a pair of consumers leaves weights for the other: each thread for the one with its number.
    fn passed_tile(b: &mut Builder, cfg: Config) -> SmemTile {
        b.smem_tile(cfg.input, [ROWS_PER_GROUP, cfg.shape.step], Swizzle::None, PASSED)
    }

    /// Where consumers leave dSᵀ for the mover: a row for each key.
    fn handed(b: &mut Builder, cfg: Config, [producers, consumers]: [u32; 2]) -> Pipeline {
        let tile = b.smem_tile(cfg.input, [cfg.held(), cfg.shape.step], Swizzle::B128, HANDED);
        Pipeline::new(b, tile, HANDED, consumers).filled_by(producers)
    }

    /// Initialises the barriers and makes them known to the CTA.
    fn init(&self, b: &mut Builder) {
        let thread = b.thread();
        b.if_(thread.eq(0), |b| {
            let rings = self
                .held
                .iter()
                .chain(&self.streamed)
                .chain(&self.handed)
                .chain(&self.parts)
                .chain(&self.passed);
            rings.for_each(|pipeline| pipeline.init(b));
            if let Some(landed) = self.landed {
                b.mbarrier_at(landed).init(b, 1);
            }
            b.fence_mbarrier_init();
        });
        b.sync_cta();
    }
}

/// Builds the kernel.
pub fn backward_sm90(cfg: Config) -> Result<Program<BackwardProblem>, BuildError> {
    let (name, roles) = (cfg.name(), cfg.roles());
    let mut b = Builder::new(Target::Sm90a, &name, roles.threads(), 1);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    layout.init(&mut b);
    // What lies before the predecessor's results are waited for overlaps with its end.
    b.launch_dependents();
    prefetch_maps(&mut b, &args);
    b.wait_for_predecessor();
    let writer = Writer::of(cfg, &args, &layout);
    let produce = |b: &mut Builder| producer::run(b, cfg, &args, &layout, writer.as_ref());
    let consume = |b: &mut Builder, group: Reg<U32>| tiles::run(b, cfg, &args, &layout, group);
    match Mover::of(cfg, &args, &layout) {
        Some(mover) => b.specialise_with_mover(roles, produce, |b| mover.run(b), consume),
        None => b.specialise(roles, produce, consume),
    }
    b.finish(&name, params)
}

/// Fetches the tensor maps ahead of their first use.
fn prefetch_maps(b: &mut Builder, args: &Arguments) {
    let thread = b.thread();
    let maps: Vec<_> = args.held.into_iter().chain(args.streamed).chain(args.grads.maps()).collect();
    b.if_(thread.eq(0), |b| maps.into_iter().for_each(|map| b.tma_prefetch(map)));
}

/// The launch that computes `problem` on a GPU of `sms` multiprocessors, with the workspace that it shares with others.
pub fn extent(cfg: Config, problem: &BackwardProblem, sms: u32, workspace: Vec<Workspace>) -> Extent {
    Extent { grid: [tiles(problem, cfg).min(sms), 1, 1], workspace, dependent: true }
}

/// What kernels count tiles with, where they draw them.
pub(crate) const fn counter(order: Order) -> Option<Workspace> {
    match order {
        Order::Static => None,
        Order::Atomic | Order::Drawn => Some(Workspace { slot: slots::TILE_COUNTER, bytes: 4, zeroed: true }),
    }
}

/// Held heads of a batch entry.
fn held_heads(problem: &BackwardProblem, side: Side) -> u32 {
    match side {
        Side::Keys => problem.forward().heads_kv() as u32,
        Side::Queries => problem.forward().heads_q() as u32,
    }
}

/// Held tiles of a head: those of the longest sequence.
fn blocks(problem: &BackwardProblem, cfg: Config) -> u32 {
    let rows = match cfg.side {
        Side::Keys => problem.forward().longest_kv(),
        Side::Queries => problem.forward().longest_q(),
    };
    (rows as u32).div_ceil(cfg.held())
}

/// Tiles; where sequences are packed, an upper bound.
fn tiles(problem: &BackwardProblem, cfg: Config) -> u32 {
    if cfg.packed() {
        return packed::tiles(problem.forward(), cfg.side, cfg.held()) as u32;
    }
    blocks(problem, cfg) * held_heads(problem, cfg.side) * problem.forward().batch() as u32
}

/// Held heads of a section: one by one where all tiles are equally long. Where dQ is summed, tiles of a head follow one
/// another: the more heads there are at a time, the less they wait.
fn section(problem: &BackwardProblem, cfg: Config) -> u32 {
    if cfg.mask.right || cfg.fused() { heads_at_once(problem, cfg.side) } else { 1 }
}

/// Held heads whose streamed tensors fit in L2 together.
pub(crate) fn heads_at_once(problem: &BackwardProblem, side: Side) -> u32 {
    let forward = problem.forward();
    let rows = match side {
        Side::Keys => forward.longest_q() * forward.group(),
        Side::Queries => forward.longest_kv(),
    };
    let per_head = rows * (forward.dim_qk() + forward.dim_v()) * forward.dtype().bytes();
    full_section(held_heads(problem, side) as usize * forward.batch(), per_head)
}
