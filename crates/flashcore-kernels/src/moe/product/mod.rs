//! One product of every expert with its rows: tiles of rows × features, depth through a ring of stages.
//!
//! ```text
//! layout      ring of stages, each a tile of rows and a tile of weights
//! loop        wait for a stage · barrier · start the next load · products
//! epilogue    bias · gate and up joined · rounded · global memory
//! ```
//! Gate and up of a feature are sums of the same thread: a tile of weights is a tile of gates above one of ups, or pairs of
//! them. Padding rows are zeros, never read. The first product gathers rows from the tokens, the second reads the first's
//! result; its weights are in flight before it waits for that.

mod config;
mod epilogue;
mod load;

use flashcore_tile::{
    Acc, BuildError, Builder, Element, Extent, MMA_K, MMA_M, MatrixOrder, MatrixRows, Params, Program, Reg,
    Scope, SmemTile, U32,
};

pub use config::{Config, DEPTH, Glu, Kind, Shape, WeightOrder};

use super::{Layer, NONE, Source, ids::IdArgument, join::gate_steps, overlaps, sort::IndexArgument};
use crate::parts::lines::LineLoad;
use epilogue::Output;
use load::{RowLoad, weight_load};

/// Most tiles of rows whose CTAs are neighbours, so that they meet in the cache over the same weights.
const GROUP: u64 = 8;

/// Tiles of rows whose CTAs are neighbours: no more than there are, since SMs whose CTAs end at once get others in no order.
fn group(layer: &Layer) -> u64 {
    layer.tiles().clamp(1, GROUP)
}

/// The launch for a layer, which is `None` where there are no tokens; nothing where it has too many tiles.
pub fn extent(cfg: &Config, layer: &Layer) -> Option<Option<Extent>> {
    let blocks = u64::from(blocks(cfg.kind, cfg.features(), layer));
    let ctas = layer.tiles().next_multiple_of(group(layer)) * blocks;
    let grid = [u32::try_from(ctas).ok().filter(|&ctas| ctas <= i32::MAX as u32)?, 1, 1];
    let workspace = layer.workspace.clone();
    Some((ctas > 0).then(|| Extent { grid, workspace, dependent: overlaps(cfg.target) }))
}

/// Features of a result.
fn width(kind: Kind, layer: &Layer) -> u32 {
    match kind {
        Kind::Up(_) => layer.problem.intermediate() as u32,
        Kind::Down => layer.problem.hidden() as u32,
    }
}

/// Tiles across the features.
fn blocks(kind: Kind, features: u32, layer: &Layer) -> u32 {
    width(kind, layer).div_ceil(features)
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    rows: SmemTile,
    weights: SmemTile,
}

impl Layout {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let (Shape { tile_m, tile_n, stages, .. }, depth) = (cfg.shape, cfg.shape.depth());
        let element = cfg.half.element();
        let weights = match cfg.weights {
            WeightOrder::Rows => [tile_n, depth],
            WeightOrder::Columns | WeightOrder::PairedColumns => [DEPTH, tile_n],
        };
        Self {
            rows: b.smem_tile(element, [tile_m, depth], element.swizzle(DEPTH), stages),
            weights: b.smem_tile(element, weights, element.swizzle(DEPTH), stages),
        }
    }
}

/// The tile of a CTA.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Number of the tile of rows.
    tile: Reg<U32>,
    /// Its expert.
    expert: Reg<U32>,
    /// First feature of the result.
    feature: Reg<U32>,
}

