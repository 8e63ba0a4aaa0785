//! A consumer warpgroup: QKᵀ, softmax and PV of 64 rows, overlapped.
//!
//! ```text
//! tensor cores   QK(0) |            | QK(1) PV(0) |            | QK(2) PV(1) | …  PV(last) QK(0 of the next tile)
//! this group           | softmax(0) |             | softmax(1) |             | …           epilogue
//! ```
//!
//! Others multiply while this group does its softmax. Key tiles run from the last to the first, so that those that hide
//! keys on the right, at the diagonal or at the end of the sequence, come first, and those that hide keys on the left
//! come last.

use flashcore_tile::{
    Acc, Builder, Cmp, F32, Fragment, Major, MatrixOperand, Pending, Pred, Reg, S32, Stage, Start, U32,
    Uniform, Val, WARPGROUP, Warpgroup,
};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP,
    epilogue::Epilogue,
    producer::info,
    schedule::{Tile, position},
    turns::Turn,
    values::clean_values,
};
use crate::shared::{
    mask::KeyTiles,
    softmax::{Rows, Softmax},
};

/// What a consumer keeps for the whole launch.
pub(super) struct Consumer<'a> {
    pub(super) cfg: Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
    /// Number of this thread among those of all consumers.
    pub(super) thread: Reg<U32>,
    /// Number of this warpgroup among the consumers.
    pub(super) group: Reg<U32>,
    /// Number of this warp in its warpgroup.
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
    /// The one lane of each warp that releases stages and issues stores.
    pub(super) leader: Pred,
    q: MatrixOperand,
    k: MatrixOperand,
    v: MatrixOperand,
    /// Q tiles and K/V tiles passed.
    pub(super) q_count: Reg<U32>,
    pub(super) kv_count: Reg<U32>,
    pub(super) softmax: Softmax,
    /// When this consumer may multiply, where consumers do so in turn.
    turn: Option<Turn>,
}

/// Works through the tiles that the producer posts.
pub(super) fn run(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, group: Reg<U32>) {
    let consumer = Consumer::new(b, cfg, args, layout, group);
    let epilogue = Epilogue::new(b, &consumer);
    let (first, there) = consumer.next_tile(b);
    let there = b.uniform::<Warpgroup>(there);
    b.if_uniform(there, |b| consumer.tiles(b, &epilogue, first));
    epilogue.drain(b);
}

/// Scores, output and probabilities: the registers of a tile.
pub(super) type Work = (Acc, Acc, Fragment);

/// A tile that has been begun: the next one, whether there is one, and its first product in flight.
type Begun = (Tile, Pred, Pending<Acc>);

/// What a run of key tiles may hide.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hides {
    Nothing,
    Some,
}

/// Key tiles from `block` down to `until`, of a tile whose last one is `begin`.
struct Run {
    q: MatrixOperand,
    tile: Tile,
    block: Reg<S32>,
    begin: Val<S32>,
    until: Val<S32>,
    hides: Hides,
}

impl Run {
    /// Whether `count` key tiles are left.
    fn left(&self, b: &mut Builder, count: i32) -> Uniform<Warpgroup> {
        let last = b.sub(self.block, count - 1);
        let left = b.test(Cmp::Ge, last, self.until);
        b.uniform(left)
    }
}

impl<'a> Consumer<'a> {
    pub(super) fn new(
        b: &mut Builder,
        cfg: Config,
        args: &'a Arguments,
        layout: &'a Layout,
        group: Reg<U32>,
    ) -> Self {
        let thread = b.thread();
        let warp = b.shr(thread, 5);
        let warp = b.and(warp, 3);
        let within = b.and(thread, WARPGROUP - 1);
        let thread = b.mad(group, WARPGROUP, within);
        let lane = b.lane();
        let leader = b.test(Cmp::Eq, lane, 0);
        let group_rows = b.mul(group, ROWS_PER_GROUP * layout.q.tile().slab_width());
        Self {
            cfg,
            args,
            layout,
            thread,
            group,
            warp,
            lane,
            leader,
            q: layout.q.tile().operand(b, Major::K, group_rows),
            k: layout.k.tile().operand(b, Major::K, 0),
            v: layout.v.tile().operand(b, Major::Mn, 0),
            q_count: b.var(0),
            kv_count: b.var(0),
            softmax: Softmax::new(b, args.scale.log2, cfg.half),
            turn: layout.turns.map(|turns| turns.of(b, group)),
        }
    }

