//! The product of every group: tiles of rows × columns, depth through a ring of stages.
//!
//! ```text
//! layout      ring of stages, each a tile of either factor
//! loop        wait for a stage · barrier · start the next load · products
//! epilogue    rounded · global memory
//! ```
//! Lines of either factor run along the depth or across it. Anything beyond a group is zero, never read, and not written.

use flashcore_ptx::{ident::Ident, launch::Slot, target::Target};
use flashcore_tile::{
    Acc, BuildError, Builder, Cta, Extent, Half, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Params,
    Program, Quad, Reg, Scope, SmemTile, U32, U64,
};

use super::{Divided, NONE, Work, epilogue::Output, index::IndexArgument};
use crate::{
    moe::product::Shape,
    parts::lines::{DEPTH, LineLoad, TileStart},
    slots::grouped as slots,
};

/// Bytes of an element.
const BYTES: u64 = 2;
/// Tiles of rows whose CTAs are neighbours, so that they meet in the cache over the same columns.
const GROUP: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of all tensors.
    pub half: Half,
    /// What is divided.
    pub divided: Divided,
    /// Whether lines of either factor run along the depth.
    pub along: [bool; 2],
    /// Whether the transpose is computed: neighbouring rows of a tile are neighbours in memory, instead of columns.
    pub turned: bool,
    /// How the work is split.
    pub shape: Shape,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { half, divided, along, turned, shape } = self;
        let [rows, columns] = along.map(|along| if along { "along" } else { "across" });
        let turned = if *turned { "_turned" } else { "" };
        let name = format!(
            "fc_grouped_{}_{}_{rows}_{columns}{turned}_{}",
            half.element().name(),
            divided.name(),
            shape.name(),
        );
        Ident::new(name).expect("made of legal parts")
    }
}

/// The launch for some work, which is `None` where the result has no elements; nothing where it has too many tiles.
pub fn extent(cfg: &Config, work: &Work) -> Option<Option<Extent>> {
    let ctas = work.tiles().next_multiple_of(u64::from(GROUP)) * u64::from(blocks(cfg.shape, work));
    let grid = [u32::try_from(ctas).ok().filter(|&ctas| ctas <= i32::MAX as u32)?, 1, 1];
    Some((ctas > 0).then(|| Extent { grid, workspace: work.workspace(), dependent: false }))
}

/// Tiles across the columns.
fn blocks(shape: Shape, work: &Work) -> u32 {
    (work.columns.rows() as u32).div_ceil(shape.tile_n)
}

/// Where the caller bound a factor.
pub(super) const fn slot(turned: bool, which: usize) -> Slot {
    if (which == 0) == turned { slots::B } else { slots::A }
}

/// A factor, as registers.
#[derive(Clone, Copy, Debug)]
struct Factor {
    base: Reg<U64>,
    /// Bytes from one matrix, and from one line in memory, to the next.
    matrix: Reg<U64>,
    line: Reg<U64>,
    /// Lines of the product: rows, or columns of the result.
    count: Reg<U32>,
}

impl Factor {
    /// The first factor or the second.
    fn declare(b: &mut Builder, params: &mut Params<Work>, cfg: &Config, which: usize) -> Self {
        let (along, name) = (cfg.along[which], ["rows", "columns"][which]);
        let slot = slot(cfg.turned, which);
        let layout = move |work: &Work| [work.rows, work.columns][which];
        Self {
            base: params.buffer(b, name, slot),
            matrix: params
                .u64(b, &format!("{name}_matrix"), move |work| BYTES * layout(work).strides()[0] as u64),
            line: params.u64(b, &format!("{name}_line"), move |work| {
                BYTES * layout(work).strides()[if along { 1 } else { 2 }] as u64
            }),
            count: params.u32(b, &format!("{name}_count"), move |work| layout(work).rows() as u32),
        }
    }

    /// This thread's share of the copies of a tile: from line `first` to `end` of a matrix, over some depth.
    fn load(
        &self,
        b: &mut Builder,
        tile: &SmemTile,
        (cfg, which): (&Config, usize),
        (matrix, across): (Reg<U32>, [Reg<U32>; 2]),
        depth: [Reg<U32>; 2],
    ) -> LineLoad {
        let base = b.let_(matrix.widen() * self.matrix + self.base);
        let lines = [cfg.shape.tile_m, cfg.shape.tile_n][which];
        let how = (cfg.along[which], lines, cfg.shape.rows_per_pass());
        LineLoad::of_matrix(b, tile, how, &TileStart { base, line: self.line, depth, across })
    }
}

