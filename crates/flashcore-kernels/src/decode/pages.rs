//! Which page a key lies in: numbers of the table, prefetched one turn ahead.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Params, Reg, S32, Scope, U32, U64};

use super::{
    Config,
    config::{Copies, Keys},
    unit::Unit,
};
use crate::slots;

/// The page table, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageArguments {
    table: Reg<U64>,
    /// Numbers from one sequence's to the next one's.
    stride: Reg<U32>,
    /// Keys of a page.
    size: Reg<U32>,
    /// The last page there is.
    last: Reg<U32>,
}

impl PageArguments {
    /// The arguments, where keys lie in pages.
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: &Config) -> Option<Self> {
        (cfg.keys == Keys::Paged).then(|| Self {
            table: params.buffer(b, "table", slots::TABLE),
            stride: params.u32(b, "table_row", |p| p.pages().map_or(0, |pages| pages.row_stride as u32)),
            size: params.u32(b, "page_size", |p| p.page_size().unwrap_or(1) as u32),
            last: params.u32(b, "last_page", |p| (p.k().dims().batch as u32).saturating_sub(1)),
        })
    }
}

/// Where a key lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The page, and the key's row in it.
    pub(super) page: Reg<U32>,
    pub(super) row: Reg<U32>,
}

/// The pages of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages {
    args: PageArguments,
    /// Where the sequence's page numbers lie.
    numbers: Reg<U64>,
    /// Number of this lane's key in a tile; all lanes ask for the first where a tile lies in one page.
    key: Reg<U32>,
    scope: Scope,
}

impl Pages {
    pub(super) fn new(b: &mut Builder, cfg: &Config, args: PageArguments, unit: &Unit) -> Self {
        let first = b.let_(unit.sequence.index.mul_wide(args.stride));
        let numbers = b.let_(first * 4 + args.table);
        let (key, scope) = match cfg.shape.copies {
            Copies::Lanes => {
                let lane = b.lane();
                (b.let_(lane % cfg.shape.tile_n), Scope::Lane)
            }
            Copies::Tensor => (b.var(0), Scope::Warp),
        };
        Self { args, numbers, key, scope }
    }

    /// Fetches the place of this lane's key in tile `tile`.
    pub(super) fn fetch(&self, b: &mut Builder, cfg: &Config, unit: &Unit, tile: Reg<S32>) -> Entry {
        let [page, row] = [(); 2].map(|()| b.var_in(self.scope, 0));
        let entry = Entry { page, row };
        self.fetch_into(b, cfg, unit, (tile, entry));
        entry
    }

    /// Like [`fetch`](Self::fetch), into registers that hold another.
    pub(super) fn fetch_into(
        &self,
        b: &mut Builder,
        cfg: &Config,
        unit: &Unit,
        (tile, entry): (Reg<S32>, Entry),
    ) {
        let first = b.let_(tile * cfg.shape.tile_n as i32);
        let key = b.let_(first.unsigned() + self.key);
        let number = b.let_(key / self.args.size);
        b.set(entry.row, key - number * self.args.size);
        let at = b.let_(self.numbers + number.mul_wide(4));
        // What the table says beyond the keys is never looked at.
        b.predicated(key.lt(unit.sequence.keys), |b| b.load_global_into([entry.page], at));
    }

    /// The page of an entry, which has arrived, clamped to the range of the pages.
    pub(super) fn page(&self, b: &mut Builder, entry: Entry) -> Reg<U32> {
        b.let_(entry.page.signed().max(0).min(self.args.last.signed()).unsigned())
    }
}
