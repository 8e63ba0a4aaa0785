//! Which tile a CTA works on next, and how the producer tells its consumers.
//!
//! Tiles of a persistent kernel are numbered by sections of heads, the longest of them first.

use flashcore_tile::{Builder, F32, Pred, Reg, Shared, U32, U64, Val};

use super::{Arguments, Config};
use crate::parts::{
    lengths::Span,
    mask::{KeyTiles, Visibility},
    tensor::TensorArgument,
};

/// What a tile takes when it is posted: where it is, the lengths of its sequence, and its factors.
pub(super) const INFO_BYTES: u32 = 32;

/// Where in it the factors lie.
const FACTORS_AT: u32 = 24;

/// The bit of a posted row that says whether references moved often in a tile before.
const RESTLESS_BIT: u32 = 31;
/// The other bits.
const ROW_MASK: u32 = (1 << RESTLESS_BIT) - 1;

/// A tile: which rows of which head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Row tile.
    row: Reg<U32>,
    home: Home,
    /// Query head, or group of heads that share a tile.
    pub head: Reg<U32>,
    /// Queries of the sequence, or those that the batch entry uses.
    pub q_len: Reg<U32>,
    /// Keys of the sequence, or those that the batch entry uses.
    pub kv_len: Reg<U32>,
    /// Whether references moved often in a tile before, if that is known: not 0 then.
    pub restless: Option<Reg<U32>>,
    /// What scores and the output are multiplied by, as bits, where Q, K and V have factors and it is known.
    factors: Option<[Reg<U32>; 2]>,
}

/// Where the queries of a tile's sequence lie.
#[derive(Clone, Copy, Debug)]
enum Home {
    /// In a batch entry.
    Entry {
        /// Query head among those of all batch entries; where several share a tile, their number among such groups.
        flat_head: Reg<U32>,
        batch: Reg<U32>,
    },
    /// In the only batch entry, from this row on.
    Packed { start: Reg<U32> },
}

impl Tile {
    /// Tile number `index`.
    pub(super) fn numbered(b: &mut Builder, cfg: Config, args: &Arguments, index: Reg<U32>) -> Self {
        let (row, flat_head) = args.sections(cfg).find(b, index);
        let (head, batch) = (b.let_(flat_head % args.heads), b.let_(flat_head / args.heads));
        let [q_len, kv_len] = args.lengths.used(b, batch);
        let home = Home::Entry { flat_head, batch };
        Self { row, home, head, q_len, kv_len, restless: None, factors: None }
    }

    /// Row tile `row` of a head; from the last on where rows further down see more keys.
    pub(super) fn of_head(
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        row: Reg<U32>,
        [head, batch]: [Reg<U32>; 2],
    ) -> Self {
        let row = args.sections(cfg).row_tile(b, row);
        let flat_head = b.let_(batch * args.heads + head);
        let [q_len, kv_len] = args.lengths.used(b, batch);
        let home = Home::Entry { flat_head, batch };
        Self { row, home, head, q_len, kv_len, restless: None, factors: None }
    }

    /// Row tile `row` of a head of a packed sequence of `kv_len` keys.
    pub(super) const fn packed(row: Reg<U32>, head: Reg<U32>, queries: Span, kv_len: Reg<U32>) -> Self {
        let home = Home::Packed { start: queries.start };
        Self { row, home, head, q_len: queries.len, kv_len, restless: None, factors: None }
    }

    /// Batch entry.
    pub(super) const fn batch(&self) -> Val<U32> {
        match self.home {
            Home::Entry { batch, .. } => Val::Reg(batch),
            Home::Packed { .. } => Val::Const(0),
        }
    }

    /// The same as a register, where there are several.
    pub(super) const fn entry(&self) -> Option<Reg<U32>> {
        match self.home {
            Home::Entry { batch, .. } => Some(batch),
            Home::Packed { .. } => None,
        }
    }

    /// Where in Q and the output the query at a position of the sequence lies.
    pub(super) fn place(&self, b: &mut Builder, position: Reg<U32>) -> Reg<U32> {
        match self.home {
            Home::Entry { .. } => position,
            Home::Packed { start } => b.let_(start + position),
        }
    }

    /// Address of the row at a position of the sequence, in a tensor like the output.
    pub(super) fn row_of(
        &self,
        b: &mut Builder,
        tensor: &TensorArgument,
        head: Reg<U32>,
        position: Reg<U32>,
    ) -> Reg<U64> {
        match self.home {
            Home::Entry { batch, .. } => tensor.at(b, batch, head, position),
            Home::Packed { start } => {
                let (only, place) = (b.var(0), b.let_(start + position));
                tensor.at(b, only, head, place)
            }
        }
    }

    /// First row of the tile among those of its head, or of the heads that share it.
    pub(super) fn first_row(&self, b: &mut Builder, cfg: Config) -> Reg<U32> {
        b.let_(self.row * cfg.tile_m())
    }

    /// Where the box of columns `col` and rows `row` starts in Q or the output.
    pub(super) fn coordinates(&self, b: &mut Builder, cfg: Config, col: u32, row: Reg<U32>) -> Vec<Val<U32>> {
        let (head, batch) = (self.head.into(), self.batch());
        if cfg.pack == 1 {
            let place = self.place(b, row);
            return vec![Val::Const(col), place.into(), head, batch];
        }
        let (member, position) = (member(b, cfg, row), position(b, cfg, row));
        let place = self.place(b, position);
        vec![Val::Const(col), member.into(), place.into(), head, batch]
    }

    /// The query head of a row.
    pub(super) fn head_of(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        if cfg.pack == 1 {
            return self.head;
        }
        let member = member(b, cfg, row);
        b.let_(self.head * cfg.pack + member)
    }

