//! Where the keys of a tile in pages lie: two words for each key in shared memory.
//!
//! The page numbers of a tile are copied while the previous tile is loaded, in the same group of copies, so nobody
//! waits for the table. A stage's entries are read when its tile is loaded, and overwritten one barrier later.

use flashcore_tile::{Builder, CopyWidth, Global, Reg, S32, Shared, U32, U64, Val};

use super::{load::has_copies, pages::PageArguments, schedule::Tile};

/// Bytes of a key's entry: the number from the table, and which key of its page it is.
pub(crate) const ENTRY_BYTES: u32 = 8;

/// The entries of all stages, in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    offset: u32,
    keys: u32,
    stages: u32,
}

impl Entries {
    /// Entries of so many keys in so many stages.
    pub(crate) fn new(b: &mut Builder, keys: u32, stages: u32) -> Self {
        Self { offset: b.shared(stages * keys * ENTRY_BYTES, ENTRY_BYTES), keys, stages }
    }

    /// Where the entries of a stage start.
    #[track_caller]
    pub(crate) fn of_stage(&self, b: &mut Builder, stage: Val<U32>) -> Shared {
        let base = b.let_(stage * (self.keys * ENTRY_BYTES) + b.shared_base());
        Shared { base, offset: self.offset }
    }

    /// The stage before one.
    #[track_caller]
    pub(crate) fn before(&self, b: &mut Builder, stage: Val<U32>) -> Reg<U32> {
        let stage = b.var(stage);
        b.let_(stage.eq(0).select(self.stages - 1, stage - 1))
    }
}

/// Reads the table of this CTA's sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableReader {
    pages: PageArguments,
    pub(crate) entries: Entries,
    /// The sequence's row of the table.
    row: Reg<U64>,
    /// Keys of the sequence.
    keys: Reg<U32>,
}

impl TableReader {
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, pages: PageArguments, entries: Entries, tile: &Tile) -> Self {
        Self { pages, entries, row: pages.row(b, tile.sequence), keys: tile.kv_len }
    }

    /// Starts to fetch the entries of key tile `tile` into those of `stage`; keys that do not exist get page 0.
    #[track_caller]
    pub(crate) fn fetch(&self, b: &mut Builder, tile: Reg<S32>, stage: Val<U32>) {
        let to = self.entries.of_stage(b, stage);
        let (thread, threads) = (b.thread(), b.threads());
        for first in (0..self.entries.keys).step_by(threads as usize) {
            let n = b.let_(thread + first);
            let fetch = |b: &mut Builder| self.fetch_one(b, tile, n, to);
            if first + threads <= self.entries.keys {
                fetch(b)
            } else {
                b.if_(n.lt(self.entries.keys), fetch)
            }
        }
    }

    /// The entry of key number `n` of a tile.
    #[track_caller]
    fn fetch_one(&self, b: &mut Builder, tile: Reg<S32>, n: Reg<U32>, to: Shared) {
        let key = b.let_((tile * self.entries.keys as i32).unsigned() + n);
        // A tile before the first has keys beyond every length.
        let there = b.let_(key.lt(self.keys));
        let key = b.select(there, key, 0);
        let (page, within) = self.pages.find(b, key);
        let from = b.let_(self.row + page.mul_wide(4));
        let to = to.plus(b, n * ENTRY_BYTES);
        if has_copies(b) {
            let bytes = b.select::<U32>(there, 4, 0);
            b.copy_async(CopyWidth::B4, to, Global::from(from), Some(bytes.into()));
        } else {
            let number = b.var_in(flashcore_tile::Scope::Lane, 0);
            b.predicated(there, |b| b.load_global_into([number], from));
            b.store_shared(to, &[Val::from(number)]);
        }
        b.store_shared(to.at(4), &[Val::from(within)]);
    }

    /// Page and place in it of the key whose entry lies at `at`.
    #[track_caller]
    pub(crate) fn place(&self, b: &mut Builder, at: Shared) -> (Reg<U32>, Reg<U32>) {
        let [number, within] = b.load_shared::<U32, 2>(at);
        (self.pages.clamp(b, number), within)
    }
}
