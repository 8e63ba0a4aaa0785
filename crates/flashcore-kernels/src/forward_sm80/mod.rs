//! Attention forward for every GPU from sm_75 on: `mma.sync`, `ldmatrix` and, from sm_80 on, `cp.async`.
//!
//! ```text
//! layout      Q tile | ring of stages, each a K tile and a V tile; the output is gathered where they were
//! loop        wait for a stage · barrier · start the next load · QKᵀ · mask · softmax · PV
//! epilogue    normalise · round · shared memory · global memory; f32 rows from registers to global memory
//! ```
//! A CTA works on one tile of query rows and walks its key tiles from the last to the first: tiles that the mask or
//! the end of the sequence cuts come first, then the whole ones, then those that the left bound cuts. A warp has rows of
//! its own; where their output is too wide for its registers, two warps have the same rows and halves of the columns.
//! Keys in pages are found a turn before they are loaded, see `parts/entries.rs`. Those of 8 bits are widened in shared
//! memory when they have arrived, see `parts/widen.rs`. f32 tensors take the same way with three products for one, see
//! `parts/factor.rs`. Of few queries over many keys all heads of a group are rows of one tile, and CTAs share its keys: each
//! leaves its part of the rows in f32, see `parts/split.rs`. Reads Q, K, V, SINKS, BIAS, SEED, FACTORS_*, LENGTHS_*, TABLE;
//! writes OUT and, unless it is null, LSE, or PARTS (see [`crate::slots`]).

mod block;
mod config;
mod epilogue;
mod products;
mod ring;
mod work;

use flashcore_core::Problem;
use flashcore_tile::{BuildError, Builder, Extent, Params, Program, Reg, SmemTile, U64};

pub use crate::parts::portion::Access;
pub use config::{Config, Shape};

use crate::{
    parts::{
        bias::BiasArgument,
        columns::padded,
        dropout::DropoutArgument,
        entries::Entries,
        factors::CacheFactors,
        mask::Mask,
        pages::PageArguments,
        scale::Scale,
        schedule::{LongOnly, Schedule, Side, folded_tiles, long_tiles},
        share::Share,
        sinks::SinkArgument,
        split::{self, SplitRows},
        tensor::TensorArgument,
    },
    slots,
};

