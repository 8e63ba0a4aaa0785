//! The producer: weights by tensor copies of one thread, rows by tensor copies too or gathered by all threads.
//!
//! Gathered rows are published some stages after they were issued, once they have arrived: matrix products see them only
//! after a fence of the threads that copied them.

use flashcore_ptx::layout::Swizzle;
use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Global, Params, Pred, Reg, Scope, Shared, SmemTile, Stage, TensorMap,
    U32, U64, Val, WARPGROUP,
};

use super::{
    super::{
        Layer, NONE,
        product::{DEPTH, Kind},
    },
    Layout,
    config::{BYTES, Config, WARPS},
    maps,
    place::{Arguments, Place},
};
use crate::slots::moe as slots;

/// Threads that share a line of 128 bytes.
const LANES: u32 = DEPTH * BYTES / CHUNK_BYTES;
/// Rows that one pass of all threads copies.
const ROWS_PER_PASS: u32 = WARPGROUP / LANES;

/// Both CTAs of a pair.
const BOTH: u16 = 0b11;

/// Arrivals that fill a stage: of the thread that asks for weights, and of each warp that gathers.
pub(super) const fn arrivals(cfg: &Config) -> u32 {
    match cfg.kind {
        Kind::Up(_) => 1 + WARPS,
        Kind::Down => 1,
    }
}

/// Stages that are asked for before the oldest of them is waited for.
const fn lag(cfg: &Config) -> u32 {
    cfg.shape.stages - 2
}

/// Where weights and rows come from, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    weights: TensorMap,
    from: Source,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// The tokens: their address, bytes between them, and experts of each.
    Tokens { base: Reg<U64>, stride: Reg<U64>, top_k: Reg<U32> },
    /// What the first product left.
    Joined(TensorMap),
}

impl Rows {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let cfg = *cfg;
        let weights = params.tensor_map(b, "weights", move |layer| maps::weights(&cfg, layer));
        let from = match cfg.kind {
            Kind::Up(_) => Source::Tokens {
                base: params.buffer(b, "rows", slots::X),
                stride: params
                    .u64(b, "row_stride", |layer| layer.problem.x().strides()[2] as u64 * u64::from(BYTES)),
                top_k: params.u32(b, "top_k", |layer| layer.problem.top_k() as u32),
            },
            Kind::Down => Source::Joined(params.tensor_map(b, "rows", move |layer| {
                let from = (slots::JOINED, layer.problem.intermediate());
                maps::rows(&cfg, layer, from, ([DEPTH, cfg.shape.rows], Swizzle::B128))
            })),
        };
        Self { weights, from }
    }
}

/// Fills the ring with every tile of this CTA.
pub(super) fn run(b: &mut Builder, cfg: &Config, args: &Arguments, rows: &Rows, layout: &Layout) {
    let thread = b.thread();
    let first: Pred = b.let_((thread % WARPGROUP).eq(0));
    let filling = Filling { cfg: *cfg, args: *args, weights: rows.weights, layout: *layout, first };
    match rows.from {
        Source::Joined(map) => b.if_(first, |b| {
            let early = cfg.early().then(|| {
                let early = filling.start_weights(b);
                b.wait_for_predecessor();
                early
            });
            let count = b.var(0u32);
            filling.each_tile(b, |b, place| filling.copied(b, map, (count, early), place));
        }),
        Source::Tokens { base, stride, top_k } => {
            let gather = Gather::new(b, &filling, (base, stride, top_k));
            filling.each_tile(b, |b, place| gather.tile(b, place));
            gather.drain(b);
        }
    }
}

/// What the producer keeps for the whole launch.
struct Filling {
    cfg: Config,
    args: Arguments,
    weights: TensorMap,
    layout: Layout,
    /// The thread that issues tensor copies.
    first: Pred,
}

impl Filling {
    fn each_tile(&self, b: &mut Builder, fill: impl FnOnce(&mut Builder, Place)) {
        let [tiles, all] = self.args.count(b);
        let [cta, ctas] = self.args.walkers(b);
        let index = b.var(cta);
        b.while_(
            |_| index.lt(all),
            |b| {
                let place = self.args.place(b, index, tiles);
                fill(b, place);
                b.add_to(index, ctas);
            },
        );
    }

