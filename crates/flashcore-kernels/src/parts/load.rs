//! Tiles of global memory into shared memory by copies of a few bytes per thread, whatever strides and alignment.
//!
//! A row's portions are spread over neighbouring threads; a thread keeps its portion and takes every n-th row. Rows of more
//! portions than a CTA has threads are taken in several parts, one after another. What lies
//! beyond the tensor's features, and rows beyond a sequence, are never read: zeros take their place. Copies are
//! asynchronous, by chunks of 16 bytes, where the GPU has such and rows are aligned to at least 4 bytes; others pass
//! through registers.

use flashcore_ptx::target::Target;
use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Global, Pred, Reg, S32, Shared, SmemTile, U32, U64, Val,
};

use super::{
    entries::{ENTRY_BYTES, TableReader},
    portion::{Access, Cut, Features, Portion, both},
    tensor::TensorArgument,
};

/// Rows after which the swizzle pattern repeats, whatever its width.
const PATTERN_ROWS: u32 = 8;

/// How a kernel copies tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copies {
    /// What rows are aligned to.
    pub(crate) access: Access,
    /// Words that a thread reads before it needs any, where copies pass through registers: memory is slow to answer, but
    /// many sums leave few registers.
    pub(crate) words_at_once: u32,
}

/// Closes a group of copies, where there are asynchronous ones.
#[track_caller]
pub(crate) fn commit(b: &mut Builder) {
    if has_copies(b) {
        b.commit_copies();
    }
}

/// Waits until at most `pending` groups are under way, where there are any.
#[track_caller]
pub(crate) fn wait(b: &mut Builder, pending: u32) {
    if has_copies(b) {
        b.wait_copies(pending);
    }
}

/// Whether the GPU has asynchronous copies.
pub(super) fn has_copies(b: &Builder) -> bool {
    b.target().includes(Target::Sm80)
}

/// What finds rows in pages.
type Finder = (TensorArgument, TableReader);

/// Where the rows of a tile lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowSource {
    /// At equal distances: where the first starts, and bytes between them.
    Strided(Reg<U64>, Reg<U64>),
    /// Where a table says; the rows of a head in the first page start at the address.
    Paged(Reg<U64>, TensorArgument, TableReader),
}

impl RowSource {
    /// Where rows start, bytes between them, and what finds them in pages.
    const fn parts(self) -> (Reg<U64>, Option<Reg<U64>>, Option<Finder>) {
        match self {
            Self::Strided(start, stride) => (start, Some(stride), None),
            Self::Paged(start, tensor, table) => (start, None, Some((tensor, table))),
        }
    }
}

/// One thread's share of the copies that fill a tile.
#[derive(Debug)]
pub(crate) struct TileLoad {
    access: Access,
    tile: SmemTile,
    /// Bytes that a thread moves of a row, and rows that it reads before it writes any.
    portion: u32,
    at_once: u32,
    rows_per_pass: u32,
    /// First row of this thread.
    row: Reg<U32>,
    /// This thread's portions of a row.
    shares: Vec<Share>,
    /// Where this thread's first row comes from; of rows in pages, where it would lie in the first.
    from: Reg<U64>,
    /// Bytes between rows of neighbouring passes, and between tiles, where rows lie at equal distances.
    steps: Option<Steps>,
    /// What finds rows in pages.
    table: Option<Finder>,
}

/// A portion of each of a thread's rows.
#[derive(Debug)]
struct Share {
    /// Bytes of a row between this portion and the thread's first.
    skip: u32,
    /// Where the rows go, but for the tile's offset, which is added as a constant so that tiles of one shape share
    /// registers: one address per row of the pattern it meets.
    to: Vec<Reg<U32>>,
    /// Whether this thread takes part, where some do not.
    active: Option<Pred>,
    features: Features,
}

/// Distances in bytes.
#[derive(Clone, Copy, Debug)]
struct Steps {
    pass: Reg<U64>,
    tile: Reg<U64>,
}