/// What the host passes, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments {
    q: TensorArgument,
    k: TensorArgument,
    v: TensorArgument,
    out: TensorArgument,
    lse: Reg<U64>,
    sinks: Option<SinkArgument>,
    bias: Option<BiasArgument>,
    schedule: Schedule,
    mask: Mask,
    scale: Scale,
    pages: Option<PageArguments>,
    /// Where others compute sequences of few queries.
    long: Option<LongOnly>,
    factors: Option<CacheFactors>,
    dropout: Option<DropoutArgument>,
    /// Where parts of rows go, where keys are split.
    split: Option<SplitRows>,
    /// Bytes between neighbouring rows of the queries then.
    q_step: Option<Reg<U64>>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Self {
        Self {
            q: TensorArgument::declare(b, params, "q", slots::Q, |p| (p.q(), p.dtype())),
            k: TensorArgument::declare(b, params, "k", slots::K, |p| (p.k(), p.kv_dtype())),
            v: TensorArgument::declare(b, params, "v", slots::V, |p| (p.v(), p.kv_dtype())),
            out: TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.out_dtype())),
            lse: params.buffer(b, "lse", slots::LSE),
            sinks: SinkArgument::declare(b, params, cfg.sinks),
            bias: BiasArgument::declare(b, params, cfg.bias),
            schedule: match cfg.parts {
                None => Schedule::declare(b, params, (Side::Queries, cfg.lengths), cfg.tile_m()),
                Some(_) => Schedule::declare_folded(b, params, cfg.lengths, cfg.tile_m()),
            },
            mask: Mask::declare(b, params, cfg.mask),
            scale: Scale::declare(b, params, cfg.softcap, cfg.input),
            pages: cfg.paged.then(|| PageArguments::declare(b, params)),
            long: (cfg.share == Share::Long).then(|| LongOnly::declare(b, params)),
            factors: cfg.scaled.then(|| CacheFactors::declare(b, params)),
            dropout: DropoutArgument::declare(b, params, cfg.dropout),
            split: cfg.parts.map(|parts| SplitRows::declare(b, params, [cfg.dim_v, parts])),
            q_step: cfg.parts.map(|_| params.u64(b, "q_step", |p| folded_step(p).unwrap_or(0))),
        }
    }
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    q: SmemTile,
    k: SmemTile,
    v: SmemTile,
    /// The ring of keys and of values of 8 bits, two in 16: `k` and `v` are one tile then, of what was widened.
    stored: Option<[SmemTile; 2]>,
    /// Page and place of the keys of each stage, where they lie in pages.
    entries: Option<Entries>,
    /// Where the output is gathered, over the other tiles, unless it is f32 and leaves from registers.
    staging: Option<SmemTile>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let (tile_m, Shape { tile_n, stages, .. }) = (cfg.tile_m(), cfg.shape);
        let (qk, v) = (padded(cfg.dim_qk), cfg.columns().all());
        let (input, output) = (cfg.input, cfg.output);
        let q = b.smem_tile(input, [tile_m, qk], input.swizzle(qk), 1);
        let stored = cfg.widened().map(|_| {
            [qk / 2, v / 2].map(|cols| b.smem_tile(input, [tile_n, cols], input.swizzle(cols), stages))
        });
        let copies = if stored.is_some() { 1 } else { stages };
        let k = b.smem_tile(input, [tile_n, qk], input.swizzle(qk), copies);
        let values = b.smem_tile(input, [tile_n, v], input.swizzle(v), copies);
        let entries = cfg.paged.then(|| Entries::new(b, cfg.shape.tile_n, cfg.shape.stages));
        let staging = (!cfg.wide()).then(|| {
            // Narrow keys leave too little room for wide values.
            let needed = output.bytes() * tile_m * v;
            let missing = needed.saturating_sub(values.offset() + copies * values.bytes());
            b.shared(missing, 1);
            b.smem_tile_over(0, output, [tile_m, v], output.swizzle(v))
        });
        Self { q, k, v: values, stored, entries, staging }
    }
}

/// Bytes from a row of the queries to the next where those of all heads of a group are rows; `None` where they do not lie at
/// equal distances.
pub(crate) fn folded_step(problem: &Problem) -> Option<u64> {
    let [_, head, row, _] = problem.q().strides();
    let step = match problem.group() {
        // Steps to what is not there may be anything.
        1 if problem.seq_q() == 1 => 0,
        1 => row,
        _ if problem.seq_q() == 1 => head,
        group => (problem.heads_kv() == 1 && row == group * head).then_some(head)?,
    };
    Some((step * problem.dtype().bytes()) as u64)
}

/// Builds the kernel.
pub fn forward_sm80(cfg: &Config) -> Result<Program<Problem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, cfg.shape.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    work::row_tile(&mut b, cfg, &args, &layout);
    b.finish(&name, params)
}

/// The launch that computes `problem`: one CTA for each row tile. `None` where there is nothing to compute.
pub fn extent(cfg: &Config, problem: &Problem) -> Option<Extent> {
    let tiles = match (cfg.parts, cfg.share) {
        (Some(parts), _) => folded_tiles(problem, cfg.tile_m()) * u64::from(parts),
        (None, Share::Long) => long_tiles(problem, cfg.tile_m()),
        (None, _) => Side::Queries.tile_count(problem, cfg.tile_m()),
    };
    let workspace = cfg.parts.map(|parts| split::workspace(problem, parts));
    (tiles > 0).then(|| Extent {
        grid: [tiles as u32, 1, 1],
        workspace: workspace.into_iter().collect(),
        dependent: false,
    })
}
