//! Which rows of which head a CTA works on, where each CTA has one row tile.
//!
//! Row tiles of queries run from the last (with a causal mask: the longest) to the first, those of keys from the first to
//! the last.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Reg, Scope, U32, U64};

use super::{
    lengths::{LengthArguments, LengthsKind, Span},
    search,
    sections::{self, Sections},
    share::short_queries,
    tensor::TensorArgument,
};

/// Whose rows a CTA has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Those of queries of one head.
    Queries,
    /// Those of keys of one key head.
    Keys,
}

/// What a kernel needs to find its tile, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    side: Side,
    kind: LengthsKind,
    /// Heads of the side.
    heads: Reg<U32>,
    group: Reg<U32>,
    planes: Reg<U32>,
    row_tiles: Reg<U32>,
    section: Reg<U32>,
    lengths: LengthArguments,
    /// Whether the queries of all heads of a group are rows, see [`Schedule::declare_folded`].
    folded: bool,
}

/// The tile of a CTA, as registers that all its threads agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// First row in the sequence.
    pub(crate) first_row: Reg<U32>,
    /// Number of the sequence.
    pub(crate) sequence: Reg<U32>,
    /// Query head; where rows are keys, the first of those that share them.
    pub(crate) head: Reg<U32>,
    /// Head of keys and values.
    pub(crate) head_kv: Reg<U32>,
    /// Index along the tensors' batch dimension.
    pub(crate) batch: Reg<U32>,
    /// First row of the sequence in Q and the output.
    pub(crate) q_start: Reg<U32>,
    /// Queries of the sequence.
    pub(crate) q_len: Reg<U32>,
    /// Rows of the sequence that the output has: at least as many as are used.
    pub(crate) rows: Reg<U32>,
    /// First row of the sequence in K and V.
    pub(crate) kv_start: Reg<U32>,
    /// Keys of the sequence.
    pub(crate) kv_len: Reg<U32>,
}

impl Side {
    fn heads(self, problem: &Problem) -> usize {
        match self {
            Self::Queries => problem.heads_q(),
            Self::Keys => problem.heads_kv(),
        }
    }

    /// Heads of all sequences.
    pub(crate) fn planes(self, problem: &Problem) -> u64 {
        problem.sequences() as u64 * self.heads(problem) as u64
    }

    /// Row tiles of a head: those of the longest sequence.
    pub(crate) fn row_tiles(self, problem: &Problem, tile_rows: u32) -> u64 {
        let longest = match self {
            Self::Queries => problem.longest_q(),
            Self::Keys => problem.longest_kv(),
        };
        longest.div_ceil(tile_rows as usize) as u64
    }

    /// Row tiles of a problem.
    pub(crate) fn tile_count(self, problem: &Problem, tile_rows: u32) -> u64 {
        self.row_tiles(problem, tile_rows).saturating_mul(self.planes(problem))
    }
}

impl Schedule {
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem>>(
        b: &mut Builder,
        params: &mut Params<A>,
        (side, kind): (Side, LengthsKind),
        tile_rows: u32,
    ) -> Self {
        let heads = params.u32(b, "heads", move |p| side.heads(p.as_ref()) as u32);
        let group = params.u32(b, "group", |p| p.as_ref().group() as u32);
        let planes = params.u32(b, "planes", move |p| side.planes(p.as_ref()) as u32);
        let row_tiles = params.u32(b, "row_tiles", move |p| side.row_tiles(p.as_ref(), tile_rows) as u32);
        let section = params.u32(b, "section", move |p| sections::heads(p.as_ref(), side));
        let seq_q = params.u32(b, "seq_q", |p| p.as_ref().seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.as_ref().seq_kv() as u32);
        let lengths = LengthArguments::declare(b, params, kind, [seq_q, seq_kv]);
        Self { side, kind, heads, group, planes, row_tiles, section, lengths, folded: false }
    }

    /// The schedule of rows that are the queries of all heads that share a key head, heads of a query next to each other: heads
    /// of the schedule are key heads then, and rows of a [`Tile`] count such rows.
    #[track_caller]
    pub(crate) fn declare_folded(
        b: &mut Builder,
        params: &mut Params<Problem>,
        kind: LengthsKind,
        tile_rows: u32,
    ) -> Self {
        let heads = params.u32(b, "heads", |p| p.heads_kv() as u32);
        let group = params.u32(b, "group", |p| p.group() as u32);
        let planes = params.u32(b, "planes", |p| Side::Keys.planes(p) as u32);
        let row_tiles = params.u32(b, "row_tiles", move |p| folded_row_tiles(p, tile_rows) as u32);
        let section = b.var(1);
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        let lengths = LengthArguments::declare(b, params, kind, [seq_q, seq_kv]);
        Self { side: Side::Queries, kind, heads, group, planes, row_tiles, section, lengths, folded: true }
    }

    /// Query and query head of a folded row of a tile's sequence.
    #[track_caller]
    pub(crate) fn unfolded(&self, b: &mut Builder, tile: &Tile, row: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let row = b.let_(tile.q_start + row);
        (b.let_(row / self.group), b.let_(tile.head + row % self.group))
    }

    /// Rows of Q, all sequences together where they are packed.
    pub(crate) const fn seq_q(&self) -> Reg<U32> {
        self.lengths.seq_q
    }

    /// Heads of the side whose rows a CTA has.
    pub(crate) const fn heads(&self) -> Reg<U32> {
        self.heads
    }

    /// Heads of the queries.
    #[track_caller]
    pub(crate) fn query_heads(&self, b: &mut Builder) -> Reg<U32> {
        match self.side {
            Side::Queries => self.heads,
            Side::Keys => b.let_(self.heads * self.group),
        }
    }

