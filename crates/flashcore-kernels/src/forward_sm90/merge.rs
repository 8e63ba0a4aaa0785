//! The parts of a tile, computed by the CTAs of a cluster, become one: through shared memory, in the order of ranks, so
//! that bits do not depend on timing.
//!
//! Each CTA merges a share of the columns, and the others send it their values of that share, thread by thread, from
//! registers. A store that completes on the receiver's mbarrier needs no fence, while a barrier of the cluster that
//! publishes what was written costs a fence of the whole GPU.

use flashcore_tile::{Acc, Builder, F32, Global, Reg, Shared, Val, WARPGROUP};

use super::{
    Config,
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::parts::softmax::{Finished, Rows, Softmax};

/// Values that a thread moves at once.
const VECTOR: u32 = 4;
/// Columns from one of a thread's vectors to its next in a row of the output.
const OUTPUT_STEP: u32 = 8;

/// Vectors of output values of a thread: each holds two columns of both rows.
const fn vectors(cfg: Config) -> u32 {
    cfg.dim_v / OUTPUT_STEP
}

/// Vectors that one CTA merges.
const fn share(cfg: Config) -> u32 {
    vectors(cfg).div_ceil(cfg.shape.order.parts())
}

/// Bytes from a vector of a thread to its next one.
const fn stride(cfg: Config) -> u32 {
    cfg.shape.consumers * WARPGROUP * VECTOR * 4
}

/// Bytes of what one CTA sends to another: a vector of references and sums, and a share of the output.
const fn message_bytes(cfg: Config) -> u32 {
    stride(cfg) + share(cfg) * stride(cfg)
}

/// Where the parts of a cluster lie in shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// A message from each CTA of the cluster, this one too.
    inbox: u32,
    /// Where messages of the others are counted.
    arrived: u32,
}

impl Exchange {
    /// Reserves what they need, where a tile has several.
    pub(super) fn reserve(b: &mut Builder, cfg: Config) -> Option<Self> {
        let ctas = cfg.shape.order.parts();
        (ctas > 1).then(|| Self { inbox: b.shared(ctas * message_bytes(cfg), 16), arrived: b.mbarriers(1) })
    }

    /// Prepares the count of messages; one thread does it, before the cluster synchronises.
    pub(super) fn init(self, b: &mut Builder, cfg: Config) {
        let arrived = b.mbarrier_at(self.arrived);
        arrived.init(b, 1);
        arrived.arrive_expecting(b, (cfg.shape.order.parts() - 1) * message_bytes(cfg));
    }
}

/// Merges the parts of a tile and writes it; executed by all consumers of all CTAs of the cluster.
pub(super) fn merge(b: &mut Builder, consumer: &Consumer<'_>, exchange: Exchange, tile: &Tile, output: &Acc) {
    let cfg = consumer.cfg;
    let part = consumer.softmax.part(b);
    // Everybody counts messages by now.
    b.wait_cluster();
    send(b, consumer, exchange, &part, output);
    // Whoever has all its messages may end: nobody has anything more for it.
    b.mbarrier_at(exchange.arrived).wait_for_peers(b, 0);
    let received = received(b, consumer, exchange);
    let stats: Vec<_> = received.iter().map(|&message| b.load_shared(message)).collect();
    let columns: Vec<_> = received.iter().map(|&message| read_columns(b, cfg, message)).collect();
    let sinks = consumer.sinks(b, tile);
    let merged = Softmax::merge_parts(b, &stats, sinks);
    let columns = weighted_sum(b, &columns, &merged.weights);
    write(b, consumer, tile, &columns);
    write_lse(b, consumer, tile, merged.finished);
}

/// Sends this thread's values to the CTAs that merge them. What this CTA merges itself is read by the thread that
/// stores it.
fn send(b: &mut Builder, consumer: &Consumer<'_>, exchange: Exchange, part: &Vector, output: &Acc) {
    let cfg = consumer.cfg;
    let rank = b.cluster_rank();
    let thread = b.let_(consumer.thread * (VECTOR * 4));
    let skip = b.let_(rank * message_bytes(cfg) + thread);
    let own = b.shared_at(exchange.inbox).plus(b, skip).address(b);
    let arrived = b.shared_at(exchange.arrived).address(b);
    for peer in 0..cfg.shape.order.parts() {
        let (mine, others) = (b.let_(rank.eq(peer)), b.let_(rank.ne(peer)));
        let [place, done] = [own, arrived].map(|at| b.peer_address(at, peer));
        for (n, vector) in (0..).zip(message_to(cfg, peer, part, output)) {
            let offset = n * stride(cfg);
            b.predicated(mine, |b| b.store_shared::<F32>(Shared::from(own).at(offset), &vector));
            b.predicated(others, |b| b.send_to_peer(Shared::from(place).at(offset), &vector, done));
        }
    }
}

