//! What one CTA works on at a time: the rows of a key head of a sequence, and a range of their keys.

use flashcore_tile::{Builder, Cta, Pred, Reg, S32, U32};

use super::{
    Arguments, Config,
    config::Order,
    cuts::{Cuts, Pieces, Row, SPAN},
};
use crate::parts::{
    lengths::{LengthsKind, Span},
    mask::{KeyTiles, Visibility},
    share::Share,
};

/// A sequence: its queries and keys, and what its rows see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub(super) index: Reg<U32>,
    /// Index along the tensors' batch dimension.
    pub(super) batch: Reg<U32>,
    /// First query in Q and the output.
    q_start: Reg<U32>,
    /// Queries of the sequence.
    pub(super) queries: Reg<U32>,
    /// Rows of the tile that are queries, and that the output has: at least as many.
    pub(super) rows: Reg<U32>,
    pub(super) written: Reg<U32>,
    /// First key in K and V.
    pub(super) kv_start: Reg<U32>,
    /// Keys of the sequence.
    pub(super) keys: Reg<U32>,
    pub(super) visible: Visibility,
    /// Key tiles that the rows see.
    pub(super) tiles: KeyTiles,
    /// The first of them, and how many there are.
    pub(super) first: Reg<S32>,
    count: Reg<U32>,
    /// Whether this kernel computes the sequence, if there is one that it does not.
    mine: Option<Pred>,
}

impl Sequence {
    /// Sequence number `index`; each lane may ask for another.
    pub(super) fn find(b: &mut Builder, cfg: &Config, args: &Arguments, index: Reg<U32>) -> Self {
        let [q, kv] = spans(b, cfg, args, index);
        let zero = b.var(0);
        let packed = matches!(cfg.lengths, LengthsKind::Ragged | LengthsKind::PackedQueries);
        let (batch, all) = if packed { (zero, q.len) } else { (index, args.lengths.seq_q) };
        // A sequence with more queries than was promised loses some, but touches nothing it should not.
        let all_rows = b.let_(q.len * args.group);
        let rows = b.let_(all_rows.min(args.rows));
        let mine = (cfg.share != Share::All).then(|| b.let_(all_rows.le(args.rows)));
        let written = b.let_((all * args.group).min(args.rows));
        let visible = args.mask.over(b, q.len, kv.len);
        let tiles = key_tiles(b, cfg, &visible, q.len);
        let first = b.let_(tiles.first() + 0);
        Self {
            index,
            batch,
            q_start: q.start,
            queries: q.len,
            rows,
            written,
            kv_start: kv.start,
            keys: kv.len,
            visible,
            tiles,
            first,
            count: b.let_((tiles.end - first).max(0).unsigned()),
            mine,
        }
    }

    /// Turns that a CTA needs for all keys: at least one, which writes the rows even if they see none.
    /// Where keys are cut at fixed places, spans are what CTAs share.
    pub(super) fn turns(&self, b: &mut Builder, cfg: &Config, args: &Arguments) -> Reg<U32> {
        let turns = match args.cuts {
            Some(cuts) => Row::of(b, cfg, cuts, self).spans(b),
            None => b.let_(self.count.div_ceil(cfg.shape.warps).max(1)),
        };
        self.if_mine(b, turns)
    }

    /// A number of this sequence, or 0 where it is another kernel's.
    pub(super) fn if_mine(&self, b: &mut Builder, number: Reg<U32>) -> Reg<U32> {
        self.mine.map_or(number, |mine| b.select(mine, number, 0))
    }

    /// Where a query lies in Q and the output.
    pub(super) fn place_of(&self, b: &mut Builder, query: Reg<U32>) -> Reg<U32> {
        b.let_(self.q_start + query)
    }
}

/// Some key tiles of the rows of a key head, as registers that all threads of a CTA agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub(super) sequence: Sequence,
    pub(super) head_kv: Reg<U32>,
    /// Key tiles of this unit.
    pub(super) begin: Reg<S32>,
    pub(super) end: Reg<S32>,
    /// How many units share the rows.
    pub(super) count: Reg<U32>,
    /// Numbers of parts in memory: of this unit's, of the first unit's, and of the second's, behind which all others lie.
    pub(super) part: Reg<U32>,
    pub(super) first_part: Reg<U32>,
    pub(super) second_part: Reg<U32>,
    /// Parts from one of those to the next.
    pub(super) part_step: u32,
    /// The pieces that it has, where keys are cut at fixed places.
    pub(super) pieces: Option<Pieces>,
}