    /// Waits for the next Q tile and reads which one it is.
    fn next_tile(&self, b: &mut Builder) -> (Tile, Pred) {
        let stage = self.layout.q.stage(b, self.q_count);
        stage.wait_full(b);
        let info = info(b, self.layout, self.q_count);
        Tile::read(b, self.cfg, self.args, info)
    }

    /// All tiles, one after another; the scores of a tile's first key tile are in flight when its turn begins.
    fn tiles(&self, b: &mut Builder, epilogue: &Epilogue, first: Tile) {
        let mut tile = first.variable(b, self.cfg);
        let scores = Acc::new(b, self.cfg.tile_n() as usize);
        let output = Acc::new(b, self.cfg.dim_v as usize);
        let probs = Fragment::new(b, self.cfg.tile_n() as usize);
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
        output: Acc,
        probs: Fragment,
    ) -> Begun {
        let own = tile.own_key_tiles(b, self.cfg, self.args, self.group);
        // Only now: the values may lie where those of the tile before were multiplied to its very end.
        self.pass_over_values(b, own.behind);
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
        output: Acc,
        probs: Fragment,
    ) -> Work {
        let block = b.sub(tiles.end, 1);
        let block = b.var(block);
        output.fill(b, 0.0);
        let scores = opening.wait(b);
        self.layout.k.stage(b, self.kv_count).release(b, self.leader);
        let begin = tiles.begin.map_or(Val::Const(0), Val::from);
        self.release_q_early(b, block, begin);
        self.args.scale.cap(b, scores.regs());
        let hides = tiles.hides(b, block);
        let hides = b.uniform::<Warpgroup>(hides);
        b.if_uniform(hides, |b| self.hide(b, &scores, tile, block));
        if self.cfg.lengths.cuts_keys() {
            clean_values(b, self, tile, block);
        }
        b.add_to(self.kv_count, 1);
        self.softmax.first(b, &scores, &probs);
        let below = b.sub(block, 1);
        b.set(block, below);

        let q = self.q_operand(b, self.q_count);
        let clean_begin = tiles.clean_begin.map_or(begin, Val::from);
        let run = |until, hides| Run { q, tile: *tile, block, begin, until, hides };
        let mut work = (scores, output, probs);
        if self.cfg.mask.right {
            let until = b.max(tiles.clean_end, begin);
            work = self.steps(b, &run(until.into(), Hides::Some), work);
        }
        work = self.steps(b, &run(clean_begin, Hides::Nothing), work);
        if self.cfg.mask.left {
            work = self.steps(b, &run(begin, Hides::Some), work);
        }
        work
    }

    /// The key tiles of a run.
    fn steps(&self, b: &mut Builder, run: &Run, work: Work) -> Work {
        if run.hides == Hides::Some || self.cfg.shape.turn == 1 {
            return self.unrolled(b, run, 1, work);
        }
        let work = self.unrolled(b, run, 2, work);
        let odd = run.left(b, 1);
        b.if_carrying(odd, work, |b, work| self.step(b, run, work))
    }

    /// Loops over `count` key tiles at a time, as long as there are so many.
    fn unrolled(&self, b: &mut Builder, run: &Run, count: i32, work: Work) -> Work {
        let any = run.left(b, count);
        b.if_carrying(any, work, |b, work| {
            b.do_while_carrying(work, |b, work| {
                let work = (0..count).fold(work, |work, _| self.step(b, run, work));
                (run.left(b, count), work)
            })
        })
    }

    /// One key tile: QKᵀ of this one and PV of the one before run together, while other consumers do their softmax.
    /// PV has ended before the turn is passed on: where products of two consumers mix, both wait for both.
    fn step(&self, b: &mut Builder, run: &Run, (scores, output, probs): Work) -> Work {
        let k = self.layout.k.stage(b, self.kv_count);
        let before = b.sub(self.kv_count, 1);
        let v = self.layout.v.stage(b, before);
        k.wait_full(b);
        self.take_turn(b);
        let scores = self.qk(b, scores, &run.q, &k);
        v.wait_full(b);
        let products = (scores, self.pv(b, output, probs, &v));
        let (scores, output, probs) = self.take_products(b, run, products, &k, &v);
        self.softmax.step(b, &scores, &probs, &output);
        b.add_to(self.kv_count, 1);
        let below = b.sub(run.block, 1);
        b.set(run.block, below);
        (scores, output, probs)
    }

