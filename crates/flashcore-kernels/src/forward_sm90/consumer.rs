//! A consumer warpgroup: QKᵀ, softmax and PV of 64 rows, overlapped.
//!
//! ```text
//! tensor cores   QK(0) | QK(1) PV(0) | QK(2) PV(1) | …  PV(last) QK(0 of the next tile)
//! this group           | softmax(0)  | softmax(1)  | …           epilogue
//! ```

use flashcore_tile::{
    Acc, Builder, Cmp, Fragment, Major, MatrixOperand, Pending, Pred, Reg, S32, Stage, Start, U32, Warpgroup,
};

use super::{
    Arguments, Config, Layout, ROWS_PER_GROUP, ROWS_PER_WARP, epilogue::Epilogue, producer::info,
    schedule::Tile,
};
use crate::shared::softmax::{Keys, Softmax};

/// What a consumer keeps for the whole launch.
pub(super) struct Consumer<'a> {
    pub(super) cfg: Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
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
    q_count: Reg<U32>,
    kv_count: Reg<U32>,
    softmax: Softmax,
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
type Work = (Acc, Acc, Fragment);

impl<'a> Consumer<'a> {
    fn new(b: &mut Builder, cfg: Config, args: &'a Arguments, layout: &'a Layout, group: Reg<U32>) -> Self {
        let thread = b.thread();
        let warp = b.shr(thread, 5);
        let warp = b.and(warp, 3);
        let lane = b.lane();
        let leader = b.test(Cmp::Eq, lane, 0);
        let group_rows = b.mul(group, ROWS_PER_GROUP * layout.q.tile().slab_width());
        Self {
            cfg,
            args,
            layout,
            group,
            warp,
            lane,
            leader,
            q: layout.q.tile().operand(b, Major::K, group_rows),
            k: layout.k.tile().operand(b, Major::K, 0),
            v: layout.v.tile().operand(b, Major::Mn, 0),
            q_count: b.var(0),
            kv_count: b.var(0),
            softmax: Softmax::new(b, args.scale_log2, Keys::FromTheFirst),
        }
    }

    /// Waits for the next Q tile and reads which one it is.
    fn next_tile(&self, b: &mut Builder) -> (Tile, Pred) {
        let stage = self.layout.q.stage(b, self.q_count);
        stage.wait_full(b);
        let info = info(b, self.layout, self.q_count);
        Tile::read(b, info)
    }

    /// All tiles, one after another; the scores of a tile's first key tile are in flight when its turn begins.
    fn tiles(&self, b: &mut Builder, epilogue: &Epilogue, first: Tile) {
        let tile = first.variable(b);
        let scores = Acc::new(b, self.cfg.tile_n as usize);
        let output = Acc::new(b, self.cfg.dim as usize);
        let probs = Fragment::new(b, self.cfg.tile_n as usize);
        let stage = self.layout.k.stage(b, self.kv_count);
        stage.wait_full(b);
        let q = self.q_operand(b);
        let opening = self.qk(b, scores, &q, &stage);
        let mut registers = Some((output, probs));
        let last = b.do_while_carrying(opening, |b, opening| {
            let (output, probs) = registers.take().expect("the body is built once");
            let (next, there, opening) = self.tile(b, epilogue, &tile, opening, output, probs);
            tile.set(b, &next);
            (b.uniform::<Warpgroup>(there), opening)
        });
        // Behind the last tile, a product over stale memory was issued; nobody reads it.
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
    ) -> (Tile, Pred, Pending<Acc>) {
        let blocks = tile.key_tiles(b, self.cfg, self.args);
        let block = b.sub(blocks, 1);
        let block = b.var(block);
        output.fill(b, 0.0);
        let scores = opening.wait(b);
        self.layout.k.stage(b, self.kv_count).release(b, self.leader);
        b.add_to(self.kv_count, 1);
        self.mask(b, &scores, tile, block);
        self.softmax.first(b, &scores);
        scores.pack_into(b, self.cfg.half, &probs);

        let q = self.q_operand(b);
        let more = b.test(Cmp::Ne, block, 0);
        let more = b.uniform::<Warpgroup>(more);
        let (scores, output, probs) = b.if_carrying(more, (scores, output, probs), |b, work| {
            b.do_while_carrying(work, |b, work| {
                let work = self.step(b, &q, work);
                let below = b.sub(block, 1);
                b.set(block, below);
                let again = b.test(Cmp::Ne, block, 0);
                (b.uniform::<Warpgroup>(again), work)
            })
        });
        self.close(b, epilogue, tile, (scores, output, probs))
    }

