//! The config: everything that determines a kernel's text.

use flashcore_core::{BackwardProblem, DType};
use flashcore_ptx::ident::Ident;
use flashcore_tile::{Half, RegisterBudget, Roles};
use serde::{Deserialize, Serialize};

use super::ROWS_PER_GROUP;
use crate::parts::{lengths::LengthsKind, mask::Sides, schedule::Side};

/// Features up to which a consumer has registers for the gradients of 64 keys and of their values.
const NARROW: u32 = 128;

/// Half of the features of keys and values, and queries of a step, up to which a fused consumer has registers for scores and
/// slopes.
const ROOM: u32 = 180;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Whose gradients it computes: a CTA holds tiles of these, and those of the other side stream past.
    pub side: Side,
    /// Element type of all tensors; probabilities and slopes are rounded to it too.
    pub input: Half,
    /// What becomes of gradients.
    pub ending: Ending,
    /// Features of queries and keys: a multiple of 8.
    pub dim_qk: u32,
    /// Features of values: a multiple of 8.
    pub dim_v: u32,
    /// Which bounds the mask has.
    pub mask: Sides,
    /// How the rows of sequences are told; packed with keys or not at all.
    pub lengths: LengthsKind,
    /// Scores are limited by a hyperbolic tangent.
    pub softcap: bool,
    /// How the work is split.
    pub shape: Shape,
}

/// What becomes of gradients in the end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// They are rounded to the tensors' type.
    Rounded,
    /// They are written in f32.
    Wide,
    /// They are added to what is there, in f32.
    Added,
}

impl Ending {
    /// What a problem requires.
    pub fn of(problem: &BackwardProblem) -> Self {
        match (problem.accumulate(), problem.grad_dtype()) {
            (true, _) => Self::Added,
            (false, DType::F32) => Self::Wide,
            _ => Self::Rounded,
        }
    }

    /// How it is named in the names of kernels.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Self::Rounded => "",
            Self::Wide => "_wide",
            Self::Added => "_added",
        }
    }
}

/// Tile, warpgroups and pipeline of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Consumer warpgroups; the held tile has 64 rows for each, or 64 in all where they are paired.
    pub consumers: u32,
    /// Rows of a streamed tile: a multiple of 16, 64 where queries stream.
    pub step: u32,
    /// Streamed tiles in flight: of queries or keys, and of dO or values.
    pub stages: [u32; 2],
    /// Places of 64 columns in which a warp gathers its rows of a gradient; with none, the held dO or values make room.
    pub places: u32,
    /// Registers of the producer and of each consumer.
    pub registers: [u32; 2],
    /// In which order CTAs take tiles.
    pub order: Order,
    /// Registers of a mover, which sums dQ in memory: one kernel then does all. Keys are held, and all rows are used.
    #[serde(default)]
    pub mover: Option<u32>,
    /// Two consumers hold the same 64 keys: one makes P and the gradient of values, the other dS and the gradient of keys.
    #[serde(default)]
    pub paired: bool,
    /// Of a pair of consumers, the first multiplies the scores of the next pair of tiles before the gradient of this one.
    #[serde(default)]
    pub ahead: bool,
}

/// In which order CTAs take tiles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, …: best when all tiles are equally long.
    Static,
    /// A CTA takes the next tile when it is done: evens out tiles of different length.
    Atomic,
    /// Like `Atomic`, and a CTA has no tile before it draws one, so a wait for an earlier tile is for one that a CTA
    /// has drawn.
    Drawn,
}

impl Order {
    const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Atomic => "atomic",
            Self::Drawn => "drawn",
        }
    }
}

impl Config {
    /// Rows of the held tile.
    pub const fn held(&self) -> u32 {
        if self.shape.paired { ROWS_PER_GROUP } else { self.shape.consumers * ROWS_PER_GROUP }
    }

    /// Features of the two held tiles, which are those of the streamed ones too.
    pub(super) const fn dims(&self) -> [u32; 2] {
        [self.dim_qk, self.dim_v]
    }

    /// Whether a mover sums dQ beside the gradients of keys and values.
    pub const fn fused(&self) -> bool {
        self.shape.mover.is_some()
    }

