//! The end of a held tile: a warp's 16 rows of a gradient go to shared memory and from there by tensor copy to global
//! memory, 64 columns at a time; f32 gradients are stored from registers.

use flashcore_tile::{Acc, Builder, F32, Pred, Reg, Shared, TensorMap, U32, Val};

use super::{Ending, Gradients, Side, To, consumer::Consumer, packed::Gathered, schedule::Tile};
use crate::parts::{
    range::Range,
    row_end,
    tensor::TensorArgument,
    wide::{self, Ended, Exist, Vector, WideRows},
};

/// Columns that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;

/// Where this warp gathers its rows.
struct Store {
    /// The warp's own places.
    staging: Shared,
    /// How many there are, and bytes from one to the next.
    places: u32,
    stride: u32,
    /// This lane's address for each pair of matrices in the first place.
    lanes: Vec<Reg<U32>>,
}

impl Store {
    fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        let tile = consumer.layout.staging;
        let warp = b.let_((consumer.group << 2) + consumer.warp);
        // Where rows are gathered in the held tile, a warp has its own rows of each slab.
        let held = consumer.layout.held[1].tile();
        let (places, stride, of_warp) = match consumer.cfg.shape.places {
            0 => (held.slabs(), held.slab_bytes(), tile.bytes()),
            places => (places, tile.bytes(), places * tile.bytes()),
        };
        let skip = b.let_(warp * of_warp);
        let start = tile.at(b).plus(b, skip).address(b);
        let (row, right) = (b.let_(consumer.lane & 15), b.let_(consumer.lane >> 4));
        let lanes = (0..tile.slab_cols() / PAIR_COLS).map(|pair| tile.chunk(b, start, row, right + 2 * pair));
        Self { lanes: lanes.collect(), staging: start.into(), places, stride }
    }

    /// Writes the gradients of one tile. Those of queries and keys are multiplied by the factor on scores.
    fn rounded(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        tile: &Tile,
        grads: [(Option<&Acc>, Option<Reg<F32>>); 2],
        to: &[To],
    ) {
        let beyond = consumer.cfg.cuts_held().then(|| consumer.beyond_use(b, tile));
        let row = consumer.warp_row(b, tile);
        let mut written = 0;
        for ((grad, factor), to) in grads.into_iter().zip(to) {
            let Some(grad) = grad else { continue };
            beyond.iter().for_each(|&beyond| row_end::clear_unused(b, beyond, grad));
            written = self.gradient(b, consumer, (grad, factor), (to, tile, row), written);
        }
    }

    /// Writes one gradient, `written` places after the tile's first; says how many there are then.
    fn gradient(
        &self,
        b: &mut Builder,
        consumer: &Consumer<'_>,
        (grad, factor): (&Acc, Option<Reg<F32>>),
        (target, tile, row): (&To, &Tile, Reg<U32>),
        mut written: u32,
    ) -> u32 {
        let (staging, places) = (consumer.layout.staging, self.places);
        for (slab, values) in (0..).zip(grad.regs().chunks(staging.cols() as usize / 2)) {
            let place = written % places * self.stride;
            // At a tile's first places those of the tile before may still be in use, in whatever order.
            self.wait_for_place(b, consumer.leader, if written < places { 0 } else { places - 1 });
            self.gather(b, consumer, values, factor, place);
            b.fence_async();
            b.sync_warp();
            let (column, from) = (slab * staging.cols(), self.staging.at(place));
            let Some(rows) = &target.rows else {
                copy(b, consumer, target.map, (tile, row), (column, from));
                written += 1;
                continue;
            };
            let (whole, dim) = (consumer.whole_rows(b, tile), grad.cols() as u32);
            b.if_else(
                whole,
                |b| copy(b, consumer, target.map, (tile, row), (column, from)),
                |b| {
                    consumer.store_rows(b, tile, rows, &Gathered { from, column, dim });
                    // Copies are counted by places, whether they copy anything or not.
                    b.predicated(consumer.leader, Builder::tma_commit);
                },
            );
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

/// Starts the tensor copy of the warp's rows of one tile from `row` of their sequence on, gathered at `from`.
fn copy(
    b: &mut Builder,
    consumer: &Consumer<'_>,
    map: TensorMap,
    (tile, row): (&Tile, Reg<U32>),
    (column, from): (u32, Shared),
) {
    let place = tile.held_place(b, consumer.cfg, row);
    let at = [Val::Const(column), place.into(), tile.head.into(), tile.batch.into()];
    b.predicated(consumer.leader, |b| {
        b.tma_store(map, from, at);
        b.tma_commit();
    });
}

/// Writes the gradients of one tile. Those of queries and keys are multiplied by the factor on scores.
pub(super) fn gradients(
    b: &mut Builder,
    consumer: &Consumer<'_>,
    tile: &Tile,
    [first, second]: [Option<&Acc>; 2],
    range: Option<Range>,
) {
    let factor = match range.map(|range| range.inverse(b)) {
        Some(inverse) => b.let_(inverse * consumer.args.factor),
        None => consumer.args.factor,
    };
    let grads = [(first, Some(factor)), (second, None)];
    match &consumer.args.grads {
        // Where rows are gathered is worked out anew for each tile: it would take registers all the while.
        Gradients::Rounded(to) => Store::new(b, consumer).rounded(b, consumer, tile, grads, to),
        Gradients::Tensors(tensors) => {
            for ((grad, factor), tensor) in grads.into_iter().zip(tensors) {
                grad.iter().for_each(|grad| wide(b, consumer, tile, (grad, factor), tensor));
            }
        }
    }
}

/// Brings what gradients are added to near, before the first pair streams past.
pub(super) fn prefetch(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, own: [bool; 2]) {
    let Gradients::Tensors(tensors) = &consumer.args.grads else { return };
    if consumer.cfg.ending != Ending::Added {
        return;
    }
    for ((tensor, dim), _) in tensors.iter().zip(consumer.cfg.dims()).zip(own).filter(|(_, own)| *own) {
        wide_rows(b, consumer, tile, tensor).prefetch(b, consumer.lane, dim);
    }
}

/// This thread's rows of a gradient in f32.
fn wide_rows(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, tensor: &TensorArgument) -> WideRows {
    let (cfg, args) = (consumer.cfg, consumer.args);
    // Rows that are not used are left alone where others are added to; behind packed ones come those of others.
    let end = match cfg.side {
        _ if cfg.ending == Ending::Added || cfg.packed() => tile.held_len(cfg),
        Side::Keys => args.lengths.seq_kv,
        Side::Queries => args.lengths.seq_q,
    };
    let rows = consumer.thread_rows(b, tile);
    let there = rows.map(|row| b.let_(row.lt(Val::from(end))));
    let column = wide::first_column(b, consumer.lane, None);
    let to = rows.map(|row| {
        let place = tile.held_place(b, cfg, row);
        let row = tensor.at(b, tile.batch, tile.head, place);
        b.let_(row + column)
    });
    WideRows { to, there, pairs: true }
}

/// Writes one gradient in f32 from registers, or adds it to what is there.
fn wide(
    b: &mut Builder,
    consumer: &Consumer<'_>,
    tile: &Tile,
    (grad, factor): (&Acc, Option<Reg<F32>>),
    tensor: &TensorArgument,
) {
    let cfg = consumer.cfg;
    let used = tile.held_len(cfg);
    let factor = factor.unwrap_or_else(|| b.var(1.0));
    let factors = consumer.thread_rows(b, tile).map(|row| match cfg.cuts_held() {
        true => b.let_(row.lt(Val::from(used)).select(factor, 0.0)),
        false => factor,
    });
    let to = wide_rows(b, consumer, tile, tensor);
    let vectors: Vec<Vector> = grad.regs().chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]).collect();
    let ended = Ended::added(b, factors, cfg.ending == Ending::Added);
    to.write(b, &ended, &vectors, |_, _| Exist::All);
}

/// Waits until all places of this warp have been read.
pub(super) fn free_places(b: &mut Builder, consumer: &Consumer<'_>) {
    b.predicated(consumer.leader, |b| b.tma_wait_read(0));
    b.sync_warp();
}

/// Waits until every store has been written; at the end of the kernel.
pub(super) fn drain(b: &mut Builder) {
    let lane = b.lane();
    b.predicated(lane.eq(0), |b| b.tma_wait(0));
}
