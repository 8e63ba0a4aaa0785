//! The epilogue: a warp's 16 rows of the output go to shared memory and from there by tensor copy to global memory, f32
//! rows straight from registers.

use std::ops::Range;

use flashcore_tile::{Acc, Builder, CHUNK_BYTES, F32, Global, Pred, Reg, Shared, U32, U64, Val};

use super::{
    ROWS_PER_WARP,
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::parts::{
    row_end::{self, LseOutput},
    softmax::{Finished, Rows},
    wide::{self, Ended, Vector, WideRows},
};

/// Columns of 16-bit elements that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;

const WARP: u32 = 32;

/// How the rows of this warp leave.
pub(super) enum Epilogue {
    /// Through shared memory, by tensor copies.
    Staged(Staged),
    /// From registers, being f32.
    Wide,
}

impl Epilogue {
    pub(super) fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        if consumer.cfg.wide() { Self::Wide } else { Self::Staged(Staged::new(b, consumer)) }
    }

    /// Writes the rows of one tile.
    pub(super) fn write(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        tile: &Tile,
        output: &Acc,
        ended: Ended,
    ) {
        match self {
            Self::Staged(staged) => staged.write(b, consumer, tile, output, ended.factor),
            Self::Wide => {
                let vectors: Vec<Vector> =
                    output.regs().chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]).collect();
                let rows = consumer.wide_rows(b, tile, None);
                rows.write(b, &ended, &vectors, |_, _| None);
            }
        }
    }

    /// Waits until every store has been written; at the end of the kernel.
    pub(super) fn drain(&self, b: &mut Builder) {
        if let Self::Staged(staged) = self {
            b.predicated(staged.leader, |b| b.tma_wait(0));
        }
    }
}

/// Where this warp gathers its rows.
pub(super) struct Staged {
    /// The warp's own staging tiles.
    staging: Shared,
    /// This lane's address for each pair of matrices in the first slab.
    lanes: Vec<Reg<U32>>,
    leader: Pred,
}

