//! The config: everything that determines the kernel's text.

use flashcore_core::DType;
use flashcore_ptx::{
    ident::Ident,
    sm::{REGISTERS, THREAD_REGISTERS},
    target::Target,
};
use flashcore_tile::{Element, Half, MMA_M};
use serde::{Deserialize, Serialize};

use super::{MOST_SEQUENCES, cluster::Exchange, fold::FOLDED_BYTES, part::COLUMNS};
use crate::parts::{factors::cache_name, lengths::LengthsKind, mask::Sides, share::Share, sinks::sink_name};

/// Floats by which the row of a part is longer than its values: a head of four, and as many that only pad, so that
/// four rows meet different banks of shared memory.
const BESIDE: u32 = 8;

/// Bytes that tiles which start at multiples of a swizzle pattern may leave between them.
const ALIGNED: u32 = 1024;
/// Columns of all rows up to which a block of rows meets at once.
const MET_COLUMNS: u32 = MMA_M * 128;

/// Places of a thread up to which registers hold what has been folded there.
const HELD_PLACES: u32 = 2;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The oldest architecture that runs it.
    pub target: Target,
    /// Element type of Q, and what K is multiplied as.
    pub input: Half,
    /// Element type of K and V: as Q, or E4M3, which is widened before the products.
    pub cache: Element,
    /// Whether keys and values of 8 bits have factors.
    pub scaled: bool,
    /// Element type of the output: as the input, or f32.
    pub output: Element,
    /// Features of queries and keys: a multiple of 8.
    pub dim_qk: u32,
    /// Features of values: a multiple of 8.
    pub dim_v: u32,
    /// How the work is split.
    pub shape: Shape,
    /// Rows of a tile that there is room for where clusters exchange them, or pieces are folded; 0 elsewhere.
    pub rows: u32,
    /// Parts of a row that clusters exchange at most; 0 where there are none.
    pub messages: u32,
    /// Keys are cut at fixed places, so that a row's bits do not depend on the batch.
    pub invariant: bool,
    /// Which bounds the mask has.
    pub mask: Sides,
    /// How sequences are told.
    pub lengths: LengthsKind,
    /// Which sequences it computes: all, or the short ones.
    pub share: Share,
    /// How the keys of a sequence lie.
    pub keys: Keys,
    /// Scores are limited by a hyperbolic tangent.
    pub softcap: bool,
    /// Element type of every head's extra logit, if there is one.
    pub sinks: Option<DType>,
}

/// How the keys of a sequence lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Keys {
    /// One after another.
    Together,
    /// In pages that a table names.
    Paged,
}

/// How tiles get into shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Copies {
    /// Every lane copies 16 bytes at a time.
    Lanes,
    /// One lane asks for a whole tile, from sm_90 on.
    Tensor,
}

/// Which CTA computes what.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Each CTA has one unit; the grid says how many share a row.
    Grid,
    /// All keys are split evenly over as many CTAs as the GPU holds.
    Even,
    /// The CTAs of a cluster, from sm_90 on, share a row.
    Cluster {
        /// How many.
        parts: u32,
    },
}

/// Tile, warps and ring of a kernel: what tuning changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Warps of a CTA, each with keys of its own.
    pub warps: u32,
    /// Blocks of 16 rows (query heads of a group, times queries) of each warp.
    pub blocks: u32,
    /// Keys of a warp's tile: a multiple of 16.
    pub tile_n: u32,
    /// K and V tiles of a warp in flight.
    pub stages: u32,
    /// CTAs that share an SM; caps the registers.
    pub ctas_per_sm: u32,
    /// Whether Q stays in registers, or is read again for every key tile.
    pub q_in_registers: bool,
    /// How K and V get there.
    pub copies: Copies,
    /// Which CTA computes what.
    pub order: Order,
    /// Most CTAs that share the keys of a row; as many as fill the GPU where `None`.
    pub splits: Option<u32>,
}

impl Shape {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// Rows of a tile.
    pub const fn rows(&self) -> u32 {
        self.blocks * MMA_M
    }

    /// Most registers a thread can have so that the CTAs fit on an SM.
    pub const fn registers(&self) -> u32 {
        let share = REGISTERS / (self.ctas_per_sm * self.threads()) / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }

    /// Shared memory of a kernel of this shape for queries of 16 bits, and keys and values of `cache`, with the given
    /// features.
    pub fn shared_bytes(&self, dims: [u32; 2], cache: Element) -> u32 {
        let queries = self.rows() * padded(dims[0]) * 2;
        let [k, v] = dims.map(|dim| 2 * tile_cols(cache, dim));
        let ring = self.warps * self.stages * self.tile_n * (k + v);
        // Parts lie over queries and ring when those have been read; a word says who came last.
        (queries + ring).max(self.over_bytes(dims[1])) + 16 + 8 * self.barriers()
    }

    /// Barriers of all stages.
    pub(super) const fn barriers(&self) -> u32 {
        2 * self.warps * self.stages
    }

    /// Whether a warp's part fits over its own ring of keys, so that it need not wait for others.
    pub(super) const fn parts_fit(&self, dims: [u32; 2], cache: Element) -> bool {
        self.rows() * part_row(dims[1]) <= self.stages * self.tile_n * tile_cols(cache, dims[0]) * 2
    }

    /// Bytes of parts that meet at a cut, and of the rows that they are folded into.
    pub(crate) const fn fold_bytes(&self, rows: u32, dim_v: u32) -> [u32; 2] {
        let met = self.warps * met_rows(rows, dim_v) * part_row(dim_v);
        let folded = rows * dim_v / COLUMNS * FOLDED_BYTES;
        [met, ALIGNED + if self.places_of_thread(rows, dim_v) <= HELD_PLACES { 0 } else { folded }]
    }

