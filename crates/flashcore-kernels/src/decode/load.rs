//! Copies of 16 bytes per lane: a warp's key tiles into its own ring, the queries into the tile that all warps read.
//!
//! Neighbouring lanes copy neighbouring chunks of a row, and a lane keeps its chunk over all rows that it copies. Rows
//! that are not there, and columns that only pad, become zeros without being read.

use flashcore_tile::{Builder, CHUNK_BYTES, CopyWidth, Pred, Reg, S32, Shared, SmemTile, U32, U64};

use super::{Arguments, Config, Layout, unit::Unit};
use crate::parts::tensor::TensorArgument;

/// Rows after which the swizzle pattern repeats, whatever its width.
const PATTERN_ROWS: u32 = 8;
const WARP: u32 = 32;

/// How a team of threads shares the chunks of a tile's rows.
#[derive(Debug)]
struct Chunks {
    rows_per_pass: u32,
    passes: u32,
    /// First row of this thread, and its chunk of every row.
    row: Reg<U32>,
    chunk: Reg<U32>,
    /// Whether this thread copies at all, and whether its chunk holds features, where some do not.
    takes_part: Option<Pred>,
    features: Option<Pred>,
}

impl Chunks {
    /// `thread` of `threads`; the first `dim` columns of the tile are features.
    fn new(b: &mut Builder, tile: &SmemTile, dim: u32, thread: Reg<U32>, threads: u32) -> Self {
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
    fn present(&self, b: &mut Builder, there: Pred) -> Reg<U32> {
        let there = self.features.map_or(there, |features| b.both(features, there));
        b.select(there, CHUNK_BYTES, 0)
    }

    /// Runs `body` in the threads that copy.
    fn each(&self, b: &mut Builder, body: impl FnOnce(&mut Builder)) {
        match self.takes_part {
            Some(some) => b.if_(some, body),
            None => body(b),
        }
    }

    /// Where this thread's chunk goes in a tile that starts at `start`: one address for each row of the swizzle pattern
    /// that it meets.
    fn places(&self, b: &mut Builder, tile: &SmemTile, start: Reg<U32>) -> Vec<Reg<U32>> {
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
    fn place(&self, tile: &SmemTile, places: &[Reg<U32>], pass: u32) -> Shared {
        let rows = pass * self.rows_per_pass / PATTERN_ROWS * PATTERN_ROWS;
        Shared { base: places[pass as usize % places.len()], offset: rows * tile.slab_width() }
    }
}

/// Starts the copies of the unit's queries by all threads; rows that are none become zeros.
pub(super) fn queries(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout, unit: &Unit) {
    let thread = b.thread();
    let chunks = Chunks::new(b, &layout.q, cfg.dim_qk, thread, cfg.shape.threads());
    let start = layout.q.at(b).address(b);
    let places = chunks.places(b, &layout.q, start);
    chunks.each(b, |b| {
        for pass in 0..chunks.passes {
            let row = b.let_(chunks.row + pass * chunks.rows_per_pass);
            let there = b.let_(row.lt(unit.rows));
            let present = chunks.present(b, there);
            let (query, head) = (unit.query_of(b, args, row), unit.head_of(b, args, row));
            let place = unit.place_of(b, query);
            let from = args.q.at(b, unit.batch, head, place);
            let from = b.let_(from + chunks.chunk.mul_wide(CHUNK_BYTES));
            // Nothing is read of rows that are not there, but addresses stay inside the tensor all the same.
            let from = b.select(there, from, args.q.base());
            let to = chunks.place(&layout.q, &places, pass);
            b.copy_async(CopyWidth::B16, to, from, Some(present.into()));
        }
    });
    b.commit_copies();
}

/// One warp's copies of its tiles of keys or values.
#[derive(Debug)]
pub(super) struct WarpLoad {
    tile: SmemTile,
    chunks: Chunks,
    places: Vec<Reg<U32>>,
    /// Where this lane's first row of the next tile lies.
    from: Reg<U64>,
    /// Bytes from one pass to the next, and from one tile of the warp to its next.
    pass: Reg<U64>,
    step: Reg<U64>,
}

impl WarpLoad {
    /// Copies into the ring of `warp`, of which the first `dim` columns are features, beginning with the tile at row `row`
    /// of a tensor.
    pub(super) fn new(
        b: &mut Builder,
        cfg: &Config,
        unit: &Unit,
        (tensor, tile, dim): (&TensorArgument, &SmemTile, u32),
        (warp, row): (Reg<U32>, Reg<U32>),
    ) -> Self {
        let lane = b.lane();
        let chunks = Chunks::new(b, tile, dim, lane, WARP);
        let start = tile.at(b).address(b);
        let start = b.let_(warp * (cfg.shape.stages * tile.bytes()) + start);
        let places = chunks.places(b, tile, start);
        let row = b.let_(row + chunks.row);
        let from = tensor.at(b, unit.batch, unit.head_kv, row);
        let from = b.let_(from + chunks.chunk.mul_wide(CHUNK_BYTES));
        let pass = b.let_(tensor.row * u64::from(chunks.rows_per_pass));
        // Passes have moved on by all but one of their rows when a tile ends.
        let rest = cfg.keys_per_turn() - (chunks.passes - 1) * chunks.rows_per_pass;
        let step = b.let_(tensor.row * u64::from(rest));
        Self { tile: *tile, chunks, places, from: b.var(from), pass, step }
    }

    /// Starts the copies of the warp's next tile, of which `rows_there` rows are keys, into stage `stage`.
    pub(super) fn issue(&self, b: &mut Builder, stage: Reg<U32>, rows_there: Reg<S32>) {
        let skip = b.let_(stage * self.tile.bytes());
        let places: Vec<_> = self.places.iter().map(|&place| b.let_(place + skip)).collect();
        let left = b.let_(rows_there - self.chunks.row.signed());
        for pass in 0..self.chunks.passes {
            let rows = pass * self.chunks.rows_per_pass;
            let there = b.let_(left.gt(rows as i32));
            let present = self.chunks.present(b, there);
            let to = self.chunks.place(&self.tile, &places, pass);
            self.chunks.each(b, |b| b.copy_async(CopyWidth::B16, to, self.from, Some(present.into())));
            let on = if pass + 1 < self.chunks.passes { self.pass } else { self.step };
            b.set(self.from, self.from + on);
        }
    }
}