    /// The kernel's name: all of the config is in it but the registers of producer and mover.
    pub fn name(&self) -> Ident {
        let Shape {
            consumers, step, stages: [first, second], places, registers: [_, registers], order, ..
        } = self.shape;
        let side = match self.side {
            Side::Keys if self.fused() => "fused",
            Side::Keys if self.shape.ahead => "ahead",
            Side::Keys if self.shape.paired => "paired",
            Side::Keys => "keys",
            Side::Queries => "queries",
        };
        let mut name = format!(
            "fc_backward_sm_90a_{}_{}_d{}v{}_g{consumers}n{step}s{first}x{second}o{places}r{registers}_{}_{}",
            side,
            self.input.element().name(),
            self.dim_qk,
            self.dim_v,
            order.name(),
            self.mask.name()
        );
        if self.cuts() {
            name.push_str(&format!("_{}", self.lengths.name()));
        }
        if self.softcap {
            name.push_str("_cap");
        }
        name.push_str(self.ending.suffix());
        Ident::new(name).expect("made of legal parts")
    }

    /// Columns of a tile for `dim` features: whole slabs.
    pub(super) const fn padded(&self, dim: u32) -> u32 {
        dim.next_multiple_of(self.input.element().slab_cols())
    }

    /// Whether tiles are so large that nothing fits between them.
    pub(super) const fn is_wide(&self) -> bool {
        self.dim_qk > NARROW || self.dim_v > NARROW
    }

    /// Whether rows of a gradient are gathered where the second held tile was.
    pub(super) fn gathers_in_held(&self) -> bool {
        self.shape.places == 0 && self.ending == Ending::Rounded
    }

    /// Whether sequences are packed one after another.
    pub const fn packed(&self) -> bool {
        self.lengths.packs_queries()
    }

    /// Whether each held tile has lengths of its own: batch entries use only their first rows, or sequences are packed.
    pub(super) const fn cuts(&self) -> bool {
        self.lengths.cuts_queries() || self.lengths.cuts_keys() || self.packed()
    }

    /// Whether some of the held rows may not be used, and have gradients of 0.
    pub(super) const fn cuts_held(&self) -> bool {
        match self.side {
            Side::Keys => self.lengths.cuts_keys(),
            Side::Queries => self.lengths.cuts_queries(),
        }
    }

    /// Whether some of the streamed rows may not be used, or not by this sequence.
    pub(super) const fn cuts_streamed(&self) -> bool {
        match self.side {
            _ if self.packed() => true,
            Side::Keys => self.lengths.cuts_queries(),
            Side::Queries => self.lengths.cuts_keys(),
        }
    }

    /// Whether keys beyond the last of a sequence are hidden together with what the mask hides: in a fused kernel packed sequences
    /// leave no registers for more.
    pub(super) const fn hides_others(&self) -> bool {
        self.fused() && self.packed()
    }

    /// Whether slopes take the registers of scores, which then must be weights before slopes are multiplied: where there are
    /// too few for both.
    pub(super) const fn shares_scores(&self) -> bool {
        self.fused() && !self.softcap && (self.dim_qk + self.dim_v) / 2 + self.shape.step > ROOM
    }

    /// Whether the gradient of values is multiplied right after the probabilities it is made of: the assembler would leave
    /// exponentials for later, up to the branch that keeps ranges, and has no registers for them beside slopes of 128 queries,
    /// nor where keys have other features than values.
    pub(super) fn multiplies_values_early(&self) -> bool {
        let tight = self.shape.step > ROWS_PER_GROUP || self.dim_qk != self.dim_v;
        self.shares_scores() && self.keeps_range() && tight
    }

    /// Whether weights are rounded before slopes are there: where there are no registers for both as they are, where another
    /// consumer makes slopes, and where capped scores have weights of another kind.
    pub(super) const fn rounds_early(&self) -> bool {
        self.fused() || self.softcap || self.shape.paired
    }

    /// Whether gradients of scores are kept in the range of f16.
    pub(super) fn keeps_range(&self) -> bool {
        self.input == Half::F16
    }

    /// Whether the mask hides the first, and the last, of the streamed rows from held ones.
    pub(super) const fn edges(&self) -> [bool; 2] {
        match self.side {
            Side::Keys => [self.mask.right, self.mask.left],
            Side::Queries => [self.mask.left, self.mask.right],
        }
    }

    /// Registers of a thread before the roles share them.
    pub const fn registers_at_entry(&self) -> u32 {
        self.roles().registers_at_entry(1)
    }

    pub(super) const fn roles(&self) -> Roles {
        let [producer, consumer] = self.shape.registers;
        let budget = Some(RegisterBudget { producer, consumer });
        Roles { consumers: self.shape.consumers, budget, mover: self.shape.mover }
    }
}
