//! Which rows of which head a CTA works on, where each CTA has one row tile.
//!
//! Tiles are numbered by sections of heads whose K and V fit in L2 together; inside a section, row tiles run from the
//! last (with a causal mask: the longest) to the first and heads fastest, so that CTAs that run at the same time share
//! K and V and the short tiles fill the gaps at the end.

use flashcore_core::{Problem, Sequences};
use flashcore_tile::{Builder, Params, Reg, U32, U64};

use super::lengths::{LengthArguments, LengthsKind, Span};

/// Bytes of L2 that a section of heads may fill with K and V: well under what data-centre GPUs have.
const SECTION_BYTES: usize = 24 << 20;

fn row_tiles(problem: &Problem, tile_m: u32) -> u64 {
    problem.longest_q().div_ceil(tile_m as usize) as u64
}

fn planes(problem: &Problem) -> u64 {
    problem.sequences() as u64 * problem.heads_q() as u64
}

/// Tiles of a problem, and CTAs that work on them.
pub(crate) fn tile_count(problem: &Problem, tile_m: u32) -> u64 {
    row_tiles(problem, tile_m).saturating_mul(planes(problem))
}

/// Query heads of one section, whose K and V share L2.
fn section(problem: &Problem) -> u32 {
    let keys = match problem.sequences_kind() {
        Sequences::Ragged { .. } => problem.seq_kv().div_ceil(problem.sequences().max(1)),
        _ => problem.seq_kv(),
    };
    let per_key = (problem.dim_qk() + problem.dim_v()) * problem.dtype().bytes();
    let per_head = keys.saturating_mul(per_key).div_ceil(problem.group()).max(1);
    let fit = (SECTION_BYTES / per_head) as u64;
    fit.clamp(1, planes(problem).max(1)) as u32
}

/// What a kernel needs to find its tile, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
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
pub(crate) struct Tile {
    /// First row in the sequence.
    pub(crate) first_row: Reg<U32>,
    /// Query head.
    pub(crate) head: Reg<U32>,
    /// Head of keys and values.
    pub(crate) head_kv: Reg<U32>,
    /// Index along the tensors' batch dimension.
    pub(crate) batch: Reg<U32>,
    /// First row of the sequence in Q and the output.
    pub(crate) q_start: Reg<U32>,
    /// Queries of the sequence.
    pub(crate) q_len: Reg<U32>,
    /// Rows of the sequence that the output has: at least as many.
    pub(crate) rows: Reg<U32>,
    /// First row of the sequence in K and V.
    pub(crate) kv_start: Reg<U32>,
    /// Keys of the sequence.
    pub(crate) kv_len: Reg<U32>,
}

impl Schedule {
    #[track_caller]
    pub(crate) fn declare(
        b: &mut Builder,
        params: &mut Params<Problem>,
        kind: LengthsKind,
        tile_m: u32,
    ) -> Self {
        let heads = params.u32(b, "heads", |p| p.heads_q() as u32);
        let group = params.u32(b, "group", |p| p.group() as u32);
        let planes = params.u32(b, "planes", |p| planes(p) as u32);
        let row_tiles = params.u32(b, "row_tiles", move |p| row_tiles(p, tile_m) as u32);
        let section = params.u32(b, "section", section);
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        let lengths = LengthArguments::declare(b, params, kind, [seq_q, seq_kv]);
        Self { kind, heads, group, planes, row_tiles, section, lengths }
    }

    /// Rows of Q, all sequences together where they are packed.
    pub(crate) const fn seq_q(&self) -> Reg<U32> {
        self.lengths.seq_q
    }

    /// Query heads.
    pub(crate) const fn heads(&self) -> Reg<U32> {
        self.heads
    }

    /// The tile of this CTA.
    #[track_caller]
    pub(crate) fn tile(&self, b: &mut Builder, tile_m: u32) -> Tile {
        let (row_tile, plane) = self.place(b);
        let sequence = b.div(plane, self.heads);
        let sequence = b.uniform_register(sequence);
        let head = b.rem(plane, self.heads);
        let head = b.uniform_register(head);
        let zero = b.var(0);
        let first_row = b.mul(row_tile, tile_m);
        let head_kv = b.div(head, self.group);
        let head_kv = b.uniform_register(head_kv);
        let all = Span { start: zero, len: self.lengths.seq_q };
        let (q, kv) = match self.kind {
            LengthsKind::Uniform => (all, Span { start: zero, len: self.lengths.seq_kv }),
            _ => self.lengths.sequence(b, sequence).map(|span| span.uniform(b)).into(),
        };
        let (batch, rows) = match self.kind {
            LengthsKind::Ragged => (zero, q.len),
            _ => (sequence, all.len),
        };
        Tile {
            first_row,
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
        let section_tiles = b.mul(self.section, self.row_tiles);
        let section = b.div(index, section_tiles);
        let within = b.rem(index, section_tiles);
        let first = b.mul(section, self.section);
        // The last section may be narrower.
        let left = b.sub(self.planes, first);
        let width = b.min(left, self.section);
        let row_tile = b.div(within, width);
        let last = b.sub(self.row_tiles, 1);
        let row_tile = b.sub(last, row_tile);
        let plane = b.rem(within, width);
        let plane = b.add(first, plane);
        // Division happens in vector registers; what it gives is the same for all threads and lives long.
        (b.uniform_register(row_tile), b.uniform_register(plane))
    }
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

/// A tensor: where it starts, and its strides in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorArgument {
    base: Reg<U64>,
    batch: Reg<U64>,
    head: Reg<U64>,
    pub(crate) row: Reg<U64>,
}

impl TensorArgument {
    /// Address of a row.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let steps = [(batch, self.batch), (head, self.head), (row, self.row)];
        steps.into_iter().fold(self.base, |at, (index, stride)| {
            let index = b.widen(index);
            b.mad(index, stride, at)
        })
    }

    #[track_caller]
    pub(crate) fn declare(
        b: &mut Builder,
        params: &mut Params<Problem>,
        name: &str,
        slot: flashcore_ptx::launch::Slot,
        layout: fn(&Problem) -> &flashcore_core::Layout,
    ) -> Self {
        let base = params.buffer(b, name, slot);
        let mut stride = |b: &mut Builder, what: &str, axis: usize| {
            params.u64(b, &format!("{name}_{what}"), move |p| {
                (layout(p).strides()[axis] * p.dtype().bytes()) as u64
            })
        };
        Self { base, batch: stride(b, "batch", 0), head: stride(b, "head", 1), row: stride(b, "row", 2) }
    }
}
