//! Packed sequences: the producer finds tiles in offsets that only the device knows, and rows are stored one by one where a
//! sequence ends inside a warp's rows.
//!
//! Tensor maps cover the rows of all sequences; tiles of a sequence are shifted by its offset. The search is that of
//! `forward_sm90/packed.rs`. After the last streamed row of a sequence come those of another, which may hold anything: the producer
//! clears them as it clears unused rows, and marks them in their terms as having no gradients. `producer.rs` and `store.rs` call
//! this.

use flashcore_core::{BackwardProblem, Problem};
use flashcore_tile::{
    Builder, CHUNK_BYTES, F32, Global, Params, Pred, Reg, Scope, Shared, U32, Uniform, Val, Warp,
};

use super::{
    Config, Order, ROWS_PER_WARP, Side, TERM_BYTES,
    consumer::Consumer,
    producer::{LANES, Producer},
    schedule::Tile,
};
use crate::parts::{
    search::{Progress, find_from},
    sections::Sections,
    tensor::TensorArgument,
};

/// What is known of packed sequences, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    sequences: Reg<U32>,
}

impl Packed {
    pub(super) fn declare(
        b: &mut Builder,
        params: &mut Params<BackwardProblem>,
        cfg: Config,
    ) -> Option<Self> {
        cfg.packed()
            .then(|| Self { sequences: params.u32(b, "sequences", |p| p.forward().sequences() as u32) })
    }
}

/// Tiles of `held` rows of all heads at most: one that is not full for each sequence.
pub(crate) fn tiles(forward: &Problem, side: Side, held: u32) -> u64 {
    let (rows, longest, heads) = match side {
        Side::Keys => (forward.seq_kv(), forward.longest_kv(), forward.heads_kv()),
        Side::Queries => (forward.seq_q(), forward.longest_q(), forward.heads_q()),
    };
    let (held, sequences) = (u64::from(held), forward.sequences() as u64);
    let each = (longest as u64).div_ceil(held).saturating_mul(sequences);
    each.min((rows as u64 / held).saturating_add(sequences)).saturating_mul(heads as u64)
}

/// Streamed tiles of a head for which there are sums: a sequence's may start in the middle of what the one before has.
pub(crate) fn sums(forward: &Problem, step: u32) -> u64 {
    forward.seq_q() as u64 / u64::from(step) + forward.sequences() as u64
}

/// The first of these of a sequence: no two sequences share one, and if offsets are within the tensor, so are all.
pub(crate) fn first_sums(b: &mut Builder, start: Reg<U32>, sequence: Reg<U32>, step: u32) -> Reg<U32> {
    b.let_(start / step + sequence)
}

/// A tile, if there is one of its number.
struct Found {
    tile: Tile,
    there: Pred,
    /// How many tiles there are, where this is none.
    tiles: Reg<U32>,
}

/// The way of a CTA through the tiles.
struct Walk<'a> {
    producer: &'a Producer<'a>,
    last_sequence: Reg<U32>,
    progress: Progress,
    /// Number of the next tile.
    index: Reg<U32>,
    /// The ticket that it was drawn with.
    ticket: Reg<U32>,
}

impl Producer<'_> {
    /// As many tiles as lengths say when the kernel runs.
    pub(super) fn packed_tiles(&self, b: &mut Builder, packed: Packed) {
        let walk = Walk::new(b, self, packed);
        let mut last = None;
        b.do_while(|b| {
            let found = walk.find(b);
            let there = b.uniform::<Warp>(found.there);
            let stage = self.layout.held[0].stage(b, self.held);
            Self::wait_empty(b, &stage);
            b.if_uniform(there, |b| {
                self.begin(b, &found.tile);
                walk.step(b);
            });
            last = Some(found.tiles);
            there
        });
        last.iter().for_each(|&tiles| walk.leave(b, tiles));
    }

    /// Rows of streamed queries from `used` on are those of others: they have no gradients.
    pub(super) fn clear_terms(&self, b: &mut Builder, terms: Shared, used: Reg<U32>) {
        if !self.cfg.packed() {
            return;
        }
        let row = b.var(self.lane + used);
        b.while_(
            |_| row.lt(self.cfg.shape.step),
            |b| {
                let skip = b.let_(row * TERM_BYTES);
                let at = terms.plus(b, skip);
                b.store_shared::<F32>(at, &[f32::NEG_INFINITY, 0.0].map(Val::Const));
                b.add_to(row, LANES);
            },
        );
        b.sync_warp();
    }
}

impl<'a> Walk<'a> {
    fn new(b: &mut Builder, producer: &'a Producer<'a>, packed: Packed) -> Self {
        let cta = b.cta();
        let walk = Self {
            producer,
            last_sequence: b.let_(packed.sequences - 1),
            progress: Progress::new(b),
            index: b.var_in(Scope::Warp, cta),
            // Before the first ticket there is none that could be the last.
            ticket: b.var_in(Scope::Warp, u32::MAX),
        };
        if walk.drawn() {
            walk.step(b);
        }
        walk
    }

    /// Whether a CTA has no tile before it draws one.
    fn drawn(&self) -> bool {
        self.producer.cfg.shape.order == Order::Drawn
    }

