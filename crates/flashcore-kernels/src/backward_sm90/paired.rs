//! Two consumers that hold the same 64 keys, for heads so wide that the gradients of keys and of values do not fit in one's
//! registers.
//!
//! | consumer | first product | makes | second product |
//! | --- | --- | --- | --- |
//! | [`Duty::Values`] | scores: K·Qᵀ | P, which it also passes on | dV += P·dO |
//! | [`Duty::Keys`] | slopes: V·dOᵀ | dS of slopes and P | dK += dS·Q |
//!
//! Weights pass through shared memory as rounded. A thread has the same rows and columns as the same-numbered thread of the
//! other consumer, so each passes its registers to that one. The first may be two pairs ahead: its exponentials overlap the
//! products of the other.

use flashcore_tile::{
    Acc, B32, Builder, Carried, Fragment, Pending, Reg, Shared, Stage, Start, U32, Val, Warpgroup,
};

use super::{
    consumer::Consumer,
    schedule::Tile,
    step::{Place, Run},
    store,
    tiles::{WARPGROUP, Ways},
};
use crate::parts::range::Range;

/// What one of the two consumers does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Duty {
    /// P, and the gradient of values.
    Values,
    /// dS, and the gradient of keys.
    Keys,
}

impl Duty {
    /// Which held and streamed tiles are multiplied first; the other streamed tile is multiplied with what was made.
    const fn first(self) -> usize {
        match self {
            Self::Values => 0,
            Self::Keys => 1,
        }
    }

    const fn second(self) -> usize {
        1 - self.first()
    }
}

/// The registers of a tile beside those of its first product.
struct Work {
    /// P or dS.
    made: Fragment,
    /// dV or dK.
    sum: Acc,
}

impl Carried for Work {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        [self.made.identity(b), self.sum.identity(b)].concat()
    }

    fn twin(&self) -> Self {
        Self { made: self.made.twin(), sum: self.sum.twin() }
    }
}

/// A first product in flight.
type Opened = (Pending<Acc>, Work);

