//! The writer: a warp that adds the parts of dQ, which the mover left in shared memory, to sums in memory.
//!
//! Key tiles that see the same queries add to them in the order of their numbers, so that sums are bitwise reproducible. A
//! writer publishes its progress as a number in memory and waits until the writer of the previous tile is past the place at
//! which it wants to add. CTAs draw tiles in order, so nobody waits for a tile that no CTA has drawn. All walk the queries in
//! the same direction, so each stays one step behind the previous.
//!
//! A writer waits until its additions are done before it publishes, and the next one adds after it has read that: additions
//! are made in L2, in this order, whichever other writes of a thread are visible. So numbers are published without a fence,
//! which would wait for everything in flight and made the writer the bottleneck. [`crate::backward_sums`] puts the sums in
//! order and leaves zeros.

use std::cell::Cell;

use flashcore_core::BackwardProblem;
use flashcore_tile::{Builder, Expr, Global, Params, Pipeline, Pred, Reg, Scope, U32, U64};

use super::{Arguments, Config, Layout, ROWS_PER_GROUP, mover::Part, packed, producer::info, schedule::Tile};
use crate::{backward_sums::QUAD_BYTES, slots::backward as slots};

/// What a tile publishes when all of it has been added.
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
            steps: params.u32(b, "steps", move |p| match cfg.packed() {
                true => packed::sums(p.forward(), step) as u32,
                false => (p.forward().seq_q() as u32).div_ceil(step),
            }),
        }
    }
}

/// What the writer keeps for the whole launch.
pub(super) struct Writer<'a> {
    cfg: Config,
    args: &'a Arguments,
    layout: &'a Layout,
    sums: SumsArgument,
    parts: Pipeline,
}

/// A tile's place among those of its head.
struct Place {
    /// Where this tile publishes its progress, and the previous one did.
    own: Reg<U64>,
    before: Global,
    /// Whether this is the first, and the last, of a head.
    first: Pred,
    last: Pred,
    /// What the previous tile published last.
    seen: Reg<U32>,
}

/// Counters of the writer.
#[derive(Clone, Copy)]
struct Counts {
    held: Reg<U32>,
    parts: Reg<U32>,
}

impl<'a> Writer<'a> {
    /// The writer of a kernel that has one.
    pub(super) fn of(cfg: Config, args: &'a Arguments, layout: &'a Layout) -> Option<Self> {
        Some(Self { cfg, args, layout, sums: args.sums?, parts: layout.parts? })
    }

    /// Works through the tiles that the producer posts.
    pub(super) fn run(&self, b: &mut Builder) {
        let counts = Counts { held: b.var(0), parts: b.var(0) };
        let lane = b.lane();
        let leads = b.let_(lane.eq(0));
        let held = Cell::new(None);
        b.while_(
            |b| {
                let stage = self.layout.held[0].stage(b, counts.held);
                stage.wait_full(b);
                let info = info(b, self.layout, counts.held);
                let (tile, there) = Tile::read(b, self.cfg, self.args, info);
                // The next tile may come while parts of this one are still on their way.
                b.sync_warp();
                stage.release(b, leads);
                b.add_to(counts.held, 1);
                held.set(Some(tile));
                there
            },
            |b| held.get().iter().for_each(|tile| self.tile(b, tile, counts, leads)),
        );
    }

    fn tile(&self, b: &mut Builder, tile: &Tile, counts: Counts, leads: Pred) {
        let place = self.place(b, tile);
        let streamed = tile.streamed(b, self.cfg, self.args);
        streamed.each(b, self.cfg, self.args.group, |b, member, block| {
            let head = b.let_(tile.head * self.args.group + member);
            let row = b.let_(block.unsigned());
            let at = b.let_((self.sums.steps - 1 - row) * self.args.group + member);
            let to = self.sums_at(b, tile, head, row);
            self.step(b, &place, counts, leads, at, to);
        });
        b.if_(leads, |b| self.tell(b, &place, DONE));
        // Without it the assembler lets the other lanes go on to what all of them do together.
        b.sync_warp();
    }

    fn place(&self, b: &mut Builder, tile: &Tile) -> Place {
        let (number, blocks) = match tile.before {
            Some([before, _]) => {
                let blocks = b.let_(tile.kv_len.div_ceil(self.cfg.held()).min(self.args.blocks));
                (b.let_(before * self.args.heads + (tile.head * blocks + tile.block)), blocks)
            }
            None => {
                let flat = b.let_(tile.batch * self.args.heads + tile.head);
                (b.let_(flat * self.args.blocks + tile.block), self.args.blocks)
            }
        };
        let own = b.let_(self.sums.turns + number.mul_wide(4));
        Place {
            own,
            before: Global::from(own).at(-4),
            first: b.let_(tile.block.eq(0)),
            last: b.let_((tile.block + 1).eq(blocks)),
            seen: b.var_in(Scope::Lane, 0),
        }
    }

    /// Where the sums of a streamed tile start.
    fn sums_at(&self, b: &mut Builder, tile: &Tile, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let number = match tile.before {
            Some([_, before]) => b.let_(head * self.sums.steps + (before + row)),
            None => {
                let flat = b.let_(tile.batch * self.sums.heads + head);
                b.let_(flat * self.sums.steps + row)
            }
        };
        let bytes = self.cfg.shape.step / ROWS_PER_GROUP * self.block_bytes();
        b.let_(self.sums.sums + number.mul_wide(bytes))
    }

    /// Bytes of the sums of 64 rows.
    const fn block_bytes(&self) -> u32 {
        self.cfg.dim_qk / 8 * QUAD_BYTES
    }

    /// One streamed tile, the one at `at` in the order of all.
    fn step(
        &self,
        b: &mut Builder,
        place: &Place,
        counts: Counts,
        leads: Pred,
        at: Reg<U32>,
        sums: Reg<U64>,
    ) {
        let parts = Part::all(self.cfg);
        for (n, part) in parts.iter().enumerate() {
            let stage = self.parts.stage(b, counts.parts);
            stage.wait_full(b);
            let from = stage.at(b);
            let to = part.block * self.block_bytes() + part.column / 8 * QUAD_BYTES;
            let to = Global::from(sums).at(to as i32);
            b.if_(leads, |b| {
                if n == 0 {
                    self.wait_for_turn(b, place, at);
                }
                b.bulk_add(from, to, part.cols / 8 * QUAD_BYTES);
                b.tma_commit();
                b.tma_wait_read(0);
            });
            // Lanes need not come together again where a branch ends. One that still looked for this part when the mover puts
            // the one after the next in its place would wait for a phase that is over.
            b.sync_warp();
            stage.release(b, leads);
            b.add_to(counts.parts, 1);
        }
        b.if_(leads, |b| {
            b.tma_wait(0);
            let next = b.let_(at + 1);
            self.tell(b, place, next);
        });
    }

    /// Publishes that everything before `at` has been added.
    fn tell(&self, b: &mut Builder, place: &Place, at: impl Into<Expr<U32>>) {
        let at = at.into();
        b.predicated(place.last.not(), |b| b.tell(place.own, at));
    }

    /// Waits until the tile before has added its part at `at`.
    fn wait_for_turn(&self, b: &mut Builder, place: &Place, at: Reg<U32>) {
        let waits = b.let_(place.seen.le(at) & place.first.not());
        b.if_(waits, |b| {
            let seen = b.wait_above(place.before, at);
            b.set(place.seen, seen);
        });
    }
}