    /// One key tile: QKᵀ of this one and PV of the one before run while the other's softmax is done.
    fn step(&self, b: &mut Builder, q: &MatrixOperand, (scores, output, probs): Work) -> Work {
        let k = self.layout.k.stage(b, self.kv_count);
        let before = b.sub(self.kv_count, 1);
        let v = self.layout.v.stage(b, before);
        k.wait_full(b);
        let scores = self.qk(b, scores, q, &k);
        v.wait_full(b);
        let output = self.pv(b, output, probs, &v);
        let scores = scores.wait(b);
        k.release(b, self.leader);
        let growth = self.softmax.step(b, &scores);
        let (output, probs) = output.wait(b);
        v.release(b, self.leader);
        scores.pack_into(b, self.cfg.half, &probs);
        self.softmax.rescale(b, growth, &output);
        b.add_to(self.kv_count, 1);
        (scores, output, probs)
    }

    /// The last PV of a tile, the first QKᵀ of the next, and the epilogue.
    fn close(
        &self,
        b: &mut Builder,
        epilogue: &Epilogue,
        tile: &Tile,
        (scores, output, probs): Work,
    ) -> (Tile, Pred, Pending<Acc>) {
        self.layout.q.stage(b, self.q_count).release(b, self.leader);
        b.add_to(self.q_count, 1);
        let before = b.sub(self.kv_count, 1);
        let v = self.layout.v.stage(b, before);
        v.wait_full(b);
        let output = self.pv(b, output, probs, &v);
        let (next, there) = self.next_tile(b);
        let k = self.layout.k.stage(b, self.kv_count);
        k.wait_full_or(b, there.not());
        let q = self.q_operand(b);
        let opening = self.qk(b, scores, &q, &k);
        let finished = self.softmax.finish(b, None);
        epilogue.write_lse(b, self, tile, finished.lse);
        let (output, _) = output.wait(b);
        v.release(b, self.leader);
        epilogue.write(b, self, tile, &output, finished.factor);
        (next, there, opening)
    }

    fn q_operand(&self, b: &mut Builder) -> MatrixOperand {
        let stage = self.layout.q.stage(b, self.q_count);
        self.q.plus(b, stage.bytes)
    }

    fn qk(&self, b: &mut Builder, scores: Acc, q: &MatrixOperand, stage: &Stage) -> Pending<Acc> {
        let k = self.k.plus(b, stage.bytes);
        b.wgmma_ss(scores, Start::Zero, self.cfg.half, [q, &k], self.cfg.dim)
    }

    fn pv(&self, b: &mut Builder, output: Acc, probs: Fragment, stage: &Stage) -> Pending<(Acc, Fragment)> {
        let v = self.v.plus(b, stage.bytes);
        b.wgmma_rs(output, Start::Accumulate, self.cfg.half, probs, &v)
    }

    /// First row of this warp in the query sequence.
    pub(super) fn warp_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let row = b.mul(tile.row, self.cfg.tile_m());
        let row = b.mad(self.group, ROWS_PER_GROUP, row);
        b.mad(self.warp, ROWS_PER_WARP, row)
    }

    /// First of this thread's two rows; the other lies eight further down.
    pub(super) fn thread_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let row = self.warp_row(b, tile);
        let quad = b.shr(self.lane, 2);
        b.add(row, quad)
    }

    /// Hides keys beyond the sequence and, if causal, beyond each row's position; only a tile's last keys need it.
    fn mask(&self, b: &mut Builder, scores: &Acc, tile: &Tile, block: Reg<U32>) {
        if self.cfg.causal {
            return self.mask_causal(b, scores, tile, block);
        }
        let end = b.mad(block, self.cfg.tile_n, self.cfg.tile_n);
        let partial = b.test(Cmp::Gt, end, self.args.seq_kv);
        let partial = b.uniform::<Warpgroup>(partial);
        b.if_uniform(partial, |b| {
            let limit = self.limit(b, self.args.seq_kv, block);
            hide_beyond(b, scores, [limit, limit]);
        });
    }

    fn mask_causal(&self, b: &mut Builder, scores: &Acc, tile: &Tile, block: Reg<U32>) {
        let row = self.thread_row(b, tile);
        let limits = [1, 9].map(|below| {
            let end = b.add(row, below);
            let end = b.min(end, self.args.seq_kv);
            self.limit(b, end, block)
        });
        hide_beyond(b, scores, limits);
    }

    /// First column, in lane 0's numbering, of a key tile that this thread must not see, where keys end at `end`.
    fn limit(&self, b: &mut Builder, end: Reg<U32>, block: Reg<U32>) -> Reg<S32> {
        let quad = b.and(self.lane, 3);
        let column = b.shl(quad, 1);
        let start = b.mad(block, self.cfg.tile_n, column);
        let limit = b.sub(end, start);
        b.signed(limit)
    }
}

/// Sets the scores at and beyond each row's limit to −∞.
fn hide_beyond(b: &mut Builder, scores: &Acc, limits: [Reg<S32>; 2]) {
    for (i, &score) in scores.regs().iter().enumerate() {
        let hidden = b.test(Cmp::Le, limits[Acc::row(i)], Acc::col(i) as i32);
        b.select_into(score, hidden, f32::NEG_INFINITY, score);
    }
}
