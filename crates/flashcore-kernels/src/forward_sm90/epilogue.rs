//! The epilogue: a warp's 16 rows of the output go to shared memory and from there by tensor copy to global memory.

use std::ops::Range;

use flashcore_tile::{Acc, Builder, F32, Pred, Reg, Shared, U32, Val};

use super::{
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::parts::{
    row_end::{self, LseOutput},
    softmax::Rows,
};

/// Columns of 16-bit elements that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;

/// Where this warp gathers its rows.
pub(super) struct Epilogue {
    /// The warp's own staging tiles.
    staging: Shared,
    /// This lane's address for each pair of matrices in the first slab.
    lanes: Vec<Reg<U32>>,
    leader: Pred,
}

impl Epilogue {
    pub(super) fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        let tile = consumer.layout.staging;
        let warp = b.let_((consumer.group << 2) + consumer.warp);
        let skip = b.let_(warp * (consumer.cfg.shape.staging.places * tile.bytes()));
        let start = tile.at(b).plus(b, skip).address(b);
        let (row, right) = (b.let_(consumer.lane & 15), b.let_(consumer.lane >> 4));
        let lanes = (0..tile.slab_cols() / PAIR_COLS).map(|pair| tile.chunk(b, start, row, right + 2 * pair));
        Self { lanes: lanes.collect(), staging: start.into(), leader: consumer.leader }
    }

    /// Scales the rows of one tile by `factor` and writes them by tensor copy.
    pub(super) fn write(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        tile: &Tile,
        output: &Acc,
        factor: Rows<F32>,
    ) {
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

    /// Starts the copies of the columns that were gathered at `place`.
    fn store(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, cols: Range<u32>, place: u32) {
        let row = consumer.warp_row(b, tile);
        let staging = consumer.layout.staging;
        b.predicated(self.leader, |b| {
            for (slab, col) in (0..staging.slabs()).zip(cols.step_by(staging.slab_cols() as usize)) {
                let from = self.staging.at(place + slab * staging.slab_bytes());
                let at = tile.coordinates(b, consumer.cfg, col, row);
                b.tma_store(consumer.args.out, from, at);
            }
            b.tma_commit();
        });
    }

    /// Waits until every store has been written; at the end of the kernel.
    pub(super) fn drain(&self, b: &mut Builder) {
        b.predicated(self.leader, Builder::tma_wait);
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
    /// Writes the LSE of this thread's rows, where they exist and somebody wants them.
    pub(super) fn write_lse(&self, b: &mut Builder, tile: &Tile, mut lse: Rows<F32>) {
        let (cfg, args) = (self.cfg, self.args);
        if cfg.lengths.cuts_queries() {
            let beyond = self.beyond_use(b, tile);
            lse = std::array::from_fn(|row| row_end::lse_of_used(b, beyond[row], lse[row]));
        }
        let output = LseOutput::new(b, args.lse, self.lane);
        for (row, value) in self.thread_rows(b, tile).into_iter().zip(lse) {
            let (head, position) = (tile.flat_head_of(b, cfg, row), position(b, cfg, row));
            let index = b.let_(head.mul_wide(args.lengths.seq_q) + position.widen());
            let bytes = b.let_(index * 4);
            let to = b.let_(args.lse + bytes);
            let who = b.let_(output.writes & position.lt(args.lengths.seq_q));
            LseOutput::write(b, who, to, value);
        }
    }
}
