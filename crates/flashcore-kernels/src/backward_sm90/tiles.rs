//! Held tiles of a consumer, one after another: all streamed pairs of a tile, then its gradients.

use std::cell::Cell;

use flashcore_tile::{Acc, Builder, Carried, Pending, Pred, Reg, Shared, Stage, U32, Val, Warpgroup};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP, Side,
    consumer::Consumer,
    packed,
    paired::Duty,
    producer::info,
    schedule::{Streamed, Tile},
    step::{Opened, Run, Work},
    store,
};
use crate::parts::{range::Range, row_end::thread_rows, softmax::Rows};

/// Threads of a consumer.
pub(super) const WARPGROUP: u32 = 128;
/// What the threads of a consumer set aside.
pub(super) const fn aside_bytes(cfg: Config) -> u32 {
    WARPGROUP * if cfg.packed() { packed::ASIDE_BYTES } else { 8 }
}

/// A product in flight, and the other registers of a tile.
type InFlight<W> = (Pending<Acc>, W);
/// From some registers of a tile to others.
type Way<'a, From, To> = &'a dyn Fn(&mut Builder, From) -> To;

/// What a consumer does with the pairs of a held tile.
pub(super) struct Ways<'a, W> {
    /// Issues the first product of the first pair.
    pub(super) begun: Way<'a, (Acc, W), InFlight<W>>,
    /// One pair, with the first product of the next issued.
    pub(super) step: Way<'a, InFlight<W>, InFlight<W>>,
    /// The last pair, after which the held tiles are released.
    pub(super) last: Way<'a, InFlight<W>, (Acc, W)>,
}

/// Works through the tiles that the producer posts.
pub(super) fn run(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, group: Reg<U32>) {
    let consumer = Consumer::new(b, cfg, args, layout, group);
    if cfg.shape.paired {
        let first = b.uniform::<Warpgroup>(group.eq(0));
        b.if_else(first, |b| consumer.run_paired(b, Duty::Values), |b| consumer.run_paired(b, Duty::Keys));
    } else {
        consumer.each_tile(b, |_| (), |b, tile| consumer.tile(b, tile));
    }
}

