//! The parts of a tile, computed by the CTAs of a cluster, become one: through shared memory, in the order of ranks, so
//! that bits do not depend on timing.
//!
//! Each CTA merges a share of the columns, and the others send it their values of that share. A copy that completes on the
//! receiver's mbarrier needs no fence, while a barrier of the cluster that publishes what was written costs a fence of
//! the whole GPU.

use flashcore_tile::{Acc, Builder, Cmp, F32, Global, Reg, Shared, U32, U64, Val, WARPGROUP};

use super::{
    Config,
    consumer::Consumer,
    epilogue::Epilogue,
    schedule::{Tile, position},
};
use crate::shared::softmax::{Finished, Rows, Softmax};

/// Values that a thread moves at once.
const VECTOR: u32 = 4;
/// Bytes from one of a thread's vectors to its next in a row of the output.
const OUTPUT_STEP: u32 = 16;

/// Vectors of output values of a thread: each holds two columns of both rows.
const fn vectors(cfg: Config) -> u32 {
    cfg.dim_v / 8
}

/// Vectors that one CTA merges.
const fn share(cfg: Config) -> u32 {
    vectors(cfg).div_ceil(cfg.shape.order.parts())
}

/// Bytes from a vector of a thread to its next one.
const fn stride(cfg: Config) -> u32 {
    cfg.shape.consumers * WARPGROUP * VECTOR * 4
}

/// Bytes of what one CTA sends to another: a vector of maxima and sums, and a share of the output.
const fn letter_bytes(cfg: Config) -> u32 {
    stride(cfg) + share(cfg) * stride(cfg)
}

/// Where parts lie in shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mail {
    /// Maxima and sums, then all output values of this CTA.
    outbox: u32,
    /// A letter from each CTA of the cluster; the place of this CTA's own stays empty.
    inbox: u32,
    /// Where letters are counted.
    arrived: u32,
}

impl Mail {
    /// Reserves what the parts of a cluster need.
    pub(super) fn reserve(b: &mut Builder, cfg: Config) -> Self {
        let ctas = cfg.shape.order.parts();
        if ctas == 1 {
            return Self { outbox: 0, inbox: 0, arrived: 0 };
        }
        Self {
            outbox: b.shared(stride(cfg) + ctas * share(cfg) * stride(cfg), 16),
            inbox: b.shared(ctas * letter_bytes(cfg), 16),
            arrived: b.mbarriers(1),
        }
    }

    /// Prepares the count of letters; one thread does it, before the cluster synchronises.
    pub(super) fn init(self, b: &mut Builder, cfg: Config) {
        let ctas = cfg.shape.order.parts();
        if ctas > 1 {
            let arrived = b.mbarrier_at(self.arrived);
            arrived.init(b, 1);
            arrived.arrive_expecting(b, (ctas - 1) * letter_bytes(cfg));
        }
    }

    /// Sends every other CTA of the cluster what it merges; one thread does it.
    fn send(self, b: &mut Builder, cfg: Config) {
        let rank = b.cluster_rank();
        let skip = b.mul(rank, letter_bytes(cfg));
        let place = b.shared_at(self.inbox).plus(b, skip);
        let place = place.address(b);
        let arrived = b.shared_at(self.arrived).address(b);
        let stats = b.shared_at(self.outbox);
        let ctas = cfg.shape.order.parts();
        for ahead in 1..ctas {
            let peer = b.add(rank, ahead);
            let peer = b.and(peer, ctas - 1);
            let [to, done] = [place, arrived].map(|at| b.peer_address(at, peer));
            b.copy_to_peer(to, stats, stride(cfg), done);
            let to = b.add(to, stride(cfg));
            let columns = self.columns_for(b, cfg, peer);
            b.copy_to_peer(to, columns, share(cfg) * stride(cfg), done);
        }
    }

    /// This CTA's values of the share that CTA `rank` merges.
    fn columns_for(self, b: &mut Builder, cfg: Config, rank: Reg<U32>) -> Shared {
        let skip = b.mul(rank, share(cfg) * stride(cfg));
        b.shared_at(self.outbox).at(stride(cfg)).plus(b, skip)
    }
}

/// Merges the parts of a tile and writes it; executed by all consumers of all CTAs of the cluster.
pub(super) fn merge(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, output: &Acc) {
    let (cfg, mail) = (consumer.cfg, consumer.layout.mail);
    let part = consumer.softmax.part(b);
    leave(b, consumer, &part, output);
    b.fence_async();
    b.sync(consumer.layout.consumers);
    // Everybody counts letters by now.
    b.wait_cluster();
    let first = b.test(Cmp::Eq, consumer.thread, 0);
    b.if_(first, |b| mail.send(b, cfg));
    b.mbarrier_at(mail.arrived).wait(b, 0);
    b.arrive_cluster_relaxed();
    let letters = letters(b, consumer);
    let stats: Vec<_> = letters.iter().map(|letter| b.load_shared(letter.stats)).collect();
    let columns: Vec<_> = letters.iter().map(|letter| read_columns(b, cfg, letter.columns)).collect();
    let sinks = consumer.sinks(b, tile);
    let merged = Softmax::merge_parts(b, &stats, sinks);
    let columns = weighted_sum(b, &columns, &merged.weights);
    write(b, consumer, tile, &columns);
    write_lse(b, consumer, tile, merged.finished);
    // Once all have their letters, nobody reads this CTA's memory any more.
    b.wait_cluster();
}

