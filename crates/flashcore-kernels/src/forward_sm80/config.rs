//! Everything that decides the text of the kernel.

use flashcore_core::DType;
use flashcore_ptx::{
    ident::Ident,
    sm::{REGISTERS, THREAD_REGISTERS},
    target::Target,
};
use flashcore_tile::{Element, Half, MMA_M};
use serde::{Deserialize, Serialize};

use super::Access;
use crate::parts::{
    bias::BiasKind,
    columns::{Columns, padded},
    entries::ENTRY_BYTES,
    factors::cache_name,
    lengths::LengthsKind,
    load::Copies,
    mask::Sides,
    share::Share,
    sinks::sink_name,
};

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The oldest architecture that runs it; also says how much shared memory there is.
    pub target: Target,
    /// What Q, K and V are multiplied as, f16, bf16 or f32; probabilities are rounded to it too.
    pub input: Element,
    /// What K and V are made of: as the input, or E4M3, which is widened to it in shared memory.
    pub cache: Element,
    /// Whether keys and values of 8 bits have factors.
    pub scaled: bool,
    /// What the output is made of: as the input, or f32.
    pub output: Element,
    /// Whether the result is merged into what output and LSE hold already; the output is f32 then.
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
    /// Element type of every head's extra logit, if there is one.
    pub sinks: Option<DType>,
    /// What is added to scores, if anything.
    pub bias: Option<BiasKind>,
    /// Weights are left out at random.
    pub dropout: bool,
    /// What rows are aligned to.
    pub access: Access,
    /// Keys and values lie in pages.
    pub paged: bool,
    /// Which sequences it computes: all, or the long ones.
    pub share: Share,
    /// Parts that the keys of a row are split into, for few queries: the queries of all heads of a group are rows then, and what
    /// CTAs leave in f32 is put together by [`crate::combine`].
    pub parts: Option<u32>,
}

/// Tile, warps and pipeline of a kernel: what tuning changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Warps of a CTA.
    pub warps: u32,
    /// Blocks of 16 query rows of each warp: with two, a key fragment read once is used twice.
    pub blocks: u32,
    /// Keys of a tile, which is what one barrier brings: a multiple of `step_n`.
    pub tile_n: u32,
    /// Keys of one step of the softmax, whose scores are in registers at once: a multiple of 16.
    pub step_n: u32,
    /// K and V tiles in flight: at least 2.
    pub stages: u32,
    /// CTAs that share an SM; caps the registers.
    pub ctas_per_sm: u32,
    /// Whether Q stays in registers, or is read again for every key tile.
    pub q_in_registers: bool,
}

impl Shape {
    /// Query rows of a tile, where values have `dim_v` features.
    pub const fn tile_m(&self, dim_v: u32) -> u32 {
        self.warps / Columns::of(dim_v, MOST_COLUMNS).groups * self.blocks * MMA_M
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// Most registers a thread can have so that the CTAs fit on an SM.
    pub const fn registers(&self) -> u32 {
        let share = REGISTERS / (self.ctas_per_sm * self.threads()) / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }

    /// Shared memory of a kernel of this shape for the given elements and features.
    pub fn shared_bytes(&self, [input, cache, output]: [Element; 3], dims: [u32; 2], paged: bool) -> u32 {
        let [qk, v] = [padded(dims[0]), Columns::of(dims[1], MOST_COLUMNS).all()];
        let tile_m = self.tile_m(dims[1]);
        let first = input.bytes() * tile_m * qk;
        let tile = self.tile_n * (qk + v);
        let widened = if cache == input { 0 } else { input.bytes() * tile };
        let ring = self.stages * cache.bytes() * tile + widened;
        // The output is gathered where Q and the ring were; f32 leaves from registers.
        let staging = if output == Element::F32 { 0 } else { output.bytes() * tile_m * v };
        let entries = if paged { self.stages * self.tile_n * ENTRY_BYTES } else { 0 };
        (first + ring + entries).max(staging)
    }
}

/// Most output columns that the registers of a warp hold beside scores.
const MOST_COLUMNS: u32 = 256;

impl Config {
    /// Query rows of a tile.
    pub const fn tile_m(&self) -> u32 {
        self.shape.tile_m(self.dim_v)
    }

    /// Output columns of a warp.
    pub const fn warp_columns(&self) -> u32 {
        self.columns().each
    }

    /// How warps share the columns of the output.
    pub(super) const fn columns(&self) -> Columns {
        Columns::of(self.dim_v, MOST_COLUMNS)
    }

    /// Shared memory of a CTA.
    pub fn shared_bytes(&self) -> u32 {
        let elements = [self.input, self.cache, self.output];
        self.shape.shared_bytes(elements, [self.dim_qk, self.dim_v], self.paged)
    }

    /// The 16-bit float that keys and values are widened to, if they are.
    pub(super) fn widened(&self) -> Option<Half> {
        (self.cache != self.input).then(|| self.input.half()).flatten()
    }

    /// How tiles are copied.
    pub(super) const fn copies(&self) -> Copies {
        let words_at_once = if self.shape.blocks * self.columns().each <= 128 { 32 } else { 8 };
        Copies { access: self.access, words_at_once }
    }

    /// Whether rows of the output are f32 and leave from registers.
    pub(super) fn wide(&self) -> bool {
        self.output == Element::F32
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Shape { warps, blocks, tile_n, step_n, stages, ctas_per_sm, q_in_registers } = self.shape;
        let mut name = format!(
            "fc_forward_{}_{}{}_d{}v{}_w{warps}x{blocks}n{tile_n}x{step_n}s{stages}c{ctas_per_sm}",
            self.target,
            self.input.name(),
            cache_name(self.cache, self.scaled),
            self.dim_qk,
            self.dim_v
        );
        let mut option = |on: bool, text: &str| {
            if on {
                name.push_str(text)
            }
        };
        option(q_in_registers, "q");
        option(true, &format!("_{}", self.mask.name()));
        option(self.lengths.name() != "uniform", &format!("_{}", self.lengths.name()));
        option(self.softcap, "_cap");
        option(self.sinks.is_some(), sink_name(self.sinks));
        option(self.bias.is_some(), self.bias.map_or("", BiasKind::name));
        option(self.dropout, "_drop");
        option(self.output != self.input, &format!("_to_{}", self.output.name()));
        option(self.accumulate, "_acc");
        option(self.paged, "_paged");
        option(self.share != Share::All, "_long");
        option(self.parts.is_some(), &format!("_p{}", self.parts.unwrap_or(0)));
        option(self.access != Access::B16, &format!("_a{}", self.access.bytes()));
        Ident::new(name).expect("made of legal parts")
    }
}
