//! Tiles of a consumer, one after another: the last PV of a tile, the first QKᵀ of the next after it, and the epilogue
//! while both run.

use flashcore_tile::{
    Acc, Builder, Fragment, MatrixOperand, Pending, Pred, Reg, S32, Stage, U32, Val, Warpgroup,
};

use super::{
    config::Settles,
    consumer::Consumer,
    epilogue::Epilogue,
    output::{Output, Place},
    producer::info,
    schedule::Tile,
    step::{Hides, Order, Run, Work},
    values::clean_values,
};
use crate::parts::mask::KeyTiles;

/// A tile that has been begun: the next one, whether there is one, and its first product in flight.
type Begun = (Tile, Pred, Pending<Acc>);

impl Consumer<'_> {
    /// Waits for the next Q tile and reads which one it is.
    pub(super) fn next_tile(&self, b: &mut Builder) -> (Tile, Pred) {
        let stage = self.layout.q.stage(b, self.q_count);
        stage.wait_full(b);
        let info = info(b, self.layout, self.q_count);
        Tile::read(b, self.cfg, self.args, info)
    }

    /// All tiles, one after another; the scores of a tile's first key tile are in flight when its turn begins.
    pub(super) fn tiles(&self, b: &mut Builder, epilogue: &Epilogue, first: Tile) {
        let mut tile = first.variable(b, self.cfg);
        let scores = Acc::new(b, self.cfg.tile_n() as usize);
        let output = Output::new(b, self.cfg);
        let probs = Fragment::of(b, self.cfg.input, self.cfg.tile_n() as usize);
        let behind = self.tile_behind(b, &tile);
        self.pass_over_keys(b, behind);
        let stage = self.layout.k.stage(b, self.kv_count);
        stage.wait_full(b);
        let q = self.q_operand(b, self.q_count);
        let opening = self.qk(b, scores, &q, &stage);
        let last = b.do_while_carrying(opening, |b, opening| {
            let (next, there, opening) = self.tile(b, epilogue, &tile, opening, output, probs);
            tile.set(b, self.cfg, next);
            (b.uniform::<Warpgroup>(there), opening)
        });
        last.wait(b);
    }

    /// One tile; returns the next one with its first product in flight.
    fn tile(
        &self,
        b: &mut Builder,
        epilogue: &Epilogue,
        tile: &Tile,
        opening: Pending<Acc>,
        output: Output,
        probs: Fragment,
    ) -> Begun {
        let own = tile.own_key_tiles(b, self.cfg, self.args, self.group);
        // Only now: the values may lie where those of the tile before were multiplied to its very end.
        self.pass_over_values(b, own.behind);
        if self.cfg.accumulate {
            self.wide_rows(b, tile, None).prefetch(b, self.lane, self.cfg.dim_v);
        }
        let work = self.body(b, tile, &own.tiles, opening, output, probs);
        self.close(b, epilogue, tile, own.before, work)
    }

    /// All key tiles of a tile but the last PV, which is left to the caller.
    pub(super) fn body(
        &self,
        b: &mut Builder,
        tile: &Tile,
        tiles: &KeyTiles,
        opening: Pending<Acc>,
        output: Output,
        probs: Fragment,
    ) -> Work {
        let block = b.var(tiles.end - 1);
        output.clear(b);
        self.take_factors(b, tile);
        let factor = self.block_factor(b, block);
        let scores = opening.wait(b);
        self.layout.k.stage(b, self.kv_count).release(b, self.leader);
        let begin = tiles.first();
        self.release_q_early(b, block, begin);
        self.take_block(b, factor);
        self.scale.cap(b, scores.regs());
        let hides = tiles.hides(b, block);
        let hides = b.uniform::<Warpgroup>(hides);
        b.if_uniform(hides, |b| self.hide(b, &scores, tile, block));
        // Values of 8 bits were cleaned when they were turned.
        if self.cfg.lengths.has_keys() && !self.cfg.narrow() {
            clean_values(b, self, tile, block);
        }
        b.add_to(self.kv_count, 1);
        self.softmax.first(b, &scores, &probs);
        b.set(block, block - 1);

        let q = self.q_operand(b, self.q_count);
        let clean_begin = tiles.clean_begin.map_or(begin, Val::from);
        let run =
            |until, hides| Run { q, tile: *tile, block, begin, until, hides, softmax: Order::SumsFirst };
        let mut work = (scores, output, probs);
        if self.cfg.settles == Settles::Parts {
            work = self.multiply_parts(b, work);
        }
        if self.cfg.mask.right {
            let until = b.let_(tiles.clean_end.max(begin));
            work = self.steps(b, &run(until.into(), Hides::Some), work);
        }
        let whole = run(clean_begin, Hides::Nothing);
        if let Some(restless) = tile.restless {
            let restless = b.let_(restless.ne(0));
            let restless = b.uniform::<Warpgroup>(restless);
            let careful = Run { softmax: Order::MaximaFirst, ..whole };
            work = b.if_carrying(restless, work, |b, work| self.steps(b, &careful, work));
        }
        work = self.steps(b, &whole, work);
        if self.cfg.mask.left {
            work = self.steps(b, &run(begin, Hides::Some), work);
        }
        work
    }

    /// The last PV of a tile, the first QKᵀ of the next, and the epilogue.
    fn close(
        &self,
        b: &mut Builder,
        epilogue: &Epilogue,
        tile: &Tile,
        before: Option<Pred>,
        (scores, output, probs): Work,
    ) -> Begun {
        if self.cfg.shape.q_stages > 1 {
            self.report(b, self.leader);
            self.layout.q.stage(b, self.q_count).release(b, self.leader);
        }
        b.add_to(self.q_count, 1);
        if self.cfg.settles == Settles::Parts {
            self.pass_over_keys(b, before);
            self.pass_over_values(b, before);
            let begun = self.open(b, scores);
            self.write_settled(b, epilogue, tile, &output);
            return begun;
        }
        let (output, v) = self.last_pv(b, output, probs);
        self.pass_over_keys(b, before);
        self.pass_over_values(b, before);
        let begun = self.open(b, scores);
        self.finish(b, epilogue, tile, output, &v);
        begun
    }

    /// Waits for the next tile and issues its first product. Without a next tile the last product is issued once more,
    /// for nobody: a branch around products in flight would make the compiler serialise them.
    fn open(&self, b: &mut Builder, scores: Acc) -> Begun {
        let (next, there) = self.next_tile(b);
        let behind = self.tile_behind(b, &next).map(|behind| b.let_(behind & there));
        self.pass_over_keys(b, behind);
        let [q_count, kv_count] = [self.q_count, self.kv_count].map(|count| {
            let last = b.let_(count - 1);
            b.select(there, count, last)
        });
        let k = self.layout.k.stage(b, kv_count);
        k.wait_full(b);
        let q = self.q_operand(b, q_count);
        (next, there, self.qk(b, scores, &q, &k))
    }

    /// Waits for the output of a tile and writes it.
    fn finish(
        &self,
        b: &mut Builder,
        epilogue: &Epilogue,
        tile: &Tile,
        output: Pending<(Output, Fragment)>,
        v: &Stage,
    ) {
        if self.cfg.narrow() {
            // The sums that rows are divided by come out of the last product too.
            let (output, _) = output.wait(b);
            v.release(b, self.leader);
            return self.write_settled(b, epilogue, tile, &output);
        }
        let sinks = self.sinks(b, tile);
        let finished = self.softmax.finish(b, sinks, None);
        let ended = self.end_rows(b, tile, finished);
        self.write_lse(b, tile, ended.lse);
        let (output, _) = output.wait(b);
        v.release(b, self.leader);
        epilogue.write(b, self, tile, &output.recent, ended);
    }

    /// Writes an output of which no product is in flight.
    fn write_settled(&self, b: &mut Builder, epilogue: &Epilogue, tile: &Tile, output: &Output) {
        let sinks = self.sinks(b, tile);
        let (output, counted) = output.settle(b);
        self.scale_features(b, tile, output);
        let finished = self.softmax.finish(b, sinks, counted);
        let ended = self.end_rows(b, tile, finished);
        self.write_lse(b, tile, ended.lse);
        epilogue.write(b, self, tile, output, ended);
    }

    /// Issues the last PV of a tile.
    pub(super) fn last_pv(
        &self,
        b: &mut Builder,
        output: Output,
        probs: Fragment,
    ) -> (Pending<(Output, Fragment)>, Stage) {
        let v = self.values_before(b);
        v.wait_full(b);
        (self.pv(b, output, probs, &v, Place::Only), v)
    }

    /// Where there is one Q tile only, releases it as soon as its last product is there, so that the next Q arrives
    /// while this tile ends. Where there are two, the end of the tile is soon enough.
    pub(super) fn release_q_early(&self, b: &mut Builder, block: Reg<S32>, begin: Val<S32>) {
        if self.cfg.shape.q_stages > 1 {
            return;
        }
        let who = b.let_(block.le(begin) & self.leader);
        self.report(b, who);
        self.layout.q.stage(b, self.q_count).release(b, who);
    }

    /// Reports to later tiles how this one went.
    fn report(&self, b: &mut Builder, who: Pred) {
        self.layout.reports.iter().for_each(|reports| reports.write(b, self, who));
    }

    /// Q tile number `count`.
    pub(super) fn q_operand(&self, b: &mut Builder, count: Reg<U32>) -> MatrixOperand {
        let stage = self.layout.q.stage(b, count);
        self.q.plus(b, stage.bytes)
    }
}