/// The tile of a CTA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Matrices of both factors and of the result.
    matrices: [Reg<U32>; 2],
    pub(super) out: Reg<U32>,
    /// First row and end of the rows that are written; likewise of columns and depth.
    pub(super) rows: [Reg<U32>; 2],
    pub(super) columns: [Reg<U32>; 2],
    depth: [Reg<U32>; 2],
}

/// Numbers that decide where a CTA works.
struct Arguments {
    factors: [Factor; 2],
    index: Option<IndexArgument>,
    /// Tiles across the columns, and of the rows of one matrix or of all.
    blocks: Reg<U32>,
    tiles: Reg<U32>,
    depth: Reg<U32>,
    groups: Reg<U32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Work>, cfg: &Config) -> Self {
        let shape = cfg.shape;
        Self {
            factors: [0, 1].map(|which| Factor::declare(b, params, cfg, which)),
            index: (cfg.divided != Divided::Nothing).then(|| IndexArgument::declare(b, params)),
            blocks: params.u32(b, "blocks", move |work| blocks(shape, work)),
            tiles: params.u32(b, "tiles", move |work| (work.rows.rows() as u32).div_ceil(shape.tile_m)),
            depth: params.u32(b, "depth", |work| work.rows.cols() as u32),
            groups: params.u32(b, "groups", |work| work.problem.groups() as u32),
        }
    }

    /// The tile of this CTA; CTAs that have none end here.
    fn place(&self, b: &mut Builder, cfg: &Config) -> Place {
        let cta = b.cta();
        let group = b.let_(self.blocks * GROUP);
        let (before, within) = (b.let_(cta / group), b.let_(cta % group));
        let tile = b.let_(before * GROUP + within % GROUP);
        let column = b.let_(within / GROUP * cfg.shape.tile_n);
        let columns = [column, self.factors[1].count];
        let zero = b.var(0u32);
        match (cfg.divided, self.index) {
            (Divided::Rows, Some(index)) => {
                let [count] = b.load_global::<U32, 1>(index.count());
                b.if_(tile.ge(count), |b| b.exit());
                let at = index.record(b, tile);
                let [number, row, end, _] = b.load_global::<U32, 4>(at);
                let nobody = b.let_(number.eq(NONE));
                let matrix = b.select(nobody, 0, number);
                let depth = b.select(nobody, 0, self.depth);
                Place { matrices: [zero, matrix], out: zero, rows: [row, end], columns, depth: [zero, depth] }
            }
            (_, index) => {
                let matrix = b.let_(tile / self.tiles);
                b.if_(matrix.ge(self.groups), |b| b.exit());
                let row = b.let_(tile % self.tiles * cfg.shape.tile_m);
                let rows = [row, self.factors[0].count];
                match index {
                    None => {
                        let (matrices, depth) = ([matrix; 2], [zero, self.depth]);
                        Place { matrices, out: matrix, rows, columns, depth }
                    }
                    Some(index) => {
                        let at = index.record(b, matrix);
                        let depth = b.load_global::<U32, 2>(at);
                        Place { matrices: [zero; 2], out: matrix, rows, columns, depth }
                    }
                }
            }
        }
    }
}

/// Builds the kernel.
pub fn product(cfg: &Config) -> Result<Program<Work>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, cfg.shape.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let tiles = [0, 1].map(|which| tile(&mut b, cfg, which));
    let output = Output::declare(&mut b, &mut params);
    let place = args.place(&mut b, cfg);
    let [first, second] = args.factors;
    let [from, to] = place.depth;
    let ring = Ring {
        cfg: *cfg,
        tiles,
        loads: [
            first.load(&mut b, &tiles[0], (cfg, 0), (place.matrices[0], place.rows), place.depth),
            second.load(&mut b, &tiles[1], (cfg, 1), (place.matrices[1], place.columns), place.depth),
        ],
        steps: b.let_((to - from).div_ceil(DEPTH)),
    };
    let sums = ring.run(&mut b);
    output.write(&mut b, cfg, place, &sums);
    b.finish(&name, params)
}

/// The stages of a factor in shared memory.
fn tile(b: &mut Builder, cfg: &Config, which: usize) -> SmemTile {
    let (element, lines) = (cfg.half.element(), [cfg.shape.tile_m, cfg.shape.tile_n][which]);
    let extents = if cfg.along[which] { [lines, DEPTH] } else { [DEPTH, lines] };
    b.smem_tile(element, extents, element.swizzle(DEPTH), cfg.shape.stages)
}

/// Sums of a warp: one accumulator for each 16 rows.
pub(super) type Sums = Vec<Acc>;

/// The ring of stages and what fills it.
struct Ring {
    cfg: Config,
    tiles: [SmemTile; 2],
    loads: [LineLoad; 2],
    steps: Reg<U32>,
}

impl Ring {
    fn issue(&self, b: &mut Builder, stage: Reg<U32>) {
        for (load, tile) in self.loads.iter().zip(&self.tiles) {
            load.issue(b, stage * tile.bytes());
        }
    }

