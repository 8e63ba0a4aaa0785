//! The steady state of a consumer: QKᵀ of one key tile, PV of the one before, softmax.
//!
//! Key tiles run from the last to the first, so that those masked on the right, at the diagonal or at the end of the
//! sequence, come first, and those masked on the left come last.

use flashcore_tile::{
    Acc, Builder, F32, Fragment, MatrixOperand, Pending, Reg, S32, Stage, Start, Uniform, Val, Warpgroup,
};

use super::{
    config::Settles,
    consumer::Consumer,
    output::{Output, Place},
    schedule::Tile,
};

/// Scores, output and probabilities: the registers of a tile.
pub(super) type Work = (Acc, Output, Fragment);

/// What a run of key tiles may hide.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hides {
    Nothing,
    Some,
}

/// Key tiles from `block` down to `until`, of a tile whose last one is `begin`.
pub(super) struct Run {
    pub(super) q: MatrixOperand,
    pub(super) tile: Tile,
    pub(super) block: Reg<S32>,
    pub(super) begin: Val<S32>,
    pub(super) until: Val<S32>,
    pub(super) hides: Hides,
    pub(super) softmax: Order,
}

/// What comes first in the softmax of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Exponentials, whose sum tells whether they were measured from the right reference.
    SumsFirst,
    /// Maxima first, so that nothing is done twice.
    MaximaFirst,
}

impl Run {
    /// Whether `count` key tiles are left.
    fn left(&self, b: &mut Builder, count: i32) -> Uniform<Warpgroup> {
        b.uniform((self.block - (count - 1)).ge(self.until))
    }
}

impl Consumer<'_> {
    /// The key tiles of a run.
    pub(super) fn steps(&self, b: &mut Builder, run: &Run, work: Work) -> Work {
        if run.hides == Hides::Some || run.softmax == Order::MaximaFirst || self.cfg.shape.turn == 1 {
            return self.unrolled(b, run, 1, work);
        }
        let work = self.unrolled(b, run, 2, work);
        let odd = run.left(b, 1);
        b.if_carrying(odd, work, |b, work| self.step(b, run, work, Place::Only))
    }

    /// Loops over `count` key tiles at a time, as long as there are so many.
    fn unrolled(&self, b: &mut Builder, run: &Run, count: i32, work: Work) -> Work {
        let any = run.left(b, count);
        b.if_carrying(any, work, |b, work| {
            b.do_while_carrying(work, |b, work| {
                let work = (0..count).fold(work, |work, n| self.step(b, run, work, self.place(n, count)));
                (run.left(b, count), work)
            })
        })
    }

    /// How the product of key tile number `n` of a turn of the loop is settled.
    fn place(&self, n: i32, count: i32) -> Place {
        match n {
            _ if self.cfg.settles != Settles::Pairs || count == 1 => Place::Only,
            0 => Place::First,
            _ => Place::Last,
        }
    }

    /// One key tile: QKᵀ of this one and PV of the one before run together, while other consumers do their softmax.
    /// PV has ended before the turn is passed on: where products of two consumers mix, both wait for both.
    fn step(&self, b: &mut Builder, run: &Run, work: Work, place: Place) -> Work {
        if self.cfg.settles == Settles::Parts {
            return self.step_in_parts(b, run, work);
        }
        let (scores, output, probs) = work;
        let k = self.layout.k.stage(b, self.kv_count);
        let v = self.values_before(b);
        let factor = self.block_factor(b, run.block);
        k.wait_full(b);
        self.take_turn(b);
        let scores = self.qk(b, scores, &run.q, &k);
        v.wait_full(b);
        let output = self.pv(b, output, probs, &v, place);
        let (scores, output, probs) = if self.cfg.policy.waits_once {
            let (output, probs) = output.wait(b);
            let scores = scores.wait(b);
            k.release(b, self.leader);
            self.give_back_values(b, &v);
            self.finish_scores(b, run, &scores, factor);
            (scores, output, probs)
        } else {
            let scores = scores.wait(b);
            k.release(b, self.leader);
            self.finish_scores(b, run, &scores, factor);
            let (output, probs) = output.wait(b);
            self.give_back_values(b, &v);
            (scores, output, probs)
        };
        self.settle_early(b, &output, place);
        self.weigh(b, run, &scores, &probs, &output.lasting(place));
        b.add_to(self.kv_count, 1);
        b.set(run.block, run.block - 1);
        (scores, output, probs)
    }

    /// Scores become probabilities; tiles of the output follow where references move.
    pub(super) fn weigh(&self, b: &mut Builder, run: &Run, scores: &Acc, probs: &Fragment, output: &[&Acc]) {
        match run.softmax {
            Order::SumsFirst => self.softmax.step(b, scores, probs, output),
            Order::MaximaFirst => self.softmax.careful_step(b, scores, probs, output),
        }
    }

    /// Releases Q after its last product, and prepares scores for softmax: softcapped and masked. `factor` is that of
    /// the key tile, where it has one.
    pub(super) fn finish_scores(&self, b: &mut Builder, run: &Run, scores: &Acc, factor: Option<Reg<F32>>) {
        self.release_q_early(b, run.block, run.begin);
        self.take_block(b, factor);
        self.scale.cap(b, scores.regs());
        if run.hides == Hides::Some {
            self.hide(b, scores, &run.tile, run.block);
        }
    }

    /// Releases the values that were multiplied, and with them the turn.
    fn give_back_values(&self, b: &mut Builder, v: &Stage) {
        v.release(b, self.leader);
        self.pass_turn(b);
    }

    /// Scores of a key tile.
    pub(super) fn qk(&self, b: &mut Builder, scores: Acc, q: &MatrixOperand, stage: &Stage) -> Pending<Acc> {
        let k = self.k.plus(b, stage.bytes);
        // As many features at a time as one instruction multiplies; what the tensor does not have was filled with zeros.
        let depth = self.cfg.dim_qk.next_multiple_of(self.cfg.input.depth());
        b.wgmma_ss(scores, Start::Zero, [q, &k], depth)
    }

    /// Adds the values of a key tile to the output.
    pub(super) fn pv(
        &self,
        b: &mut Builder,
        output: Output,
        probs: Fragment,
        stage: &Stage,
        place: Place,
    ) -> Pending<(Output, Fragment)> {
        let v = self.v.plus(b, stage.bytes);
        let start = output.start(place);
        let Output { recent, settled } = output;
        b.wgmma_rs(recent, start, probs, &v).map(|(recent, probs)| (Output { recent, settled }, probs))
    }

    /// The stage of the values of the key tile before the one that is counted now.
    pub(super) fn values_before(&self, b: &mut Builder) -> Stage {
        let before = b.let_(self.kv_count - 1);
        self.layout.v.stage(b, before)
    }
}
