//! The parts of a tile, computed by the CTAs of a cluster, become one: through each other's shared memory, in the order
//! of ranks, so that bits do not depend on timing.
//!
//! Every thread leaves its values where the same thread of every other CTA finds them; CTA `r` of `n` then merges the
//! `r`-th part of the columns and writes it.

use flashcore_tile::{
    Acc, Builder, Cmp, F32, Global, ROWS_PER_THREAD, Reg, Shared, U32, U64, Val, WARPGROUP,
};

use super::{Config, consumer::Consumer, epilogue::Epilogue, schedule::Tile};
use crate::shared::softmax::{Finished, Rows, Softmax};

/// Values that a thread moves at once.
const VECTOR: u32 = 4;

/// Vectors of output values of a thread: each holds two columns of both rows.
const fn vectors(cfg: Config) -> u32 {
    cfg.dim_v / 8
}

const fn threads(cfg: Config) -> u32 {
    cfg.shape.consumers * WARPGROUP
}

/// Shared memory for the part of a CTA: output values, and one vector of maxima and sums.
pub(super) const fn bytes(cfg: Config) -> u32 {
    (vectors(cfg) + 1) * vector_stride(cfg)
}

/// Bytes from a vector of a thread to its next one.
const fn vector_stride(cfg: Config) -> u32 {
    threads(cfg) * VECTOR * 4
}

/// Merges the parts of a tile and writes it; executed by all consumers of all CTAs of the cluster.
pub(super) fn merge(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, output: &Acc) {
    let cfg = consumer.cfg;
    let own = own_place(b, consumer);
    let part = consumer.softmax.part(b);
    leave(b, cfg, own, &part, output);
    b.sync_cluster();
    let parts = cfg.shape.order.parts();
    let peers: Vec<_> = (0..parts).map(|rank| Shared::from(b.peer_address(own, rank))).collect();
    let stats: Vec<_> =
        peers.iter().map(|peer| b.load_peer::<F32, 4>(peer.at(vectors(cfg) * vector_stride(cfg)))).collect();
    let sink = consumer.sink(b, tile);
    let merged = Softmax::merge_parts(b, &stats, sink);
    let values = own_columns(b, cfg, &peers, &merged.weights);
    // Peers may go once nobody reads their memory any more.
    b.arrive_cluster();
    write(b, consumer, tile, &values);
    write_lse(b, consumer, tile, merged.finished);
    b.wait_cluster();
}

/// Where this thread leaves its values.
fn own_place(b: &mut Builder, consumer: &Consumer<'_>) -> Reg<U32> {
    let thread = b.thread();
    let number = b.sub(thread, WARPGROUP);
    let bytes = b.mul(number, VECTOR * 4);
    let place = b.shared_at(consumer.layout.parts).plus(b, bytes);
    place.address(b)
}

fn leave(b: &mut Builder, cfg: Config, own: Reg<U32>, part: &[Reg<F32>; 4], output: &Acc) {
    let vectors = output.regs().chunks_exact(VECTOR as usize).chain([&part[..]]);
    for (n, values) in (0..).zip(vectors) {
        let values: Vec<Val<F32>> = values.iter().map(|&value| value.into()).collect();
        b.store_shared(Shared::from(own).at(n * vector_stride(cfg)), &values);
    }
}

/// Merged values of the columns that this CTA writes: the vectors from `rank * share`.
struct OwnColumns {
    first: Reg<U32>,
    values: Vec<[Reg<F32>; 4]>,
}

fn own_columns(b: &mut Builder, cfg: Config, peers: &[Shared], weights: &[Rows<F32>]) -> OwnColumns {
    let share = vectors(cfg).div_ceil(cfg.shape.order.parts());
    let rank = b.cluster_rank();
    let first = b.mul(rank, share);
    let skip = b.mul(first, vector_stride(cfg));
    let starts: Vec<_> = peers.iter().map(|peer| peer.plus(b, skip)).collect();
    let merged = |b: &mut Builder, n: u32| {
        let read = |b: &mut Builder, start: &Shared| b.load_peer::<F32, 4>(start.at(n * vector_stride(cfg)));
        let parts: Vec<_> = starts.iter().map(|start| read(b, start)).collect();
        std::array::from_fn(|i| {
            let row = Acc::row(i);
            let first = b.mul(parts[0][i], weights[0][row]);
            parts
                .iter()
                .zip(weights)
                .skip(1)
                .fold(first, |sum, (part, weight)| b.fma(part[i], weight[row], sum))
        })
    };
    OwnColumns { first, values: (0..share).map(|n| merged(b, n)).collect() }
}

/// Writes merged columns, two at a time.
fn write(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, columns: &OwnColumns) {
    let (cfg, args) = (consumer.cfg, consumer.args);
    let Some(out) = args.out_rows else { return };
    let row = consumer.thread_row(b, tile);
    let dead = Epilogue::beyond_use(b, consumer, tile);
    let within = b.and(consumer.lane, 3);
    for (half, below) in [0u32, 8].into_iter().enumerate().take(ROWS_PER_THREAD) {
        let row = b.add(row, below);
        let exists = b.test(Cmp::Lt, row, args.seq_q);
        let start = out.at(b, tile.batch, tile.head, row);
        let pairs = b.mul_wide(within, 4);
        let start: Reg<U64> = b.add(start, pairs);
        for (n, values) in (0..).zip(&columns.values) {
            let vector = b.add(columns.first, n);
            let there = b.test(Cmp::Lt, vector, vectors(cfg));
            let there = b.both(there, exists);
            let [low, high] = [values[2 * half], values[2 * half + 1]]
                .map(|value| if cfg.used { b.select(dead[half], 0.0, value) } else { value });
            let word = b.pack(cfg.half, low, high);
            let bytes = b.mul_wide(vector, 16);
            let to = b.add(start, bytes);
            b.predicated(there, |b| b.store_global(Global::from(to), &[word.into()]));
        }
    }
}

/// The first CTA of the cluster writes the LSE.
fn write_lse(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, finished: Finished) {
    let rank = b.cluster_rank();
    let first = b.test(Cmp::Eq, rank, 0);
    b.if_(first, |b| Epilogue::write_lse(b, consumer, tile, finished.lse));
}