/// Leaves this thread's values for the CTAs that merge them.
fn leave(b: &mut Builder, consumer: &Consumer<'_>, part: &[Reg<F32>; 4], output: &Acc) {
    let cfg = consumer.cfg;
    let bytes = b.mul(consumer.thread, VECTOR * 4);
    let own = b.shared_at(consumer.layout.mail.outbox).plus(b, bytes);
    let chunks = [&part[..]].into_iter().chain(output.regs().chunks_exact(VECTOR as usize));
    let values = chunks.map(|chunk| chunk.iter().map(|&value| value.into()).collect());
    // Shares are equally long, so that the last may end in vectors that there are not.
    let missing = share(cfg) * cfg.shape.order.parts() - vectors(cfg);
    let padding = std::iter::repeat_n(vec![Val::Const(0.0); VECTOR as usize], missing as usize);
    for (n, vector) in (0..).zip(values.chain(padding)) {
        let vector: Vec<Val<F32>> = vector;
        b.store_shared(own.at(n * stride(cfg)), &vector);
    }
}

/// What one CTA has for this thread.
struct Letter {
    stats: Shared,
    columns: Shared,
}

/// Where this thread finds what each CTA has for it, in the order in which parts are merged: its own CTA's part was
/// never sent.
fn letters(b: &mut Builder, consumer: &Consumer<'_>) -> Vec<Letter> {
    let (cfg, mail) = (consumer.cfg, consumer.layout.mail);
    let own_rank = b.cluster_rank();
    let bytes = b.mul(consumer.thread, VECTOR * 4);
    let kept = [b.shared_at(mail.outbox), mail.columns_for(b, cfg, own_rank)];
    let letter = |b: &mut Builder, rank: u32| {
        let own = b.test(Cmp::Eq, own_rank, rank);
        let sent = b.shared_at(mail.inbox).at(rank * letter_bytes(cfg));
        let sent = [sent, sent.at(stride(cfg))];
        let [stats, columns] = std::array::from_fn(|i| {
            let [kept, sent] = [kept[i], sent[i]].map(|place| place.address(b));
            let place = b.select(own, kept, sent);
            Shared::from(b.add(place, bytes))
        });
        Letter { stats, columns }
    };
    (0..cfg.shape.order.parts()).map(|rank| letter(b, rank)).collect()
}

/// Two columns of both rows of a thread.
type Vector = [Reg<F32>; VECTOR as usize];

/// The vectors of a share.
fn read_columns(b: &mut Builder, cfg: Config, columns: Shared) -> Vec<Vector> {
    (0..share(cfg)).map(|n| b.load_shared(columns.at(n * stride(cfg)))).collect()
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
    let first = b.mul(rank, share(cfg));
    let dead = Epilogue::beyond_use(b, consumer, tile);
    let within = b.and(consumer.lane, 3);
    let pair = b.shl(within, 2);
    let bytes = b.mad(first, OUTPUT_STEP, pair);
    let bytes = b.widen(bytes);
    for (half, row) in consumer.thread_rows(b, tile).into_iter().enumerate() {
        let (head, position) = (tile.head_of(b, cfg, row), position(b, cfg, row));
        let start = out.at(b, tile.batch, head, position);
        let start: Reg<U64> = b.add(start, bytes);
        let exists = b.test(Cmp::Lt, position, args.seq_q);
        for (n, values) in (0..).zip(columns) {
            let vector = b.add(first, n);
            let there = b.test(Cmp::Lt, vector, vectors(cfg));
            let there = b.both(there, exists);
            let [low, high] = [values[2 * half], values[2 * half + 1]]
                .map(|value| if cfg.used { b.select(dead[half], 0.0, value) } else { value });
            let word = b.pack(cfg.half, low, high);
            let to = Global::from(start).at((n * OUTPUT_STEP) as i32);
            b.predicated(there, |b| b.store_global(to, &[word.into()]));
        }
    }
}

/// The first CTA of the cluster writes the LSE.
fn write_lse(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, finished: Finished) {
    let rank = b.cluster_rank();
    let first = b.test(Cmp::Eq, rank, 0);
    b.if_(first, |b| Epilogue::write_lse(b, consumer, tile, finished.lse));
}