    /// Walks the depth.
    fn run(&self, b: &mut Builder) -> Sums {
        let Shape { tile_m, tile_n, warps, stages, .. } = self.cfg.shape;
        for stage in 0..stages - 1 {
            let there = b.uniform::<Cta>(self.steps.gt(stage));
            let stage = b.var(stage);
            b.if_uniform(there, |b| self.issue(b, stage));
            b.commit_copies();
        }
        let operands = [0, 1].map(|which| Operand::new(b, &self.cfg, &self.tiles[which], which));
        let blocks = tile_m / warps[0] / MMA_M;
        let sums: Sums = (0..blocks).map(|_| Acc::zero(b, (tile_n / warps[1]) as usize)).collect();
        let [step, ahead, slot, next] =
            [0, stages - 1, 0, stages - 1].map(|first: u32| b.var_in(Scope::Cta, first));
        b.while_(
            |_| step.lt(self.steps),
            |b| {
                b.wait_copies(stages - 2);
                b.sync_cta();
                let more = b.uniform::<Cta>(ahead.lt(self.steps));
                b.if_uniform(more, |b| self.issue(b, next));
                b.commit_copies();
                self.multiply(b, &operands, slot, &sums);
                b.add_to(step, 1);
                b.add_to(ahead, 1);
                for var in [slot, next] {
                    let following = b.let_(var + 1);
                    let wrapped = b.let_(following.eq(stages).select(0, following));
                    b.set(var, wrapped);
                }
            },
        );
        sums
    }

    /// Adds the products of a stage.
    fn multiply(&self, b: &mut Builder, [rows, columns]: &[Operand; 2], slot: Reg<U32>, sums: &Sums) {
        let Shape { tile_n, warps, .. } = self.cfg.shape;
        let [rows, columns] = [rows, columns].map(|operand| operand.at(b, slot));
        for depth in (0..DEPTH).step_by(MMA_K as usize) {
            let left: Vec<_> = (0..sums.len() as u32).map(|n| rows.load(b, n * MMA_M, depth)).collect();
            for column in (0..tile_n / warps[1]).step_by(MMA_K as usize) {
                let right = columns.load(b, column, depth);
                for (left, sums) in left.iter().zip(sums) {
                    b.mma_pair(self.cfg.half.element(), sums, (column / MMA_K) as usize, *left, right);
                }
            }
        }
    }
}

/// Place of a warp among those of a CTA: along the rows and across them.
pub(super) fn warp_place(b: &mut Builder, cfg: &Config) -> [Reg<U32>; 2] {
    let (warp, across) = (b.warp(), cfg.shape.warps[1]);
    [b.let_(warp / across), b.let_(warp % across)]
}

/// A factor's tile as a warp reads it.
struct Operand {
    rows: MatrixRows,
    along: bool,
    /// Bytes to the warp's own lines.
    skip: Reg<U32>,
}

impl Operand {
    fn new(b: &mut Builder, cfg: &Config, tile: &SmemTile, which: usize) -> Self {
        let lines = [cfg.shape.tile_m, cfg.shape.tile_n][which] / cfg.shape.warps[which];
        let (along, own) = (cfg.along[which], warp_place(b, cfg)[which]);
        let first = b.let_(own * lines);
        // The left factor's matrices are wanted down the lines first, the right one's along the depth first.
        let lines_first = if which == 0 { MatrixOrder::RowsFirst } else { MatrixOrder::ColumnsFirst };
        let depth_first = if which == 0 { MatrixOrder::ColumnsFirst } else { MatrixOrder::RowsFirst };
        if along {
            let rows = tile.matrix_rows(b, lines_first);
            return Self { rows, along, skip: b.let_(first * tile.slab_width()) };
        }
        let rows = tile.matrix_rows(b, depth_first);
        let rows = rows.from_column(b, first % tile.slab_cols() * BYTES as u32);
        Self { rows, along, skip: b.let_(first / tile.slab_cols() * tile.slab_bytes()) }
    }

    /// One copy of the tile.
    fn at(&self, b: &mut Builder, slot: Reg<U32>) -> OperandView {
        let view = self.rows.at(b, slot * self.rows.tile().bytes() + self.skip);
        OperandView { view, along: self.along }
    }
}

/// A stage of a factor.
struct OperandView {
    view: MatrixView,
    along: bool,
}

impl OperandView {
    /// 16 lines from `line` on over 16 elements of depth.
    fn load(&self, b: &mut Builder, line: u32, depth: u32) -> Quad {
        match self.along {
            true => self.view.load(b, line, depth),
            false => self.view.load_transposed(b, depth, line),
        }
    }
}
