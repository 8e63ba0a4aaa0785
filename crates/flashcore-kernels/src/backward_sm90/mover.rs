//! The mover: a warpgroup that multiplies the dS of the consumers with K, and puts dQ in shared memory for the writer.
//!
//! A part of dQ lies in shared memory in the order of an accumulator's registers: quad after quad (8 columns), in each four
//! values of each thread. Sums in memory have the same layout, so the writer adds a part with one copy: adding from
//! registers would go through the load/store units.

use std::cell::Cell;

use flashcore_tile::{
    Acc, Builder, F32, Fragment, Major, MatrixOperand, Pipeline, Pred, Reg, Shared, Start, U32, Uniform,
    Warpgroup,
};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP, consumer::Consumer, producer::info,
    ranges::Factors, schedule::Tile,
};
use crate::backward_sums::QUAD_BYTES;

/// Columns of dQ that are multiplied at once.
pub(super) const PART: u32 = 64;
/// Parts that wait for being added.
pub(super) const PLACES: u32 = 2;

/// A part of the dQ of a streamed tile: 64 rows, and columns.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) block: u32,
    pub(super) column: u32,
    pub(super) cols: u32,
}

impl Part {
    /// The parts of a streamed tile, in the order in which they are multiplied and added.
    pub(super) fn all(cfg: Config) -> Vec<Self> {
        let part = |block: u32, column: u32| Self { block, column, cols: PART.min(cfg.dim_qk - column) };
        let columns = || (0..cfg.dim_qk).step_by(PART as usize);
        let blocks = 0..cfg.shape.step / ROWS_PER_GROUP;
        blocks.flat_map(|block| columns().map(move |column| part(block, column))).collect()
    }
}

/// What the mover keeps for the whole launch.
pub(super) struct Mover<'a> {
    cfg: Config,
    args: &'a Arguments,
    layout: &'a Layout,
    handed: Pipeline,
    parts: Pipeline,
}

/// Counters of the mover.
#[derive(Clone, Copy)]
struct Counts {
    held: Reg<U32>,
    handed: Reg<U32>,
    parts: Reg<U32>,
}

impl<'a> Mover<'a> {
    /// The mover of a kernel that has one.
    pub(super) fn of(cfg: Config, args: &'a Arguments, layout: &'a Layout) -> Option<Self> {
        Some(Self { cfg, args, layout, handed: layout.handed?, parts: layout.parts? })
    }

    /// Works through the tiles that the producer posts.
    pub(super) fn run(&self, b: &mut Builder) {
        let [held, handed, parts] = [(); 3].map(|()| b.var(0));
        let counts = Counts { held, handed, parts };
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
        let streamed = tile.streamed(b, self.cfg, self.args);
        streamed.each(b, self.cfg, self.args.group, |b, _, _| {
            self.step(b, counts);
            b.add_to(counts.handed, 1);
        });
        let leader = self.leader(b);
        // Of a tile that nothing streams past, a lane may not have read more than that it is there.
        b.sync_warp();
        self.layout.held[0].stage(b, counts.held).release(b, leader);
        b.add_to(counts.held, 1);
    }

    /// The lane of each warp that speaks for it.
    fn leader(&self, b: &mut Builder) -> Pred {
        let lane = b.lane();
        b.let_(lane.eq(0))
    }

    /// One streamed tile.
    fn step(&self, b: &mut Builder, counts: Counts) {
        let stage = self.handed.stage(b, counts.handed);
        stage.wait_full(b);
        let ranges = self.layout.ranges.map(|ranges| {
            let slot = self.handed.slot(b, counts.handed);
            let factors = ranges.at(b, slot);
            (factors, factors.differ(b))
        });
        let (parts, leader) = (Part::all(self.cfg), self.leader(b));
        // Parts take turns in the same registers: the assembler would keep those of all of them apart.
        let mut free: Option<Acc> = None;
        for (n, &part) in parts.iter().enumerate() {
            let operands = self.operands(b, stage.bytes, part);
            let sums = free.take().filter(|acc| acc.cols() == part.cols as usize);
            let sums = sums.unwrap_or_else(|| Acc::new(b, part.cols as usize));
            let sums = self.product(b, sums, &operands, ranges);
            if n + 1 == parts.len() {
                stage.release(b, leader);
            }
            self.hand_on(b, counts, &sums);
            free = Some(sums);
        }
    }

    /// dS times K, over the keys of all warps, whatever their ranges.
    fn product(
        &self,
        b: &mut Builder,
        sums: Acc,
        [left, right]: &[MatrixOperand; 2],
        ranges: Option<(Factors, Uniform<Warpgroup>)>,
    ) -> Acc {
        let keys = self.cfg.held();
        let at_once = |b: &mut Builder, sums| b.wgmma_ss(sums, Start::Zero, [left, right], keys).wait(b);
        let Some((factors, differ)) = ranges else { return at_once(b, sums) };
        let key_bytes = self.handed.tile().slab_width();
        let by_warps = |b: &mut Builder, sums| factors.product(b, sums, [left, right], key_bytes);
        b.if_else_carrying(differ, sums, by_warps, at_once)
    }

    /// Puts a part where the writer finds it.
    fn hand_on(&self, b: &mut Builder, counts: Counts, sums: &Acc) {
        let stage = self.parts.stage(b, counts.parts);
        stage.wait_empty(b);
        let thread = b.thread();
        let mine = b.let_((thread & 127) * 16);
        let mine = stage.at(b).plus(b, mine);
        for (quad, values) in (0..).zip(sums.regs().chunks_exact(4)) {
            b.store_shared::<F32>(mine.at(quad * QUAD_BYTES), &[0, 1, 2, 3].map(|i| values[i].into()));
        }
        b.fence_async();
        b.sync_warp();
        let leader = self.leader(b);
        b.predicated(leader, |b| stage.publish(b));
        b.add_to(counts.parts, 1);
    }

    /// dS of 64 queries, and columns of K.
    fn operands(
        &self,
        b: &mut Builder,
        stage: Reg<U32>,
        Part { block, column, .. }: Part,
    ) -> [MatrixOperand; 2] {
        let (handed, keys) = (self.handed.tile(), self.layout.held[0].tile());
        let left = handed.operand(b, Major::Mn, stage + block * handed.slab_bytes());
        let right = keys.operand(b, Major::Mn, column / PART * keys.slab_bytes());
        [left, right]
    }
}

impl Consumer<'_> {
    /// Waits until the mover has read the buffer that dS of this pair will overwrite.
    pub(super) fn wait_for_mover(&self, b: &mut Builder) {
        let Some(handed) = self.layout.handed else { return };
        self.handed_stage(b, &handed).wait_empty(b);
    }

    /// Puts dS where the mover reads it.
    pub(super) fn store_for_mover(&self, b: &mut Builder, ds: &Fragment) {
        let Some(handed) = self.layout.handed else { return };
        let (tile, stage) = (handed.tile(), self.handed_stage(b, &handed));
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

    /// Passes what was stored to the mover.
    pub(super) fn hand_over(&self, b: &mut Builder) {
        let Some(handed) = self.layout.handed else { return };
        let stage = self.handed_stage(b, &handed);
        b.fence_async();
        b.sync_warp();
        b.predicated(self.leader, |b| stage.publish(b));
    }
}
