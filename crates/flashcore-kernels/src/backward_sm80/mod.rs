//! Gradients for every GPU from sm_80 on: `mma.sync`, `ldmatrix` and `cp.async`. One kernel for dQ, one for dK and dV.
//!
//! ```text
//! layout      stationary tiles | ring of stages, each a tile of both streamed tensors (and of row terms)
//! loop        wait for a stage · barrier · start the next load · S · P · [dV] · dP · dS · dQ or dK
//! epilogue    scale · round · shared memory · global memory; f32 rows from registers to global memory
//! ```
//! Both are one text seen from two sides. A CTA keeps rows of its side, their gradients in registers, and walks the tiles
//! of the other side from the last to the first; nothing is added up in memory, so that the same call gives the same bits.
//!
//! | side | stationary | streamed | `S = a₁b₁ᵀ` | `dP = a₂b₂ᵀ` | gradients |
//! | --- | --- | --- | --- | --- | --- |
//! | queries | Q, dO | K, V | `QKᵀ` | `dO·Vᵀ` | `dQ = dS·b₁` |
//! | keys | K, V | Q, dO of every head of the group | `KQᵀ` | `V·dOᵀ` | `dV = P·b₂`, `dK = dS·b₁` |
//!
//! With keys as rows, scores are transposed, and so is the mask; P and dS come out of one product as the next one's left
//! operand on both sides. A warp has rows of its own; where gradients are too wide for its registers, several warps have
//! the same rows and shares of the columns. f32 tensors take the same way with three products for one, P and dS in two parts as
//! all operands, see `parts/factor.rs`. Reads Q, K, V, D_OUT, ROW_TERMS, BIAS, SEED, LENGTHS_*; writes DQ, or DK and DV (see
//! [`crate::slots::backward`]).

mod config;
mod epilogue;
mod products;
mod ring;
mod terms;
mod work;

use flashcore_core::{BackwardProblem, DType, Layout as TensorLayout};
use flashcore_ptx::launch::{Slot, Workspace};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Program, Reg, SmemTile};

pub use config::{Config, Shape};

use crate::{
    backward_rows::TermsArgument,
    parts::{
        bias::BiasArgument,
        columns::Columns,
        dropout::DropoutArgument,
        mask::Mask,
        scale::Scale,
        schedule::{Schedule, Side},
        tensor::TensorArgument,
    },
    slots::backward as slots,
};

/// Bytes of the terms of a row in shared memory: two f32, in arrays of their own.
pub(crate) const TERM_BYTES: u32 = 8;

/// What the host passes, as registers.
struct Arguments {
    /// Tensors whose rows a CTA keeps.
    stationary: [TensorArgument; 2],
    /// Tensors whose rows it walks through.
    streamed: [TensorArgument; 2],
    /// dQ or dK.
    first: TensorArgument,
    /// dV.
    second: Option<TensorArgument>,
    terms: TermsArgument,
    schedule: Schedule,
    mask: Mask,
    scale: Scale,
    bias: Option<BiasArgument>,
    /// What the sums of dQ and dK are multiplied by.
    factor: Reg<F32>,
    dropout: Option<DropoutArgument>,
}

/// A tensor as [`TensorArgument::declare`] wants it.
type Tensor = (&'static str, Slot, fn(&BackwardProblem) -> (&TensorLayout, DType));

const Q: Tensor = ("q", slots::Q, |p| (p.forward().q(), p.forward().dtype()));
const K: Tensor = ("k", slots::K, |p| (p.forward().k(), p.forward().dtype()));
const V: Tensor = ("v", slots::V, |p| (p.forward().v(), p.forward().dtype()));
const D_OUT: Tensor = ("d_out", slots::D_OUT, |p| (p.d_out(), p.forward().dtype()));
const DQ: Tensor = ("dq", slots::DQ, |p| (p.dq(), p.grad_dtype()));
const DK: Tensor = ("dk", slots::DK, |p| (p.dk(), p.grad_dtype()));
const DV: Tensor = ("dv", slots::DV, |p| (p.dv(), p.grad_dtype()));

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: &Config) -> Self {
        let (of_queries, of_keys) = ([Q, D_OUT], [K, V]);
        let (stationary, streamed, first, second) = match cfg.side {
            Side::Queries => (of_queries, of_keys, DQ, None),
            Side::Keys => (of_keys, of_queries, DK, Some(DV)),
        };
        let mut tensor = |(name, slot, of): Tensor| TensorArgument::declare(b, params, name, slot, of);
        Self {
            stationary: stationary.map(&mut tensor),
            streamed: streamed.map(&mut tensor),
            first: tensor(first),
            second: second.map(&mut tensor),
            terms: TermsArgument::declare(b, params),
            schedule: Schedule::declare(b, params, (cfg.side, cfg.lengths), cfg.tile_rows()),
            mask: Mask::declare(b, params, cfg.mask),
            scale: Scale::declare(b, params, cfg.softcap, cfg.input),
            bias: BiasArgument::declare(b, params, cfg.bias),
            factor: params.f32(b, "scale", |p| p.forward().scale()),
            dropout: DropoutArgument::declare(b, params, cfg.dropout),
        }
    }
}

/// What lives in shared memory.
struct Layout {
    stationary: [SmemTile; 2],
    streamed: [SmemTile; 2],
    /// Where the ring's row terms start, where rows are streamed: all `−lse` of a stage, then all sums.
    terms: Option<u32>,
    /// Where gradients are gathered, over the other tiles, unless they are f32 and leave from registers.
    staging: Option<[SmemTile; 2]>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let (rows, Shape { tile, stages, .. }) = (cfg.tile_rows(), cfg.shape);
        let mut tiles = |rows: u32, columns: [u32; 2], stages: u32| {
            columns.map(|columns| b.smem_tile(cfg.input, [rows, columns], cfg.input.swizzle(columns), stages))
        };
        let stationary = tiles(rows, cfg.stationary_columns(), 1);
        let streamed = tiles(tile, cfg.streamed_columns(), stages);
        let terms = (cfg.side == Side::Keys).then(|| b.shared(stages * tile * TERM_BYTES, 16));
        let staging = (!cfg.wide()).then(|| {
            let reserved = streamed[1].offset() + stages * streamed[1].bytes();
            let reserved = terms.map_or(reserved, |at| at + stages * tile * TERM_BYTES);
            b.shared(cfg.shared_bytes().saturating_sub(reserved), 1);
            [cfg.first_columns(), cfg.second_columns().unwrap_or(cfg.first_columns())].map(
                |columns: Columns| {
                    let all = columns.all();
                    b.smem_tile_over(0, cfg.output, [rows, all], cfg.output.swizzle(all))
                },
            )
        });
        Self { stationary, streamed, terms, staging }
    }
}

/// Builds the kernel.
pub fn backward_sm80(cfg: &Config) -> Result<Program<BackwardProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, cfg.shape.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    work::row_tile(&mut b, cfg, &args, &layout);
    b.finish(&name, params)
}

/// The launch that computes `problem`: one CTA for each row tile. `None` where there is nothing to compute.
pub fn extent(cfg: &Config, problem: &BackwardProblem, workspace: &[Workspace]) -> Option<Extent> {
    let tiles = cfg.side.tile_count(problem.forward(), cfg.tile_rows());
    let extent = || Extent { grid: [tiles as u32, 1, 1], workspace: workspace.to_vec(), dependent: false };
    (tiles > 0).then(extent)
}