    /// Waits for the products of a step and gives back what they have read.
    fn take_products(
        &self,
        b: &mut Builder,
        run: &Run,
        (scores, output): (Pending<Acc>, Pending<(Acc, Fragment)>),
        k: &Stage,
        v: &Stage,
    ) -> Work {
        if self.cfg.waits_once() {
            let (output, probs) = output.wait(b);
            let scores = scores.wait(b);
            k.release(b, self.leader);
            self.give_back_values(b, v);
            self.finish_scores(b, run, &scores);
            return (scores, output, probs);
        }
        let scores = scores.wait(b);
        k.release(b, self.leader);
        self.finish_scores(b, run, &scores);
        let (output, probs) = output.wait(b);
        self.give_back_values(b, v);
        (scores, output, probs)
    }

    /// Gives Q back after its last product, and makes of scores what softmax takes: limited and hidden.
    fn finish_scores(&self, b: &mut Builder, run: &Run, scores: &Acc) {
        self.release_q_early(b, run.block, run.begin);
        self.args.scale.cap(b, scores.regs());
        if run.hides == Hides::Some {
            self.hide(b, scores, &run.tile, run.block);
        }
    }

    /// Gives back the values that were multiplied, and with them the turn.
    fn give_back_values(&self, b: &mut Builder, v: &Stage) {
        v.release(b, self.leader);
        self.pass_turn(b);
    }

    /// Waits until tensor cores are this consumer's, where consumers multiply in turn.
    fn take_turn(&self, b: &mut Builder) {
        self.turn.iter().for_each(|turn| turn.take(b));
    }

