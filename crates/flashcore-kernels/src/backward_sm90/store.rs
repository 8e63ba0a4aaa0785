//! The end of a held tile: a warp's 16 rows of a gradient go to shared memory and from there by tensor copy to global
//! memory, 64 columns at a time.

use flashcore_tile::{Acc, Builder, F32, Pred, Reg, Shared, TensorMap, U32, Val};

use super::{consumer::Consumer, schedule::Tile, step::Work};
use crate::parts::row_end;

/// Columns that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;

/// Where this warp gathers its rows.
pub(super) struct Store {
    /// The warp's own places.
    staging: Shared,
    /// This lane's address for each pair of matrices in the first place.
    lanes: Vec<Reg<U32>>,
}

impl Store {
    pub(super) fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        let (tile, places) = (consumer.layout.staging, consumer.cfg.shape.places);
        let warp = b.let_((consumer.group << 2) + consumer.warp);
        let skip = b.let_(warp * (places * tile.bytes()));
        let start = tile.at(b).plus(b, skip).address(b);
        let (row, right) = (b.let_(consumer.lane & 15), b.let_(consumer.lane >> 4));
        let lanes = (0..tile.slab_cols() / PAIR_COLS).map(|pair| tile.chunk(b, start, row, right + 2 * pair));
        Self { lanes: lanes.collect(), staging: start.into() }
    }

    /// Writes the gradients of one tile. Those of queries and keys are multiplied by the factor on scores.
    pub(super) fn gradients(&self, b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, work: &Work) {
        let grads = [(Some(&work.first), Some(consumer.args.factor)), (work.second.as_ref(), None)];
        let beyond = consumer.cfg.cuts_held().then(|| consumer.beyond_use(b, tile));
        let row = consumer.warp_row(b, tile);
        let mut written = 0;
        for ((grad, factor), &map) in grads.into_iter().zip(&consumer.args.grads) {
            let Some(grad) = grad else { continue };
            beyond.iter().for_each(|&beyond| row_end::clear_unused(b, beyond, grad));
            written = self.gradient(b, consumer, (grad, factor), (map, tile, row), written);
        }
    }

    /// Writes one gradient, `written` places after the tile's first; says how many there are then.
    fn gradient(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        (grad, factor): (&Acc, Option<Reg<F32>>),
        (map, tile, row): (TensorMap, &Tile, Reg<U32>),
        mut written: u32,
    ) -> u32 {
        let (staging, places) = (consumer.layout.staging, consumer.cfg.shape.places);
        for (slab, values) in (0..).zip(grad.regs().chunks(staging.cols() as usize / 2)) {
            let place = written % places * staging.bytes();
            // At a tile's first places those of the tile before may still be in use, in whatever order.
            self.wait_for_place(b, consumer.leader, if written < places { 0 } else { places - 1 });
            self.gather(b, consumer, values, factor, place);
            b.fence_async();
            b.sync_warp();
            let at = [Val::Const(slab * staging.cols()), row.into(), tile.head.into(), tile.batch.into()];
            b.predicated(consumer.leader, |b| {
                b.tma_store(map, self.staging.at(place), at);
                b.tma_commit();
            });
            written += 1;
        }
        written
    }

    /// All but the `pending` latest copies must have read their places.
    fn wait_for_place(&self, b: &mut Builder, leader: Pred, pending: u32) {
        b.predicated(leader, |b| b.tma_wait_read(pending));
        b.sync_warp();
    }

    /// Rounds values and puts them into shared memory.
    fn gather(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        values: &[Reg<F32>],
        factor: Option<Reg<F32>>,
        place: u32,
    ) {
        for (&to, values) in self.lanes.iter().zip(values.chunks(8)) {
            // Features come in eights; beyond the last, the copy clips what is stored here.
            let mut value = |i: usize| -> Val<F32> {
                let Some(&value) = values.get(i) else { return Val::Const(0.0) };
                factor.map_or(value, |factor| b.mul(value, factor)).into()
            };
            let scaled: [Val<F32>; 8] = std::array::from_fn(&mut value);
            let packed =
                std::array::from_fn(|i| b.pack(consumer.cfg.input, scaled[2 * i], scaled[2 * i + 1]));
            b.stmatrix(Shared::from(to).at(place), packed);
        }
    }
}

/// Waits until every store has been written; at the end of the kernel.
pub(super) fn drain(b: &mut Builder) {
    let lane = b.lane();
    b.predicated(lane.eq(0), Builder::tma_wait);
}
