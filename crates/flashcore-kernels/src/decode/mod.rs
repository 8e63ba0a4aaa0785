//! Attention of few queries over many keys, from sm_80 on: K and V are read once, at memory bandwidth.
//!
//! ```text
//! unit        the queries of all heads that share a key head, against a range of its keys: one CTA
//! warp        every n-th key tile of the unit, through a ring of its own, with a reference and sums of its own
//! end         warps meet in shared memory; units of a row meet in global memory, where the last merges all in order
//! ```
//! Rows of a tile are queries × heads of a group, padded to 16 or 32. Tensor cores have time to spare, so what counts is
//! how many bytes are in flight: each warp keeps `stages` tiles of K and of V in flight, and waits for them separately. No
//! warp waits for another before its keys are done. The grid says how many units share a row, and the row's own length,
//! which the kernel reads when it runs, how many keys each of them has. Keys and values of 8 bits go through the ring
//! unconverted, two in 16 bits, and are widened in registers, see `narrow.rs`. Reads Q, K, V, SINKS, FACTORS_*, LENGTHS_*,
//! TABLE; writes OUT and, unless it is null, LSE (see [`crate::slots`]).

mod cluster;
mod config;
mod cost;
mod cuts;
mod end;
mod even;
mod fold;
mod load;
mod narrow;
mod pages;
mod part;
mod products;
mod ring;
mod source;
mod unit;
mod work;

use flashcore_core::{DType, Problem};
use flashcore_ptx::{
    launch::{Slot, Workspace},
    target::Target,
};
use flashcore_tile::{BuildError, Builder, Extent, Params, Program, Reg, SmemTile, U32, U64};

pub use config::{Config, Copies, Keys, Order, Shape};
pub use even::MOST_SEQUENCES;

use crate::{
    parts::{
        factors::CacheFactors,
        lengths::LengthArguments,
        maps::slab_map,
        mask::Mask,
        scale::Scale,
        share::{Share, short_queries},
        sinks::SinkArgument,
        tensor::TensorArgument,
    },
    slots,
};
use cluster::Exchange;
use config::{padded, part_row, tile_cols};
pub(crate) use cost::{nanoseconds, room};
use cost::{of_parts, visible_keys};
use cuts::{Cuts, most_pieces};
pub(crate) use cuts::{SPAN, most_messages};
use even::members;
use pages::PageArguments;
use source::Tensor;

/// Memory through which units share rows.
#[derive(Clone, Copy, Debug)]
struct SharedRows {
    /// Parts of the rows.
    parts: Reg<U64>,
    /// For each row tile, how many of its units are done.
    done: Reg<U64>,
}