    /// The query head of a row among those of all batch entries.
    pub(super) fn flat_head_of(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        let flat_head = match self.home {
            Home::Entry { flat_head, .. } => flat_head,
            Home::Packed { .. } => self.head,
        };
        if cfg.pack == 1 {
            return flat_head;
        }
        let member = member(b, cfg, row);
        b.let_(flat_head * cfg.pack + member)
    }

    /// What the rows of this tile see.
    pub(super) fn visibility(&self, b: &mut Builder, args: &Arguments) -> Visibility {
        args.mask.over(b, self.q_len, self.kv_len)
    }

    /// Key tiles to work through: at least one, which hides everything if there is nothing to see.
    pub(super) fn key_tiles(&self, b: &mut Builder, cfg: Config, args: &Arguments) -> KeyTiles {
        let first = self.first_row(b, cfg);
        let tiles = self.key_tiles_of(b, cfg, args, first, cfg.tile_m());
        let end = b.let_(tiles.end.max(1));
        let last = b.let_(end - 1);
        KeyTiles { end, begin: tiles.begin.map(|begin| b.let_(begin.min(last))), ..tiles }
    }

    /// Key tiles that `rows` rows from `first` on see something of.
    pub(super) fn key_tiles_of(
        &self,
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        first: Reg<U32>,
        rows: u32,
    ) -> KeyTiles {
        let end = b.let_(first + rows);
        let [first, end] = [first, end].map(|row| position(b, cfg, row));
        let last = b.let_((end.min(self.q_len) - 1).signed());
        self.visibility(b, args).key_tiles(b, [first.signed(), last], cfg.tile_n())
    }

    /// Signals to consumers that this is their next tile, and whether references moved often in one before.
    pub(super) fn post(&self, b: &mut Builder, cfg: Config, to: Shared, restless: Option<Reg<U32>>) {
        // The row is counted from one, so that zero says that there is none.
        let row = b.let_(self.row + 1);
        let row = restless.map_or(row, |restless| b.let_(row | (restless << RESTLESS_BIT)));
        let first = match self.home {
            Home::Entry { flat_head, .. } => flat_head,
            Home::Packed { start } => start,
        };
        b.store_shared(to, &[row.into(), first.into(), self.head.into(), self.batch()]);
        if cfg.used() {
            b.store_shared(to.at(16), &[self.q_len, self.kv_len].map(Val::from));
        }
    }

    /// Tells consumers what the tile's scores and output are multiplied by.
    pub(super) fn post_factors(&self, b: &mut Builder, args: &Arguments, to: Shared) {
        let Some(factors) = args.factors else { return };
        let head = b.let_(self.head / args.group);
        let Home::Entry { batch, .. } = self.home else { return };
        let [q, k, v] = factors.at(b, batch, head);
        let scores = b.let_(q * k);
        b.store_shared(to.at(FACTORS_AT), &[scores, v].map(Val::from));
    }

    /// What the tile's scores and output are multiplied by, if by anything.
    pub(super) fn factors(&self, b: &mut Builder) -> Option<[Reg<F32>; 2]> {
        self.factors.map(|factors| factors.map(|bits| b.float_of_bits(bits.signed())))
    }

    /// Signals to consumers that there is no further tile.
    pub(super) fn post_end(b: &mut Builder, cfg: Config, to: Shared) {
        b.store_shared::<U32>(to, &[Val::Const(0); 4]);
        if cfg.used() {
            // Consumers read all of it before they know that it is the end.
            b.store_shared::<U32>(to.at(16), &[Val::Const(0); 2]);
        }
        if cfg.posts_factors() {
            b.store_shared::<U32>(to.at(FACTORS_AT), &[Val::Const(0); 2]);
        }
    }

    /// Reads what the producer posted: the tile, and whether there is one.
    pub(super) fn read(b: &mut Builder, cfg: Config, args: &Arguments, from: Shared) -> (Self, Pred) {
        let [row, first, head, batch] = b.load_shared::<U32, 4>(from);
        let home = match cfg.lengths.packs_queries() {
            true => Home::Packed { start: first },
            false => Home::Entry { flat_head: first, batch },
        };
        let [q_len, kv_len] = if cfg.used() {
            b.load_shared::<U32, 2>(from.at(16)).map(|len| b.uniform_register(len))
        } else {
            [args.lengths.seq_q, args.lengths.seq_kv]
        };
        let factors = cfg.posts_factors().then(|| b.load_shared::<U32, 2>(from.at(FACTORS_AT)));
        // Loops and branches depend on the row and the lengths alone.
        let word = b.uniform_register(row);
        let there = b.let_(word.ne(0));
        let (row, restless) = if cfg.policy.adapts {
            (b.let_((word & ROW_MASK) - 1), Some(b.let_(word >> RESTLESS_BIT)))
        } else {
            (b.let_(word - 1), None)
        };
        (Self { row, home, head, q_len, kv_len, restless, factors }, there)
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
        let always = match &mut self.home {
            Home::Entry { flat_head, batch } => vec![&mut self.row, flat_head, &mut self.head, batch],
            Home::Packed { start } => vec![&mut self.row, start, &mut self.head],
        };
        let lengths = [&mut self.q_len, &mut self.kv_len].into_iter().filter(|_| cfg.used());
        always
            .into_iter()
            .chain(lengths)
            .chain(&mut self.restless)
            .chain(self.factors.iter_mut().flatten())
            .collect()
    }
}

/// The position of a tile's row in its sequence.
pub(super) fn position(b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
    if cfg.pack == 1 { row } else { b.let_(row / cfg.pack) }
}

/// Which of the heads that share a tile a row belongs to.
fn member(b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
    b.let_(row % cfg.pack)
}
