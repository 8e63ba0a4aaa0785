//! The epilogue: a warp's 16 rows of the output go to shared memory and from there by tensor copy to global memory.

use std::ops::Range;

use flashcore_tile::{Acc, Builder, Cmp, F32, Global, Pred, ROWS_PER_THREAD, Reg, Shared, U32, Val};

use super::{
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::shared::softmax::Rows;

/// Pairs of 8-column matrices that one stmatrix writes, per slab.
const PAIRS_PER_SLAB: u32 = 4;

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
        let warps = b.shl(consumer.group, 2);
        let warp = b.add(warps, consumer.warp);
        let bytes = b.mul(warp, consumer.cfg.shape.staging.places * tile.bytes());
        let start = tile.at(b).plus(b, bytes);
        let start = start.address(b);
        let row = b.and(consumer.lane, 15);
        let right = b.shr(consumer.lane, 4);
        let lanes = (0..PAIRS_PER_SLAB).map(|pair| {
            let chunk = b.add(right, 2 * pair);
            tile.chunk(b, start, row, chunk)
        });
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
        self.forget_unused(b, consumer, tile, output);
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

    /// Rows beyond the used queries become zeros, whatever was read for them.
    fn forget_unused(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, output: &Acc) {
        if !consumer.cfg.lengths.cuts_queries() {
            return;
        }
        let beyond = Self::beyond_use(b, consumer, tile);
        for (i, &value) in output.regs().iter().enumerate() {
            b.select_into(value, beyond[Acc::row(i)], 0.0, value);
        }
    }

    /// Which of this thread's rows lie beyond the used queries.
    pub(super) fn beyond_use(
        b: &mut Builder,
        consumer: &Consumer<'_>,
        tile: &Tile,
    ) -> [Pred; ROWS_PER_THREAD] {
        consumer.thread_positions(b, tile).map(|position| b.test(Cmp::Ge, position, tile.q_len))
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
            let packed = std::array::from_fn(|i| b.pack(consumer.cfg.half, value(2 * i), value(2 * i + 1)));
            let (slab, pair) = (pair as u32 / PAIRS_PER_SLAB, pair as u32 % PAIRS_PER_SLAB);
            let to = Shared::from(self.lanes[pair as usize]).at(place + slab * staging.slab_bytes());
            b.stmatrix(to, packed);
        }
    }

    /// One lane of each quad writes the LSE of its two rows, where rows exist and somebody wants them.
    pub(super) fn write_lse(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, lse: Rows<F32>) {
        let args = consumer.args;
        let lse = if consumer.cfg.lengths.cuts_queries() {
            let beyond = Self::beyond_use(b, consumer, tile);
            std::array::from_fn(|row| b.select(beyond[row], f32::NEG_INFINITY, lse[row]))
        } else {
            lse
        };
        let quad = b.and(consumer.lane, 3);
        let speaks = b.test(Cmp::Eq, quad, 0);
        let wanted = b.test(Cmp::Ne, args.lse, 0);
        let speaks = b.both(speaks, wanted);
        for (row, value) in consumer.thread_rows(b, tile).into_iter().zip(lse) {
            let (head, position) = (tile.flat_head_of(b, consumer.cfg, row), position(b, consumer.cfg, row));
            let first = b.mul_wide(head, args.lengths.seq_q);
            let index = b.widen(position);
            let index = b.add(first, index);
            let bytes = b.mul(index, 4);
            let to = Global::from(b.add(args.lse, bytes));
            let exists = b.test(Cmp::Lt, position, args.lengths.seq_q);
            let writes = b.both(speaks, exists);
            b.predicated(writes, |b| b.store_global::<F32>(to, &[value.into()]));
        }
    }
}
