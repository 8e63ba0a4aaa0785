//! Mixtures of experts for every GPU from sm_80 on: `mma.sync`, `ldmatrix`, `cp.async`.
//!
//! ```text
//! route     logits → experts of each token and their weights, where a call brings logits
//! sort      rows of a product: the tokens of each expert, padded to whole tiles; index maps only
//! product   up: rows gathered from the tokens, gate and up joined in registers; then down
//! combine   a token's results added up in the order of its experts
//! ```
//! Nothing is read back: grids are sized by upper bounds, and CTAs without a tile exit at once. A row's bits depend only
//! on its own token, so the order of an expert's rows does not matter. With few pairs of tokens and experts there is no
//! sorting: each pair is its own tile. Experts with many tokens have separate products on Hopper ([`product_sm90`]).
//! Slots are those of [`crate::slots::moe`].

pub mod combine;
mod ids;
mod join;
pub mod product;
pub mod product_sm90;
pub mod route;
pub mod sort;

use flashcore_core::{Index, MoeProblem, Routing};
use flashcore_ptx::{
    launch::{Slot, Workspace},
    target::Target,
};
use flashcore_tile::{BuildError, Program};
use serde::{Deserialize, Serialize};

use crate::{parts::overlaps, slots::moe as slots};

/// A row or an expert that is not there.
pub(crate) const NONE: u32 = u32::MAX;

/// A kernel of a mixture of experts: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Config {
    /// Chooses experts.
    Route(route::Config),
    /// Puts tokens under their experts.
    Sort(sort::Config),
    /// One of the two products.
    Product(product::Config),
    /// The same, for experts with many tokens on Hopper.
    ProductSm90(product_sm90::Config),
    /// Adds up results.
    Combine(combine::Config),
}

impl Config {
    /// The kernel's name.
    pub fn name(&self) -> String {
        match self {
            Self::Route(cfg) => cfg.name().to_string(),
            Self::Sort(cfg) => cfg.name().to_string(),
            Self::Product(cfg) => cfg.name().to_string(),
            Self::ProductSm90(cfg) => cfg.name().to_string(),
            Self::Combine(cfg) => cfg.name().to_string(),
        }
    }

    /// The architecture it is built for.
    pub const fn target(&self) -> Target {
        match self {
            Self::Route(cfg) => cfg.target,
            Self::Sort(cfg) => cfg.target,
            Self::Product(cfg) => cfg.target,
            Self::ProductSm90(_) => Target::Sm90a,
            Self::Combine(cfg) => cfg.target,
        }
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        match self {
            Self::Route(_) => 128,
            Self::Sort(_) => 64,
            Self::Product(cfg) => cfg.shape.registers(),
            Self::ProductSm90(cfg) => cfg.registers(),
            Self::Combine(_) => 128,
        }
    }

    /// Builds the kernel.
    pub fn program(&self) -> Result<Program<Layer>, BuildError> {
        match self {
            Self::Route(cfg) => route::route(cfg),
            Self::Sort(cfg) => sort::sort(cfg),
            Self::Product(cfg) => product::product(cfg),
            Self::ProductSm90(cfg) => product_sm90::product_sm90(cfg),
            Self::Combine(cfg) => combine::combine(cfg),
        }
    }
}

/// How a product is cut: which kernel, and its tiles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// For every GPU.
    General(product::Shape),
    /// For Hopper.
    Sm90(product_sm90::Shape),
}

impl Cut {
    /// Whether tiles of rows come in pairs.
    pub const fn pairs(&self) -> bool {
        matches!(self, Self::Sm90(shape) if shape.pair)
    }

    /// Rows of a tile.
    pub const fn tile_m(&self) -> u32 {
        match self {
            Self::General(shape) => shape.tile_m,
            Self::Sm90(shape) => shape.rows,
        }
    }
}

/// Where the rows of a tile come from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// From the index that sorting made.
    Sorted,
    /// Each pair of a token and an expert is a tile with one row.
    Pairs,
    /// All tokens, for the shared expert.
    All,
}

impl Source {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sorted => "sorted",
            Self::Pairs => "pairs",
            Self::All => "all",
        }
    }
}

/// Where the numbers of experts are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IdSource {
    /// Where the caller bound them.
    Given(Index),
    /// Where the router put them.
    Chosen,
}

impl IdSource {
    /// Those of a problem.
    pub const fn of(problem: &MoeProblem) -> Self {
        match *problem.routing() {
            Routing::Given { ids, .. } => Self::Given(ids),
            Routing::Computed { .. } => Self::Chosen,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Given(Index::I32) => "i32",
            Self::Given(Index::I64) => "i64",
            Self::Chosen => "chosen",
        }
    }
}

/// A problem and how its rows are cut: what launches are made for. That of a shared expert is a problem of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Layer {
    /// The problem.
    pub problem: MoeProblem,
    /// Rows of a tile.
    pub tile_m: u32,
    /// Where rows come from.
    pub source: Source,
    /// Whether tiles come in pairs.
    pub even: bool,
    /// What all launches of a plan share.
    pub workspace: Vec<Workspace>,
}

impl Layer {
    /// Most tiles that any routing may need.
    pub fn tiles(&self) -> u64 {
        let (entries, tile) = (self.problem.entries() as u64, u64::from(self.tile_m));
        match self.source {
            Source::Pairs => entries,
            Source::All => entries.div_ceil(tile),
            Source::Sorted => {
                let used = entries.min(self.problem.experts() as u64);
                let tiles = (entries + used * (tile - 1)) / tile;
                if self.even { tiles.next_multiple_of(2) } else { tiles }
            }
        }
    }

    /// Rows of all tiles.
    pub fn rows(&self) -> u64 {
        self.tiles() * u64::from(self.tile_m)
    }

    /// Byte offsets in the index of each tile's expert, each row's entry, each entry's row; the tile count comes first.
    fn index_offsets(&self) -> [u64; 3] {
        let experts = 16;
        let rows = experts + 4 * self.tiles().next_multiple_of(4);
        [experts, rows, rows + 4 * self.rows()]
    }

    /// What its launches leave for each other.
    pub fn own_workspace(&self) -> Vec<Workspace> {
        let scratch = |slot: Slot, bytes: u64| Workspace { slot, bytes: bytes.max(16), zeroed: false };
        let (problem, rows) = (&self.problem, self.rows());
        let entries = problem.entries() as u64;
        let row = |features: usize| features as u64 * problem.dtype().bytes() as u64;
        if self.source == Source::All {
            return vec![
                scratch(slots::SHARED_JOINED, rows * row(problem.intermediate())),
                scratch(slots::SHARED_RESULTS, rows * row(problem.hidden())),
            ];
        }
        let mut workspace = vec![
            scratch(slots::INDEX, self.index_offsets()[2] + 4 * entries),
            scratch(slots::JOINED, rows * row(problem.intermediate())),
            scratch(slots::RESULTS, rows * row(problem.hidden())),
        ];
        if IdSource::of(problem) == IdSource::Chosen {
            workspace.push(scratch(slots::CHOSEN, 4 * entries));
            workspace.push(scratch(slots::CHOSEN_WEIGHTS, 4 * entries));
        }
        workspace
    }
}