/// What the host passes, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments {
    q: TensorArgument,
    k: Tensor,
    v: Tensor,
    out: TensorArgument,
    lse: Reg<U64>,
    /// Rows that units share through global memory, where they do not form clusters.
    shared: Option<SharedRows>,
    /// Rows of a tile at most, heads of queries and of keys, heads that share one of keys, and sequences.
    rows: Reg<U32>,
    heads: Reg<U32>,
    heads_kv: Reg<U32>,
    group: Reg<U32>,
    sequences: Reg<U32>,
    /// Key tiles of a unit at least.
    least_tiles: Reg<U32>,
    /// Where keys are split, if bits do not depend on the batch.
    cuts: Option<Cuts>,
    lengths: LengthArguments,
    pages: Option<PageArguments>,
    sinks: Option<SinkArgument>,
    mask: Mask,
    scale: Scale,
    factors: Option<CacheFactors>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Self {
        let (turn, tile_n, share) = (cfg.keys_per_turn(), cfg.shape.tile_n, cfg.share);
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        Self {
            q: TensorArgument::declare(b, params, "q", slots::Q, |p| (p.q(), p.dtype())),
            k: tensor(b, params, cfg, ("k", slots::K, padded(cfg.dim_qk)), |p| (p.k(), p.kv_dtype())),
            v: tensor(b, params, cfg, ("v", slots::V, padded(cfg.dim_v)), |p| (p.v(), p.kv_dtype())),
            out: TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.out_dtype())),
            lse: params.buffer(b, "lse", slots::LSE),
            shared: (!matches!(cfg.shape.order, Order::Cluster { .. })).then(|| SharedRows {
                parts: params.buffer(b, "parts", slots::PARTS),
                done: params.buffer(b, "done", slots::TILE_COUNTER),
            }),
            rows: params.u32(b, "rows", move |p| tile_rows(p, share) as u32),
            heads: params.u32(b, "heads", |p| p.heads_q() as u32),
            heads_kv: params.u32(b, "heads_kv", |p| p.heads_kv() as u32),
            group: params.u32(b, "group", |p| p.group() as u32),
            sequences: params.u32(b, "sequences", |p| p.sequences() as u32),
            least_tiles: params.u32(b, "least_tiles", move |_| turn / tile_n),
            cuts: Cuts::declare(b, params, cfg),
            lengths: LengthArguments::declare(b, params, cfg.lengths, [seq_q, seq_kv]),
            pages: PageArguments::declare(b, params, cfg),
            sinks: SinkArgument::declare(b, params, cfg.sinks),
            mask: Mask::declare(b, params, cfg.mask),
            scale: Scale::declare(b, params, cfg.softcap, cfg.input),
            factors: cfg.scaled.then(|| CacheFactors::declare(b, params)),
        }
    }
}

/// Keys or values, in tiles of so many columns.
fn tensor(
    b: &mut Builder,
    params: &mut Params<Problem>,
    cfg: &Config,
    (name, slot, cols): (&str, Slot, u32),
    of: fn(&Problem) -> (&flashcore_core::Layout, DType),
) -> Tensor {
    let (rows, element) = (cfg.shape.tile_n, cfg.input.element());
    let map = move |p: &Problem| slab_map(of(p).0, element, slot, (rows, element.swizzle(cols)));
    match cfg.shape.copies {
        Copies::Lanes => Tensor::Rows(TensorArgument::declare(b, params, name, slot, of)),
        Copies::Tensor => Tensor::Map(params.tensor_map(b, name, map)),
    }
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    q: SmemTile,
    /// The rings of all warps, one after another.
    k: SmemTile,
    v: SmemTile,
    /// Parts of all warps: where the first lies, and bytes from one to the next.
    parts: [u32; 2],
    /// Where the thread that counts units publishes its result to the others.
    found: u32,
    /// Barriers of all warps' stages, where tensor copies fill them.
    barriers: Option<u32>,
    /// Where parts of a cluster are merged.
    exchange: Option<Exchange>,
    /// Where pieces are folded.
    folded: Option<u32>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let Shape { warps, tile_n, stages, .. } = cfg.shape;
        let (input, qk) = (cfg.input.element(), padded(cfg.dim_qk));
        let q = b.smem_tile(input, [cfg.shape.rows(), qk], input.swizzle(qk), 1);
        let [k, v] = [cfg.dim_qk, cfg.dim_v].map(|dim| {
            let cols = tile_cols(cfg.cache, dim);
            b.smem_tile(input, [tile_n, cols], input.swizzle(cols), warps * stages)
        });
        let held = v.offset() + v.copies() * v.bytes();
        b.shared(cfg.shape.over_bytes(cfg.dim_v).saturating_sub(held), 1);
        let parts = match cfg.shape.parts_fit([cfg.dim_qk, cfg.dim_v], cfg.cache) {
            true => [k.offset(), stages * k.bytes()],
            false => [0, cfg.shape.rows() * part_row(cfg.dim_v)],
        };
        let barriers = (cfg.shape.copies == Copies::Tensor).then(|| b.mbarriers(cfg.shape.barriers()));
        let (found, exchange) = (b.shared(4, 16), Exchange::reserve(b, cfg));
        let [met, folded] = cfg.fold_bytes();
        match cfg.invariant {
            true => {
                let parts = [b.shared(met, 16), cfg.met_rows() * part_row(cfg.dim_v)];
                Self { q, k, v, parts, found, barriers, exchange, folded: Some(b.shared(folded, 16)) }
            }
            false => Self { q, k, v, parts, found, barriers, exchange, folded: None },
        }
    }
}