    /// Calls `fill` with the stage of each step, once it is empty, and the step's first element of depth.
    fn each_step(&self, b: &mut Builder, count: Reg<U32>, fill: impl FnOnce(&mut Builder, Stage, Reg<U32>)) {
        let depth = b.var(0u32);
        b.while_(
            |_| depth.lt(self.args.depth),
            |b| {
                let stage = self.layout.ring.stage(b, count);
                stage.wait_empty(b);
                fill(b, stage, depth);
                b.add_to(count, 1);
                b.add_to(depth, DEPTH);
            },
        );
    }

    /// Starts the copy of a stage's weights.
    fn copy_weights(&self, b: &mut Builder, stage: &Stage, place: Place, depth: Reg<U32>) {
        let to = stage.at(b).at(self.cfg.shape.rows * self.tile().slab_width());
        match place.other {
            None => {
                let at = self.weights_at(b, place, depth, 0);
                b.tma_load(self.weights, self.tile(), to, at, stage.full());
            }
            Some(other) => self.copy_pair(b, (stage, to), place, other, depth),
        }
    }

    /// Weights of a pair: half of them to both, where they have the same expert, else all for this CTA alone.
    fn copy_pair(
        &self,
        b: &mut Builder,
        (stage, to): (&Stage, Shared),
        place: Place,
        other: Reg<U32>,
        depth: Reg<U32>,
    ) {
        let rank = b.cluster_rank();
        let same: Pred = b.let_(other.eq(place.expert));
        let half = self.cfg.shape.tile_n / 2 * self.tile().slab_width();
        for n in 0..2 {
            let (at, to) = (self.weights_at(b, place, depth, n), to.at(n * half));
            let shared = b.let_(same & rank.eq(n));
            b.predicated(shared, |b| {
                b.tma_load_to(BOTH, self.weights, (self.tile(), to), at, stage.full());
            });
            let at = self.weights_at(b, place, depth, n);
            b.predicated(other.ne(place.expert), |b| {
                b.tma_load(self.weights, self.tile(), to, at, stage.full());
            });
        }
    }

    /// Where the weights of a stage start, or half number `half` of them.
    fn weights_at(&self, b: &mut Builder, place: Place, depth: Reg<U32>, half: u32) -> [Val<U32>; 4] {
        let (feature, matrix) = match self.cfg.kind {
            Kind::Up(_) => (place.feature, half),
            Kind::Down if half == 0 => (place.feature, 0),
            Kind::Down => (b.let_(place.feature + half * (self.cfg.features() / 2)), 0),
        };
        [depth.into(), feature.into(), Val::Const(matrix), place.expert.into()]
    }

    /// A tile whose rows lie one after another; `early` stages of all have their weights already.
    fn copied(
        &self,
        b: &mut Builder,
        map: TensorMap,
        (count, early): (Reg<U32>, Option<Reg<U32>>),
        place: Place,
    ) {
        let row = b.let_(place.tile * self.cfg.shape.rows);
        self.each_step(b, count, |b, stage, depth| {
            let weights = |b: &mut Builder| {
                stage.expect_tile(b);
                self.copy_weights(b, &stage, place, depth);
            };
            match early {
                None => stage.expect_tile(b),
                Some(early) => b.if_(count.ge(early), weights),
            }
            let to = stage.at(b);
            b.tma_load(map, self.tile(), to, [Val::from(depth), row.into()], stage.full());
            if early.is_none() {
                self.copy_weights(b, &stage, place, depth);
            }
        });
    }

    /// Starts the copies of the first tile's weights, which are older than the rows; returns the number of stages.
    fn start_weights(&self, b: &mut Builder) -> Reg<U32> {
        let [tiles, all] = self.args.count(b);
        let ([cta, _], steps) = (self.args.walkers(b), self.args.steps(b));
        let early = b.let_(steps.min(self.cfg.shape.stages));
        let early = b.let_(cta.lt(all).select(early, 0));
        b.if_(early.gt(0), |b| {
            let place = self.args.place(b, cta, tiles);
            let (count, depth) = (b.var_in(Scope::Lane, 0u32), b.var_in(Scope::Lane, 0u32));
            b.while_(
                |_| count.lt(early),
                |b| {
                    let stage = self.layout.ring.stage(b, count);
                    stage.expect_tile(b);
                    self.copy_weights(b, &stage, place, depth);
                    b.add_to(count, 1);
                    b.add_to(depth, DEPTH);
                },
            );
        });
        early
    }