    /// Leaves them to the next one.
    fn pass_turn(&self, b: &mut Builder) {
        self.turn.iter().for_each(|turn| turn.pass(b, self.leader));
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
            self.layout.q.stage(b, self.q_count).release(b, self.leader);
        }
        b.add_to(self.q_count, 1);
        let (output, v) = self.last_pv(b, output, probs);
        self.pass_over_keys(b, before);
        self.pass_over_values(b, before);
        let begun = self.open(b, scores);
        self.finish(b, epilogue, tile, output, &v);
        begun
    }

    /// Whether a tile has a last key tile that this consumer passes over.
    fn tile_behind(&self, b: &mut Builder, tile: &Tile) -> Option<Pred> {
        let passes = self.cfg.passes().then(|| tile.own_key_tiles(b, self.cfg, self.args, self.group));
        passes.and_then(|own| own.behind)
    }

    /// Gives the keys of a tile that hides everything from this consumer back as they came, where there is one.
    fn pass_over_keys(&self, b: &mut Builder, one: Option<Pred>) {
        self.pass_over(b, one, |b| {
            let stage = self.layout.k.stage(b, self.kv_count);
            b.add_to(self.kv_count, 1);
            stage
        });
    }

    /// The same for its values, once its keys have been counted, and for the turn to multiply them.
    fn pass_over_values(&self, b: &mut Builder, one: Option<Pred>) {
        self.pass_over(b, one, |b| {
            self.take_turn(b);
            self.pass_turn(b);
            let before = b.sub(self.kv_count, 1);
            self.layout.v.stage(b, before)
        });
    }

    fn pass_over(&self, b: &mut Builder, one: Option<Pred>, stage: impl FnOnce(&mut Builder) -> Stage) {
        let Some(one) = one else { return };
        let one = b.uniform::<Warpgroup>(one);
        b.if_uniform(one, |b| {
            let stage = stage(b);
            stage.wait_full(b);
            stage.release(b, self.leader);
        });
    }

    /// Issues the last PV of a tile.
    pub(super) fn last_pv(
        &self,
        b: &mut Builder,
        output: Acc,
        probs: Fragment,
    ) -> (Pending<(Acc, Fragment)>, Stage) {
        let before = b.sub(self.kv_count, 1);
        let v = self.layout.v.stage(b, before);
        v.wait_full(b);
        (self.pv(b, output, probs, &v), v)
    }

    /// Where there is one Q tile only, gives it back as soon as its last product is there, so that the next Q arrives
    /// while this tile ends. Where there are two, the end of the tile is soon enough.
    fn release_q_early(&self, b: &mut Builder, block: Reg<S32>, begin: Val<S32>) {
        if self.cfg.shape.q_stages > 1 {
            return;
        }
        let last = b.test(Cmp::Le, block, begin);
        let who = b.both(last, self.leader);
        self.layout.q.stage(b, self.q_count).release(b, who);
    }

    /// Waits for the next tile and issues its first product. Without a next tile the last product is issued once more,
    /// for nobody: a branch around products in flight would make the compiler serialise them.
    fn open(&self, b: &mut Builder, scores: Acc) -> Begun {
        let (next, there) = self.next_tile(b);
        let behind = self.tile_behind(b, &next).map(|behind| b.both(behind, there));
        self.pass_over_keys(b, behind);
        let [q_count, kv_count] = [self.q_count, self.kv_count].map(|count| {
            let last = b.sub(count, 1);
            b.select(there, count, last)
        });
        let k = self.layout.k.stage(b, kv_count);
        k.wait_full(b);
        let q = self.q_operand(b, q_count);
        (next, there, self.qk(b, scores, &q, &k))
    }

    /// Waits for the output of a tile and writes it.
    pub(super) fn finish(
        &self,
        b: &mut Builder,
        epilogue: &Epilogue,
        tile: &Tile,
        output: Pending<(Acc, Fragment)>,
        v: &Stage,
    ) {
        let sinks = self.sinks(b, tile);
        let finished = self.softmax.finish(b, sinks);
        Epilogue::write_lse(b, self, tile, finished.lse);
        let (output, _) = output.wait(b);
        v.release(b, self.leader);
        epilogue.write(b, self, tile, &output, finished.factor);
    }

    /// Q tile number `count`.
    pub(super) fn q_operand(&self, b: &mut Builder, count: Reg<U32>) -> MatrixOperand {
        let stage = self.layout.q.stage(b, count);
        self.q.plus(b, stage.bytes)
    }

    pub(super) fn qk(&self, b: &mut Builder, scores: Acc, q: &MatrixOperand, stage: &Stage) -> Pending<Acc> {
        let k = self.k.plus(b, stage.bytes);
        // Sixteen features at a time; what the tensor does not have was filled with zeros.
        b.wgmma_ss(scores, Start::Zero, self.cfg.half, [q, &k], self.cfg.dim_qk.next_multiple_of(16))
    }

    fn pv(&self, b: &mut Builder, output: Acc, probs: Fragment, stage: &Stage) -> Pending<(Acc, Fragment)> {
        let v = self.v.plus(b, stage.bytes);
        b.wgmma_rs(output, Start::Accumulate, self.cfg.half, probs, &v)
    }

    /// The extra logits of this thread's rows, if the problem has sinks.
    pub(super) fn sinks(&self, b: &mut Builder, tile: &Tile) -> Option<Rows<F32>> {
        let sinks = self.args.sinks?;
        let rows = self.thread_rows(b, tile);
        Some(rows.map(|row| {
            let head = tile.head_of(b, self.cfg, row);
            sinks.of_head(b, head)
        }))
    }

    /// Hides what the rows of this thread must not see of a key tile.
    fn hide(&self, b: &mut Builder, scores: &Acc, tile: &Tile, block: Reg<S32>) {
        let rows = self.thread_positions(b, tile).map(|position| position.signed());
        let quad = b.and(self.lane, 3);
        let column = b.shl(quad, 1);
        let column = column.signed();
        let key = b.mad(block, self.cfg.tile_n() as i32, column);
        tile.visibility(b, self.args).of_thread(b, rows).hide(b, scores, key);
    }

    /// First row of this warp in its sequence.
    pub(super) fn warp_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let row = tile.first_row(b, self.cfg);
        let row = b.mad(self.group, ROWS_PER_GROUP, row);
        b.mad(self.warp, ROWS_PER_WARP, row)
    }

    /// This thread's two rows.
    pub(super) fn thread_rows(&self, b: &mut Builder, tile: &Tile) -> Rows<U32> {
        let row = self.warp_row(b, tile);
        let quad = b.shr(self.lane, 2);
        let row = b.add(row, quad);
        [row, b.add(row, 8)]
    }

    /// Where this thread's rows are in their sequence.
    pub(super) fn thread_positions(&self, b: &mut Builder, tile: &Tile) -> Rows<U32> {
        self.thread_rows(b, tile).map(|row| position(b, self.cfg, row))
    }
}
