//! Copies of 16 bytes per thread: how a team of threads splits a tile, and the queries, which all threads copy.
//!
//! Neighbouring threads copy neighbouring chunks of a row, and a thread keeps its chunk over all rows that it copies. Rows
//! past the end and padding columns become zeros without being read.

use flashcore_tile::{Builder, CHUNK_BYTES, CopyWidth, Pred, Reg, Shared, SmemTile, U32, U64};

use super::{Arguments, Config, Layout, unit::Unit};

/// Rows after which the swizzle pattern repeats, whatever its width.
const PATTERN_ROWS: u32 = 8;

/// How a team of threads shares the chunks of a tile's rows.
#[derive(Debug)]
pub(super) struct Chunks {
    pub(super) rows_per_pass: u32,
    pub(super) passes: u32,
    /// First row of this thread, and its chunk of every row.
    pub(super) row: Reg<U32>,
    pub(super) chunk: Reg<U32>,
    /// Whether this thread copies at all, and whether its chunk holds features, where some do not.
    takes_part: Option<Pred>,
    features: Option<Pred>,
}

impl Chunks {
    /// `thread` of `threads`; the first `dim` columns of the tile are features.
    pub(super) fn new(b: &mut Builder, tile: &SmemTile, dim: u32, thread: Reg<U32>, threads: u32) -> Self {
        let per_chunk = tile.element().per_chunk();
        let (chunks, held) = (tile.cols() / per_chunk, dim / per_chunk);
        let lanes = chunks.next_power_of_two();
        let rows_per_pass = threads / lanes;
        let (row, chunk) = (b.let_(thread / lanes), b.let_(thread % lanes));
        let padding = (lanes > chunks).then(|| b.let_(chunk.lt(chunks)));
        let beyond = (rows_per_pass > tile.rows()).then(|| b.let_(row.lt(tile.rows())));
        Self {
            rows_per_pass,
            passes: tile.rows().div_ceil(rows_per_pass),
            row,
            chunk,
            takes_part: padding.or(beyond).map(|one| match (padding, beyond) {
                (Some(x), Some(y)) => b.both(x, y),
                _ => one,
            }),
            features: (held < chunks).then(|| b.let_(chunk.lt(held))),
        }
    }

    /// Bytes that are read of a row that is `there`.
    pub(super) fn present(&self, b: &mut Builder, there: Pred) -> Reg<U32> {
        let there = self.features.map_or(there, |features| b.both(features, there));
        b.select(there, CHUNK_BYTES, 0)
    }

    /// Runs `body` in the threads that copy.
    pub(super) fn each(&self, b: &mut Builder, body: impl FnOnce(&mut Builder)) {
        match self.takes_part {
            Some(some) => b.if_(some, body),
            None => body(b),
        }
    }

    /// Where this thread's chunk goes in a tile that starts at `start`: one address for each row of the swizzle pattern
    /// that it meets.
    pub(super) fn places(&self, b: &mut Builder, tile: &SmemTile, start: Reg<U32>) -> Vec<Reg<U32>> {
        let per_slab = tile.slab_width() / CHUNK_BYTES;
        let slab = b.let_((self.chunk / per_slab) * tile.slab_bytes() + start);
        let within = b.let_(self.chunk % per_slab);
        let met = (PATTERN_ROWS / self.rows_per_pass).clamp(1, self.passes);
        let place = |n: u32| {
            let row = b.let_(self.row + n * self.rows_per_pass);
            tile.chunk(b, slab, row, within)
        };
        (0..met).map(place).collect()
    }

    /// Where the rows of pass `pass` go.
    pub(super) fn place(&self, tile: &SmemTile, places: &[Reg<U32>], pass: u32) -> Shared {
        let rows = pass * self.rows_per_pass / PATTERN_ROWS * PATTERN_ROWS;
        Shared { base: places[pass as usize % places.len()], offset: rows * tile.slab_width() }
    }
}

/// The copies of a unit's queries by all threads: where each comes from, and where it goes.
pub(super) struct QueryLoad {
    chunks: Chunks,
    copies: Vec<(Shared, Reg<U64>, Reg<U32>)>,
}

impl QueryLoad {
    /// Prepares the copies; rows that are no queries become zeros.
    pub(super) fn new(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout, unit: &Unit) -> Self {
        let thread = b.thread();
        let chunks = Chunks::new(b, &layout.q, cfg.dim_qk, thread, cfg.shape.threads());
        let start = layout.q.at(b).address(b);
        let places = chunks.places(b, &layout.q, start);
        let copy = |pass: u32| {
            let row = b.let_(chunks.row + pass * chunks.rows_per_pass);
            let there = b.let_(row.lt(unit.sequence.rows));
            let (query, head) = (unit.query_of(b, args, row), unit.head_of(b, args, row));
            let place = unit.sequence.place_of(b, query);
            let from = args.q.at(b, unit.sequence.batch, head, place);
            let from = b.let_(from + chunks.chunk.mul_wide(CHUNK_BYTES));
            // Nothing is read of rows that are not there, but addresses stay inside the tensor all the same.
            let from = b.select(there, from, args.q.base());
            (chunks.place(&layout.q, &places, pass), from, chunks.present(b, there))
        };
        let copies = (0..chunks.passes).map(copy).collect();
        Self { chunks, copies }
    }

    /// Starts the copies: a group of their own.
    pub(super) fn issue(&self, b: &mut Builder) {
        self.chunks.each(b, |b| {
            for &(to, from, present) in &self.copies {
                b.copy_async(CopyWidth::B16, to, from, Some(present.into()));
            }
        });
        b.commit_copies();
    }
}
