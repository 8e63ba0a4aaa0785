//! The config: everything that determines the kernel's text.

use flashcore_core::DType;
use flashcore_ptx::ident::Ident;
use flashcore_tile::{Element, RegisterBudget, Roles};
use serde::{Deserialize, Serialize};

use super::ROWS_PER_GROUP;
use crate::{
    parts::{lengths::LengthsKind, mask::Sides, share::Share, sinks::sink_name, turner::COUNTED},
    plan::hopper,
};

/// Copies of a key tile that one thread issues.
const MOST_COPIES: u32 = 3;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// What Q, K and V are made of, f16, bf16 or E4M3; probabilities are rounded to it too.
    pub input: Element,
    /// Whether Q, K and V have factors.
    pub scaled: bool,
    /// Whether these are factors of blocks of rows and of features of V, instead of heads.
    pub blocks: bool,
    /// When what tensor cores have added up is added to the rest in f32.
    pub settles: Settles,
    /// Element type of the output: as the input where that has 16 bits, or f32.
    pub output: Element,
    /// Whether the result is merged into what output and LSE hold already; the output is f32 then.
    pub accumulate: bool,
    /// Features of queries and keys: a multiple of 8.
    pub dim_qk: u32,
    /// Features of values: a multiple of 8.
    pub dim_v: u32,
    /// Which bounds the mask has.
    pub mask: Sides,
    /// How the rows of sequences are told.
    pub lengths: LengthsKind,
    /// Rows of a page that one copy brings, where keys lie in pages: pages and key tiles are multiples of it.
    pub page_rows: Option<u32>,
    /// Which sequences it computes: all, or those of many queries.
    pub share: Share,
    /// Scores are limited by a hyperbolic tangent.
    pub softcap: bool,
    /// Element type of every head's extra logit, if there is one.
    pub sinks: Option<DType>,
    /// Query heads of a group that share a tile, row by row: a power of two up to 64; 1 where rows of one head fill it.
    pub pack: u32,
    /// How the work is split.
    pub shape: Shape,
    /// How consumers share the tensor cores and the keys.
    pub policy: Policy,
}

/// When sums of tensor cores are added to the rest in f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Settles {
    /// When a tile ends: they are as exact as f32.
    AtEnd,
    /// After every key tile.
    Tiles,
    /// After two whole key tiles, which a turn of the loop must have; after every other key tile.
    Pairs,
    /// After every key tile, some features at a time: sums and scores take turns in the same registers, and products do not
    /// overlap with softmax in one consumer.
    Parts,
}

impl Settles {
    /// What a name says of it.
    const fn name(self) -> &'static str {
        match self {
            Self::AtEnd => "",
            Self::Tiles => "_settled",
            Self::Pairs => "_settled2",
            Self::Parts => "_settled_parts",
        }
    }
}

/// What a kernel may do in one way or another; `plan/hopper.rs` says which is faster, and which is possible at all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Policy {
    /// Consumers multiply in turn, instead of whenever they are ready.
    pub in_turn: bool,
    /// A step waits for both of its products at once, instead of for scores first.
    pub waits_once: bool,
    /// Consumers pass over key tiles that only the rows of others see.
    pub passes_over: bool,
    /// Only the producer waits for the kernel before, instead of all threads.
    pub producer_waits: bool,
    /// Tiles are told how those before them went, and look for maxima first where references kept moving.
    pub adapts: bool,
}

impl Policy {
    /// What a name says of a policy: nothing where it is the usual one.
    fn suffix(self, usual: Self) -> String {
        let Self { in_turn, waits_once, passes_over, producer_waits, adapts } = self;
        if self == usual {
            return String::new();
        }
        let choices =
            [(in_turn, "t"), (waits_once, "w"), (passes_over, "o"), (producer_waits, "p"), (adapts, "a")];
        let made: String = choices.into_iter().filter(|(on, _)| *on).map(|(_, letter)| letter).collect();
        format!("_by_{made}")
    }
}

/// Tile, warpgroups and pipeline of a kernel: what tuning changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Consumer warpgroups; the tile has 64 rows for each.
    pub consumers: u32,
    /// Keys of a tile: a multiple of 16.
    pub tile_n: u32,
    /// K and V tiles in flight.
    pub stages: u32,
    /// Q tiles in flight: with two, the next tile's Q is there before this tile ends.
    pub q_stages: u32,
    /// How a warp's rows of the output leave.
    pub staging: Staging,
    /// Registers of producer and consumers; `None` where all threads keep what the launch gave them.
    #[serde(rename = "registers", with = "registers")]
    pub budget: Option<RegisterBudget>,
    /// In which order CTAs take tiles.
    pub order: Order,
    /// CTAs that share an SM; caps the registers.
    pub ctas_per_sm: u32,
    /// Whole key tiles in one turn of the loop: two are scheduled better, but take longer to fetch at first.
    pub turn: u32,
}

/// Where a warp gathers its rows of the output before tensor copies take them away.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// Columns that leave together: a multiple of 64.
    pub cols: u32,
    /// Places for that many columns: with two, one is filled while the other leaves.
    pub places: u32,
}

/// In which order CTAs take tiles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, …: best when all tiles are equally long.
    Static,
    /// A CTA takes the next tile when it is done: evens out tiles of different length.
    Atomic,
    /// There are so few tiles that each has a cluster of CTAs to itself, which share its keys.
    Single {
        /// CTAs of a cluster: a power of two up to 8.
        parts: u32,
    },
}