/// Numbers that decide where a CTA works.
#[derive(Clone, Copy, Debug)]
struct Arguments {
    ids: IdArgument,
    index: IndexArgument,
    blocks: Reg<U32>,
    group: Reg<U32>,
    tiles: Reg<U32>,
    /// Tokens, where all of them are rows.
    tokens: Option<Reg<U32>>,
    depth: Reg<U32>,
    features: Reg<U32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let (kind, features) = (cfg.kind, cfg.features());
        let ids = IdArgument::declare(b, params, cfg.ids);
        Self {
            ids: if cfg.early() { ids.read_early() } else { ids },
            index: IndexArgument::declare(b, params),
            blocks: params.u32(b, "blocks", move |layer| blocks(kind, features, layer)),
            group: params.u32(b, "group", |layer| group(layer) as u32),
            tiles: params.u32(b, "tiles", |layer| layer.tiles() as u32),
            tokens: (cfg.source == Source::All)
                .then(|| params.u32(b, "tokens", |layer| layer.problem.tokens() as u32)),
            depth: params.u32(b, "depth", move |layer| match kind {
                Kind::Up(_) => layer.problem.hidden() as u32,
                Kind::Down => layer.problem.intermediate() as u32,
            }),
            features: params.u32(b, "features", move |layer| width(kind, layer)),
        }
    }

    /// The tile of this CTA; CTAs that have none end here, and not before their predecessor: who waits for this kernel alone
    /// relies on that one's end.
    fn place(&self, b: &mut Builder, cfg: &Config) -> Place {
        let end = |b: &mut Builder| {
            if cfg.early() {
                b.wait_for_predecessor();
            }
            b.exit();
        };
        let cta = b.cta();
        let group = b.let_(self.blocks * self.group);
        let (before, within) = (b.let_(cta / group), b.let_(cta % group));
        let tile = b.let_(before * self.group + within % self.group);
        let feature = b.let_(within / self.group * cfg.features());
        let expert = match cfg.source {
            Source::Sorted => {
                let read = |b: &mut Builder, at| match cfg.early() {
                    true => b.load_global_fresh(at),
                    false => b.load_global::<U32, 1>(at)[0],
                };
                let count = read(b, self.index.count);
                b.if_(tile.ge(count), end);
                let at = b.let_(self.index.experts + tile.mul_wide(4));
                read(b, at)
            }
            Source::Pairs => {
                b.if_(tile.ge(self.tiles), end);
                let expert = self.ids.local(b, tile, None);
                b.if_(expert.eq(NONE), end);
                expert
            }
            Source::All => {
                b.if_(tile.ge(self.tiles), end);
                b.var(0u32)
            }
        };
        Place { tile, expert, feature }
    }
}

