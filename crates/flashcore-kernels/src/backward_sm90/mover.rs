//! The mover: a warpgroup that multiplies dS, as consumers hand it over, with K and adds dQ to sums in memory.
//!
//! Sums are f32, each block of 64 rows in the order of an accumulator's registers: quad after quad (8 columns), in each four
//! values of each thread. So the threads put their registers side by side into shared memory, and one copy adds all of them:
//! added from registers, they would take the way of all other loads and stores. [`crate::backward_sums`] puts them in order.
//!
//! Tiles of keys that see the same queries add to them in the order of their numbers. A mover tells how far it has come by a
//! number in memory and waits until the mover of the tile before is past the place at which it wants to add. CTAs draw tiles
//! in order, so that nobody waits for a tile that nobody has. All walk the queries in the same direction, so that one stays
//! behind the other by a step, and rarely has to look.

use std::cell::Cell;

use flashcore_core::BackwardProblem;
use flashcore_tile::{
    Acc, Builder, Expr, F32, Fragment, Global, Major, MatrixOperand, Params, Pipeline, Pred, Reg, Scope,
    Shared, Start, U32, U64,
};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP, consumer::Consumer, producer::info,
    schedule::Tile,
};
use crate::{backward_sums::QUAD_BYTES, slots::backward as slots};

/// Columns of dQ that are multiplied at once.
const PART: u32 = 64;
/// Places in which parts of dQ wait for being added, and the bytes of one.
pub(super) const PLACES: usize = 2;
pub(super) const PLACE_BYTES: u32 = PART / 8 * QUAD_BYTES;
/// What a tile tells when all of it has been added.
const DONE: u32 = i32::MAX as u32;

/// Where dQ is summed, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct SumsArgument {
    sums: Reg<U64>,
    /// How far each tile of keys has come; [`crate::backward_sums`] leaves zeros.
    turns: Reg<U64>,
    /// Query heads of a batch entry.
    heads: Reg<U32>,
    /// Streamed tiles of a head.
    steps: Reg<U32>,
}

impl SumsArgument {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: Config) -> Self {
        let step = cfg.shape.step;
        Self {
            sums: params.buffer(b, "sums", slots::DQ_SUMS),
            turns: params.buffer(b, "turns", slots::TURNS),
            heads: params.u32(b, "heads_q", |p| p.forward().heads_q() as u32),
            steps: params.u32(b, "steps", move |p| (p.forward().seq_q() as u32).div_ceil(step)),
        }
    }
}

/// What the mover keeps for the whole launch.
pub(super) struct Mover<'a> {
    cfg: Config,
    args: &'a Arguments,
    layout: &'a Layout,
    sums: SumsArgument,
    handed: Pipeline,
    staging: u32,
}

/// A tile's place among those of its head.
struct Place {
    /// Where this tile tells how far it is, and the one before it did.
    own: Reg<U64>,
    before: Global,
    /// Whether this is the first, and the last, of a head.
    first: Pred,
    last: Pred,
    /// The one thread that adds, tells and waits.
    leads: Pred,
    /// What the tile before told last.
    seen: Reg<U32>,
}

/// Counters of the mover.
#[derive(Clone, Copy)]
struct Counts {
    held: Reg<U32>,
    handed: Reg<U32>,
}

impl<'a> Mover<'a> {
    /// The mover of a kernel that has one.
    pub(super) fn of(cfg: Config, args: &'a Arguments, layout: &'a Layout) -> Option<Self> {
        Some(Self { cfg, args, layout, sums: args.sums?, handed: layout.handed?, staging: layout.sums? })
    }

    /// Works through the tiles that the producer posts.
    pub(super) fn run(&self, b: &mut Builder) {
        let counts = Counts { held: b.var(0), handed: b.var(0) };
        let held = Cell::new(None);
        b.while_(
            |b| {
                self.layout.held[0].stage(b, counts.held).wait_full(b);
                let info = info(b, self.layout, counts.held);
                let (tile, there) = Tile::read(b, self.cfg, self.args, info);
                held.set(Some(tile));
                there
            },
            |b| held.get().iter().for_each(|tile| self.tile(b, tile, counts)),
        );
    }