impl Consumer<'_> {
    /// Does `work` with each tile, and what is to be done when the consumer knows which it is.
    pub(super) fn each_tile(
        &self,
        b: &mut Builder,
        known: impl FnOnce(&mut Builder),
        work: impl Fn(&mut Builder, &Tile),
    ) {
        let held = Cell::new(None);
        b.while_(
            |b| {
                self.held_stage(b, 0).wait_full(b);
                let number = self.held_number(b);
                let info = info(b, self.layout, number);
                let (tile, there) = Tile::read(b, self.cfg, self.args, info);
                held.set(Some(tile));
                known(b);
                there
            },
            |b| held.get().iter().for_each(|tile| work(b, tile)),
        );
        store::drain(b);
    }

    fn tile(&self, b: &mut Builder, tile: &Tile) {
        let work = Work::new(b, self);
        work.first.fill(b, 0.0);
        work.second.iter().for_each(|second| second.fill(b, 0.0));
        store::prefetch(b, self, tile, [true; 2]);
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
                let begun = |b: &mut Builder, (scores, work): (Acc, Work)| -> Opened {
                    let opened = self.open(b, scores, self.count);
                    self.held_stage(b, 1).wait_full(b);
                    (opened, work)
                };
                let ways = Ways {
                    begun: &begun,
                    step: &|b, opened| self.step(b, &run, opened),
                    last: &|b, opened| self.last_step(b, &run, opened),
                };
                ended = Some(self.pairs(b, &streamed, (scores, work), ways));
            },
            |b| self.skip(b),
        );
        let work = ended.expect("the block has run");
        let tile = self.take_back(b, tile);
        let grads = [Some(&work.first), work.second.as_ref()];
        if self.cfg.gathers_in_held() {
            self.sync_group(b);
            store::gradients(b, self, &tile, grads, range);
            store::free_places(b, self);
            self.held_stage(b, 1).release(b, self.leader);
            return self.pass_held(b);
        }
        self.pass_held(b);
        store::gradients(b, self, &tile, grads, range);
    }

    /// Waits for the other warps of this consumer.
    fn sync_group(&self, b: &mut Builder) {
        for number in 0..self.cfg.shape.consumers {
            let barrier = b.named_barrier(WARPGROUP);
            let own = b.uniform::<Warpgroup>(self.group.eq(number));
            b.if_uniform(own, |b| b.sync(barrier));
        }
    }

    /// Where this thread sets aside what pairs have no use for: a fused kernel has no registers for it meanwhile.
    fn aside(&self, b: &mut Builder) -> Option<Shared> {
        let start = self.layout.aside?;
        let thread = b.thread();
        let mine =
            b.let_((thread % (self.cfg.shape.consumers * WARPGROUP)) * (aside_bytes(self.cfg) / WARPGROUP));
        Some(b.shared_at(start).plus(b, mine))
    }

    fn set_aside(&self, b: &mut Builder, tile: &Tile) {
        if let Some(aside) = self.aside(b) {
            match tile.starts {
                Some([_, keys]) => packed::set_aside(b, aside, tile, keys),
                None => b.store_shared(aside, &[tile.head, tile.batch].map(Val::from)),
            }
        }
    }

    pub(super) fn take_back(&self, b: &mut Builder, tile: &Tile) -> Tile {
        let Some(aside) = self.aside(b) else { return *tile };
        if self.cfg.packed() {
            return packed::take_back(b, aside, tile);
        }
        let [head, batch] = b.load_shared::<U32, 2>(aside);
        Tile { head, batch, ..*tile }
    }

    /// All pairs of a held tile. Where there is but one, no loop stands around the products in flight: a branch there would
    /// make the assembler serialise them.
    pub(super) fn pairs<W: Carried>(
        &self,
        b: &mut Builder,
        streamed: &Streamed,
        free: (Acc, W),
        Ways { begun, step, last }: Ways<'_, W>,
    ) -> W {
        let Streamed { begin, end, .. } = *streamed;
        let tiles = b.let_((end - begin).unsigned());
        let pairs = match self.cfg.side {
            Side::Keys => b.let_(tiles * self.args.group),
            Side::Queries => tiles,
        };
        let several = b.uniform::<Warpgroup>(pairs.gt(1));
        let left = b.var(pairs - 1);
        let ended = b.if_else_carrying(
            several,
            free,
            |b, free| {
                let opened = begun(b, free);
                let opened = b.do_while_carrying(opened, |b, opened| {
                    let opened = step(b, opened);
                    b.set(left, left - 1);
                    (b.uniform::<Warpgroup>(left.gt(0)), opened)
                });
                last(b, opened)
            },
            |b, free| {
                let opened = begun(b, free);
                last(b, opened)
            },
        );
        ended.1
    }

    /// Releases held tiles that nothing streams past.
    fn skip(&self, b: &mut Builder) {
        for which in [0, 1] {
            let stage = self.held_stage(b, which);
            self.give_back_unused(b, &stage, which == 0 || !self.cfg.gathers_in_held());
        }
    }

    /// Waits for a held tile that nothing is multiplied with, and releases it if that is to be done here. No product has
    /// brought the lanes together: the stage may not be filled again while some of them still wait.
    pub(super) fn give_back_unused(&self, b: &mut Builder, stage: &Stage, here: bool) {
        stage.wait_full(b);
        if here {
            b.sync_warp();
            stage.release(b, self.leader);
        }
    }

    /// First row of this warp in its sequence.
    pub(super) fn warp_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let first = tile.first_row(b, self.cfg);
        if self.cfg.shape.paired {
            return b.let_(self.warp * ROWS_PER_WARP + first);
        }
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