impl Staged {
    fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        let tile = consumer.layout.staging;
        let warp = b.let_((consumer.group << 2) + consumer.warp);
        let skip = b.let_(warp * (consumer.cfg.shape.staging.places * tile.bytes()));
        let start = tile.at(b).plus(b, skip).address(b);
        let (row, right) = (b.let_(consumer.lane & 15), b.let_(consumer.lane >> 4));
        let lanes = (0..tile.slab_cols() / PAIR_COLS).map(|pair| tile.chunk(b, start, row, right + 2 * pair));
        Self { lanes: lanes.collect(), staging: start.into(), leader: consumer.leader }
    }

    /// Scales the rows of one tile by `factor` and writes them by tensor copy.
    fn write(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, output: &Acc, factor: Rows<F32>) {
        let (staging, places) = (consumer.layout.staging, consumer.cfg.shape.staging.places);
        let parts = output.cols().div_ceil(staging.cols() as usize) as u32;
        // Places are taken in turn; where a tile ends out of turn, the next one begins with the place used last.
        let pending = if parts.is_multiple_of(places) { places - 1 } else { 0 };
        self.wait_for_staging(b, pending);
        output.scale_rows(b, factor);
        if consumer.cfg.lengths.cuts_queries() {
            let beyond = consumer.beyond_use(b, tile);
            row_end::clear_unused(b, beyond, output);
        }
        for (part, values) in (0..).zip(output.regs().chunks(staging.cols() as usize / 2)) {
            if part > 0 {
                self.wait_for_staging(b, places - 1);
            }
            let place = part % places * staging.bytes();
            self.gather(b, consumer, values, place);
            b.fence_async();
            b.sync_warp();
            self.store(b, consumer, tile, part * staging.cols()..output.cols() as u32, place);
        }
    }

    /// Writes the columns that were gathered at `place`: by tensor copy, unless that would overwrite rows of another
    /// sequence.
    fn store(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, cols: Range<u32>, place: u32) {
        if !consumer.cfg.lengths.packs_queries() {
            return self.copy(b, consumer, tile, cols, place);
        }
        let row = consumer.warp_row(b, tile);
        let last = b.let_(row + (ROWS_PER_WARP - 1));
        let last = position(b, consumer.cfg, last);
        let whole = b.let_(last.lt(tile.q_len));
        let whole = b.all(whole);
        b.if_else(
            whole,
            |b| self.copy(b, consumer, tile, cols.clone(), place),
            |b| {
                self.store_rows(b, consumer, (tile, row), cols.clone(), place);
                // Copies are counted by parts, whether they copy anything or not.
                b.predicated(self.leader, Builder::tma_commit);
            },
        );
    }

    /// Writes those of the warp's rows that the sequence has: four at a time, eight lanes each.
    fn store_rows(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        (tile, first): (&Tile, Reg<U32>),
        cols: Range<u32>,
        place: u32,
    ) {
        let (cfg, staging, start) = (consumer.cfg, consumer.layout.staging, self.staging.address(b));
        let Some(out) = consumer.args.out_rows else { return };
        let per_row = staging.slab_width() / CHUNK_BYTES;
        let (line, chunk) = (b.let_(consumer.lane / per_row), b.let_(consumer.lane % per_row));
        let column = b.let_(chunk.mul_wide(CHUNK_BYTES));
        for pass in 0..ROWS_PER_WARP * per_row / WARP {
            let line = b.let_(line + pass * (WARP / per_row));
            let row = b.let_(first + line);
            let (head, position) = (tile.head_of(b, cfg, row), position(b, cfg, row));
            let there = b.let_(position.lt(tile.q_len));
            let to = tile.row_of(b, &out, head, position);
            let to = b.let_(to + column);
            let from = Shared::from(staging.chunk(b, start, line, chunk));
            for (slab, col) in (0..staging.slabs()).zip(cols.clone().step_by(staging.slab_cols() as usize)) {
                let chunks = (cfg.dim_v - col) * cfg.output.bytes() / CHUNK_BYTES;
                let from = from.at(place + slab * staging.slab_bytes());
                let to = Global::from(to).at((col * cfg.output.bytes()) as i32);
                if chunks < per_row {
                    // Nobody has gathered anything behind the last feature.
                    b.predicated(there & chunk.lt(chunks), |b| {
                        let values = b.load_shared::<U32, 4>(from);
                        b.store_global(to, &values.map(Val::from));
                    });
                } else {
                    let values = b.load_shared::<U32, 4>(from);
                    b.predicated(there, |b| b.store_global(to, &values.map(Val::from)));
                }
            }
        }
    }

    /// Starts the tensor copies of the columns that were gathered at `place`.
    fn copy(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, cols: Range<u32>, place: u32) {
        let row = consumer.warp_row(b, tile);
        let staging = consumer.layout.staging;
        let Some(map) = consumer.args.out else { return };
        b.predicated(self.leader, |b| {
            for (slab, col) in (0..staging.slabs()).zip(cols.step_by(staging.slab_cols() as usize)) {
                let from = self.staging.at(place + slab * staging.slab_bytes());
                let at = tile.coordinates(b, consumer.cfg, col, row);
                b.tma_store(map, from, at);
            }
            b.tma_commit();
        });
    }

    /// All but the `pending` latest copies must have read their staging tiles.
    fn wait_for_staging(&self, b: &mut Builder, pending: u32) {
        b.predicated(self.leader, |b| b.tma_wait_read(pending));
        b.sync_warp();
    }

    /// Rounds values and puts them into shared memory.
    fn gather(&self, b: &mut Builder, consumer: &Consumer<'_>, values: &[Reg<F32>], place: u32) {
        let staging = consumer.layout.staging;
        for (pair, values) in values.chunks(8).enumerate() {
            // Features come in eights; beyond the last, the copy clips what is stored here.
            let value = |i: usize| values.get(i).map_or(Val::Const(0.0), |&value| value.into());
            let packed = std::array::from_fn(|i| b.pack(consumer.cfg.output, value(2 * i), value(2 * i + 1)));
            let pairs = staging.slab_cols() / PAIR_COLS;
            let (slab, pair) = (pair as u32 / pairs, pair as u32 % pairs);
            let to = Shared::from(self.lanes[pair as usize]).at(place + slab * staging.slab_bytes());
            b.stmatrix(to, packed);
        }
    }
}

