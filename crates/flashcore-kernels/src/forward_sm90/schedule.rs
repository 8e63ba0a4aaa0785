//! Which tile a CTA works on next, and how the producer tells its consumers.
//!
//! Tiles are numbered by sections of heads whose K and V fit in L2 together; inside a section, row tiles run from the
//! longest to the shortest (causal) and heads fastest, so that CTAs that run at the same time share K and V.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Cmp, Pred, Reg, Shared, U32, Val};
use serde::{Deserialize, Serialize};

use super::{Arguments, Config, ROWS_PER_GROUP};
use crate::shared::mask::{KeyTiles, Visibility};

/// Bytes of L2 that a section of heads may fill with K and V.
const SECTION_BYTES: usize = 32 << 20;
/// What a tile takes when it is posted: where it is, and the lengths of its sequence.
pub(super) const INFO_BYTES: u32 = 32;

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
    pub(super) fn name(self) -> String {
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

/// Heads whose K and V share L2; a power of two that divides all heads, so that sections are full.
pub(super) fn section(problem: &Problem, cfg: Config) -> u32 {
    if !cfg.mask.right {
        return 1;
    }
    let heads = problem.heads_q() * problem.batch();
    let per_head = 2 * problem.seq_kv() * problem.dim_v() * problem.dtype().bytes();
    let fits = |n: &usize| heads.is_multiple_of(*n) && n * per_head <= SECTION_BYTES;
    let largest = (1..usize::BITS).map(|bit| 1usize << bit).take_while(|&n| n <= heads && fits(&n)).last();
    largest.unwrap_or(1) as u32
}

/// The key tiles that a consumer works through, and whether its CTA has one more at either end.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnTiles {
    pub(super) tiles: KeyTiles,
    /// Behind the last of its own.
    pub(super) behind: Option<Pred>,
    /// Before the first.
    pub(super) before: Option<Pred>,
}

/// A tile: which rows of which head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Row tile.
    row: Reg<U32>,
    /// Query head among those of all batch entries; where several share a tile, their number among such groups.
    pub flat_head: Reg<U32>,
    /// Query head, or group of heads that share a tile.
    pub head: Reg<U32>,
    /// Batch entry.
    pub batch: Reg<U32>,
    /// Queries that the batch entry uses.
    pub q_len: Reg<U32>,
    /// Keys that the batch entry uses.
    pub kv_len: Reg<U32>,
}

impl Tile {
    /// Tile number `index`.
    pub(super) fn numbered(b: &mut Builder, cfg: Config, args: &Arguments, index: Reg<U32>) -> Self {
        let section_tiles = b.mul(args.section, args.row_tiles);
        let section = b.div(index, section_tiles);
        let within = b.rem(index, section_tiles);
        let row = b.div(within, args.section);
        let row = longest_first(b, cfg, args, row);
        let flat_head = b.rem(within, args.section);
        let flat_head = b.mad(section, args.section, flat_head);
        let (head, batch) = (b.rem(flat_head, args.heads), b.div(flat_head, args.heads));
        let [q_len, kv_len] = args.lengths.used(b, batch);
        Self { row, flat_head, head, batch, q_len, kv_len }
    }

    /// Row tile `row` of a head; from the last on where rows further down see more keys.
    pub(super) fn of_head(
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        row: Reg<U32>,
        [head, batch]: [Reg<U32>; 2],
    ) -> Self {
        let row = longest_first(b, cfg, args, row);
        let flat_head = b.mad(batch, args.heads, head);
        let [q_len, kv_len] = args.lengths.used(b, batch);
        Self { row, flat_head, head, batch, q_len, kv_len }
    }

    /// First row of the tile among those of its head, or of the heads that share it.
    pub(super) fn first_row(&self, b: &mut Builder, cfg: Config) -> Reg<U32> {
        b.mul(self.row, cfg.tile_m())
    }

    /// Where the box of columns `col` and rows `row` starts in Q or the output.
    pub(super) fn coordinates(&self, b: &mut Builder, cfg: Config, col: u32, row: Reg<U32>) -> Vec<Val<U32>> {
        let (head, batch) = (self.head.into(), self.batch.into());
        if cfg.pack == 1 {
            return vec![Val::Const(col), row.into(), head, batch];
        }
        let (member, position) = (member(b, cfg, row), position(b, cfg, row));
        vec![Val::Const(col), member.into(), position.into(), head, batch]
    }

    /// The query head of a row.
    pub(super) fn head_of(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        if cfg.pack == 1 {
            return self.head;
        }
        let member = member(b, cfg, row);
        b.mad(self.head, cfg.pack, member)
    }

    /// The query head of a row among those of all batch entries.
    pub(super) fn flat_head_of(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        if cfg.pack == 1 {
            return self.flat_head;
        }
        let member = member(b, cfg, row);
        b.mad(self.flat_head, cfg.pack, member)
    }

    /// What the rows of this tile see.
    pub(super) fn visibility(&self, b: &mut Builder, args: &Arguments) -> Visibility {
        args.mask.over(b, self.q_len, self.kv_len)
    }

    /// Key tiles to work through: at least one, which hides everything if there is nothing to see.
    pub(super) fn key_tiles(&self, b: &mut Builder, cfg: Config, args: &Arguments) -> KeyTiles {
        let first = self.first_row(b, cfg);
        let tiles = self.key_tiles_of(b, cfg, args, first, cfg.tile_m());
        let end = b.max(tiles.end, 1);
        let last = b.sub(end, 1);
        KeyTiles { end, begin: tiles.begin.map(|begin| b.min(begin, last)), ..tiles }
    }

