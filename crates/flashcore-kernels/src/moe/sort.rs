//! Puts tokens under their experts: one CTA counts, adds up and numbers rows.
//!
//! Each expert's rows are padded to whole tiles, in the index alone. In which order the rows of an expert lie depends on
//! the order in which threads count, and nothing else does.

use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, Params, Pred, Program, Reg, Scope, Shared, U32, U64};

use super::{IdSource, Layer, NONE, ids::IdArgument, overlaps};
use crate::slots::moe as slots;

/// Threads of the CTA: one for each expert.
const THREADS: u32 = 1024;
/// Entries that a thread reads before it needs any.
const AT_ONCE: u32 = 8;

/// A kernel of this family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The architecture it is built for.
    pub target: Target,
    /// Where the numbers of experts are.
    pub ids: IdSource,
    /// Rows of a tile: a power of two.
    pub tile_m: u32,
    /// Whether there is an even number of tiles, the last one perhaps without a row.
    pub even: bool,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let even = if self.even { "_even" } else { "" };
        let name = format!("fc_moe_sort_{}_{}_m{}{even}", self.target, self.ids.name(), self.tile_m);
        Ident::new(name).expect("made of legal parts")
    }
}

/// The launch for a layer; `None` where there are no tokens.
pub fn extent(cfg: &Config, layer: &Layer) -> Option<Extent> {
    let (grid, workspace) = ([1, 1, 1], layer.workspace.clone());
    (layer.problem.entries() > 0).then(|| Extent { grid, workspace, dependent: overlaps(cfg.target) })
}

/// Where the index lies, as registers; products and sums read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexArgument {
    /// Number of tiles.
    pub(super) count: Reg<U64>,
    /// Expert of each tile.
    pub(super) experts: Reg<U64>,
    /// Entry of each row.
    pub(super) entries: Reg<U64>,
    /// Row of each entry.
    pub(super) rows: Reg<U64>,
}

impl IndexArgument {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>) -> Self {
        let count = params.buffer(b, "index", slots::INDEX);
        let [experts, entries, rows] = [("tile_experts", 0), ("row_entries", 1), ("entry_rows", 2)]
            .map(|(name, n)| params.u64(b, name, move |layer| layer.index_offsets()[n]));
        let [experts, entries, rows] = [experts, entries, rows].map(|offset| b.let_(count + offset));
        Self { count, experts, entries, rows }
    }
}

/// What the CTA works with.
struct Sort {
    ids: IdArgument,
    index: IndexArgument,
    entries: Reg<U32>,
    tile_m: u32,
    even: bool,
    thread: Reg<U32>,
    /// One number per expert: rows, then the first row.
    counts: u32,
    /// One number per thread.
    sums: u32,
}

/// Builds the kernel.
pub fn sort(cfg: &Config) -> Result<Program<Layer>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, THREADS, 1);
    let mut params = Params::default();
    let ids = IdArgument::declare(&mut b, &mut params, cfg.ids);
    let index = IndexArgument::declare(&mut b, &mut params);
    let entries = params.u32(&mut b, "entries", |layer| layer.problem.entries() as u32);
    let (counts, sums) = (b.shared(4 * THREADS, 16), b.shared(4 * THREADS, 16));
    let thread = b.thread();
    let sort = Sort { ids, index, entries, tile_m: cfg.tile_m, even: cfg.even, thread, counts, sums };
    let own = sort.number(&mut b, counts, thread);
    b.store_shared(own, &[0u32.into()]);
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
    }
    b.sync_cta();
    sort.count(&mut b);
    b.sync_cta();
    sort.lay_out(&mut b);
    b.sync_cta();
    if cfg.even {
        sort.fill_up(&mut b);
    }
    if overlaps(cfg.target) {
        b.launch_dependents();
    }
    sort.place(&mut b);
    b.finish(&name, params)
}

impl Sort {
    /// Number `n` of an array in shared memory.
    fn number(&self, b: &mut Builder, array: u32, n: Reg<U32>) -> Shared {
        let at = b.shared_at(array);
        at.plus(b, n * 4)
    }

    /// Calls `visit` with each of this thread's entries, whether there is such an entry, and its expert.
    fn each_entry(&self, b: &mut Builder, visit: impl Fn(&mut Builder, Reg<U32>, Pred, Reg<U32>)) {
        let first = b.var_in(Scope::Lane, self.thread);
        b.while_(
            |_| first.lt(self.entries),
            |b| {
                let read = |n: u32| {
                    let entry = b.let_(first + n * THREADS);
                    let there: Pred = b.let_(entry.lt(self.entries));
                    (entry, there, self.ids.local(b, entry, Some(there)))
                };
                let entries: Vec<_> = (0..AT_ONCE).map(read).collect();
                entries.into_iter().for_each(|(entry, there, expert)| visit(b, entry, there, expert));
                b.add_to(first, AT_ONCE * THREADS);
            },
        );
    }

