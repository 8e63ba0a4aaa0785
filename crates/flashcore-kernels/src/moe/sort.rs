//! Groups tokens by expert: one CTA, or a cluster of them, counts, sums and numbers rows.
//!
//! CTAs of a cluster share the entries; each knows from the others' counts where its own rows start.
//!
//! Each expert's rows are padded to whole tiles, in the index only. The order of an expert's rows depends on the order
//! in which threads count; nothing else does.

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
    /// CTAs that share the entries: more than one from sm_90 on.
    pub ctas: u32,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { target, ids, tile_m, even, ctas } = self;
        let even = if *even { "_even" } else { "" };
        let name = format!("fc_moe_sort_{target}_{}_m{tile_m}{even}_c{ctas}", ids.name());
        Ident::new(name).expect("made of legal parts")
    }
}

/// The launch for a layer; `None` where there are no tokens.
pub fn extent(cfg: &Config, layer: &Layer) -> Option<Extent> {
    let (grid, workspace) = ([cfg.ctas, 1, 1], layer.workspace.clone());
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
    /// CTAs of the cluster, and which of them this is, if there are several.
    ctas: u32,
    rank: Option<Reg<U32>>,
    /// One number per expert: its rows here.
    counts: u32,
    /// One number per expert: its first row here.
    starts: u32,
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
    let [counts, starts, sums] = [(); 3].map(|()| b.shared(4 * THREADS, 16));
    let (thread, ctas) = (b.thread(), cfg.ctas);
    let rank = (ctas > 1).then(|| {
        b.cluster(ctas);
        b.cluster_rank()
    });
    let sort = Sort {
        ids,
        index,
        entries,
        tile_m: cfg.tile_m,
        even: cfg.even,
        thread,
        ctas,
        rank,
        counts,
        starts,
        sums,
    };
    let own = sort.number(&mut b, counts, thread);
    b.store_shared(own, &[0u32.into()]);
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    b.sync_cta();
    sort.count(&mut b);
    sort.sync(&mut b);
    sort.lay_out(&mut b);
    sort.sync(&mut b);
    if cfg.even {
        sort.once(&mut b, |b| sort.fill_up(b));
    }
    sort.place(&mut b);
    b.finish(&name, params)
}

impl Sort {
    /// Waits for all threads, also of the other CTAs.
    fn sync(&self, b: &mut Builder) {
        match self.rank {
            None => b.sync_cta(),
            Some(_) => b.sync_cluster(),
        }
    }

    /// Number `n` of an array in shared memory.
    fn number(&self, b: &mut Builder, array: u32, n: Reg<U32>) -> Shared {
        let at = b.shared_at(array);
        at.plus(b, n * 4)
    }

    /// Calls `visit` with each of this thread's entries, whether there is such an entry, and its expert.
    fn each_entry(&self, b: &mut Builder, visit: impl Fn(&mut Builder, Reg<U32>, Pred, Reg<U32>)) {
        let own = self.rank.map_or(self.thread, |rank| b.let_(rank * (AT_ONCE * THREADS) + self.thread));
        let first = b.var_in(Scope::Lane, own);
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
                b.add_to(first, self.ctas * AT_ONCE * THREADS);
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
        let [before, count] = self.counted(b);
        let tiles = b.let_(count.div_ceil(self.tile_m));
        let end = self.add_up(b, tiles);
        let first = b.let_(end - tiles);
        let row = b.let_(first * self.tile_m);
        let start = self.number(b, self.starts, self.thread);
        let own = b.let_(row + before);
        b.store_shared(start, &[own.into()]);
        self.once(b, |b| self.name_tiles(b, [first, end], count));
    }

    /// What one CTA does for all.
    fn once(&self, b: &mut Builder, what: impl FnOnce(&mut Builder)) {
        match self.rank {
            None => what(b),
            Some(rank) => b.if_(rank.eq(0), what),
        }
    }

    /// Rows of this thread's expert that other CTAs have before those here, and all of them.
    fn counted(&self, b: &mut Builder) -> [Reg<U32>; 2] {
        let own = self.number(b, self.counts, self.thread);
        let Some(rank) = self.rank else {
            let none = b.var(0u32);
            return [none, b.load_shared::<U32, 1>(own)[0]];
        };
        let own = own.address(b);
        let [before, all] = [(); 2].map(|()| b.var_in(Scope::Lane, 0u32));
        for cta in 0..self.ctas {
            let there = b.peer_address(own, cta);
            let [count] = b.load_peer::<U32, 1>(there);
            let earlier = b.let_(rank.gt(cta).select(count, 0));
            b.add_to(before, earlier);
            b.add_to(all, count);
        }
        [before, all]
    }

    /// Says how many tiles there are, whose each is, and which rows are padding.
    fn name_tiles(&self, b: &mut Builder, [first, end]: [Reg<U32>; 2], rows: Reg<U32>) {
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
        let padding = b.var_in(Scope::Lane, first * self.tile_m + rows);
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
                let first = self.number(b, self.starts, expert);
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
