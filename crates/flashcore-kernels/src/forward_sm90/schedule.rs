//! Which tile a CTA works on next, and how the producer tells its consumers.
//!
//! Tiles are numbered by sections of heads whose K and V fit in L2 together; inside a section, row tiles run from the
//! longest to the shortest (causal) and heads fastest, so that CTAs that run at the same time share K and V.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Cmp, Pred, Reg, Shared, U32, Val};

use super::{Arguments, Config};

/// Bytes of L2 that a section of heads may fill with K and V.
const SECTION_BYTES: usize = 32 << 20;
/// Row tile, head, batch entry, and whether there is a tile at all.
pub(super) const INFO_BYTES: u32 = 16;

/// In which order CTAs take tiles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, …: best when all tiles are equally long.
    Static,
    /// A CTA takes the next tile when it is done: evens out tiles of different length.
    Atomic,
}

impl Order {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Atomic => "atomic",
        }
    }
}

/// Heads whose K and V share L2; a power of two that divides all heads, so that sections are full.
pub(super) fn section(problem: &Problem, cfg: Config) -> u32 {
    if !cfg.causal {
        return 1;
    }
    let heads = problem.heads_q() * problem.batch();
    let per_head = 2 * problem.seq_kv() * problem.dim_v() * problem.dtype().bytes();
    let fits = |n: &usize| heads.is_multiple_of(*n) && n * per_head <= SECTION_BYTES;
    let largest = (1..usize::BITS).map(|bit| 1usize << bit).take_while(|&n| n <= heads && fits(&n)).last();
    largest.unwrap_or(1) as u32
}

/// A tile: which rows of which head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Row tile.
    pub row: Reg<U32>,
    /// Query head among those of all batch entries.
    pub flat_head: Reg<U32>,
    /// Query head.
    pub head: Reg<U32>,
    /// Batch entry.
    pub batch: Reg<U32>,
}

impl Tile {
    /// Tile number `index`.
    pub(super) fn numbered(b: &mut Builder, cfg: Config, args: &Arguments, index: Reg<U32>) -> Self {
        let section_tiles = b.mul(args.section, args.row_tiles);
        let section = b.div(index, section_tiles);
        let within = b.rem(index, section_tiles);
        let row = b.div(within, args.section);
        let row = if cfg.causal {
            let last = b.sub(args.row_tiles, 1);
            b.sub(last, row)
        } else {
            row
        };
        let flat_head = b.rem(within, args.section);
        let flat_head = b.mad(section, args.section, flat_head);
        Self { row, flat_head, head: b.rem(flat_head, args.heads), batch: b.div(flat_head, args.heads) }
    }

    /// Key tiles that the rows of this tile see.
    pub(super) fn key_tiles(&self, b: &mut Builder, cfg: Config, args: &Arguments) -> Reg<U32> {
        if !cfg.causal {
            return b.div_ceil(args.seq_kv, cfg.tile_n);
        }
        let end = b.mad(self.row, cfg.tile_m(), cfg.tile_m());
        let end = b.min(end, args.seq_kv);
        b.div_ceil(end, cfg.tile_n)
    }

    /// Tells consumers that this is their next tile.
    pub(super) fn post(&self, b: &mut Builder, to: Shared) {
        // The row is counted from one, so that zero says that there is none.
        let row = b.add(self.row, 1);
        b.store_shared(to, &[row, self.flat_head, self.head, self.batch].map(Val::from));
    }

    /// Tells consumers that there is no further tile.
    pub(super) fn post_end(b: &mut Builder, to: Shared) {
        b.store_shared::<U32>(to, &[Val::Const(0); 4]);
    }

    /// Reads what the producer posted: the tile, and whether there is one.
    pub(super) fn read(b: &mut Builder, from: Shared) -> (Self, Pred) {
        let [row, flat_head, head, batch] = b.load_shared::<U32, 4>(from);
        // Loops and branches depend on the row alone.
        let row = b.uniform_register(row);
        let there = b.test(Cmp::Ne, row, 0);
        (Self { row: b.sub(row, 1), flat_head, head, batch }, there)
    }

    /// The same tile in registers that [`set`](Self::set) may change.
    pub(super) fn variable(&self, b: &mut Builder) -> Self {
        let [row, flat_head, head, batch] = self.registers().map(|reg| b.var(reg));
        Self { row, flat_head, head, batch }
    }

    /// Becomes another tile.
    pub(super) fn set(&self, b: &mut Builder, other: &Self) {
        for (mine, others) in self.registers().into_iter().zip(other.registers()) {
            b.set(mine, others);
        }
    }

    const fn registers(&self) -> [Reg<U32>; 4] {
        [self.row, self.flat_head, self.head, self.batch]
    }
}
