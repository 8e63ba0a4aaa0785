//! Parts of rows, which CTAs of `forward_sm80` left where keys were split among them, put together by their LSE.
//!
//! A warp has a row: each lane some of its features. Parts are added in their order, so that a row's bits depend on nothing
//! but its parts. Rows that no sequence has are left alone. Reads PARTS and LENGTHS_*; writes OUT and, unless it is null, LSE
//! (see [`crate::slots`]).

use flashcore_core::{DType, Problem};
use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, Params, Program, Reg, U32, U64};

use crate::{
    merge::{self, Rows},
    parts::{
        lengths::LengthsKind,
        schedule::{Schedule, Tile, folded_tiles},
        split::{self, SplitRows},
        tensor::TensorArgument,
    },
    slots,
};

/// Rows of a CTA: one for each warp.
pub(crate) const ROWS: u32 = 4;
const THREADS: u32 = 32 * ROWS;
const CTAS_PER_SM: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of the result.
    pub out: DType,
    /// Features of a row.
    pub dim: u32,
    /// Parts of a row.
    pub parts: u32,
    /// Neighbouring features that a lane has: 1 or 4.
    pub width: u32,
    /// How sequences are told.
    pub lengths: LengthsKind,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { out, dim, parts, width, lengths } = self;
        let name = format!("fc_combine_{out}_d{dim}p{parts}w{width}_{}", lengths.name());
        Ident::new(name).expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        flashcore_ptx::sm::REGISTERS / (CTAS_PER_SM * THREADS)
    }

    /// How a lane merges what it has of each part.
    const fn merge(&self) -> merge::Config {
        let shape = merge::Shape { width: self.width, lanes: 32 };
        merge::Config { part: DType::F32, out: self.out, source: merge::Source::Stacked, shape }
    }
}

/// The launch that computes `problem`; `None` where there is nothing to compute.
pub(crate) fn extent(cfg: &Config, problem: &Problem) -> Option<Extent> {
    let ctas = folded_tiles(problem, ROWS);
    let workspace = vec![split::workspace(problem, cfg.parts)];
    (ctas > 0).then_some(Extent { grid: [ctas as u32, 1, 1], workspace, dependent: false })
}

/// Builds the kernel.
pub(crate) fn combine(cfg: &Config) -> Result<Program<Problem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, THREADS, CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let tile = args.schedule.tile(&mut b, ROWS);
    let warp = b.warp();
    let row = b.let_(tile.first_row + warp);
    b.if_(row.lt(tile.rows), |b| args.row(b, cfg, &tile, [row, warp]));
    b.finish(&name, params)
}

/// What the host passes, as registers.
struct Arguments {
    parts: SplitRows,
    out: TensorArgument,
    lse: Reg<U64>,
    schedule: Schedule,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Self {
        Self {
            parts: SplitRows::declare(b, params, [cfg.dim, cfg.parts]),
            out: TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.out_dtype())),
            lse: params.buffer(b, "lse", slots::LSE),
            schedule: Schedule::declare_folded(b, params, cfg.lengths, ROWS),
        }
    }

    /// Puts a row together: row number `row` of its sequence, `within` of its tile.
    fn row(&self, b: &mut Builder, cfg: &Config, tile: &Tile, [row, within]: [Reg<U32>; 2]) {
        let (zero, count) = (b.var(0u32), b.var(cfg.parts));
        let number = split::first_row(b, &self.schedule, tile);
        let number = b.let_(number + within);
        let first = self.parts.place(b, zero, number);
        let rows = Rows::Stacked { first, count, steps: self.parts.steps(b) };
        let (query, head) = self.schedule.unfolded(b, tile, row);
        let to = self.out.at(b, tile.batch, head, query);
        let lse_bytes = self.lse_bytes(b, tile, head, query);
        let (lane, merge, top) = (b.lane(), cfg.merge(), rows.top(b));
        let column = b.var(lane * cfg.width);
        b.while_(
            |_| column.lt(cfg.dim),
            |b| {
                let merged = rows.sum(b, &merge, top, column);
                merged.write(b, cfg.out, (to, column), (self.lse, lse_bytes));
                b.add_to(column, cfg.width * 32);
            },
        );
    }

    /// Bytes from the first LSE to that of a query.
    fn lse_bytes(&self, b: &mut Builder, tile: &Tile, head: Reg<U32>, query: Reg<U32>) -> Reg<U64> {
        let heads = b.let_(self.schedule.heads() * self.schedule.group());
        let plane = b.let_(tile.batch * heads + head);
        let index = b.let_(plane.widen() * self.schedule.seq_q().widen() + query.widen());
        b.let_(index * 4)
    }
}