    /// Turns in which threads take the places of rows that meet at once, and places of a thread in all.
    const fn turns_of_places(&self, rows: u32, dim_v: u32) -> u32 {
        (met_rows(rows, dim_v) * dim_v / COLUMNS).div_ceil(self.threads())
    }

    const fn places_of_thread(&self, rows: u32, dim_v: u32) -> u32 {
        rows.div_ceil(met_rows(rows, dim_v)) * self.turns_of_places(rows, dim_v)
    }

    /// Bytes of what lies over queries and ring at other times: turns of sequences before, parts of all warps after.
    pub(super) fn over_bytes(&self, dim_v: u32) -> u32 {
        let turns = if self.order == Order::Even { 4 * MOST_SEQUENCES } else { 0 };
        turns.max(self.warps * self.rows() * part_row(dim_v))
    }
}

/// Rows that meet at once: fewer where there are many columns.
const fn met_rows(rows: u32, dim_v: u32) -> u32 {
    let most = if rows * dim_v > MET_COLUMNS { MMA_M / 2 } else { MMA_M };
    if rows < most { rows } else { most }
}

/// Columns of a tile for `dim` features: whole slabs of the widest swizzle that wastes little.
pub(super) const fn padded(dim: u32) -> u32 {
    if dim <= 16 { 16 } else { dim.next_multiple_of(32) }
}

/// Columns of 16 bits of a tile of keys or values: two elements of 8 bits lie in one, and are read 32 at a time.
pub(super) const fn tile_cols(cache: Element, dim: u32) -> u32 {
    if cache.bytes() == 1 { dim.next_multiple_of(32) / 2 } else { padded(dim) }
}

/// Bytes from one row of a part to the next.
pub(super) const fn part_row(dim_v: u32) -> u32 {
    (dim_v + BESIDE) * 4
}

impl Config {
    /// Keys that all warps of a CTA take in one turn.
    pub const fn keys_per_turn(&self) -> u32 {
        self.shape.warps * self.shape.tile_n
    }

    /// Rows whose parts of all warps meet in shared memory at once, where pieces are folded.
    pub(super) const fn met_rows(&self) -> u32 {
        met_rows(self.rows, self.dim_v)
    }

    /// Bytes of these parts, and of the rows that they are folded into: they have a place of their own, because the ring
    /// goes on meanwhile.
    pub(super) const fn fold_bytes(&self) -> [u32; 2] {
        if self.invariant { self.shape.fold_bytes(self.rows, self.dim_v) } else { [0, 0] }
    }

    /// Turns in which threads take the places of rows that meet at once, and places of a thread in all.
    pub(super) const fn turns_of_places(&self) -> u32 {
        self.shape.turns_of_places(self.rows, self.dim_v)
    }

    pub(super) const fn places_of_thread(&self) -> u32 {
        self.shape.places_of_thread(self.rows, self.dim_v)
    }

    /// Whether registers hold what has been folded.
    pub(super) const fn folds_in_registers(&self) -> bool {
        self.places_of_thread() <= HELD_PLACES
    }

    /// Four columns of rows, as many as there is room for.
    pub(super) const fn places(&self) -> u32 {
        self.rows * self.dim_v / COLUMNS
    }

    /// Shared memory of a CTA.
    pub fn shared_bytes(&self) -> u32 {
        let exchange = match self.shape.order {
            Order::Cluster { parts } => Exchange::bytes(self.places(), parts, self.messages),
            _ => 0,
        };
        let [met, folded] = self.fold_bytes();
        self.shape.shared_bytes([self.dim_qk, self.dim_v], self.cache) + met + folded + exchange
    }

    /// Whether keys and values are widened.
    pub(super) const fn widens(&self) -> bool {
        self.cache.bytes() == 1
    }

    /// What probabilities and values are multiplied as. Widening to f16 takes fewer instructions, and probabilities lie in
    /// its range.
    pub(super) const fn products(&self) -> Half {
        if self.widens() { Half::F16 } else { self.input }
    }

    /// The kernel's name: every field is in it that the text depends on, which is all but the splits, told by the grid.
    pub fn name(&self) -> Ident {
        let Shape { warps, blocks, tile_n, stages, ctas_per_sm, q_in_registers, copies, order, splits: _ } =
            self.shape;
        let mut name = format!(
            "fc_decode_{}_{}{}_d{}v{}_w{warps}x{blocks}n{tile_n}s{stages}c{ctas_per_sm}",
            self.target,
            self.input.element().name(),
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
        option(copies == Copies::Tensor, "t");
        option(order == Order::Even, "e");
        if let Order::Cluster { parts } = order {
            option(true, &format!("k{parts}r{}", self.rows));
            option(self.messages != parts, &format!("m{}", self.messages));
        }
        option(self.invariant, "_fixed");
        option(self.invariant && !matches!(order, Order::Cluster { .. }), &format!("_r{}", self.rows));
        option(true, &format!("_{}", self.mask.name()));
        option(self.lengths.name() != "uniform", &format!("_{}", self.lengths.name()));
        option(self.share != Share::All, "_short");
        option(self.keys == Keys::Paged, "_paged");
        option(self.softcap, "_cap");
        option(self.sinks.is_some(), sink_name(self.sinks));
        option(self.output == Element::F32, "_to_f32");
        Ident::new(name).expect("made of legal parts")
    }
}