/// This thread's part of the message to `peer`, vector by vector.
fn message_to(cfg: Config, peer: u32, part: &Vector, output: &Acc) -> Vec<[Val<F32>; VECTOR as usize]> {
    let values = |vector: &[Reg<F32>]| std::array::from_fn(|i| vector[i].into());
    let columns = output.regs().chunks_exact(VECTOR as usize).skip((peer * share(cfg)) as usize);
    // Shares are equally long; the last part may have fewer vectors.
    let padded = columns.map(values).chain(std::iter::repeat([Val::Const(0.0); VECTOR as usize]));
    std::iter::once(values(part)).chain(padded.take(share(cfg) as usize)).collect()
}

/// Where this thread finds what each CTA has for it, in the order in which parts are merged.
fn received(b: &mut Builder, consumer: &Consumer<'_>, exchange: Exchange) -> Vec<Shared> {
    let cfg = consumer.cfg;
    let thread = b.let_(consumer.thread * (VECTOR * 4));
    let first = b.shared_at(exchange.inbox).plus(b, thread);
    (0..cfg.shape.order.parts()).map(|rank| first.at(rank * message_bytes(cfg))).collect()
}

/// Two columns of both rows of a thread.
type Vector = [Reg<F32>; VECTOR as usize];

/// The vectors of a message's share.
fn read_columns(b: &mut Builder, cfg: Config, message: Shared) -> Vec<Vector> {
    (1..=share(cfg)).map(|n| b.load_shared(message.at(n * stride(cfg)))).collect()
}

/// The sums over all parts.
fn weighted_sum(b: &mut Builder, parts: &[Vec<Vector>], weights: &[Rows<F32>]) -> Vec<Vector> {
    let sum = |b: &mut Builder, n: usize, i: usize| {
        let row = Acc::row(i);
        let first = b.mul(parts[0][n][i], weights[0][row]);
        let others = parts.iter().zip(weights).skip(1);
        others.fold(first, |sum, (part, weight)| b.fma(part[n][i], weight[row], sum))
    };
    (0..parts[0].len()).map(|n| std::array::from_fn(|i| sum(b, n, i))).collect()
}

/// Writes the columns that this CTA has merged, two at a time.
fn write(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, columns: &[Vector]) {
    let (cfg, args) = (consumer.cfg, consumer.args);
    let Some(out) = args.out_rows else { return };
    let rank = b.cluster_rank();
    let first = b.let_(rank * share(cfg));
    let dead = consumer.beyond_use(b, tile);
    let (step, pair) = (OUTPUT_STEP * cfg.output.bytes(), 2 * cfg.output.bytes());
    let within = (consumer.lane & 3) << pair.trailing_zeros();
    let bytes = b.let_((first * step + within).widen());
    for (half, row) in consumer.thread_rows(b, tile).into_iter().enumerate() {
        let (head, position) = (tile.head_of(b, cfg, row), position(b, cfg, row));
        let start = out.at(b, tile.batch, head, position);
        let start = b.let_(start + bytes);
        let exists = b.let_(position.lt(args.lengths.seq_q));
        for (n, values) in (0..).zip(columns) {
            let there = b.let_((first + n).lt(vectors(cfg)) & exists);
            let [low, high] = [values[2 * half], values[2 * half + 1]].map(|value| {
                if cfg.lengths.cuts_queries() { b.select(dead[half], 0.0, value) } else { value }
            });
            let word = b.pack(cfg.output, low, high);
            let to = Global::from(start).at((n * step) as i32);
            b.predicated(there, |b| b.store_global(to, &[word.into()]));
        }
    }
}

/// The first CTA of the cluster writes the LSE.
fn write_lse(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, finished: Finished) {
    let rank = b.cluster_rank();
    b.if_(rank.eq(0), |b| consumer.write_lse(b, tile, finished.lse));
}