    /// The tile that comes next. Tiles of a sequence are numbered one after another, all heads together.
    fn find(&self, b: &mut Builder) -> Found {
        let Producer { cfg, args, lane, .. } = *self.producer;
        let number = b.let_(self.index / args.heads);
        let ends = (lane, self.last_sequence);
        let found = find_from(b, self.progress, number, ends, |b, sequence| self.row_tiles(b, sequence));
        let there = b.let_((number - found.before).lt(found.own));
        // Where tiles tell how far they are, there is a place for as many as the host knows of, whatever the offsets say.
        let there = if cfg.fused() { b.let_(there & self.index.lt(args.tiles)) } else { there };
        // Nobody looks at a tile that is not there, but it is numbered all the same.
        let row_tiles = b.let_(found.own.max(1));
        let numbering = Sections { row_tiles, ..args.sections(cfg) };
        let before = b.let_(found.before * args.heads);
        let within = b.let_(self.index - before);
        let (block, head) = numbering.find(b, within);
        let [q, kv] = args.lengths.sequence(b, found.index);
        let starts = Some([q.start, kv.start]);
        let tiles = b.let_(found.own * args.heads + before);
        let before = cfg.fused().then(|| [found.before, first_sums(b, q.start, found.index, cfg.shape.step)]);
        Found {
            tile: Tile { block, head, batch: b.var(0), q_len: q.len, kv_len: kv.len, starts, before },
            there,
            tiles: if cfg.fused() { b.let_(tiles.min(args.tiles)) } else { tiles },
        }
    }

    /// Held tiles of a head of a sequence: no more than the host knows of, whatever the offsets say.
    fn row_tiles(&self, b: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
        let Producer { cfg, args, .. } = *self.producer;
        let rows = match cfg.side {
            Side::Keys => args.lengths.packed_keys(b, sequence),
            Side::Queries => args.lengths.packed_queries(b, sequence),
        };
        b.let_(rows.div_ceil(cfg.held()).min(args.blocks))
    }

    /// Moves on to the next tile.
    fn step(&self, b: &mut Builder) {
        let Producer { args, leader, .. } = *self.producer;
        let ctas = b.ctas();
        let Some(counter) = args.tile_counter else { return b.add_to(self.index, ctas) };
        let ticket = b.var_in::<U32>(Scope::Lane, 0);
        b.predicated(leader, |b| {
            let drawn = b.atomic_add(counter, 1);
            b.set(ticket, drawn);
        });
        let ticket = b.broadcast(ticket, Scope::Warp);
        b.set(self.ticket, ticket);
        if self.drawn() {
            b.set(self.index, ticket);
        } else {
            b.set(self.index, ticket + ctas);
        }
    }

    /// Leaves the counter as it was found: each tile has drawn one ticket, and where CTAs start without one, each of them
    /// another; who drew the last one is here.
    fn leave(&self, b: &mut Builder, tiles: Reg<U32>) {
        let Some(counter) = self.producer.args.tile_counter else { return };
        let ctas = b.ctas();
        let tickets = if self.drawn() { b.let_(tiles + ctas) } else { tiles };
        // Without tiles nobody may have drawn any.
        let last = b.let_((tickets - 1).eq(self.ticket) & tickets.ne(0) & self.producer.leader);
        b.predicated(last, |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
    }
}

/// Bytes that each thread sets aside.
pub(super) const ASIDE_BYTES: u32 = 32;

/// Sets all of a tile aside; its keys start at `keys`.
pub(super) fn set_aside(b: &mut Builder, aside: Shared, tile: &Tile, keys: Reg<U32>) {
    b.store_shared(aside, &[tile.head, keys, tile.q_len, tile.kv_len].map(Val::from));
    b.store_shared(aside.at(16), &[tile.block.into()]);
}

/// The tile that was set aside.
pub(super) fn take_back(b: &mut Builder, aside: Shared, tile: &Tile) -> Tile {
    let [head, keys, q_len, kv_len] = b.load_shared::<U32, 4>(aside);
    let [block] = b.load_shared::<U32, 1>(aside.at(16));
    let starts = tile.starts.map(|[queries, _]| [queries, keys]);
    Tile { head, q_len, kv_len, block, starts, ..*tile }
}

/// A part of a gradient that a warp has gathered in shared memory.
pub(super) struct Gathered {
    pub(super) from: Shared,
    /// The first of its columns, and how many features rows have.
    pub(super) column: u32,
    pub(super) dim: u32,
}

impl Consumer<'_> {
    /// Whether all of this warp's rows belong to the sequence.
    pub(super) fn whole_rows(&self, b: &mut Builder, tile: &Tile) -> Uniform<Warp> {
        let row = self.warp_row(b, tile);
        let whole = b.let_((row + (ROWS_PER_WARP - 1)).lt(tile.held_len(self.cfg)));
        b.all(whole)
    }

    /// Writes those of the warp's rows that the sequence has: four at a time, eight lanes each.
    pub(super) fn store_rows(&self, b: &mut Builder, tile: &Tile, to: &TensorArgument, part: &Gathered) {
        let (staging, bytes) = (self.layout.staging, self.cfg.input.element().bytes());
        let start = part.from.address(b);
        let first = self.warp_row(b, tile);
        let per_row = staging.slab_width() / CHUNK_BYTES;
        let (line, chunk) = (b.let_(self.lane / per_row), b.let_(self.lane % per_row));
        // Nobody has gathered anything behind the last feature.
        let chunks = per_row.min((part.dim - part.column) * bytes / CHUNK_BYTES);
        let column = b.let_((chunk * CHUNK_BYTES + part.column * bytes).widen());
        for pass in 0..ROWS_PER_WARP * per_row / LANES {
            let line = b.let_(line + pass * (LANES / per_row));
            let row = b.let_(first + line);
            let there = b.let_(row.lt(tile.held_len(self.cfg)) & chunk.lt(chunks));
            let place = tile.held_place(b, self.cfg, row);
            let to = to.at(b, tile.batch, tile.head, place);
            let to = b.let_(to + column);
            let from = Shared::from(staging.chunk(b, start, line, chunk));
            b.predicated(there, |b| {
                let values = b.load_shared::<U32, 4>(from);
                b.store_global(Global::from(to), &values.map(Val::from));
            });
        }
    }
}