    fn tile(&self, b: &mut Builder, tile: &Tile, counts: Counts) {
        let place = self.place(b, tile);
        let streamed = tile.streamed(b, self.cfg, self.args);
        streamed.each(b, self.cfg, self.args.group, |b, member, block| {
            let head = b.let_(tile.head * self.args.group + member);
            let row = b.let_(block.unsigned());
            let at = b.let_((self.sums.steps - 1 - row) * self.args.group + member);
            let to = self.sums_at(b, tile, head, row);
            self.step(b, &place, counts, at, to);
            b.add_to(counts.handed, 1);
        });
        let lane = b.lane();
        let leader = b.let_(lane.eq(0));
        self.layout.held[0].stage(b, counts.held).release(b, leader);
        b.add_to(counts.held, 1);
        self.tell(b, &place, DONE);
    }

    fn place(&self, b: &mut Builder, tile: &Tile) -> Place {
        let thread = b.thread();
        let flat = b.let_(tile.batch * self.args.heads + tile.head);
        let number = b.let_(flat * self.args.blocks + tile.block);
        let own = b.let_(self.sums.turns + number.mul_wide(4));
        Place {
            own,
            before: Global::from(own).at(-4),
            first: b.let_(tile.block.eq(0)),
            last: b.let_((tile.block + 1).eq(self.args.blocks)),
            leads: b.let_((thread & 127).eq(0)),
            seen: b.var_in(Scope::Lane, 0),
        }
    }

    /// Where the sums of a streamed tile start.
    fn sums_at(&self, b: &mut Builder, tile: &Tile, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let flat = b.let_(tile.batch * self.sums.heads + head);
        let number = b.let_(flat * self.sums.steps + row);
        let bytes = self.cfg.shape.step / ROWS_PER_GROUP * self.block_bytes();
        b.let_(self.sums.sums + number.mul_wide(bytes))
    }

    /// Bytes of the sums of 64 rows.
    const fn block_bytes(&self) -> u32 {
        self.cfg.dim_qk / 8 * QUAD_BYTES
    }

    /// One streamed tile, the one at `at` in the order of all.
    fn step(&self, b: &mut Builder, place: &Place, counts: Counts, at: Reg<U32>, to: Reg<U64>) {
        let stage = self.handed.stage(b, counts.handed);
        stage.wait_full(b);
        let blocks = self.cfg.shape.step / ROWS_PER_GROUP;
        let columns: Vec<_> = (0..self.cfg.dim_qk).step_by(PART as usize).collect();
        let parts: Vec<_> =
            (0..blocks).flat_map(|block| columns.iter().map(move |&column| (block, column))).collect();
        // Parts take turns in the same registers: the assembler would keep those of all of them apart.
        let mut free: Option<Acc> = None;
        for (n, &(block, column)) in parts.iter().enumerate() {
            let cols = PART.min(self.cfg.dim_qk - column);
            let (left, right) = self.operands(b, stage.bytes, block, column);
            let sums = free.take().filter(|acc| acc.cols() == cols as usize);
            let sums = sums.unwrap_or_else(|| Acc::new(b, cols as usize));
            let sums = b.wgmma_ss(sums, Start::Zero, [&left, &right], self.cfg.held());
            if n == 0 {
                // What was added in the last step is told of while this one is multiplied.
                self.tell(b, place, at);
            }
            let sums = sums.wait(b);
            if n + 1 == parts.len() {
                let lane = b.lane();
                let leader = b.let_(lane.eq(0));
                stage.release(b, leader);
            }
            // Where the number of parts is odd, a step ends in the place in which the next begins.
            let pending = u32::from(n > 0 || parts.len().is_multiple_of(PLACES));
            let from = self.gather(b, place, &sums, n % PLACES, pending);
            let to = Global::from(to).at((block * self.block_bytes() + column / 8 * QUAD_BYTES) as i32);
            b.if_(place.leads, |b| {
                if n == 0 {
                    self.wait_for_turn(b, place, at);
                }
                b.bulk_add(from, to, cols / 8 * QUAD_BYTES);
                b.tma_commit();
            });
            free = Some(sums);
        }
    }

