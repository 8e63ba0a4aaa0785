//! Tiles of global memory into shared memory by copies of a few bytes per thread, whatever strides and alignment.
//!
//! A row's chunks of 16 bytes are spread over neighbouring threads; a thread keeps its chunk and takes every n-th row.
//! Chunks beyond the tensor's features, and rows beyond a sequence, are never read: zeros take their place.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Global, Pred, Reg, S32, Scope, Shared, SmemTile, U32, U64, Val,
};

/// Rows after which the swizzle pattern repeats, whatever its width.
const PATTERN_ROWS: u32 = 8;

/// What every row's start is aligned to, in all tensors of a launch: how many bytes can be moved at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Access {
    /// One element.
    B2,
    /// Two elements.
    B4,
    /// Four elements.
    B8,
    /// A chunk.
    B16,
}

impl Access {
    /// Every access, narrowest first.
    pub const ALL: [Self; 4] = [Self::B2, Self::B4, Self::B8, Self::B16];

    /// Bytes moved at once.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B2 => 2,
            Self::B4 => 4,
            Self::B8 => 8,
            Self::B16 => 16,
        }
    }

    /// The widest that addresses at multiples of `bytes` allow; odd addresses hold no 16-bit elements.
    pub fn widest_for(bytes: u64) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|access| bytes.is_multiple_of(u64::from(access.bytes())))
    }

    const fn copy(self) -> Option<CopyWidth> {
        match self {
            Self::B2 => None,
            Self::B4 => Some(CopyWidth::B4),
            Self::B8 => Some(CopyWidth::B8),
            Self::B16 => Some(CopyWidth::B16),
        }
    }
}

/// One thread's share of the copies that fill a tile.
#[derive(Debug)]
pub(super) struct TileLoad {
    access: Access,
    tile: SmemTile,
    rows_per_pass: u32,
    /// First row of this thread.
    row: Reg<U32>,
    /// Where this thread's rows go, but for the tile's offset, which is added as a constant so that tiles of one
    /// shape share registers: one address per row of the pattern it meets.
    to: Vec<Reg<U32>>,
    /// Where this thread's first row comes from.
    from: Reg<U64>,
    /// Bytes between rows of neighbouring passes.
    pass: Reg<U64>,
    /// Bytes between tiles.
    step: Reg<U64>,
    /// Whether this thread takes part, where some do not.
    active: Option<Pred>,
    /// Whether this thread's chunk holds features of the tensor, where some only pad.
    feature: Option<Pred>,
}

impl TileLoad {
    /// The copies of a tile of which the first `dim` columns are features; `from` is the first element of its first
    /// row and `stride` the bytes between rows.
    #[track_caller]
    pub(super) fn new(
        b: &mut Builder,
        access: Access,
        tile: &SmemTile,
        dim: u32,
        from: Reg<U64>,
        stride: Reg<U64>,
    ) -> Self {
        let chunks = tile.cols() / tile.element().per_chunk();
        let lanes = chunks.next_power_of_two();
        let rows_per_pass = b.threads() / lanes;
        let thread = b.thread();
        let (row, chunk) = (b.let_(thread / lanes), b.let_(thread % lanes));
        let skipped = b.let_(row.widen() * stride + from);
        let column = b.let_(chunk.mul_wide(CHUNK_BYTES));
        let pass = b.let_(stride * u64::from(rows_per_pass));
        Self {
            access,
            tile: *tile,
            rows_per_pass,
            row,
            to: destinations(b, tile, row, chunk, rows_per_pass),
            from: b.let_(skipped + column),
            pass,
            step: b.let_(stride * u64::from(tile.rows())),
            active: active(b, tile, row, chunk, rows_per_pass),
            feature: (dim < tile.cols()).then(|| b.let_(chunk.lt(dim / tile.element().per_chunk()))),
        }
    }

    /// Starts the copies into the copy of the tile `skip` bytes on; rows from `rows_there` on become zeros.
    #[track_caller]
    pub(super) fn issue(&self, b: &mut Builder, skip: impl Into<Val<U32>>, rows_there: Option<Reg<S32>>) {
        let skip = skip.into();
        let starts: Vec<_> = self.to.iter().map(|&to| b.let_(to + skip)).collect();
        let left = rows_there.map(|rows| b.let_(rows - self.row.signed()));
        let from = b.var(self.from);
        let copies = |b: &mut Builder| match self.access.copy() {
            Some(width) => self.copies(b, width, &starts, from, left),
            None => self.copies_by_element(b, &starts, from, left),
        };
        match self.active {
            Some(active) => b.if_(active, copies),
            None => copies(b),
        }
    }

    fn passes(&self) -> u32 {
        self.tile.rows().div_ceil(self.rows_per_pass)
    }