/// Builds the kernel.
pub fn decode(cfg: &Config) -> Result<Program<Problem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, cfg.shape.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    if cfg.target.includes(Target::Sm90) {
        b.launch_dependents();
    }
    work::run(&mut b, cfg, &args, &layout);
    b.finish(&name, params)
}

/// Waits for what the kernel before has written. What needs none of it comes first, and overlaps with that kernel's end.
fn wait_for_predecessor(b: &mut Builder, cfg: &Config) {
    if cfg.target.includes(Target::Sm90) {
        b.wait_for_predecessor();
    }
}

/// Bytes of shared memory in which a cluster of `parts` CTAs exchanges so many numbers.
pub(crate) const fn exchange_bytes(numbers: u32, parts: u32, messages: u32) -> u32 {
    Exchange::bytes(numbers / part::COLUMNS, parts, messages)
}

/// Rows of a tile: queries × heads that share a key head.
pub fn rows(problem: &Problem) -> usize {
    problem.longest_q().saturating_mul(problem.group())
}

/// Rows of a tile at most, where a kernel computes only some sequences.
fn tile_rows(problem: &Problem, share: Share) -> usize {
    match share {
        Share::All => rows(problem),
        _ => short_queries(problem) * problem.group(),
    }
}

/// Row tiles: one for each key head of each sequence.
pub(crate) fn row_tiles(problem: &Problem) -> usize {
    problem.sequences() * problem.heads_kv()
}

/// Units of a row at most, on a GPU of `sms` multiprocessors.
pub(crate) fn splits(cfg: &Config, problem: &Problem, sms: u32) -> u32 {
    if let Some(splits) = cfg.shape.splits {
        return splits;
    }
    let turns = match cfg.invariant {
        true => most_pieces(problem),
        false => visible_keys(problem).div_ceil(cfg.keys_per_turn() as usize).max(1) as u32,
    };
    let fill = u64::from(sms * cfg.shape.ctas_per_sm).div_ceil(row_tiles(problem).max(1) as u64);
    let most = turns.min(2 * fill as u32);
    let time = |&splits: &u32| of_parts(cfg, problem, sms, splits);
    (1..=most).min_by(|one, other| time(one).total_cmp(&time(other))).unwrap_or(1)
}

/// The launch that computes `problem`: `None` where there is nothing to compute.
pub fn extent(cfg: &Config, problem: &Problem, sms: u32) -> Option<Extent> {
    let tiles = row_tiles(problem);
    let (grid, parts) = match cfg.shape.order {
        Order::Grid => {
            let splits = splits(cfg, problem, sms);
            let parts = if cfg.invariant { most_pieces(problem) } else { splits };
            ([splits, problem.heads_kv() as u32, problem.sequences() as u32], tiles * parts as usize)
        }
        Order::Cluster { parts } => ([parts, problem.heads_kv() as u32, problem.sequences() as u32], 0),
        Order::Even => {
            let ctas = sms * cfg.shape.ctas_per_sm;
            let members = members(problem, ctas);
            let parts = if cfg.invariant { most_pieces(problem) + 1 } else { 2 };
            ([ctas / members, members, 1], parts as usize * ctas as usize)
        }
    };
    let part = tile_rows(problem, cfg.share) as u64 * u64::from(part_row(cfg.dim_v));
    let mut workspace = vec![
        Workspace { slot: slots::PARTS, bytes: parts as u64 * part, zeroed: false },
        Workspace { slot: slots::TILE_COUNTER, bytes: 4 * tiles as u64, zeroed: true },
    ];
    if matches!(cfg.shape.order, Order::Cluster { .. }) {
        workspace.clear();
    }
    (tiles > 0 && problem.rows() > 0).then_some(Extent { grid, workspace, dependent: true })
}