/// What a thread reads next: a place that it moves along rows at equal distances, or the entry of its first row; and what of
/// its portion are features.
#[derive(Clone, Copy)]
struct Walk {
    from: Reg<U64>,
    entries: Option<Shared>,
    features: Features,
}

impl TileLoad {
    /// The copies of a tile of which the first `dim` columns are features.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, copies: Copies, tile: &SmemTile, dim: u32, rows: RowSource) -> Self {
        let portion = portion_bytes(copies.access, tile, b.threads());
        let portions = tile.cols() * tile.element().bytes() / portion;
        let lanes = portions.next_power_of_two().min(b.threads());
        let rows_per_pass = rows_per_pass(b.threads() / lanes, tile.rows());
        let thread = b.thread();
        let (row, index) = (b.let_(thread / lanes), b.let_(thread % lanes));
        let (start, stride, table) = rows.parts();
        let skipped = stride.map_or(start, |stride| b.let_(row.widen() * stride + start));
        let column = b.let_(index.mul_wide(portion));
        let pass = stride.map(|stride| b.let_(stride * u64::from(rows_per_pass)));
        let mut to = Some(destinations(b, tile, row, (index, portion), rows_per_pass));
        let from = b.let_(skipped + column);
        let steps = stride.zip(pass).map(|(stride, pass)| {
            let tile = b.let_(stride * u64::from(tile.rows()));
            Steps { pass, tile }
        });
        let cut = Cut { element: tile.element(), dim, bytes: portion };
        let shares = (0..portions).step_by(lanes as usize).map(|first| {
            let index = if first == 0 { index } else { b.let_(index + first) };
            let to = to.take().unwrap_or_else(|| destinations(b, tile, row, (index, portion), rows_per_pass));
            let padded = (first + lanes > portions).then_some((index, portions));
            let active = active(b, padded, lanes, (row, rows_per_pass.min(tile.rows())));
            Share {
                skip: first * portion,
                to,
                active,
                features: Features::new(b, cut, index, Some(portions)),
            }
        });
        let shares = shares.collect();
        let (access, at_once) = (copies.access, copies.words_at_once * 4 / portion);
        Self { access, tile: *tile, portion, at_once, rows_per_pass, row, shares, from, steps, table }
    }

    /// Starts the copies into the copy of the tile `skip` bytes on; rows from `rows_there` on become zeros. Rows in pages
    /// have `entries`.
    #[track_caller]
    pub(crate) fn issue(
        &self,
        b: &mut Builder,
        skip: impl Into<Val<U32>>,
        rows_there: Option<Reg<S32>>,
        entries: Option<Shared>,
    ) {
        let skip = skip.into();
        for share in &self.shares {
            self.issue_share(b, share, skip, rows_there, entries);
        }
    }

    /// The copies of one portion of each row.
    #[track_caller]
    fn issue_share(
        &self,
        b: &mut Builder,
        share: &Share,
        skip: Val<U32>,
        rows_there: Option<Reg<S32>>,
        entries: Option<Shared>,
    ) {
        let starts: Vec<_> = share.to.iter().map(|&to| b.let_(to + skip)).collect();
        let left = rows_there.map(|rows| b.let_(rows - self.row.signed()));
        let from = match share.skip {
            0 => b.var(self.from),
            skip => b.var(self.from + u64::from(skip)),
        };
        let entries = entries.map(|entries| entries.plus(b, self.row * ENTRY_BYTES));
        let walk = Walk { from, entries, features: share.features };
        let width = self.access.copy().filter(|_| has_copies(b));
        let copies = |b: &mut Builder| match width {
            Some(width) => self.copies(b, width, &starts, walk, left),
            None => self.copies_through_registers(b, &starts, walk, left),
        };
        match share.active {
            Some(active) => b.if_(active, copies),
            None => copies(b),
        }
    }

    fn passes(&self) -> u32 {
        self.tile.rows().div_ceil(self.rows_per_pass)
    }

    /// Where the rows of pass `pass` go.
    fn place(&self, starts: &[Reg<U32>], pass: u32) -> Shared {
        let row = pass * self.rows_per_pass;
        let offset = self.tile.offset() + row / PATTERN_ROWS * PATTERN_ROWS * self.tile.slab_width();
        Shared { base: starts[pass as usize % starts.len()], offset }
    }

    /// Where the row of pass `pass` comes from; passes are asked for in order.
    #[track_caller]
    fn source(&self, b: &mut Builder, walk: Walk, pass: u32) -> Reg<U64> {
        if let Some(((tensor, table), entries)) = self.table.zip(walk.entries) {
            let (page, row) = table.place(b, entries.at(pass * self.rows_per_pass * ENTRY_BYTES));
            return tensor.in_page(b, walk.from, page, row);
        }
        if let Some(steps) = self.steps.filter(|_| pass > 0) {
            b.add_to(walk.from, steps.pass);
        }
        walk.from
    }

    /// Asynchronous copies, unrolled.
    #[track_caller]
    fn copies(
        &self,
        b: &mut Builder,
        width: CopyWidth,
        starts: &[Reg<U32>],
        walk: Walk,
        left: Option<Reg<S32>>,
    ) {
        let last = self.bytes_of_last(b, walk.features, width);
        for pass in 0..self.passes() {
            let from = self.source(b, walk, pass);
            let row = pass * self.rows_per_pass;
            let there = left.map(|left| b.let_(left.gt(row as i32)));
            let present = both(b, there, walk.features.some);
            let to = self.place(starts, pass);
            let usual = present.map(|present| b.select::<U32>(present, width.bytes(), 0));
            for (at, last) in (0..).step_by(width.bytes() as usize).zip(&last) {
                let bytes = match (*last, present) {
                    (Some(last), Some(present)) => Some(b.select::<U32>(present, last, 0)),
                    (last, _) => last.or(usual),
                };
                b.copy_async(width, to.at(at), Global::from(from).at(at as i32), bytes.map(Val::from));
            }
        }
    }

    /// How much of each piece of this thread's portion is read, where that may be less than all.
    #[track_caller]
    fn bytes_of_last(&self, b: &mut Builder, features: Features, width: CopyWidth) -> Vec<Option<Reg<U32>>> {
        let width = width.bytes();
        let piece = |at: u32| {
            let end = features.end.filter(|end| end.bytes < at + width)?;
            Some(b.select::<U32>(end.whole, width, end.bytes.saturating_sub(at)))
        };
        (0..self.portion).step_by(width as usize).map(piece).collect()
    }

    /// Copies through registers: a loop where they do not hold all, because an unrolled one would keep its addresses.
    #[track_caller]
    fn copies_through_registers(
        &self,
        b: &mut Builder,
        starts: &[Reg<U32>],
        walk: Walk,
        left: Option<Reg<S32>>,
    ) {
        let passes = self.passes_at_once(starts.len() as u32);
        if passes == self.passes() {
            return self.copy_passes(b, passes, starts, walk, left);
        }
        let (rows, row, skip) = (passes * self.rows_per_pass, b.var(0), b.var(0));
        b.while_(
            |_| row.lt(self.tile.rows() as i32),
            |b| {
                let starts: Vec<_> = starts.iter().map(|&start| b.let_(start + skip)).collect();
                let left = left.map(|left| b.let_(left - row));
                let entries = walk.entries.map(|entries| entries.plus(b, row.unsigned() * ENTRY_BYTES));
                self.copy_passes(b, passes, &starts, Walk { entries, ..walk }, left);
                if let Some(steps) = self.steps {
                    b.add_to(walk.from, steps.pass);
                }
                b.add_to(row, rows as i32);
                b.add_to(skip, rows * self.tile.slab_width());
            },
        );
    }

    /// Reads the portions of some passes, then writes them.
    #[track_caller]
    fn copy_passes(
        &self,
        b: &mut Builder,
        passes: u32,
        starts: &[Reg<U32>],
        walk: Walk,
        left: Option<Reg<S32>>,
    ) {
        let read = |pass: u32| {
            let from = self.source(b, walk, pass);
            let there = left.map(|left| b.let_(left.gt((pass * self.rows_per_pass) as i32)));
            Portion::read(b, self.access, &walk.features, from.into(), there)
        };
        let portions: Vec<_> = (0..passes).map(read).collect();
        for (pass, portion) in (0..).zip(portions) {
            let words = portion.words(b);
            b.store_shared(self.place(starts, pass), &words);
        }
    }

    /// Passes that are read together: they meet every row of the pattern, and make up the tile in whole turns.
    fn passes_at_once(&self, met: u32) -> u32 {
        let serves = |passes: &u32| passes.is_multiple_of(met) && self.passes().is_multiple_of(*passes);
        (met..=self.at_once).rev().find(serves).unwrap_or(met.min(self.passes()))
    }

    /// Where this thread's first row of the next tile comes from: may be set.
    pub(crate) const fn from(&self) -> Reg<U64> {
        self.from
    }

    /// Moves on to the tile before this one.
    #[track_caller]
    pub(crate) fn step_back(&self, b: &mut Builder) {
        if let Some(steps) = self.steps {
            b.set(self.from, self.from - steps.tile);
        }
    }
}

