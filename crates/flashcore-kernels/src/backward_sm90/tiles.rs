//! Held tiles of a consumer, one after another: all pairs that stream past a tile, then its gradients.

use std::cell::Cell;

use flashcore_tile::{Acc, Builder, Pred, Reg, Shared, U32, Val, Warpgroup};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP, Side,
    consumer::Consumer,
    producer::info,
    schedule::{Streamed, Tile},
    step::{Opened, Run, Work},
    store,
};
use crate::parts::{range::Range, row_end::thread_rows, softmax::Rows};

/// Threads of a consumer.
const WARPGROUP: u32 = 128;
/// What the threads of a consumer set aside, 8 bytes each.
pub(super) const ASIDE_BYTES: u32 = 8 * WARPGROUP;

/// Works through the tiles that the producer posts.
pub(super) fn run(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, group: Reg<U32>) {
    let consumer = Consumer::new(b, cfg, args, layout, group);
    let held = Cell::new(None);
    b.while_(
        |b| {
            consumer.held_stage(b, 0).wait_full(b);
            let number = consumer.held_number(b);
            let info = info(b, layout, number);
            let (tile, there) = Tile::read(b, cfg, args, info);
            held.set(Some(tile));
            there
        },
        |b| held.get().iter().for_each(|tile| consumer.tile(b, tile)),
    );
    store::drain(b);
}

impl Consumer<'_> {
    fn tile(&self, b: &mut Builder, tile: &Tile) {
        let work = Work::new(b, self);
        work.first.fill(b, 0.0);
        work.second.iter().for_each(|second| second.fill(b, 0.0));
        store::prefetch(b, self, tile);
        let terms = self.held_terms(b, tile);
        let range = self.cfg.keeps_range().then(|| Range::new(b));
        let streamed = tile.streamed(b, self.cfg, self.args);
        self.set_aside(b, tile);
        let any = b.uniform::<Warpgroup>(streamed.begin.lt(streamed.end));
        let scores = Acc::new(b, self.cfg.shape.step as usize);
        let mut ended = None;
        b.if_else(
            any,
            |b| {
                let block = streamed.first(b, self.cfg);
                let heads_left = self.cfg.fused().then(|| b.var(self.args.group));
                let run = Run { tile, streamed: &streamed, block, heads_left, terms, range };
                ended = Some(self.pairs(b, &run, scores, work));
            },
            |b| self.skip(b),
        );
        let work = ended.expect("the block has run");
        let tile = self.take_back(b, tile);
        self.pass_held(b);
        store::gradients(b, self, &tile, &work, range);
    }

    /// Where this thread sets aside what pairs have no use for: a fused kernel has no registers for it meanwhile.
    fn aside(&self, b: &mut Builder) -> Option<Shared> {
        let start = self.layout.aside?;
        let thread = b.thread();
        let mine = b.let_((thread % (self.cfg.shape.consumers * WARPGROUP)) * (ASIDE_BYTES / WARPGROUP));
        Some(b.shared_at(start).plus(b, mine))
    }

    fn set_aside(&self, b: &mut Builder, tile: &Tile) {
        if let Some(aside) = self.aside(b) {
            b.store_shared(aside, &[tile.head, tile.batch].map(Val::from));
        }
    }

    fn take_back(&self, b: &mut Builder, tile: &Tile) -> Tile {
        let Some(aside) = self.aside(b) else { return *tile };
        let [head, batch] = b.load_shared::<U32, 2>(aside);
        Tile { head, batch, ..*tile }
    }

    /// All pairs of a held tile. Where there is but one, no loop stands around the products in flight: a branch there would
    /// make the assembler serialise them.
    fn pairs(&self, b: &mut Builder, run: &Run<'_>, scores: Acc, work: Work) -> Work {
        let Streamed { begin, end, .. } = *run.streamed;
        let tiles = b.let_((end - begin).unsigned());
        let pairs = match self.cfg.side {
            Side::Keys => b.let_(tiles * self.args.group),
            Side::Queries => tiles,
        };
        let several = b.uniform::<Warpgroup>(pairs.gt(1));
        let left = b.var(pairs - 1);
        let begun = |b: &mut Builder, (scores, work): (Acc, Work)| -> Opened {
            let opened = self.open(b, scores, self.count);
            self.held_stage(b, 1).wait_full(b);
            (opened, work)
        };
        let ended = b.if_else_carrying(
            several,
            (scores, work),
            |b, free| {
                let opened = begun(b, free);
                let opened = b.do_while_carrying(opened, |b, opened| {
                    let opened = self.step(b, run, opened);
                    b.set(left, left - 1);
                    (b.uniform::<Warpgroup>(left.gt(0)), opened)
                });
                self.last_step(b, run, opened)
            },
            |b, free| {
                let opened = begun(b, free);
                self.last_step(b, run, opened)
            },
        );
        ended.1
    }

    /// Gives back held tiles that nothing streams past.
    fn skip(&self, b: &mut Builder) {
        for which in [0, 1] {
            let stage = self.held_stage(b, which);
            stage.wait_full(b);
            // All lanes must have seen the phase before the leader lets it pass.
            b.sync_warp();
            stage.release(b, self.leader);
        }
    }

    /// First row of this warp in its sequence.
    pub(super) fn warp_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let first = tile.first_row(b, self.cfg);
        b.let_(self.warp * ROWS_PER_WARP + (self.group * ROWS_PER_GROUP + first))
    }

    /// This thread's two rows.
    pub(super) fn thread_rows(&self, b: &mut Builder, tile: &Tile) -> Rows<U32> {
        let first = self.warp_row(b, tile);
        thread_rows(b, first, self.lane)
    }

    /// Which of this thread's rows lie beyond those in use.
    pub(super) fn beyond_use(&self, b: &mut Builder, tile: &Tile) -> [Pred; 2] {
        let len = tile.held_len(self.cfg);
        self.thread_rows(b, tile).map(|row| b.let_(row.ge(Val::from(len))))
    }
}
