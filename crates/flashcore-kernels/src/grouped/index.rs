//! Reads offsets: one CTA with a thread per group makes them ascending and in range and records each group's extent.
//!
//! If depth is divided, the index has a record for each group: its start and end. If rows are divided, it has the
//! number of tiles and a record for each: group, first row, end of the group's rows. Rows of no group come last.

use flashcore_core::MAX_EXPERTS;
use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, Params, Pred, Program, Reg, Scope, Shared, U32, U64};

use super::{Divided, NONE, RECORD, Work};
use crate::{parts::overlaps, slots::grouped as slots};

/// Threads of the CTA: one for each group.
const THREADS: u32 = MAX_EXPERTS as u32;

/// A kernel of this family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The architecture it is built for.
    pub target: Target,
    /// What is divided: rows or depth.
    pub divided: Divided,
    /// Rows of a tile: a power of two.
    pub tile_m: u32,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { target, divided, tile_m } = self;
        let name = format!("fc_grouped_index_{target}_{}_m{tile_m}", divided.name());
        Ident::new(name).expect("made of legal parts")
    }
}

/// The launch for some work.
pub fn extent(cfg: &Config, work: &Work) -> Extent {
    Extent { grid: [1, 1, 1], workspace: work.workspace(), dependent: overlaps(cfg.target) }
}

/// The index, as registers; products read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexArgument(Reg<U64>);

impl IndexArgument {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Work>) -> Self {
        Self(params.buffer(b, "index", slots::INDEX))
    }

    /// Address of the number of tiles.
    pub(super) const fn count(&self) -> Reg<U64> {
        self.0
    }

    /// Address of record number `n`.
    pub(super) fn record(&self, b: &mut Builder, n: Reg<U32>) -> Reg<U64> {
        b.let_(self.0 + (n + 1).mul_wide(RECORD as u32))
    }
}

/// What the CTA works with.
struct Indexing {
    index: IndexArgument,
    tile_m: u32,
    /// How much there is to divide.
    all: Reg<U32>,
    thread: Reg<U32>,
    /// One number per thread, of which the first comes after a 0.
    numbers: u32,
}

/// Builds the kernel.
pub fn index(cfg: &Config) -> Result<Program<Work>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, THREADS, 1);
    let mut params = Params::default();
    let offsets = params.buffer(&mut b, "offsets", slots::OFFSETS);
    let index = IndexArgument::declare(&mut b, &mut params);
    let groups = params.u32(&mut b, "groups", |work: &Work| work.problem.groups() as u32);
    let all = params.u32(&mut b, "all", |work: &Work| work.problem.divided() as u32);
    let numbers = b.shared(4 * (THREADS + 4), 16);
    let thread = b.thread();
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    let indexing = Indexing { index, tile_m: cfg.tile_m, all, thread, numbers };
    let end = indexing.read(&mut b, offsets, groups);
    let [start, end] = indexing.running(&mut b, end, |b, x, y| b.let_(x.max(y)));
    match cfg.divided {
        Divided::Depth => {
            let at = index.record(&mut b, thread);
            b.predicated(thread.lt(groups), |b| b.store_global(at, &[start.into(), end.into()]));
        }
        _ => indexing.name_tiles(&mut b, start, end),
    }
    b.finish(&name, params)
}

impl Indexing {
    /// The end of this thread's group, clamped; 0 where there is no such group.
    fn read(&self, b: &mut Builder, offsets: Reg<U64>, groups: Reg<U32>) -> Reg<U32> {
        let at = b.let_(offsets + self.thread.mul_wide(4));
        let end = b.var_in::<U32>(Scope::Lane, 0);
        b.predicated(self.thread.lt(groups), |b| b.load_global_into([end], at));
        // A negative number is a large one here.
        let negative: Pred = b.let_(end.gt(i32::MAX as u32));
        let inside = b.let_(end.min(self.all));
        b.select(negative, 0, inside)
    }

    fn number(&self, b: &mut Builder, n: Reg<U32>) -> Shared {
        let at = b.shared_at(self.numbers);
        at.plus(b, n * 4)
    }

    /// The values of all threads before this one, put together, and the same with its own.
    fn running(
        &self,
        b: &mut Builder,
        value: Reg<U32>,
        join: impl Fn(&mut Builder, Reg<U32>, Reg<U32>) -> Reg<U32>,
    ) -> [Reg<U32>; 2] {
        let next = b.let_(self.thread + 1);
        let (before, own) = (self.number(b, self.thread), self.number(b, next));
        let sum = b.var_in(Scope::Lane, value);
        let distance = b.var(1u32);
        b.sync_cta();
        b.predicated(self.thread.eq(0), |b| b.store_shared(before, &[0u32.into()]));
        b.store_shared(own, &[sum.into()]);
        b.while_(
            |_| distance.lt(THREADS),
            |b| {
                b.sync_cta();
                let there: Pred = b.let_(next.gt(distance));
                let from = b.select(there, next - distance, 0);
                let from = self.number(b, from);
                let [other] = b.load_shared::<U32, 1>(from);
                b.sync_cta();
                let joined = join(b, sum, other);
                let joined = b.select(there, joined, sum);
                b.set(sum, joined);
                b.store_shared(own, &[sum.into()]);
                b.set(distance, distance * 2);
            },
        );
        b.sync_cta();
        let [earlier] = b.load_shared::<U32, 1>(before);
        [earlier, sum]
    }

    /// Names the tiles of this thread's group, and its share of those that nobody has.
    fn name_tiles(&self, b: &mut Builder, start: Reg<U32>, end: Reg<U32>) {
        let last = b.shared_at(self.numbers + 4 * THREADS);
        let [named] = b.load_shared::<U32, 1>(last);
        let tiles = b.let_((end - start).div_ceil(self.tile_m));
        let [first, beyond] = self.running(b, tiles, |b, x, y| b.let_(x + y));
        let [all_tiles] = b.load_shared::<U32, 1>(last);
        let rest = b.let_((self.all - named).div_ceil(self.tile_m));
        let count = b.let_(all_tiles + rest);
        b.predicated(self.thread.eq(0), |b| b.store_global(self.index.count(), &[count.into()]));
        let (tile, row) = (b.var_in(Scope::Lane, first), b.var_in(Scope::Lane, start));
        b.while_(
            |_| tile.lt(beyond),
            |b| {
                let at = self.index.record(b, tile);
                b.store_global(at, &[self.thread.into(), row.into(), end.into(), 0u32.into()]);
                b.add_to(tile, 1);
                b.add_to(row, self.tile_m);
            },
        );
        b.set(tile, all_tiles + self.thread);
        b.set(row, named + self.thread * self.tile_m);
        b.while_(
            |_| tile.lt(count),
            |b| {
                let at = self.index.record(b, tile);
                b.store_global(at, &[NONE.into(), row.into(), self.all.into(), 0u32.into()]);
                b.add_to(tile, THREADS);
                b.add_to(row, THREADS * self.tile_m);
            },
        );
    }
}
