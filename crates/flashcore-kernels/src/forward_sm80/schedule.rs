//! Which rows of which head a CTA works on, where each CTA has one row tile.
//!
//! Row tiles run from the last (with a causal mask: the longest) to the first.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Reg, U32, U64};

use crate::parts::{
    lengths::{LengthArguments, LengthsKind, Span},
    sections::{self, Sections, planes, row_tiles},
    tensor::TensorArgument,
};

/// What a kernel needs to find its tile, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    kind: LengthsKind,
    heads: Reg<U32>,
    group: Reg<U32>,
    planes: Reg<U32>,
    row_tiles: Reg<U32>,
    section: Reg<U32>,
    lengths: LengthArguments,
}

/// The tile of a CTA, as registers that all its threads agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// First row in the sequence.
    pub(super) first_row: Reg<U32>,
    /// Number of the sequence.
    pub(super) sequence: Reg<U32>,
    /// Query head.
    pub(super) head: Reg<U32>,
    /// Head of keys and values.
    pub(super) head_kv: Reg<U32>,
    /// Index along the tensors' batch dimension.
    pub(super) batch: Reg<U32>,
    /// First row of the sequence in Q and the output.
    pub(super) q_start: Reg<U32>,
    /// Queries of the sequence.
    pub(super) q_len: Reg<U32>,
    /// Rows of the sequence that the output has: at least as many.
    pub(super) rows: Reg<U32>,
    /// First row of the sequence in K and V.
    pub(super) kv_start: Reg<U32>,
    /// Keys of the sequence.
    pub(super) kv_len: Reg<U32>,
}

impl Schedule {
    #[track_caller]
    pub(super) fn declare(
        b: &mut Builder,
        params: &mut Params<Problem>,
        kind: LengthsKind,
        tile_m: u32,
    ) -> Self {
        let heads = params.u32(b, "heads", |p| p.heads_q() as u32);
        let group = params.u32(b, "group", |p| p.group() as u32);
        let planes = params.u32(b, "planes", |p| planes(p) as u32);
        let row_tiles = params.u32(b, "row_tiles", move |p| row_tiles(p, tile_m) as u32);
        let section = params.u32(b, "section", sections::heads);
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        let lengths = LengthArguments::declare(b, params, kind, [seq_q, seq_kv]);
        Self { kind, heads, group, planes, row_tiles, section, lengths }
    }

    /// Rows of Q, all sequences together where they are packed.
    pub(super) const fn seq_q(&self) -> Reg<U32> {
        self.lengths.seq_q
    }

    /// Query heads.
    pub(super) const fn heads(&self) -> Reg<U32> {
        self.heads
    }

    /// The tile of this CTA.
    #[track_caller]
    pub(super) fn tile(&self, b: &mut Builder, tile_m: u32) -> Tile {
        let (row_tile, plane) = self.place(b);
        let sequence = b.uniform_register(plane / self.heads);
        let head = b.uniform_register(plane % self.heads);
        let zero = b.var(0);
        let first_row = b.let_(row_tile * tile_m);
        let head_kv = b.uniform_register(head / self.group);
        let all = Span { start: zero, len: self.lengths.seq_q };
        let (q, kv) = match self.kind {
            LengthsKind::Uniform => (all, Span { start: zero, len: self.lengths.seq_kv }),
            _ => self.lengths.sequence(b, sequence).map(|span| span.uniform(b)).into(),
        };
        let (batch, rows) = match self.kind {
            LengthsKind::Ragged | LengthsKind::PackedQueries => (zero, q.len),
            _ => (sequence, all.len),
        };
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

    /// Row tile and plane (sequence and head) of this CTA.
    #[track_caller]
    fn place(&self, b: &mut Builder) -> (Reg<U32>, Reg<U32>) {
        let index = b.cta();
        let (heads, row_tiles) = (self.section, self.row_tiles);
        let (row_tile, plane) =
            Sections { heads, row_tiles, all: Some(self.planes), last_first: true }.find(b, index);
        // Division happens in vector registers; what it gives is the same for all threads and lives long.
        (b.uniform_register(row_tile), b.uniform_register(plane))
    }
}

impl Tile {
    /// Where row `row` of a tensor lies for this tile.
    #[track_caller]
    pub(super) fn row_address(
        &self,
        b: &mut Builder,
        tensor: &TensorArgument,
        head: Reg<U32>,
        row: Reg<U32>,
    ) -> Reg<U64> {
        tensor.at(b, self.batch, head, row)
    }
}