    /// Asynchronous copies, unrolled.
    #[track_caller]
    fn copies(
        &self,
        b: &mut Builder,
        width: CopyWidth,
        starts: &[Reg<U32>],
        from: Reg<U64>,
        left: Option<Reg<S32>>,
    ) {
        for pass in 0..self.passes() {
            if pass > 0 {
                b.add_to(from, self.pass);
            }
            let row = pass * self.rows_per_pass;
            let base = starts[pass as usize % starts.len()];
            let offset = self.tile.offset() + row / PATTERN_ROWS * PATTERN_ROWS * self.tile.slab_width();
            let there = left.map(|left| b.let_(left.gt(row as i32)));
            let present = both(b, there, self.feature);
            let bytes = present.map(|present| b.select::<U32>(present, width.bytes(), 0).into());
            for at in (0..CHUNK_BYTES).step_by(width.bytes() as usize) {
                b.copy_async(
                    width,
                    Shared { base, offset: offset + at },
                    Global::from(from).at(at as i32),
                    bytes,
                );
            }
        }
    }

    /// What no asynchronous copy can do; a loop, because its values pass through registers.
    #[track_caller]
    fn copies_by_element(
        &self,
        b: &mut Builder,
        starts: &[Reg<U32>],
        from: Reg<U64>,
        left: Option<Reg<S32>>,
    ) {
        let group = self.rows_per_pass * starts.len() as u32;
        let (row, skip) = (b.var(0), b.var(self.tile.offset()));
        b.while_(
            |_| row.lt(self.tile.rows() as i32),
            |b| {
                for (n, &start) in (0..).zip(starts) {
                    let row = b.let_(row + n * self.rows_per_pass as i32);
                    let there = left.map(|left| b.let_(left.gt(row)));
                    let present = both(b, there, self.feature);
                    let to = b.let_(start + skip);
                    copy_elements(b, to, from, present);
                    b.add_to(from, self.pass);
                }
                b.add_to(row, group as i32);
                b.add_to(skip, group * self.tile.slab_width());
            },
        );
    }

    /// Moves on to the tile before this one.
    #[track_caller]
    pub(super) fn step_back(&self, b: &mut Builder) {
        b.set(self.from, self.from - self.step);
    }
}

/// One chunk, element by element.
#[track_caller]
fn copy_elements(b: &mut Builder, to: Reg<U32>, from: Reg<U64>, present: Option<Pred>) {
    let words: [Reg<U32>; 4] = std::array::from_fn(|_| b.var_in(Scope::Lane, 0));
    let read = |b: &mut Builder| {
        for (at, word) in (0i32..).step_by(4).zip(words) {
            let [low, high] = [at, at + 2].map(|at| b.load_global_16(Global::from(from).at(at)));
            b.set(word, low | (high << 16));
        }
    };
    match present {
        Some(present) => b.if_(present, read),
        None => read(b),
    }
    b.store_shared(to, &words.map(Val::from));
}

/// Where rows of a thread go, one address for each row of the swizzle pattern it meets.
#[track_caller]
fn destinations(
    b: &mut Builder,
    tile: &SmemTile,
    row: Reg<U32>,
    chunk: Reg<U32>,
    rows_per_pass: u32,
) -> Vec<Reg<U32>> {
    let chunks_per_slab = tile.slab_width() / CHUNK_BYTES;
    let (slab, in_slab) = (b.let_(chunk / chunks_per_slab), b.let_(chunk % chunks_per_slab));
    let start = b.let_(slab * tile.slab_bytes() + b.shared_base());
    let meets = (PATTERN_ROWS / rows_per_pass).max(1);
    (0..meets)
        .map(|n| {
            let row = b.let_(row + n * rows_per_pass);
            tile.chunk(b, start, row, in_slab)
        })
        .collect()
}

/// Whether a thread has chunks at all, where rows and threads do not match.
#[track_caller]
fn active(
    b: &mut Builder,
    tile: &SmemTile,
    row: Reg<U32>,
    chunk: Reg<U32>,
    rows_per_pass: u32,
) -> Option<Pred> {
    let chunks = tile.cols() / tile.element().per_chunk();
    let padded = (!chunks.is_power_of_two()).then(|| b.let_(chunk.lt(chunks)));
    let beyond = (rows_per_pass > tile.rows()).then(|| b.let_(row.lt(tile.rows())));
    both(b, padded, beyond)
}

#[track_caller]
fn both(b: &mut Builder, x: Option<Pred>, y: Option<Pred>) -> Option<Pred> {
    match (x, y) {
        (Some(x), Some(y)) => Some(b.both(x, y)),
        (x, y) => x.or(y),
    }
}