impl Unit {
    /// The unit of this CTA, where each has one; ends the CTA where there is none.
    pub(super) fn of_grid(b: &mut Builder, cfg: &Config, args: &Arguments) -> Self {
        let [number, head_kv, index] = b.cta_xyz();
        let sequence = Sequence::find(b, cfg, args, index);
        if let Some(cuts) = args.cuts {
            return Self::pieces_of_grid(b, cfg, args, (sequence, [number, head_kv]), cuts);
        }
        let (most, warps) = (b.ctas(), cfg.shape.warps);
        let each = b.let_((sequence.count + most - 1) / most);
        // Whole turns of all warps: what a row's units are follows from its own length.
        let each = b.let_(each.div_ceil(warps) * warps);
        let each = b.let_(each.max(args.least_tiles));
        let count = b.let_(((sequence.count + each - 1) / each).max(1));
        let count = sequence.if_mine(b, count);
        let none = b.uniform::<Cta>(number.ge(count));
        b.if_uniform(none, |b| b.exit());
        let begin = b.let_(sequence.first + (number * each).signed());
        let row_tile = row_tile(b, args, index, head_kv);
        let first_part = b.let_(row_tile * most);
        Self {
            sequence,
            head_kv,
            begin,
            end: b.let_((begin + each.signed()).min(sequence.tiles.end)),
            count,
            part: b.let_(first_part + number),
            first_part,
            second_part: b.let_(first_part + 1),
            part_step: 1,
            pieces: None,
        }
    }

    /// The same where keys are cut at fixed places.
    fn pieces_of_grid(
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (sequence, [number, head_kv]): (Sequence, [Reg<U32>; 2]),
        cuts: Cuts,
    ) -> Self {
        let (most, row) = (b.ctas(), Row::of(b, cfg, cuts, &sequence));
        let each = b.let_((row.end - row.first + most - 1) / most);
        let pieces = row.shares(b, number, each);
        let count = sequence.if_mine(b, pieces.count);
        let none = b.uniform::<Cta>(count.eq(0));
        b.if_uniform(none, |b| b.exit());
        let row_tile = row_tile(b, args, sequence.index, head_kv);
        let first_part = b.let_(row_tile * cuts.room);
        let second_part = b.let_(first_part + 1);
        Self::of_pieces(b, cfg, (sequence, head_kv), pieces, [first_part, second_part])
    }

    /// Pieces of the rows of a key head; parts of their units are where the two numbers say.
    fn of_pieces(
        b: &mut Builder,
        cfg: &Config,
        (sequence, head_kv): (Sequence, Reg<U32>),
        pieces: Pieces,
        [first_part, second_part]: [Reg<U32>; 2],
    ) -> Self {
        let tile = |b: &mut Builder, span: Reg<U32>| b.let_((span * (SPAN / cfg.shape.tile_n)).signed());
        let (begin, end) = (tile(b, pieces.from), tile(b, pieces.to));
        Self {
            sequence,
            head_kv,
            begin,
            end: b.let_(end.min(sequence.tiles.end)),
            count: pieces.parts(b),
            part: first_part,
            first_part,
            second_part,
            part_step: 1,
            pieces: Some(pieces),
        }
    }

    /// The unit of this CTA, where those of a row are a cluster: some may have no keys.
    pub(super) fn of_cluster(b: &mut Builder, cfg: &Config, args: &Arguments, parts: u32) -> Self {
        let [number, head_kv, index] = b.cta_xyz();
        let sequence = Sequence::find(b, cfg, args, index);
        if let Some(cuts) = args.cuts {
            let (row, none) = (Row::of(b, cfg, cuts, &sequence), b.var(0));
            let each = b.let_((row.end - row.first).div_ceil(parts));
            let pieces = row.shares(b, number, each);
            return Self::of_pieces(b, cfg, (sequence, head_kv), pieces, [none; 2]);
        }
        let each = b.let_(sequence.count.div_ceil(parts * cfg.shape.warps) * cfg.shape.warps);
        let begin = b.let_(sequence.first + (number * each).signed());
        let none = b.var(0);
        Self {
            sequence,
            head_kv,
            begin,
            end: b.let_((begin + each.signed()).min(sequence.tiles.end)),
            count: b.var(parts),
            part: none,
            first_part: none,
            second_part: none,
            part_step: 1,
            pieces: None,
        }
    }

