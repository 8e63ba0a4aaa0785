//! Grouped products: for every GPU from sm_80 on by `mma.sync`, `ldmatrix`, `cp.async`, and for Hopper ([`product_sm90`]).
//!
//! ```text
//! index     what each group has, whatever the offsets are; tiles of rows, where rows are divided
//! product   tiles of rows × columns, depth through a ring of stages
//! ```
//! Offsets are read on the device: grids are sized by upper bounds, and CTAs without a tile end at once. Products whose
//! columns are divided are computed as their transposes. Rows of no group are tiles without depth: zeros. The bits of a
//! result depend only on its row and column. Slots are those of [`crate::slots::grouped`].

mod epilogue;
pub mod index;
pub mod product;
pub mod product_sm90;

use flashcore_core::{ExpertLayout, GroupedProblem, Grouping};
use flashcore_ptx::{launch::Workspace, target::Target};
use flashcore_tile::{BuildError, Program};

use crate::slots::grouped as slots;

/// The group of tiles that no group has.
pub(crate) const NONE: u32 = u32::MAX;
/// Bytes of what the index says of a tile or a group.
const RECORD: u64 = 16;

/// A kernel of grouped products: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Config {
    /// Reads offsets.
    Index(index::Config),
    /// Multiplies.
    Product(product::Config),
    /// The same, on Hopper.
    ProductSm90(product_sm90::Config),
}

impl Config {
    /// The kernel's name.
    pub fn name(&self) -> String {
        match self {
            Self::Index(cfg) => cfg.name().to_string(),
            Self::Product(cfg) => cfg.name().to_string(),
            Self::ProductSm90(cfg) => cfg.name().to_string(),
        }
    }

    /// The architecture it is built for.
    pub const fn target(&self) -> Target {
        match self {
            Self::Index(cfg) => cfg.target,
            Self::Product(_) => Target::Sm80,
            Self::ProductSm90(_) => Target::Sm90a,
        }
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        match self {
            Self::Index(_) => 64,
            Self::Product(cfg) => cfg.shape.registers(),
            Self::ProductSm90(cfg) => cfg.shape.registers(),
        }
    }

    /// Builds the kernel.
    pub fn program(&self) -> Result<Program<Work>, BuildError> {
        match self {
            Self::Index(cfg) => index::index(cfg),
            Self::Product(cfg) => product::product(cfg),
            Self::ProductSm90(cfg) => product_sm90::product_sm90(cfg),
        }
    }
}

/// What offsets divide, as kernels see it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Divided {
    /// Nothing.
    Nothing,
    /// Rows.
    Rows,
    /// Depth.
    Depth,
}

impl Divided {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "batch",
            Self::Rows => "rows",
            Self::Depth => "depth",
        }
    }
}

/// A problem as kernels see it, and how it is cut: what launches are made for.
#[derive(Clone, PartialEq, Debug)]
pub struct Work {
    /// The problem.
    pub problem: GroupedProblem,
    /// What is divided.
    pub divided: Divided,
    /// The factor whose lines are rows of the result: matrices × lines × depth.
    pub rows: ExpertLayout,
    /// The factor whose lines are columns of the result, likewise.
    pub columns: ExpertLayout,
    /// Whether it is the transpose that is computed: the factors have changed places.
    pub turned: bool,
    /// Elements of the result from one matrix, row and column to the next.
    pub out: [u64; 3],
    /// Rows of a tile.
    pub tile_m: u32,
}

impl Work {
    /// A problem, or where its columns are divided, its transpose.
    pub fn new(problem: &GroupedProblem, tile_m: u32) -> Self {
        let turned = |layout: &ExpertLayout| {
            let ([matrix, row, col], extents) =
                (layout.strides(), [layout.experts(), layout.cols(), layout.rows()]);
            ExpertLayout::strided(extents, [matrix, col, row]).expect("a legal layout, turned round")
        };
        let [matrix, _, row, _] = problem.out().strides().map(|stride| stride as u64);
        let (a, b) = (*problem.a(), turned(problem.b()));
        let is_turned = problem.grouping() == Grouping::Columns;
        let (divided, rows, columns, out) = match problem.grouping() {
            Grouping::Batch => (Divided::Nothing, a, b, [matrix, row, 1]),
            Grouping::Rows => (Divided::Rows, a, b, [matrix, row, 1]),
            Grouping::Columns => (Divided::Rows, b, a, [matrix, 1, row]),
            Grouping::Depth { .. } => (Divided::Depth, a, b, [matrix, row, 1]),
        };
        Self { problem: *problem, divided, rows, columns, turned: is_turned, out, tile_m }
    }

    /// Most tiles of rows that any offsets may need, of all matrices together.
    pub fn tiles(&self) -> u64 {
        let (rows, tile) = (self.rows.rows() as u64, u64::from(self.tile_m));
        match self.divided {
            Divided::Rows => {
                // One more than groups: what nobody has.
                let parts = rows.min(self.problem.groups() as u64 + 1);
                (rows + parts * (tile - 1)) / tile
            }
            Divided::Nothing | Divided::Depth => self.problem.groups() as u64 * rows.div_ceil(tile),
        }
    }

    /// What the index leaves for the product.
    pub fn workspace(&self) -> Vec<Workspace> {
        let records = match self.divided {
            Divided::Nothing => return Vec::new(),
            Divided::Rows => self.tiles(),
            Divided::Depth => self.problem.groups() as u64,
        };
        // The number of tiles comes first.
        vec![Workspace { slot: slots::INDEX, bytes: RECORD * (1 + records), zeroed: false }]
    }
}