/// Bytes that a thread moves of a row: a chunk, but less where elements come one by one, so that neighbouring threads
/// read neighbouring elements. A pass still has several rows: the fewer, the more addresses a thread keeps.
fn portion_bytes(access: Access, tile: &SmemTile, threads: u32) -> u32 {
    let row = tile.cols() * tile.element().bytes();
    let serves = |bytes: &u32| access == Access::B2 && 4 * (row / bytes).next_power_of_two() <= threads;
    [4, 8].into_iter().find(serves).unwrap_or(CHUNK_BYTES)
}

/// Rows that one pass of all threads brings, where they could bring `most`: passes make up the tile.
const fn rows_per_pass(most: u32, rows: u32) -> u32 {
    if most > rows || rows.is_multiple_of(most) { most } else { 1 << rows.trailing_zeros() }
}

/// Where rows of a thread go, one address for each row of the swizzle pattern it meets.
#[track_caller]
fn destinations(
    b: &mut Builder,
    tile: &SmemTile,
    row: Reg<U32>,
    (index, portion): (Reg<U32>, u32),
    rows_per_pass: u32,
) -> Vec<Reg<U32>> {
    let chunks_per_slab = tile.slab_width() / CHUNK_BYTES;
    let per_chunk = CHUNK_BYTES / portion;
    let chunk = if per_chunk > 1 { b.let_(index / per_chunk) } else { index };
    let (slab, in_slab) = (b.let_(chunk / chunks_per_slab), b.let_(chunk % chunks_per_slab));
    let start = b.let_(slab * tile.slab_bytes() + b.shared_base());
    let start = if per_chunk > 1 { b.let_((index % per_chunk) * portion + start) } else { start };
    let meets = (PATTERN_ROWS / rows_per_pass).max(1);
    (0..meets)
        .map(|n| {
            let row = b.let_(row + n * rows_per_pass);
            tile.chunk(b, start, row, in_slab)
        })
        .collect()
}

/// Whether a thread has a portion at all: where `padded` says which number there may not be, and where `lanes` threads for each
/// of some rows are fewer than there are.
#[track_caller]
fn active(
    b: &mut Builder,
    padded: Option<(Reg<U32>, u32)>,
    lanes: u32,
    (row, rows): (Reg<U32>, u32),
) -> Option<Pred> {
    let padded = padded.map(|(index, portions)| b.let_(index.lt(portions)));
    let beyond = (b.threads() / lanes > rows).then(|| b.let_(row.lt(rows)));
    both(b, padded, beyond)
}