    const fn tile(&self) -> &SmemTile {
        self.layout.ring.tile()
    }
}

/// One thread's share of gathering rows.
struct Gather<'a> {
    filling: &'a Filling,
    base: Reg<U64>,
    stride: Reg<U64>,
    top_k: Reg<U32>,
    /// The thread's first row, and its first element of a stage.
    line: Reg<U32>,
    column: Reg<U32>,
    /// Where the thread's first chunk goes in the first stage.
    to: Reg<U32>,
    count: Reg<U32>,
    /// The lane that publishes for its warp.
    leader: Pred,
}

impl<'a> Gather<'a> {
    fn new(
        b: &mut Builder,
        filling: &'a Filling,
        (base, stride, top_k): (Reg<U64>, Reg<U64>, Reg<U32>),
    ) -> Self {
        let (thread, lane) = (b.thread(), b.lane());
        let thread = b.let_(thread % WARPGROUP);
        let (line, chunk) = (b.let_(thread / LANES), b.let_(thread % LANES));
        let start = filling.tile().at(b).address(b);
        Self {
            filling,
            base: b.let_(base + chunk.mul_wide(CHUNK_BYTES)),
            stride,
            top_k,
            line,
            column: b.let_(chunk * (CHUNK_BYTES / BYTES)),
            to: filling.tile().chunk(b, start, line, chunk),
            count: b.var(0u32),
            leader: b.let_(lane.eq(0)),
        }
    }

    /// All stages of a tile.
    fn tile(&self, b: &mut Builder, place: Place) {
        let filling = self.filling;
        let rows: Vec<_> =
            (0..filling.cfg.shape.rows / ROWS_PER_PASS).map(|pass| self.row(b, place, pass)).collect();
        filling.each_step(b, self.count, |b, stage, depth| {
            b.if_(filling.first, |b| {
                stage.full().arrive_expecting(b, filling.cfg.shape.tile_n * DEPTH * BYTES);
                filling.copy_weights(b, &stage, place, depth);
            });
            let inside = (!filling.cfg.whole).then(|| b.let_((depth + self.column).lt(filling.args.depth)));
            let to = b.let_(self.to + stage.bytes);
            for (pass, &(from, present)) in (0..).zip(&rows) {
                let present = match inside {
                    Some(inside) => b.select(inside, present, 0),
                    None => present,
                };
                let to = Shared { base: to, offset: pass * ROWS_PER_PASS * filling.tile().slab_width() };
                b.copy_async(CopyWidth::B16, to, Global::from(from), Some(present.into()));
                b.add_to(from, u64::from(DEPTH * BYTES));
            }
            b.commit_copies();
            let late = lag(&filling.cfg);
            self.publish(b, late, self.count);
        });
    }

    /// Where a row of a tile comes from, and how many bytes of each chunk are read: none of padding.
    fn row(&self, b: &mut Builder, place: Place, pass: u32) -> (Reg<U64>, Reg<U32>) {
        let row = b.let_(place.tile * self.filling.cfg.shape.rows + self.line + pass * ROWS_PER_PASS);
        let at = b.let_(self.filling.args.index.entries + row.mul_wide(4));
        let [entry] = b.load_global::<U32, 1>(at);
        let there: Pred = b.let_(entry.ne(NONE));
        let token = b.let_(entry / self.top_k);
        let token = b.select(there, token, 0);
        let from = b.let_(token.widen() * self.stride + self.base);
        (b.var_in(Scope::Lane, from), b.select(there, CHUNK_BYTES, 0))
    }

    /// Publishes the stage that was asked for `late` stages before number `count`, if there is one.
    fn publish(&self, b: &mut Builder, late: u32, count: Reg<U32>) {
        b.wait_copies(late);
        b.fence_async();
        b.sync_warp();
        let due = b.let_(count - late);
        let stage = self.filling.layout.ring.stage(b, due);
        let there = b.let_(self.leader & count.ge(late));
        b.predicated(there, |b| stage.publish(b));
    }

    /// Publishes what is still in flight.
    fn drain(&self, b: &mut Builder) {
        let last = b.let_(self.count - 1);
        let some = b.uniform::<flashcore_tile::Warpgroup>(self.count.gt(0));
        b.if_uniform(some, |b| {
            for late in (0..lag(&self.filling.cfg)).rev() {
                self.publish(b, late, last);
            }
        });
    }
}