impl Order {
    fn name(self) -> String {
        match self {
            Self::Static => "static".to_owned(),
            Self::Atomic => "atomic".to_owned(),
            Self::Single { parts } => format!("single{parts}"),
        }
    }

    /// CTAs that share the keys of a tile.
    pub const fn parts(self) -> u32 {
        match self {
            Self::Static | Self::Atomic => 1,
            Self::Single { parts } => parts,
        }
    }
}

/// A budget in tables: registers of a producer and of a consumer, or null.
mod registers {
    use flashcore_tile::RegisterBudget;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        budget: &Option<RegisterBudget>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        budget.map(|RegisterBudget { producer, consumer }| [producer, consumer]).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<RegisterBudget>, D::Error> {
        let pair = <Option<[u32; 2]>>::deserialize(from)?;
        Ok(pair.map(|[producer, consumer]| RegisterBudget { producer, consumer }))
    }
}

impl Config {
    /// Query rows of a tile.
    pub const fn tile_m(&self) -> u32 {
        self.shape.consumers * ROWS_PER_GROUP
    }

    /// Keys of a tile.
    pub const fn tile_n(&self) -> u32 {
        self.shape.tile_n
    }

    /// Keys that one copy brings.
    pub(super) const fn copied_rows(&self) -> u32 {
        match self.page_rows {
            Some(rows) => rows,
            None => self.shape.tile_n,
        }
    }

    /// Whether a key tile takes so many copies that lanes of a warp share them: one thread would run out of registers for
    /// their pages.
    pub(super) const fn spreads(&self) -> bool {
        self.shape.tile_n / self.copied_rows() > MOST_COPIES
    }

    /// The kernel's name: all of the config is in it but the producer's registers.
    pub fn name(&self) -> Ident {
        let input = self.input;
        let Shape { consumers, tile_n, stages, q_stages, staging, budget, order, ctas_per_sm, turn } =
            self.shape;
        let mut name = format!(
            "fc_forward_sm_90a_{}_d{}v{}_g{consumers}n{tile_n}s{stages}q{q_stages}o{}x{}r{}c{ctas_per_sm}t{turn}_{}_{}",
            input.name(),
            self.dim_qk,
            self.dim_v,
            staging.places,
            staging.cols,
            budget.map_or(0, |budget| budget.consumer),
            order.name(),
            self.mask.name()
        );
        let used = format!("_{}", self.lengths.name());
        let options = [
            (self.used(), used.as_str()),
            (self.posts_factors(), "_scaled"),
            (self.blocks, "_blocks"),
            (self.softcap, "_cap"),
            (self.sinks.is_some(), sink_name(self.sinks)),
        ];
        options.into_iter().filter(|(on, _)| *on).for_each(|(_, text)| name.push_str(text));
        if self.output != input {
            name.push_str(&format!("_to_{}", self.output.name()));
        }
        name.push_str(self.settles.name());
        if self.accumulate {
            name.push_str("_acc");
        }
        if let Some(rows) = self.page_rows {
            name.push_str(&format!("_pages{rows}"));
        }
        if self.pack > 1 {
            name.push_str(&format!("_pack{}", self.pack));
        }
        if self.share != Share::All {
            name.push_str("_long");
        }
        name.push_str(&self.policy.suffix(hopper::policy(self)));
        Ident::new(name).expect("made of legal parts")
    }

    /// Columns of a tile of Q, K or V for `dim` features: whole slabs.
    pub(super) const fn padded(&self, dim: u32) -> u32 {
        dim.next_multiple_of(self.input.slab_cols())
    }

    /// Whether elements have 8 bits: products then want the keys of a feature next to each other, and keep fewer bits of
    /// their sums.
    pub(crate) const fn narrow(&self) -> bool {
        self.input.bytes() == 1
    }

    /// Whether factors are those of a whole tile, which are posted with it.
    pub(super) const fn posts_factors(&self) -> bool {
        self.scaled && !self.blocks
    }

    /// Columns of sums of probabilities, beside the output's: where elements have 8 bits.
    pub(super) const fn counted_cols(&self) -> u32 {
        if self.narrow() { COUNTED } else { 0 }
    }

    /// Shared memory of a CTA, but for barriers and what parts of a tile are merged in.
    pub const fn shared_bytes(&self) -> u32 {
        let Shape { tile_n, stages, q_stages, staging, .. } = self.shape;
        let (qk, v) = (self.padded(self.dim_qk), self.padded(self.dim_v));
        let input = q_stages * self.tile_m() * qk + stages * tile_n * (qk + v);
        let output = if self.stages_output() { self.tile_m() * staging.places * staging.cols } else { 0 };
        input * self.input.bytes() + output * self.output.bytes()
    }

    /// Whether rows of the output are f32 and leave from registers.
    pub(super) const fn wide(&self) -> bool {
        matches!(self.output, Element::F32)
    }

    /// Whether rows of the output are gathered in shared memory: parts of a tile and f32 rows leave from registers.
    pub(super) const fn stages_output(&self) -> bool {
        self.shape.order.parts() == 1 && !self.wide()
    }

    /// Registers of a thread before the roles share them.
    pub const fn registers_at_entry(&self) -> u32 {
        self.roles().registers_at_entry(self.shape.ctas_per_sm)
    }

    /// Whether sequences have lengths of their own.
    pub(crate) const fn used(&self) -> bool {
        self.lengths.cuts_queries() || self.lengths.has_keys()
    }

    pub(super) const fn roles(&self) -> Roles {
        Roles { consumers: self.shape.consumers, budget: self.shape.budget, mover: None }
    }
}
