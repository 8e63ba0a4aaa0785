//! The config: everything that determines the text of a product kernel.

use flashcore_core::{Activation, ExpertLayout, GateUp, MoeProblem};
use flashcore_ptx::{
    ident::Ident,
    sm::{REGISTERS, THREAD_REGISTERS},
    target::Target,
};
use flashcore_tile::Half;
use serde::{Deserialize, Serialize};

use super::super::{IdSource, Source, overlaps};

/// Elements of depth of a stage.
pub const DEPTH: u32 = crate::parts::lines::DEPTH;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The architecture it is built for.
    pub target: Target,
    /// Element type of all tensors.
    pub half: Half,
    /// Which product.
    pub kind: Kind,
    /// How weights lie.
    pub weights: WeightOrder,
    /// Where the numbers of experts are.
    pub ids: IdSource,
    /// Where rows come from.
    pub source: Source,
    /// Whether a bias is added.
    pub biases: bool,
    /// Whether weights are whole tiles.
    pub whole: bool,
    /// How the work is split.
    pub shape: Shape,
}

/// Which product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Tokens with gate and up, which are joined.
    Up(Glu),
    /// What was joined, with down.
    Down,
}

/// What joins gate and up, without its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Glu {
    /// See [`Activation::SwiGlu`].
    Swi,
    /// See [`Activation::GeGlu`].
    Ge,
    /// See [`Activation::Clamped`].
    Clamped,
}

impl Glu {
    /// That of a problem.
    pub const fn of(problem: &MoeProblem) -> Self {
        match problem.spec().activation {
            Activation::SwiGlu => Self::Swi,
            Activation::GeGlu => Self::Ge,
            Activation::Clamped { .. } => Self::Clamped,
        }
    }
}

/// How weights lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WeightOrder {
    /// Elements along the depth are contiguous.
    Rows,
    /// Elements across the depth are contiguous.
    Columns,
    /// Likewise, and gate and up are neighbours.
    PairedColumns,
}

impl WeightOrder {
    /// That of one of a problem's matrices.
    pub fn of(layout: &ExpertLayout, order: GateUp, kind: Kind) -> Self {
        match (layout.is_row_major(), kind, order) {
            (true, ..) => Self::Rows,
            (false, Kind::Up(_), GateUp::Interleaved) => Self::PairedColumns,
            (false, ..) => Self::Columns,
        }
    }
}

/// How the work is split.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Rows of a tile.
    pub tile_m: u32,
    /// Rows of weights of a tile: for the first product, half of them gates.
    pub tile_n: u32,
    /// Warps along the rows and across them.
    pub warps: [u32; 2],
    /// Stages of the ring.
    pub stages: u32,
    /// CTAs that share an SM.
    pub ctas_per_sm: u32,
    /// Lines of 128 bytes of each row that a stage holds: more of them are read from memory one after another.
    #[serde(default = "one")]
    pub lines: u32,
}

const fn one() -> u32 {
    1
}

impl Shape {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        let share = REGISTERS / (self.ctas_per_sm * self.threads()) / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }

    /// Shared memory of a CTA.
    pub const fn shared_bytes(&self) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * self.depth() * 2
    }

    /// Elements of depth of a stage.
    pub(crate) const fn depth(&self) -> u32 {
        self.lines * DEPTH
    }

    /// Its form in kernel names.
    pub(crate) fn name(&self) -> String {
        let Self { tile_m, tile_n, warps: [m, n], stages, ctas_per_sm, lines } = self;
        let lines = if *lines > 1 { format!("l{lines}") } else { String::new() };
        format!("m{tile_m}n{tile_n}w{m}x{n}s{stages}c{ctas_per_sm}{lines}")
    }

    /// Rows that one pass of all threads copies.
    pub(crate) const fn rows_per_pass(&self) -> u32 {
        self.threads() / 8
    }
}

impl Config {
    /// Whether weights are in flight before the rows, which another product leaves, are there. Index and ids are older than
    /// that product, which has waited for them.
    pub(super) const fn early(&self) -> bool {
        overlaps(self.target) && matches!(self.kind, Kind::Down)
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { target, half, kind, weights, ids, source, biases, whole, shape } = self;
        let kind = match kind {
            Kind::Up(Glu::Swi) => "up_swiglu",
            Kind::Up(Glu::Ge) => "up_geglu",
            Kind::Up(Glu::Clamped) => "up_clamped",
            Kind::Down => "down",
        };
        let weights = match weights {
            WeightOrder::Rows => "rows",
            WeightOrder::Columns => "columns",
            WeightOrder::PairedColumns => "paired",
        };
        let options = [(*biases, "_bias"), (*whole, "_whole")];
        let options: String = options.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let name = format!(
            "fc_moe_{kind}_{target}_{}_{weights}_{}_{}{options}_{}",
            half.element().name(),
            ids.name(),
            source.name(),
            shape.name(),
        );
        Ident::new(name).expect("made of legal parts")
    }

    /// Matrices of the tile of weights: gate and up apart, or one.
    pub(super) const fn matrices(&self) -> u32 {
        match (self.kind, self.weights) {
            (Kind::Up(_), WeightOrder::Rows | WeightOrder::Columns) => 2,
            _ => 1,
        }
    }

    /// Rows of weights of one of them.
    pub(super) const fn matrix_n(&self) -> u32 {
        self.shape.tile_n / self.matrices()
    }

    /// Features of the result that a tile has.
    pub const fn features(&self) -> u32 {
        match self.kind {
            Kind::Up(_) => self.shape.tile_n / 2,
            Kind::Down => self.shape.tile_n,
        }
    }
}
