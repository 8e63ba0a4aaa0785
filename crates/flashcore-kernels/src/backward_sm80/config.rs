//! Everything that decides the text of a kernel.

use flashcore_ptx::{
    ident::Ident,
    sm::{REGISTERS, THREAD_REGISTERS},
    target::Target,
};
use flashcore_tile::{Element, MMA_M};
use serde::{Deserialize, Serialize};

use super::TERM_BYTES;
use crate::parts::{
    bias::BiasKind,
    columns::{Columns, padded},
    factor::needs_branches,
    lengths::LengthsKind,
    load::Copies,
    mask::Sides,
    portion::Access,
    schedule::Side,
};

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The oldest architecture that runs it; also says how much shared memory there is.
    pub target: Target,
    /// Whose gradients it computes.
    pub side: Side,
    /// What Q, K, V and the output's gradient are made of, f16, bf16 or f32; probabilities are rounded to it too.
    pub input: Element,
    /// What gradients are made of: as the input, or f32.
    pub output: Element,
    /// Whether gradients are added to what is there; they are f32 then.
    pub accumulate: bool,
    /// Features of queries and keys.
    pub dim_qk: u32,
    /// Features of values.
    pub dim_v: u32,
    /// How the work is cut.
    pub shape: Shape,
    /// Which bounds the mask has.
    pub mask: Sides,
    /// How sequences are told.
    pub lengths: LengthsKind,
    /// Scores are limited by a hyperbolic tangent.
    pub softcap: bool,
    /// What is added to scores, if anything.
    pub bias: Option<BiasKind>,
    /// Weights are left out at random.
    pub dropout: bool,
    /// What rows are aligned to.
    pub access: Access,
}

/// Tile, warps and pipeline of a kernel: what tuning changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Warps of a CTA.
    pub warps: u32,
    /// Blocks of 16 rows of each warp, whose gradients stay in registers.
    pub blocks: u32,
    /// Rows of the other side that one barrier brings: a multiple of `step`.
    pub tile: u32,
    /// Rows of the other side whose scores are in registers at once: a multiple of 16.
    pub step: u32,
    /// Tiles of the other side in flight: at least 2.
    pub stages: u32,
    /// CTAs that share an SM; caps the registers.
    pub ctas_per_sm: u32,
}

impl Shape {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// Most registers a thread can have so that the CTAs fit on an SM.
    pub const fn registers(&self) -> u32 {
        let share = REGISTERS / (self.ctas_per_sm * self.threads()) / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }
}

/// Most columns of sums that a warp has: of dQ, and of each of dK and dV. As many as registers hold beside scores; of f32,
/// whose rows fill shared memory, so few that there are warps to hide each other's waits.
const fn most_columns(side: Side, input: Element) -> u32 {
    match (side, input) {
        (Side::Queries, Element::F32) | (Side::Keys, _) => 128,
        (Side::Queries, _) => 256,
    }
}

impl Config {
    /// How many warps share the columns of a row's gradients.
    pub(super) fn groups(&self) -> u32 {
        let widest = if self.side == Side::Queries { self.dim_qk } else { self.dim_qk.max(self.dim_v) };
        widest.div_ceil(most_columns(self.side, self.input)).next_power_of_two()
    }

    /// Rows of a tile: queries, or keys.
    pub fn tile_rows(&self) -> u32 {
        self.shape.warps / self.groups() * self.shape.blocks * MMA_M
    }

    /// The columns of dQ or dK.
    pub(super) fn first_columns(&self) -> Columns {
        Columns::shared(self.dim_qk, self.groups())
    }

    /// The columns of dV.
    pub(super) fn second_columns(&self) -> Option<Columns> {
        (self.side == Side::Keys).then(|| Columns::shared(self.dim_v, self.groups()))
    }

    /// Columns of the stationary tiles: those of Q and dO, or of K and V.
    pub(super) fn stationary_columns(&self) -> [u32; 2] {
        [padded(self.dim_qk), padded(self.dim_v)]
    }

    /// Columns of the streamed tiles: those of K and V, or of Q and dO.
    pub(super) fn streamed_columns(&self) -> [u32; 2] {
        let second = self.second_columns().map_or(padded(self.dim_v), Columns::all);
        [self.first_columns().all(), second]
    }

    /// Shared memory of a CTA.
    pub fn shared_bytes(&self) -> u32 {
        let sum = |columns: [u32; 2]| columns.into_iter().sum::<u32>();
        let Shape { tile, stages, .. } = self.shape;
        let stationary = self.tile_rows() * sum(self.stationary_columns());
        let ring = stages * tile * sum(self.streamed_columns());
        let terms = if self.side == Side::Keys { stages * tile * TERM_BYTES } else { 0 };
        // Gradients are gathered where tiles were; f32 leave from registers.
        let widest = self.first_columns().all().max(self.second_columns().map_or(0, Columns::all));
        let staging = if self.wide() { 0 } else { self.output.bytes() * self.tile_rows() * widest };
        (self.input.bytes() * (stationary + ring) + terms).max(staging)
    }

    /// How tiles are copied.
    pub(super) const fn copies(&self) -> Copies {
        Copies { access: self.access, words_at_once: 8 }
    }

    /// Whether sums leave so few registers that the text of some columns is kept apart from that of others.
    pub(super) fn crowded(&self) -> bool {
        let columns = [Some(self.first_columns()), self.second_columns()].into_iter().flatten();
        needs_branches(self.input, columns.map(|columns| columns.each).sum())
    }

    /// Whether gradients are f32 and leave from registers.
    pub(super) fn wide(&self) -> bool {
        self.output == Element::F32
    }

    /// Whether some rows of the side may not be used, but have gradients.
    pub(super) const fn cuts_rows(&self) -> bool {
        match self.side {
            Side::Queries => self.lengths.cuts_queries(),
            Side::Keys => self.lengths.cuts_keys(),
        }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Shape { warps, blocks, tile, step, stages, ctas_per_sm } = self.shape;
        let side = if self.side == Side::Queries { "dq" } else { "dkv" };
        let mut name = format!(
            "fc_backward_{side}_{}_{}_d{}v{}_w{warps}x{blocks}t{tile}x{step}s{stages}c{ctas_per_sm}_{}",
            self.target,
            self.input.name(),
            self.dim_qk,
            self.dim_v,
            self.mask.name()
        );
        let mut option = |on: bool, text: &str| {
            if on {
                name.push_str(text)
            }
        };
        option(self.lengths.name() != "uniform", &format!("_{}", self.lengths.name()));
        option(self.softcap, "_cap");
        option(self.bias.is_some(), self.bias.map_or("", BiasKind::name));
        option(self.dropout, "_drop");
        option(self.output != self.input, &format!("_to_{}", self.output.name()));
        option(self.accumulate, "_acc");
        option(self.access != Access::B16, &format!("_a{}", self.access.bytes()));
        Ident::new(name).expect("made of legal parts")
    }
}
