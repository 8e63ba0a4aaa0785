//! What one CTA works on: the rows of a key head of a sequence, and a range of their keys.

use flashcore_tile::{Builder, Cta, Reg, S32, U32, U64};

use super::{Arguments, Config};
use crate::parts::{
    lengths::{LengthsKind, Span},
    mask::{KeyTiles, Visibility},
};

/// The unit of a CTA, as registers that all its threads agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    /// Number of the row tile, which is one key head of one sequence.
    pub(super) tile: Reg<U32>,
    pub(super) sequence: Reg<U32>,
    /// Index along the tensors' batch dimension.
    pub(super) batch: Reg<U32>,
    pub(super) head_kv: Reg<U32>,
    /// First query of the sequence in Q and the output.
    q_start: Reg<U32>,
    /// Queries of the sequence.
    pub(super) queries: Reg<U32>,
    /// Rows of the tile that are queries, and that the output has: at least as many.
    pub(super) rows: Reg<U32>,
    pub(super) written: Reg<U32>,
    /// First key of the sequence in K and V.
    pub(super) kv_start: Reg<U32>,
    /// Keys of the sequence.
    pub(super) keys: Reg<U32>,
    pub(super) visible: Visibility,
    /// Key tiles that the rows see.
    pub(super) tiles: KeyTiles,
    /// Key tiles of this unit.
    pub(super) begin: Reg<S32>,
    pub(super) end: Reg<S32>,
    /// Number of this unit among those that share the rows, and how many there are.
    pub(super) number: Reg<U32>,
    pub(super) count: Reg<U32>,
}

impl Unit {
    /// The unit of this CTA; ends it where there is none.
    pub(super) fn find(b: &mut Builder, cfg: &Config, args: &Arguments) -> Self {
        let [number, head_kv, sequence] = b.cta_xyz();
        let [q, kv] = spans(b, cfg, args, sequence);
        let zero = b.var(0);
        let packed = matches!(cfg.lengths, LengthsKind::Ragged | LengthsKind::PackedQueries);
        let (batch, all) = if packed { (zero, q.len) } else { (sequence, args.lengths.seq_q) };
        // A sequence with more queries than was promised loses some, but touches nothing it should not.
        let rows = b.let_((q.len * args.group).min(args.rows));
        let written = b.let_((all * args.group).min(args.rows));
        let visible = args.mask.over(b, q.len, kv.len);
        let tiles = key_tiles(b, cfg, &visible, q.len);
        let (begin, end, count) = share(b, cfg, args, &tiles, number);
        let none = b.uniform::<Cta>(number.ge(count));
        b.if_uniform(none, |b| b.exit());
        let heads_kv = b.let_(args.heads / args.group);
        Self {
            tile: b.let_(sequence * heads_kv + head_kv),
            sequence,
            batch,
            head_kv,
            q_start: q.start,
            queries: q.len,
            rows,
            written,
            kv_start: kv.start,
            keys: kv.len,
            visible,
            tiles,
            begin,
            end,
            number,
            count,
        }
    }

    /// The query head of a row of the tile.
    pub(super) fn head_of(&self, b: &mut Builder, args: &Arguments, row: Reg<U32>) -> Reg<U32> {
        b.let_(self.head_kv * args.group + row % args.group)
    }

    /// The query of a row of the tile, counted from the first of its sequence.
    pub(super) fn query_of(&self, b: &mut Builder, args: &Arguments, row: Reg<U32>) -> Reg<U32> {
        b.let_(row / args.group)
    }

    /// Where a query of the sequence lies in Q and the output.
    pub(super) fn place_of(&self, b: &mut Builder, query: Reg<U32>) -> Reg<U32> {
        b.let_(self.q_start + query)
    }

    /// Where the part of this row tile lies that unit `number` makes.
    pub(super) fn part_at(
        &self,
        b: &mut Builder,
        args: &Arguments,
        number: Reg<U32>,
        row_bytes: u32,
    ) -> Reg<U64> {
        let most = b.ctas();
        let part = b.let_(self.tile * most + number);
        let row = b.let_(part.mul_wide(args.rows));
        b.let_(row * u64::from(row_bytes) + args.parts)
    }
}

/// Queries and keys of a sequence.
fn spans(b: &mut Builder, cfg: &Config, args: &Arguments, sequence: Reg<U32>) -> [Span; 2] {
    let zero = b.var(0);
    match cfg.lengths {
        LengthsKind::Uniform => {
            [args.lengths.seq_q, args.lengths.seq_kv].map(|len| Span { start: zero, len })
        }
        _ => args.lengths.sequence(b, sequence).map(|span| span.uniform(b)),
    }
}

/// Key tiles that some query sees; none where there is no query.
fn key_tiles(b: &mut Builder, cfg: &Config, visible: &Visibility, queries: Reg<U32>) -> KeyTiles {
    let first = b.var(0);
    let last = b.let_((queries - 1).signed());
    let tiles = visible.key_tiles(b, [first, last], cfg.shape.tile_n);
    KeyTiles { end: b.let_(queries.eq(0).select(0, tiles.end)), ..tiles }
}

/// First and last key tile of unit `number`, and how many units have some: at least one, as many as the grid has at most.
/// All but the last have equally many tiles, so that what a row's units are follows from its own length.
fn share(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    tiles: &KeyTiles,
    number: Reg<U32>,
) -> (Reg<S32>, Reg<S32>, Reg<U32>) {
    let (most, warps) = (b.ctas(), cfg.shape.warps);
    let first = b.let_(tiles.first() + 0);
    let all = b.let_((tiles.end - first).max(0).unsigned());
    let each = b.let_((all + most - 1) / most);
    // Whole turns of all warps.
    let each = b.let_(each.div_ceil(warps) * warps);
    let each = b.let_(each.max(args.least_tiles));
    let count = b.let_(((all + each - 1) / each).max(1));
    let begin = b.let_(first + (number * each).signed());
    let end = b.let_((begin + each.signed()).min(tiles.end));
    (begin, end, count)
}
