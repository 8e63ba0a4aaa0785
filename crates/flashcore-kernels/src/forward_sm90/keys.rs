//! Where the keys and values of a tile lie, and how tensor copies bring a key tile of them: rows one after another, or
//! pages that a table names. The producer calls this.

use flashcore_tile::{Builder, Mbarrier, Reg, Shared, SmemTile, TensorMap, U32, Val};

use super::{Arguments, Config, schedule::Tile};
use crate::parts::pages::PageArguments;

/// Where the keys of a sequence lie.
#[derive(Clone, Copy, Debug)]
pub(super) enum Keys {
    /// In the tile's batch entry, from its first row on.
    Entry,
    /// In the only batch entry, from this row on.
    Packed { start: Reg<U32> },
    /// In the pages of this sequence.
    Paged { pages: PageArguments, sequence: Reg<U32> },
}

impl Keys {
    /// Those of a batch entry.
    pub(super) fn of_entry(args: &Arguments, tile: &Tile) -> Self {
        let paged = args.pages.zip(tile.entry());
        paged.map_or(Self::Entry, |(pages, sequence)| Self::Paged { pages, sequence })
    }

    /// Those of a packed sequence, from row `start` on where they are packed too.
    pub(super) fn of_sequence(args: &Arguments, sequence: Reg<U32>, start: Reg<U32>) -> Self {
        args.pages.map_or(Self::Packed { start }, |pages| Self::Paged { pages, sequence })
    }

    /// Copies the tile of keys, or of their values, that begins with key `key` of a head.
    pub(super) fn copy(
        &self,
        b: &mut Builder,
        cfg: Config,
        (tile, head): (&Tile, Reg<U32>),
        key: Reg<U32>,
        to: &Destination<'_>,
    ) {
        let row = match *self {
            Self::Entry => key,
            Self::Packed { start } => b.let_(key + start),
            Self::Paged { pages, sequence } => {
                return to.copy_pages(b, cfg, (pages, sequence), (key, tile.kv_len), head);
            }
        };
        let at = [Val::Const(0), row.into(), head.into(), tile.batch()];
        b.tma_load(to.map, to.tile, to.at, at, to.done);
    }
}

/// Where a key tile goes, by which tensor map, and what its bytes complete on.
pub(super) struct Destination<'a> {
    pub(super) map: TensorMap,
    pub(super) tile: &'a SmemTile,
    pub(super) at: Shared,
    pub(super) done: Mbarrier,
}

impl Destination<'_> {
    /// Copies the keys from `key` on, of `keys` that a sequence has, page by page or part of a page by part.
    fn copy_pages(
        &self,
        b: &mut Builder,
        cfg: Config,
        (pages, sequence): (PageArguments, Reg<U32>),
        (key, keys): (Reg<U32>, Reg<U32>),
        head: Reg<U32>,
    ) {
        let rows = cfg.copied_rows();
        // All numbers are asked for before the first is needed.
        let found: Vec<_> = (0..cfg.tile_n() / rows)
            .map(|n| {
                let key = if n == 0 { key } else { b.let_(key + n * rows) };
                // What the table says beyond the keys is never looked at; some page is copied in their place.
                let there = b.let_(key.lt(keys));
                let (number, _, within) = pages.follow(b, sequence, key, there);
                (number, within)
            })
            .collect();
        for (n, (number, within)) in (0..).zip(found) {
            let page = pages.clamp(b, number);
            let to = self.at.at(n * rows * self.tile.slab_width());
            let at = [Val::Const(0), within.into(), head.into(), page.into()];
            b.tma_load(self.map, self.tile, to, at, self.done);
        }
    }
}