    /// Puts the sums of a part into a place, once all but `pending` of the copies before have read theirs.
    fn gather(&self, b: &mut Builder, place: &Place, sums: &Acc, n: usize, pending: u32) -> Shared {
        let start = b.shared_at(self.staging + n as u32 * PLACE_BYTES);
        b.predicated(place.leads, |b| b.tma_wait_read(pending));
        self.meet(b);
        let thread = b.thread();
        let mine = b.let_((thread & 127) * 16);
        let mine = start.plus(b, mine);
        for (quad, values) in (0..).zip(sums.regs().chunks_exact(4)) {
            b.store_shared::<F32>(mine.at(quad * QUAD_BYTES), &[0, 1, 2, 3].map(|i| values[i].into()));
        }
        b.fence_async();
        self.meet(b);
        start
    }

    /// dS of 64 queries, and columns of K.
    fn operands(
        &self,
        b: &mut Builder,
        stage: Reg<U32>,
        block: u32,
        column: u32,
    ) -> (MatrixOperand, MatrixOperand) {
        let (handed, keys) = (self.handed.tile(), self.layout.held[0].tile());
        let left = handed.operand(b, Major::Mn, stage + block * handed.slab_bytes());
        let right = keys.operand(b, Major::Mn, column / PART * keys.slab_bytes());
        (left, right)
    }

    /// Tells that everything before `at` has been added.
    fn tell(&self, b: &mut Builder, place: &Place, at: impl Into<Expr<U32>>) {
        let at = at.into();
        b.if_(place.leads, |b| {
            b.tma_wait();
            b.predicated(place.last.not(), |b| b.publish(place.own, at));
        });
    }

    /// Waits until the tile before has added its part at `at`.
    fn wait_for_turn(&self, b: &mut Builder, place: &Place, at: Reg<U32>) {
        let waits = b.let_(place.seen.le(at) & place.first.not());
        b.if_(waits, |b| {
            let seen = b.wait_above(place.before, at);
            b.set(place.seen, seen);
        });
    }

    /// All threads of the mover are here.
    fn meet(&self, b: &mut Builder) {
        self.layout.moved.iter().for_each(|&barrier| b.sync(barrier));
    }
}

impl Consumer<'_> {
    /// Waits until the mover has read what lies where dS of this pair will.
    pub(super) fn wait_for_mover(&self, b: &mut Builder) {
        let Some(handed) = self.layout.handed else { return };
        handed.stage(b, self.count).wait_empty(b);
    }

    /// Puts dS where the mover reads it.
    pub(super) fn store_for_mover(&self, b: &mut Builder, ds: &Fragment) {
        let Some(handed) = self.layout.handed else { return };
        let (tile, stage) = (handed.tile(), handed.stage(b, self.count));
        let row = b.let_(self.group * ROWS_PER_GROUP + self.warp * ROWS_PER_WARP + (self.lane & 15));
        let start = stage.at(b).address(b);
        let first = tile.chunk(b, start, row, self.lane >> 4);
        for k in 0..self.cfg.shape.step / 16 {
            let (slab, pair) = (k * 16 / tile.slab_cols(), k * 16 % tile.slab_cols() / 16);
            // Chunks of a row are turned by its number, so that two of them change places where a bit differs.
            let at = b.let_(first ^ (pair << 5));
            b.stmatrix(Shared::from(at).at(slab * tile.slab_bytes()), ds.slice(k as usize));
        }
    }

    /// Hands over to the mover what was stored.
    pub(super) fn hand_over(&self, b: &mut Builder) {
        let Some(handed) = self.layout.handed else { return };
        let stage = handed.stage(b, self.count);
        b.fence_async();
        b.sync_warp();
        b.predicated(self.leader, |b| stage.publish(b));
    }
}