impl Consumer<'_> {
    /// What this thread's rows become when they are written.
    pub(super) fn end_rows(&self, b: &mut Builder, tile: &Tile, mut finished: Finished) -> Ended {
        if let Some([_, values]) = tile.factors(b) {
            finished.factor = finished.factor.map(|factor| b.let_(factor * values));
        }
        let ended = if self.cfg.accumulate {
            let old = self.old_lse(b, tile, None);
            Ended::merged(b, finished, old)
        } else {
            finished.into()
        };
        self.without_unused(b, tile, ended)
    }

    /// Rows of an f32 output that lie beyond the used queries become zeros, where they are not left alone.
    pub(super) fn without_unused(&self, b: &mut Builder, tile: &Tile, ended: Ended) -> Ended {
        if !self.cfg.wide() || self.cfg.accumulate || !self.cfg.lengths.cuts_queries() {
            return ended;
        }
        let beyond = self.beyond_use(b, tile);
        ended.without(b, beyond)
    }

    /// What the LSE of this thread's rows was before, for all threads or for those for which `who` holds.
    pub(super) fn old_lse(&self, b: &mut Builder, tile: &Tile, who: Option<Pred>) -> Rows<F32> {
        let (at, there): (Vec<_>, Vec<_>) = self
            .thread_rows(b, tile)
            .into_iter()
            .map(|row| {
                let (position, at) = self.lse_place(b, tile, row);
                let there = b.let_(position.lt(self.rows_written(tile)));
                (at, who.map_or(there, |who| b.let_(there & who)))
            })
            .unzip();
        wide::old_lse(b, [at[0], at[1]], [there[0], there[1]])
    }

    /// Rows of the tile's sequence that are written: all, or where others are added to, those in use; behind packed ones
    /// come those of others.
    fn rows_written(&self, tile: &Tile) -> Reg<U32> {
        let own = self.cfg.accumulate || self.cfg.lengths.packs_queries();
        if own { tile.q_len } else { self.args.lengths.seq_q }
    }

    /// Where this thread's rows of an f32 output lie, from vector `first` of a row on.
    pub(super) fn wide_rows(&self, b: &mut Builder, tile: &Tile, first: Option<Reg<U32>>) -> WideRows {
        let out = self.args.out_rows.expect("an f32 output is written by address");
        let column = wide::first_column(b, self.lane, first);
        let (to, there): (Vec<_>, Vec<_>) = self
            .thread_rows(b, tile)
            .into_iter()
            .map(|row| {
                let (head, position) = (tile.head_of(b, self.cfg, row), position(b, self.cfg, row));
                let start = tile.row_of(b, &out, head, position);
                (b.let_(start + column), b.let_(position.lt(self.rows_written(tile))))
            })
            .unzip();
        WideRows { to: [to[0], to[1]], there: [there[0], there[1]], pairs: true }
    }

    /// Writes the LSE of this thread's rows, where they exist and somebody wants them.
    pub(super) fn write_lse(&self, b: &mut Builder, tile: &Tile, mut lse: Rows<F32>) {
        let (cfg, args) = (self.cfg, self.args);
        if cfg.accumulate {
            // Every lane of a quad has read what one of them writes.
            b.sync_warp();
        } else if cfg.lengths.cuts_queries() {
            let beyond = self.beyond_use(b, tile);
            lse = std::array::from_fn(|row| row_end::lse_of_used(b, beyond[row], lse[row]));
        }
        let output = LseOutput::new(b, args.lse, self.lane);
        for (row, value) in self.thread_rows(b, tile).into_iter().zip(lse) {
            let (position, to) = self.lse_place(b, tile, row);
            let who = b.let_(output.writes & position.lt(self.rows_written(tile)));
            LseOutput::write(b, who, to, value);
        }
    }

    /// Position of a row in its sequence, and where its LSE lies.
    fn lse_place(&self, b: &mut Builder, tile: &Tile, row: Reg<U32>) -> (Reg<U32>, Reg<U64>) {
        let (head, position) = (tile.flat_head_of(b, self.cfg, row), position(b, self.cfg, row));
        let place = tile.place(b, position);
        let index = b.let_(head.mul_wide(self.args.lengths.seq_q) + place.widen());
        let bytes = b.let_(index * 4);
        (position, b.let_(self.args.lse + bytes))
    }
}
