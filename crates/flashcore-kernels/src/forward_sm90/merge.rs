//! Merges the parts of a tile, computed by the CTAs of a cluster: through shared memory, in rank order, so that bits do
//! not depend on timing.
//!
//! Each CTA merges a share of the columns, and the others send it their values of that share, thread by thread, from
//! registers. A store that completes on the receiver's mbarrier needs no fence, while a cluster barrier that
//! publishes writes costs a GPU-wide fence.

use flashcore_tile::{Acc, Builder, F32, Global, Reg, Shared, Val, WARPGROUP};

use super::{
    Config,
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::parts::{
    softmax::{Finished, Part, Rows, Softmax},
    wide::{Ended, Vector},
};

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

/// Vectors before the output's in a message: references and sums, then sums with rounded probabilities and what the
/// rows' LSE was if it is accumulated.
const HEADS: u32 = 2;

/// Bytes of what one CTA sends to another: these vectors and a share of the output.
const fn message_bytes(cfg: Config) -> u32 {
    (HEADS + share(cfg)) * stride(cfg)
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
    let old = if cfg.accumulate {
        // Only the CTA that writes the LSE reads it, and tells the others, who might come too late.
        let rank = b.cluster_rank();
        let first = b.let_(rank.eq(0));
        consumer.old_lse(b, tile, Some(first))
    } else {
        part.rounded
    };
    let heads = [[part.top, part.sum], [part.rounded, old]].map(|[[a, b], [c, d]]| [a, b, c, d]);
    // Everybody counts messages by now.
    b.wait_cluster();
    send(b, consumer, exchange, &heads, output);
    // Whoever has all its messages may end: nobody has anything more for it.
    b.mbarrier_at(exchange.arrived).wait_for_peers(b, 0);
    let received = received(b, consumer, exchange);
    let parts: Vec<_> = received.iter().map(|&message| read_part(b, cfg, message)).collect();
    let columns: Vec<_> = received.iter().map(|&message| read_columns(b, cfg, message)).collect();
    let sinks = consumer.sinks(b, tile);
    let merged = Softmax::merge_parts(b, &parts, sinks);
    let columns = weighted_sum(b, &columns, &merged.weights);
    if !cfg.wide() {
        write(b, consumer, tile, &columns);
        return write_lse(b, consumer, tile, merged.finished.lse);
    }
    let ended = end_rows(b, consumer, tile, merged.finished, received[0]);
    write_wide(b, consumer, tile, &ended, &columns);
    write_lse(b, consumer, tile, ended.lse);
}

/// What the rows of an f32 output become, whose columns are divided by their sums already.
fn end_rows(
    b: &mut Builder,
    consumer: &Consumer<'_>,
    tile: &Tile,
    finished: Finished,
    first: Shared,
) -> Ended {
    let factor = finished.factor.map(|factor| b.let_(factor.eq(0.0).select(0.0, 1.0)));
    let whole = Finished { factor, ..finished };
    if consumer.cfg.accumulate {
        let [_, _, old0, old1] = b.load_shared(first.at(stride(consumer.cfg)));
        return Ended::merged(b, whole, [old0, old1]);
    }
    consumer.without_unused(b, tile, whole.into())
}

/// Writes the columns of an f32 output that this CTA has merged.
fn write_wide(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, ended: &Ended, columns: &[Vector]) {
    let cfg = consumer.cfg;
    let rank = b.cluster_rank();
    let first = b.let_(rank * share(cfg));
    let rows = consumer.wide_rows(b, tile, Some(first));
    rows.write(b, ended, columns, |b, n| Some(b.let_((first + n).lt(vectors(cfg)))));
}

/// Sends this thread's values to the CTAs that merge them. What this CTA merges itself is read by the thread that
/// stores it.
fn send(b: &mut Builder, consumer: &Consumer<'_>, exchange: Exchange, heads: &[Vector], output: &Acc) {
    let cfg = consumer.cfg;
    let rank = b.cluster_rank();
    let thread = b.let_(consumer.thread * (VECTOR * 4));
    let skip = b.let_(rank * message_bytes(cfg) + thread);
    let own = b.shared_at(exchange.inbox).plus(b, skip).address(b);
    let arrived = b.shared_at(exchange.arrived).address(b);
    for peer in 0..cfg.shape.order.parts() {
        let (mine, others) = (b.let_(rank.eq(peer)), b.let_(rank.ne(peer)));
        let [place, done] = [own, arrived].map(|at| b.peer_address(at, peer));
        for (n, vector) in (0..).zip(message_to(cfg, peer, heads, output)) {
            let offset = n * stride(cfg);
            b.predicated(mine, |b| b.store_shared::<F32>(Shared::from(own).at(offset), &vector));
            b.predicated(others, |b| b.send_to_peer(Shared::from(place).at(offset), &vector, done));
        }
    }
}

/// This thread's part of the message to `peer`, vector by vector.
fn message_to(cfg: Config, peer: u32, heads: &[Vector], output: &Acc) -> Vec<[Val<F32>; VECTOR as usize]> {
    let values = |vector: &[Reg<F32>]| std::array::from_fn(|i| vector[i].into());
    let columns = output.regs().chunks_exact(VECTOR as usize).skip((peer * share(cfg)) as usize);
    // Shares are equally long; the last part may have fewer vectors.
    let padded = columns.map(values).chain(std::iter::repeat([Val::Const(0.0); VECTOR as usize]));
    heads.iter().map(|head| values(head)).chain(padded.take(share(cfg) as usize)).collect()
}

/// Where this thread finds what each CTA has for it, in the order in which parts are merged.
fn received(b: &mut Builder, consumer: &Consumer<'_>, exchange: Exchange) -> Vec<Shared> {
    let cfg = consumer.cfg;
    let thread = b.let_(consumer.thread * (VECTOR * 4));
    let first = b.shared_at(exchange.inbox).plus(b, thread);
    (0..cfg.shape.order.parts()).map(|rank| first.at(rank * message_bytes(cfg))).collect()
}

/// References and sums of a message.
fn read_part(b: &mut Builder, cfg: Config, message: Shared) -> Part {
    let [top0, top1, sum0, sum1] = b.load_shared(message);
    let [rounded0, rounded1] = b.load_shared(message.at(stride(cfg)));
    Part { top: [top0, top1], sum: [sum0, sum1], rounded: [rounded0, rounded1] }
}

/// The vectors of a message's share.
fn read_columns(b: &mut Builder, cfg: Config, message: Shared) -> Vec<Vector> {
    (0..share(cfg)).map(|n| b.load_shared(message.at((HEADS + n) * stride(cfg)))).collect()
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
        let start = tile.row_of(b, &out, head, position);
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
fn write_lse(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, lse: Rows<F32>) {
    let rank = b.cluster_rank();
    b.if_(rank.eq(0), |b| consumer.write_lse(b, tile, lse));
}