/// Builds the kernel.
pub fn product(cfg: &Config) -> Result<Program<Layer>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, cfg.shape.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    let rows = load::RowArguments::declare(&mut b, &mut params, cfg);
    let weights = load::WeightArguments::declare(&mut b, &mut params, cfg);
    let output = Output::declare(&mut b, &mut params, cfg);
    if overlaps(cfg.target) && !cfg.early() {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    let place = args.place(&mut b, cfg);
    let weights = weight_load(&mut b, cfg, &layout.weights, (&weights, &args), place);
    let ring = Ring { cfg: *cfg, layout, weights, steps: b.let_(args.depth.div_ceil(cfg.shape.depth())) };
    ring.start_weights(&mut b);
    if cfg.early() {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    let rows = RowLoad::new(&mut b, cfg, &layout.rows, (&rows, &args), place);
    ring.start_rows(&mut b, &rows);
    let sums = ring.run(&mut b, &rows);
    output.write(&mut b, cfg, &args, place, &sums);
    b.finish(&name, params)
}

/// Sums of a warp: for each 16 rows, one accumulator for each matrix of the tile of weights.
type Sums = Vec<Vec<Acc>>;

/// The ring of stages and what fills it.
struct Ring {
    cfg: Config,
    layout: Layout,
    weights: LineLoad,
    steps: Reg<U32>,
}

impl Ring {
    /// Calls `start` for the stages that are filled before the loop, where the depth has as many.
    fn each_first(&self, b: &mut Builder, mut start: impl FnMut(&mut Builder, u32)) {
        for stage in 0..self.cfg.shape.stages - 1 {
            let there = b.uniform::<flashcore_tile::Cta>(self.steps.gt(stage));
            b.if_uniform(there, |b| start(b, stage));
        }
    }

    fn start_weights(&self, b: &mut Builder) {
        self.each_first(b, |b, stage| {
            for line in 0..self.cfg.shape.lines {
                let skip = stage * self.layout.weights.bytes() + line * self.layout.weights.slab_bytes();
                self.weights.issue(b, skip);
            }
        });
    }

    /// Starts the rows that belong to the weights in flight; the first group completes all of them.
    fn start_rows(&self, b: &mut Builder, rows: &RowLoad) {
        for stage in 0..self.cfg.shape.stages - 1 {
            let there = b.uniform::<flashcore_tile::Cta>(self.steps.gt(stage));
            b.if_uniform(there, |b| {
                for line in 0..self.cfg.shape.lines {
                    rows.issue(b, stage * self.layout.rows.bytes() + line * self.layout.rows.slab_bytes());
                }
            });
            b.commit_copies();
        }
    }

    /// Walks the depth.
    fn run(&self, b: &mut Builder, rows: &RowLoad) -> Sums {
        let Shape { stages, .. } = self.cfg.shape;
        let operands = Operands::new(b, &self.cfg, &self.layout);
        let sums = self.zeros(b);
        let (step, ahead) = (b.var(0u32), b.var(stages - 1));
        let (slot, next) = (b.var(0u32), b.var(stages - 1));
        let [step, ahead, slot, next] = [step, ahead, slot, next].map(|var| b.var_in(Scope::Cta, var));
        b.while_(
            |_| step.lt(self.steps),
            |b| {
                b.wait_copies(stages - 2);
                b.sync_cta();
                let more = b.uniform::<flashcore_tile::Cta>(ahead.lt(self.steps));
                b.if_uniform(more, |b| {
                    let Layout { rows: left, weights: right } = self.layout;
                    for line in 0..self.cfg.shape.lines {
                        self.weights.issue(b, next * right.bytes() + line * right.slab_bytes());
                    }
                    for line in 0..self.cfg.shape.lines {
                        rows.issue(b, next * left.bytes() + line * left.slab_bytes());
                    }
                });
                b.commit_copies();
                operands.multiply(b, &self.cfg, slot, &sums);
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

    fn zeros(&self, b: &mut Builder) -> Sums {
        let Shape { tile_m, warps, .. } = self.cfg.shape;
        let (blocks, cols) = (tile_m / warps[0] / MMA_M, self.cfg.matrix_n() / warps[1]);
        let block = |b: &mut Builder| {
            (0..self.cfg.matrices()).map(|_| Acc::zero(b, cols as usize)).collect::<Vec<_>>()
        };
        (0..blocks).map(|_| block(b)).collect()
    }
}

/// Tiles as a warp reads them.
struct Operands {
    element: Element,
    rows: MatrixRows,
    weights: MatrixRows,
    /// Bytes to the warp's rows, and to its weights.
    skips: [Reg<U32>; 2],
}

/// Place of a warp among those of a CTA: along the rows and across them.
fn warp_place(b: &mut Builder, cfg: &Config) -> [Reg<U32>; 2] {
    let warp = b.warp();
    let across = cfg.shape.warps[1];
    [b.let_(warp / across), b.let_(warp % across)]
}

impl Operands {
    fn new(b: &mut Builder, cfg: &Config, layout: &Layout) -> Self {
        let Shape { tile_m, warps, .. } = cfg.shape;
        let [along, across] = warp_place(b, cfg);
        let element = cfg.half.element();
        let rows = layout.rows.matrix_rows(b, MatrixOrder::RowsFirst);
        let own = b.let_(along * (tile_m / warps[0] * layout.rows.slab_width()));
        let first = b.let_(across * (cfg.matrix_n() / warps[1]));
        let (weights, skip) = match cfg.weights {
            WeightOrder::Rows => {
                let weights = layout.weights.matrix_rows(b, MatrixOrder::ColumnsFirst);
                (weights, b.let_(first * layout.weights.slab_width()))
            }
            WeightOrder::Columns | WeightOrder::PairedColumns => {
                let weights = layout.weights.matrix_rows(b, MatrixOrder::RowsFirst);
                let cols = layout.weights.slab_cols();
                let weights = weights.from_column(b, first % cols * element.bytes());
                (weights, b.let_(first / cols * layout.weights.slab_bytes()))
            }
        };
        Self { element, rows, weights, skips: [own, skip] }
    }

    /// Adds the products of a stage.
    fn multiply(&self, b: &mut Builder, cfg: &Config, slot: Reg<U32>, sums: &Sums) {
        let rows = self.rows.at(b, slot * self.rows.tile().bytes() + self.skips[0]);
        let weights = self.weights.at(b, slot * self.weights.tile().bytes() + self.skips[1]);
        let cols = cfg.matrix_n() / cfg.shape.warps[1];
        for depth in (0..cfg.shape.depth()).step_by(MMA_K as usize) {
            let left: Vec<_> = (0..sums.len() as u32).map(|n| rows.load(b, n * MMA_M, depth)).collect();
            for matrix in 0..cfg.matrices() {
                for col in (0..cols).step_by(16) {
                    let at = matrix * cfg.matrix_n() + col;
                    let right = match cfg.weights {
                        WeightOrder::Rows => weights.load(b, at, depth),
                        _ => weights.load_transposed(b, depth, at),
                    };
                    for (left, sums) in left.iter().zip(sums) {
                        b.mma_pair(self.element, &sums[matrix as usize], (col / 16) as usize, *left, right);
                    }
                }
            }
        }
    }
}