    /// Number of the row tile, which is one key head of one sequence.
    pub(super) fn row_tile(&self, b: &mut Builder, args: &Arguments) -> Reg<U32> {
        row_tile(b, args, self.sequence.index, self.head_kv)
    }

    /// The query head of a row of the tile.
    pub(super) fn head_of(&self, b: &mut Builder, args: &Arguments, row: Reg<U32>) -> Reg<U32> {
        b.let_(self.head_kv * args.group + row % args.group)
    }

    /// The query of a row of the tile, counted from the first of its sequence.
    pub(super) fn query_of(&self, b: &mut Builder, args: &Arguments, row: Reg<U32>) -> Reg<U32> {
        b.let_(row / args.group)
    }

    /// Turns `from..to` of the rows of a key head, where CTAs share all work evenly.
    pub(super) fn of_turns(
        b: &mut Builder,
        (cfg, args): (&Config, &Arguments),
        (sequence, head_kv): (Sequence, Reg<U32>),
        [from, to]: [Reg<U32>; 2],
        seats: &Seats,
    ) -> Self {
        let warps = cfg.shape.warps;
        if let Some(cuts) = args.cuts {
            let row = Row::of(b, cfg, cuts, &sequence);
            let pieces = row.pieces(b, [from, to], seats.turns);
            // Parts of the rows that begin in a CTA have room before those of the next CTA's, which has begun later.
            let second_part = b.let_(seats.first * cuts.room);
            let first_part = b.let_(seats.all * cuts.room + seats.first);
            return Self::of_pieces(b, cfg, (sequence, head_kv), pieces, [first_part, second_part]);
        }
        // A CTA has two places for parts: of rows that began before it, and of one that begins with it and goes on.
        let began_before = b.let_(seats.own.gt(seats.first));
        let part = b.let_(seats.own * 2);
        let tile = |b: &mut Builder, turn: Reg<U32>| b.let_(sequence.first + (turn * warps).signed());
        let (begin, end) = (tile(b, from), tile(b, to));
        Self {
            sequence,
            head_kv,
            begin,
            end: b.let_(end.min(sequence.tiles.end)),
            count: b.let_(seats.last - seats.first + 1),
            part: b.select(began_before, part, part + 1),
            first_part: b.let_(seats.first * 2 + 1),
            second_part: b.let_(seats.first * 2 + 2),
            part_step: 2,
            pieces: None,
        }
    }
}

/// CTAs that share a row, where they share all work evenly: numbers of those that share it lie side by side.
pub(super) struct Seats {
    /// This CTA, and the first and the last that have some of the row.
    pub(super) own: Reg<U32>,
    pub(super) first: Reg<U32>,
    pub(super) last: Reg<U32>,
    /// All CTAs.
    pub(super) all: Reg<U32>,
    /// Turns of the row that the first has.
    pub(super) turns: Reg<U32>,
}

fn row_tile(b: &mut Builder, args: &Arguments, sequence: Reg<U32>, head_kv: Reg<U32>) -> Reg<U32> {
    b.let_(sequence * args.heads_kv + head_kv)
}

/// Queries and keys of a sequence.
fn spans(b: &mut Builder, cfg: &Config, args: &Arguments, sequence: Reg<U32>) -> [Span; 2] {
    let zero = b.var(0);
    match cfg.lengths {
        LengthsKind::Uniform => {
            [args.lengths.seq_q, args.lengths.seq_kv].map(|len| Span { start: zero, len })
        }
        _ => {
            let [q, kv] = args.lengths.sequence(b, sequence);
            // As many keys as parts of rows have room for.
            let most = args.cuts.and_then(|cuts| cuts.keys);
            let spans = [q, most.map_or(kv, |most| Span { len: b.let_(kv.len.min(most)), ..kv })];
            // Uniform registers where a CTA has one sequence.
            if cfg.shape.order != Order::Even { spans.map(|span| span.uniform(b)) } else { spans }
        }
    }
}

/// Key tiles that some query sees; none where there is no query.
fn key_tiles(b: &mut Builder, cfg: &Config, visible: &Visibility, queries: Reg<U32>) -> KeyTiles {
    let first = b.var(0);
    let last = b.let_((queries - 1).signed());
    let tiles = visible.key_tiles(b, [first, last], cfg.shape.tile_n);
    KeyTiles { end: b.let_(queries.eq(0).select(0, tiles.end)), ..tiles }
}