impl Consumer<'_> {
    /// Works through the tiles that the producer posts.
    pub(super) fn run_paired(&self, b: &mut Builder, duty: Duty) {
        let known = |b: &mut Builder| {
            if duty == Duty::Keys {
                // It does not multiply with K: all that it needs of the stage is which tile it is.
                b.sync_warp();
                self.held_stage(b, 0).release(b, self.leader);
            }
        };
        self.each_tile(b, known, |b, tile| self.paired_tile(b, tile, duty));
    }

    fn paired_tile(&self, b: &mut Builder, tile: &Tile, duty: Duty) {
        let (step, dim) = (self.cfg.shape.step as usize, self.cfg.dims()[duty.second()] as usize);
        let work = Work { made: Fragment::new(b, step), sum: Acc::zero(b, dim) };
        store::prefetch(b, self, tile, [duty == Duty::Keys, duty == Duty::Values]);
        let range = (duty == Duty::Keys && self.cfg.keeps_range()).then(|| Range::new(b));
        let streamed = tile.streamed(b, self.cfg, self.args);
        let any = b.uniform::<Warpgroup>(streamed.begin.lt(streamed.end));
        let product = Acc::new(b, step);
        let mut ended = None;
        b.if_else(
            any,
            |b| {
                let block = streamed.first(b, self.cfg);
                let run = Run { tile, streamed: &streamed, block, heads_left: None, terms: None, range };
                let begun = |b: &mut Builder, (product, work): (Acc, Work)| -> Opened {
                    self.held_stage(b, duty.first()).wait_full(b);
                    (self.open_first(b, duty, product, self.count), work)
                };
                let ways = Ways {
                    begun: &begun,
                    step: &|b, opened| self.paired_step(b, &run, opened, duty),
                    last: &|b, opened| self.last_paired_step(b, &run, opened, duty),
                };
                ended = Some(if duty == Duty::Values && self.cfg.shape.ahead {
                    self.pairs_ahead(b, &run, (product, work))
                } else {
                    self.pairs(b, &streamed, (product, work), ways)
                });
            },
            |b| {
                let stage = self.held_stage(b, duty.first());
                self.give_back_unused(b, &stage, true);
            },
        );
        let work = ended.expect("the block has run");
        self.pass_held(b);
        let grads = match duty {
            Duty::Values => [None, Some(&work.sum)],
            Duty::Keys => [Some(&work.sum), None],
        };
        store::gradients(b, self, tile, grads, range);
    }

    /// All pairs of a held tile, where scores of the next pair are multiplied before the gradient of this one.
    fn pairs_ahead(&self, b: &mut Builder, run: &Run<'_>, (scores, Work { made, sum }): (Acc, Work)) -> Work {
        let tiles = b.let_((run.streamed.end - run.streamed.begin).unsigned());
        let left = b.var(tiles * self.args.group - 1);
        let scores = self.open_first(b, Duty::Values, scores, self.count).wait(b);
        self.weigh_and_pass(b, run, &scores, &made);
        let fresh = Fragment::new(b, self.cfg.shape.step as usize);
        let several = b.uniform::<Warpgroup>(left.gt(0));
        let work = b.if_carrying(several, (scores, Work { made, sum }), |b, work| {
            b.do_while_carrying(work, |b, work| {
                let work = self.step_ahead(b, run, work, &fresh);
                b.set(left, left - 1);
                (b.uniform::<Warpgroup>(left.gt(0)), work)
            })
        });
        self.give_back_held(b, 0, Place::Last);
        let (_, Work { made, sum }) = work;
        let stage = self.streamed_stage(b, 1, self.count);
        let sum = self.gradient(b, Duty::Values, sum, made, &stage);
        self.settle(b, sum, &stage)
    }

    /// The gradient of this pair, and probabilities of the next.
    fn step_ahead(
        &self,
        b: &mut Builder,
        run: &Run<'_>,
        (scores, Work { made, sum }): (Acc, Work),
        fresh: &Fragment,
    ) -> (Acc, Work) {
        let stage = self.streamed_stage(b, 1, self.count);
        let next = b.let_(self.count + 1);
        let scores = self.open_first(b, Duty::Values, scores, next);
        let sum = self.gradient(b, Duty::Values, sum, made, &stage);
        run.streamed.advance(b, run.block, None, self.args.group);
        b.add_to(self.count, 1);
        let scores = scores.wait(b);
        self.weigh_and_pass(b, run, &scores, fresh);
        let (sum, made) = sum.wait(b);
        stage.release(b, self.leader);
        // The product that reads probabilities has ended.
        made.regs().iter().zip(fresh.regs()).for_each(|(&to, &from)| b.set(to, from));
        (scores, Work { made, sum })
    }

    /// Makes probabilities of the current scores, passes them on, and releases the queries.
    fn weigh_and_pass(&self, b: &mut Builder, run: &Run<'_>, scores: &Acc, probs: &Fragment) {
        let terms = self.streamed_terms(b).expect("queries stream");
        self.weigh(b, run, &terms, scores, Some(probs));
        self.pass_on(b, scores, probs);
        // Terms came with the queries.
        self.streamed_stage(b, 0, self.count).release(b, self.leader);
    }

    /// Issues the gradient of a pair once what it is multiplied with is there.
    fn gradient(
        &self,
        b: &mut Builder,
        duty: Duty,
        sum: Acc,
        made: Fragment,
        stage: &Stage,
    ) -> Pending<(Acc, Fragment)> {
        stage.wait_full(b);
        let streamed = self.along[duty.second()].plus(b, stage.bytes);
        b.wgmma_rs(sum, Start::Accumulate, made, &streamed)
    }

    /// Issues the first product of streamed tile number `count` once it is there.
    fn open_first(&self, b: &mut Builder, duty: Duty, product: Acc, count: Reg<U32>) -> Pending<Acc> {
        let stage = self.streamed_stage(b, duty.first(), count);
        stage.wait_full(b);
        self.product(b, product, duty.first(), Start::Zero, &stage)
    }

    /// One pair, with the first product of the next one issued.
    fn paired_step(&self, b: &mut Builder, run: &Run<'_>, opened: Opened, duty: Duty) -> Opened {
        let (product, sum, stage) = self.paired(b, run, opened, duty, Place::Inside);
        let next = b.let_(self.count + 1);
        let opened = self.open_first(b, duty, product, next);
        let work = self.settle(b, sum, &stage);
        run.streamed.advance(b, run.block, None, self.args.group);
        (opened, work)
    }

    /// The last pair of a held tile, which is released.
    fn last_paired_step(&self, b: &mut Builder, run: &Run<'_>, opened: Opened, duty: Duty) -> (Acc, Work) {
        let (product, sum, stage) = self.paired(b, run, opened, duty, Place::Last);
        (product, self.settle(b, sum, &stage))
    }

    /// Waits for the gradient and releases what it was multiplied with.
    fn settle(&self, b: &mut Builder, sum: Pending<(Acc, Fragment)>, stage: &Stage) -> Work {
        let (sum, made) = sum.wait(b);
        stage.release(b, self.leader);
        b.add_to(self.count, 1);
        Work { made, sum }
    }

    /// All of a pair but the end of its gradient; the registers of its first product are free again.
    fn paired(
        &self,
        b: &mut Builder,
        run: &Run<'_>,
        (product, Work { made, sum }): Opened,
        duty: Duty,
        place: Place,
    ) -> (Acc, Pending<(Acc, Fragment)>, Stage) {
        let [first, second] = [duty.first(), duty.second()].map(|n| self.streamed_stage(b, n, self.count));
        let product = product.wait(b);
        self.give_back_held(b, duty.first(), place);
        match duty {
            Duty::Values => {
                let terms = self.streamed_terms(b).expect("queries stream");
                self.weigh(b, run, &terms, &product, Some(&made));
                self.pass_on(b, &product, &made);
                // Terms came with the queries.
                first.release(b, self.leader);
                second.wait_full(b);
            }
            Duty::Keys => {
                first.release(b, self.leader);
                second.wait_full(b);
                let terms = self.streamed_terms(b).expect("queries stream");
                self.add_sums(b, &product, &terms);
                self.take_weights(b, &product);
                if let Some(range) = run.range {
                    range.keep(b, std::slice::from_ref(&product), std::slice::from_ref(&sum));
                }
                self.round(b, &product, &made);
            }
        }
        let streamed = self.along[duty.second()].plus(b, second.bytes);
        let sum = b.wgmma_rs(sum, Start::Accumulate, made, &streamed);
        (product, sum, second)
    }

    /// Where this thread, and the one with its number, leave and find weights of the current pair.
    fn passed(&self, b: &mut Builder) -> (Stage, Shared) {
        let passed = self.layout.passed.as_ref().expect("consumers are paired");
        let stage = passed.stage(b, self.count);
        let thread = b.thread();
        let mine = b.let_((thread % WARPGROUP) * VECTOR_BYTES);
        let at = stage.at(b).plus(b, mine);
        (stage, at)
    }

    /// Passes weights on to the other consumer: P, or what it is times the slope of a cap.
    fn pass_on(&self, b: &mut Builder, weights: &Acc, probs: &Fragment) {
        let (stage, at) = self.passed(b);
        stage.wait_empty(b);
        for (n, weights) in (0..).zip(weights.regs().chunks_exact(2 * VECTOR)) {
            let rounded: [Reg<B32>; VECTOR] = std::array::from_fn(|i| {
                if self.cfg.softcap {
                    b.pack(self.cfg.input, weights[2 * i], weights[2 * i + 1])
                } else {
                    probs.slice(n as usize)[i]
                }
            });
            b.store_shared(at.at(n * WARPGROUP * VECTOR_BYTES), &rounded.map(Val::from));
        }
        b.sync_warp();
        b.predicated(self.leader, |b| stage.publish(b));
    }

    /// Multiplies slopes with the weights that the other consumer has passed on.
    fn take_weights(&self, b: &mut Builder, slopes: &Acc) {
        let (stage, at) = self.passed(b);
        stage.wait_full(b);
        for (n, slopes) in (0..).zip(slopes.regs().chunks_exact(2 * VECTOR)) {
            let rounded = b.load_shared::<B32, VECTOR>(at.at(n * WARPGROUP * VECTOR_BYTES));
            for (slopes, rounded) in slopes.chunks_exact(2).zip(rounded) {
                let weights = b.unpack(self.cfg.input, rounded);
                slopes.iter().zip(weights).for_each(|(&slope, weight)| b.mul_into(slope, slope, weight));
            }
        }
        b.sync_warp();
        stage.release(b, self.leader);
    }
}

/// Registers that a thread leaves at once, and their bytes.
const VECTOR: usize = 4;
const VECTOR_BYTES: u32 = 4 * VECTOR as u32;