    /// Query heads that share a key head.
    pub(crate) const fn group(&self) -> Reg<U32> {
        self.group
    }

    /// The tile of this CTA.
    #[track_caller]
    pub(crate) fn tile(&self, b: &mut Builder, tile_rows: u32) -> Tile {
        let index = b.cta();
        self.tile_number(b, index, tile_rows)
    }

    /// Tile number `index`.
    #[track_caller]
    pub(crate) fn tile_number(&self, b: &mut Builder, index: Reg<U32>, tile_rows: u32) -> Tile {
        let (row_tile, plane) = self.place(b, index);
        let sequence = b.uniform_register(plane / self.heads);
        let head = b.uniform_register(plane % self.heads);
        self.tile_of(b, tile_rows, row_tile, [sequence, head])
    }

    /// The tile of this CTA, where only sequences of many queries have tiles: it is beyond its rows where there is none.
    #[track_caller]
    pub(crate) fn long_tile(&self, b: &mut Builder, tile_rows: u32, long: LongOnly) -> Tile {
        let index = b.cta();
        let (number, head) = (b.uniform_register(index / self.heads), b.uniform_register(index % self.heads));
        let found = search::find(b, number, long.sequences, |b, sequence| {
            let queries = self.lengths.packed_queries(b, sequence);
            let tiles = b.let_(queries.div_ceil(tile_rows));
            b.let_(queries.gt(long.short).select(tiles, 0))
        });
        // Every warp of the CTA finds the same.
        let [sequence, before, own] = [found.index, found.before, found.own].map(|number| {
            let agreed = b.broadcast(number, Scope::Cta);
            b.uniform_register(agreed)
        });
        let rest = b.let_(number - before);
        let there = b.let_(rest.lt(own));
        let row_tile = b.select(there, own - 1 - rest, 0);
        let tile = self.tile_of(b, tile_rows, row_tile, [sequence, head]);
        Tile { rows: b.select(there, tile.rows, 0), ..tile }
    }

    /// Row tile `row_tile` of a head of a sequence.
    #[track_caller]
    fn tile_of(
        &self,
        b: &mut Builder,
        tile_rows: u32,
        row_tile: Reg<U32>,
        [sequence, head]: [Reg<U32>; 2],
    ) -> Tile {
        let zero = b.var(0);
        let first_row = b.let_(row_tile * tile_rows);
        let (head, head_kv) = match self.side {
            Side::Queries if !self.folded => (head, b.uniform_register(head / self.group)),
            _ => (b.let_(head * self.group), head),
        };
        let all = [self.lengths.seq_q, self.lengths.seq_kv].map(|len| Span { start: zero, len });
        let [q, kv] = match self.kind {
            LengthsKind::Uniform => all,
            _ => self.lengths.sequence(b, sequence).map(|span| span.uniform(b)),
        };
        let (all, q) = if self.folded {
            ([all[0].times(b, self.group), all[1]], q.times(b, self.group))
        } else {
            (all, q)
        };
        let (batch, held) = match self.kind {
            LengthsKind::Ragged | LengthsKind::PackedQueries => (zero, [q, kv]),
            _ => (sequence, all),
        };
        let rows = held[self.side as usize].len;
        Tile {
            first_row,
            sequence,
            head,
            head_kv,
            batch,
            q_start: q.start,
            q_len: q.len,
            rows,
            kv_start: kv.start,
            kv_len: kv.len,
        }
    }

    /// Row tile and plane (sequence and head) of tile number `index`.
    #[track_caller]
    fn place(&self, b: &mut Builder, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let (heads, row_tiles) = (self.section, self.row_tiles);
        let (row_tile, plane) =
            Sections { heads, row_tiles, all: Some(self.planes), last_first: self.side == Side::Queries }
                .find(b, index);
        // Division happens in vector registers; what it gives is the same for all threads and lives long.
        (b.uniform_register(row_tile), b.uniform_register(plane))
    }
}

/// Row tiles of a key head where the queries of all its heads are rows.
fn folded_row_tiles(problem: &Problem, tile_rows: u32) -> u64 {
    (problem.longest_q() * problem.group()).div_ceil(tile_rows as usize) as u64
}

/// Row tiles of a problem where the queries of all heads of a group are rows.
pub(crate) fn folded_tiles(problem: &Problem, tile_rows: u32) -> u64 {
    folded_row_tiles(problem, tile_rows).saturating_mul(Side::Keys.planes(problem))
}

/// What a kernel needs to find tiles of sequences of many queries alone, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LongOnly {
    sequences: Reg<U32>,
    /// Most queries of a sequence that another kernel computes.
    short: Reg<U32>,
}

impl LongOnly {
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>) -> Self {
        Self {
            sequences: params.u32(b, "sequences", |p| p.sequences() as u32),
            short: params.u32(b, "short_queries", |p| short_queries(p) as u32),
        }
    }
}

/// Row tiles of packed sequences of many queries, at most: no more than their rows fill, and one that is not full for each.
pub(crate) fn long_tiles(problem: &Problem, tile_rows: u32) -> u64 {
    let rows = problem.seq_q();
    let sequences = problem.sequences().min(rows / (short_queries(problem) + 1));
    ((rows / tile_rows as usize + sequences) * problem.heads_q()) as u64
}

impl Tile {
    /// Where row `row` of a tensor lies for this tile.
    #[track_caller]
    pub(crate) fn row_address(
        &self,
        b: &mut Builder,
        tensor: &TensorArgument,
        head: Reg<U32>,
        row: Reg<U32>,
    ) -> Reg<U64> {
        tensor.at(b, self.batch, head, row)
    }
}