    /// Counts the rows of every expert; a row's number among them waits where its number among all will be.
    fn count(&self, b: &mut Builder) {
        self.each_entry(b, |b, entry, there, expert| {
            let rank = b.var_in(Scope::Lane, NONE);
            b.if_(expert.ne(NONE), |b| {
                let count = self.number(b, self.counts, expert);
                let counted = b.atomic_add_shared(count, 1);
                b.set(rank, counted);
            });
            let at = b.let_(self.index.rows + entry.mul_wide(4));
            b.predicated(there, |b| b.store_global(at, &[rank.into()]));
        });
    }

    /// Gives every expert its tiles, in the order of experts, and names what no entry will.
    fn lay_out(&self, b: &mut Builder) {
        let own = self.number(b, self.counts, self.thread);
        let [count] = b.load_shared::<U32, 1>(own);
        let tiles = b.let_(count.div_ceil(self.tile_m));
        let end = self.add_up(b, tiles);
        let first = b.let_(end - tiles);
        let row = b.let_(first * self.tile_m);
        b.store_shared(own, &[row.into()]);
        let last: Pred = b.let_(self.thread.eq(THREADS - 1));
        let count = if self.even { b.let_((end + 1) / 2 * 2) } else { end };
        b.predicated(last, |b| b.store_global(self.index.count, &[count.into()]));
        let tile = b.var_in(Scope::Lane, first);
        b.while_(
            |_| tile.lt(end),
            |b| {
                let at = b.let_(self.index.experts + tile.mul_wide(4));
                b.store_global(at, &[self.thread.into()]);
                b.add_to(tile, 1);
            },
        );
        let padding = b.var_in(Scope::Lane, row + count);
        let stop = b.let_(end * self.tile_m);
        b.while_(
            |_| padding.lt(stop),
            |b| {
                let at = b.let_(self.index.entries + padding.mul_wide(4));
                b.store_global(at, &[NONE.into()]);
                b.add_to(padding, 1);
            },
        );
    }

    /// Names the last tile of an odd number and its rows, of which there is none.
    fn fill_up(&self, b: &mut Builder) {
        let last = b.shared_at(self.sums + 4 * (THREADS - 1));
        let [end] = b.load_shared::<U32, 1>(last);
        let at = b.let_(self.index.experts + end.mul_wide(4));
        let odd = (end % 2).eq(1);
        b.predicated(odd & self.thread.eq(0), |b| b.store_global(at, &[0u32.into()]));
        let row = b.let_(end * self.tile_m + self.thread);
        let at = b.let_(self.index.entries + row.mul_wide(4));
        let odd = (end % 2).eq(1);
        b.predicated(odd & self.thread.lt(self.tile_m), |b| b.store_global(at, &[NONE.into()]));
    }

    /// The sum of the values of this thread and all before it.
    fn add_up(&self, b: &mut Builder, value: Reg<U32>) -> Reg<U32> {
        let own = self.number(b, self.sums, self.thread);
        let sum = b.var_in(Scope::Lane, value);
        let distance = b.var(1u32);
        b.store_shared(own, &[sum.into()]);
        b.while_(
            |_| distance.lt(THREADS),
            |b| {
                b.sync_cta();
                let before: Pred = b.let_(self.thread.ge(distance));
                let from = b.select(before, self.thread - distance, 0);
                let from = self.number(b, self.sums, from);
                let [other] = b.load_shared::<U32, 1>(from);
                b.sync_cta();
                let added = b.select(before, other, 0);
                b.add_to(sum, added);
                b.store_shared(own, &[sum.into()]);
                b.set(distance, distance * 2);
            },
        );
        sum
    }

    /// Numbers the rows.
    fn place(&self, b: &mut Builder) {
        self.each_entry(b, |b, entry, _, expert| {
            b.if_(expert.ne(NONE), |b| {
                let first = self.number(b, self.counts, expert);
                let [first] = b.load_shared::<U32, 1>(first);
                let at = b.let_(self.index.rows + entry.mul_wide(4));
                let [rank] = b.load_global::<U32, 1>(at);
                let row = b.let_(first + rank);
                b.store_global(at, &[row.into()]);
                let at = b.let_(self.index.entries + row.mul_wide(4));
                b.store_global(at, &[entry.into()]);
            });
        });
    }
}