    /// Key tiles that `rows` rows from `first` on see something of.
    fn key_tiles_of(
        &self,
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        first: Reg<U32>,
        rows: u32,
    ) -> KeyTiles {
        let end = b.add(first, rows);
        let [first, end] = [first, end].map(|row| position(b, cfg, row));
        let end = b.min(end, self.q_len);
        let last = b.sub(end, 1);
        let rows = [first.signed(), last.signed()];
        self.visibility(b, args).key_tiles(b, rows, cfg.tile_n())
    }

    /// Key tiles that consumer `group` works through: all but those at either end that hide everything from it.
    pub(super) fn own_key_tiles(
        &self,
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        group: Reg<U32>,
    ) -> OwnTiles {
        let all = self.key_tiles(b, cfg, args);
        if !cfg.passes() {
            return OwnTiles { tiles: all, behind: None, before: None };
        }
        let first = self.first_row(b, cfg);
        let first = b.mad(group, ROWS_PER_GROUP, first);
        let own = self.key_tiles_of(b, cfg, args, first, ROWS_PER_GROUP);
        // One at least is left, and one at most is passed over at either end, whatever the rows see.
        let first = all.begin.map_or(Val::Const(0), Val::from);
        let (second, last) = (b.add(first, 1), b.sub(all.end, 1));
        let end = b.max(own.end, last);
        let end = b.max(end, second);
        let end = b.min(end, all.end);
        let begin = own.begin.map(|begin| {
            let most = b.sub(end, 1);
            let begin = b.min(begin, most);
            let begin = b.min(begin, second);
            b.max(begin, first)
        });
        let behind = cfg.mask.right.then(|| b.test(Cmp::Lt, end, all.end));
        let before = begin.map(|begin| b.test(Cmp::Gt, begin, first));
        OwnTiles { tiles: KeyTiles { end, begin, ..own }, behind, before }
    }

    /// Tells consumers that this is their next tile.
    pub(super) fn post(&self, b: &mut Builder, cfg: Config, to: Shared) {
        // The row is counted from one, so that zero says that there is none.
        let row = b.add(self.row, 1);
        b.store_shared(to, &[row, self.flat_head, self.head, self.batch].map(Val::from));
        if cfg.used() {
            b.store_shared(to.at(16), &[self.q_len, self.kv_len].map(Val::from));
        }
    }

    /// Tells consumers that there is no further tile.
    pub(super) fn post_end(b: &mut Builder, cfg: Config, to: Shared) {
        b.store_shared::<U32>(to, &[Val::Const(0); 4]);
        if cfg.used() {
            // Consumers read all of it before they know that it is the end.
            b.store_shared::<U32>(to.at(16), &[Val::Const(0); 2]);
        }
    }

    /// Reads what the producer posted: the tile, and whether there is one.
    pub(super) fn read(b: &mut Builder, cfg: Config, args: &Arguments, from: Shared) -> (Self, Pred) {
        let [row, flat_head, head, batch] = b.load_shared::<U32, 4>(from);
        let [q_len, kv_len] = if cfg.used() {
            b.load_shared::<U32, 2>(from.at(16)).map(|len| b.uniform_register(len))
        } else {
            [args.lengths.seq_q, args.lengths.seq_kv]
        };
        // Loops and branches depend on the row and the lengths alone.
        let row = b.uniform_register(row);
        let there = b.test(Cmp::Ne, row, 0);
        (Self { row: b.sub(row, 1), flat_head, head, batch, q_len, kv_len }, there)
    }

    /// The same tile in registers that [`set`](Self::set) may change.
    pub(super) fn variable(&self, b: &mut Builder, cfg: Config) -> Self {
        let mut copy = *self;
        copy.registers(cfg).into_iter().for_each(|reg| *reg = b.var(*reg));
        copy
    }

    /// Becomes another tile.
    pub(super) fn set(&mut self, b: &mut Builder, cfg: Config, mut other: Self) {
        let pairs = self.registers(cfg).into_iter().zip(other.registers(cfg));
        pairs.for_each(|(mine, others)| b.set(*mine, *others));
    }

    /// What differs from tile to tile.
    fn registers(&mut self, cfg: Config) -> Vec<&mut Reg<U32>> {
        let always = [&mut self.row, &mut self.flat_head, &mut self.head, &mut self.batch];
        let lengths = [&mut self.q_len, &mut self.kv_len].into_iter().filter(|_| cfg.used());
        always.into_iter().chain(lengths).collect()
    }
}

/// Row tiles from the last on where rows further down see more keys.
fn longest_first(b: &mut Builder, cfg: Config, args: &Arguments, row: Reg<U32>) -> Reg<U32> {
    if !cfg.mask.right {
        return row;
    }
    let last = b.sub(args.row_tiles, 1);
    b.sub(last, row)
}

/// The position of a tile's row in its sequence.
pub(super) fn position(b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
    if cfg.pack == 1 { row } else { b.shr(row, cfg.pack.trailing_zeros()) }
}

/// Which of the heads that share a tile a row belongs to.
fn member(b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
    b.and(row, cfg.pack - 1)
}
