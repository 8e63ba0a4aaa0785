//! One streamed pair: scores and slopes, P and dS, gradients.
//!
//! ```text
//! tensor cores   scores(i) │ slopes(i)   │ dV(i)     │ dK(i)  scores(i+1) │ slopes(i+1) …
//! this group               │ exponentials│ dS        │                    │ exponentials …
//! ```
//!
//! Scores of the next pair are issued right after the gradients of this one, so a group's tensor cores wait only if its
//! exponentials take longer than a product, and other groups multiply meanwhile.

use flashcore_tile::{Acc, Builder, Carried, Fragment, Pending, Reg, S32, Stage, Start, U32, Val, Warpgroup};

use super::{
    Side,
    consumer::Consumer,
    schedule::{Streamed, Tile},
    terms::{QUAD, Term, Terms},
    values::Values,
};
use crate::parts::{mask::thread_column, range::Range};

/// The registers of a tile beside its scores.
pub(super) struct Work {
    /// dO·Vᵀ or its transpose, if not in the registers of scores.
    slopes: Option<Acc>,
    /// P, where values have gradients.
    probs: Option<Fragment>,
    ds: Fragment,
    /// dK or dQ.
    pub(super) first: Acc,
    /// dV.
    pub(super) second: Option<Acc>,
}

impl Work {
    pub(super) fn new(b: &mut Builder, consumer: &Consumer<'_>) -> Self {
        let cfg = consumer.cfg;
        let (cols, [qk, v]) = (cfg.shape.step as usize, cfg.dims().map(|dim| dim as usize));
        let values = cfg.side == Side::Keys;
        Self {
            slopes: (!cfg.shares_scores()).then(|| Acc::new(b, cols)),
            probs: values.then(|| Fragment::new(b, cols)),
            ds: Fragment::new(b, cols),
            first: Acc::new(b, qk),
            second: values.then(|| Acc::new(b, v)),
        }
    }
}

impl Carried for Work {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        let accs = self.slopes.iter().chain([&self.first]).chain(&self.second).map(|acc| acc.identity(b));
        let fragments = [&self.ds].into_iter().chain(&self.probs).map(|fragment| fragment.identity(b));
        accs.chain(fragments).flatten().collect()
    }

    fn twin(&self) -> Self {
        Self {
            slopes: self.slopes.as_ref().map(Carried::twin),
            probs: self.probs.as_ref().map(Carried::twin),
            ds: self.ds.twin(),
            first: self.first.twin(),
            second: self.second.as_ref().map(Carried::twin),
        }
    }
}

/// The streamed tiles of a held one.
pub(super) struct Run<'a> {
    pub(super) tile: &'a Tile,
    pub(super) streamed: &'a Streamed,
    /// The one that is next, and how many heads it still has, where they follow one another.
    pub(super) block: Reg<S32>,
    pub(super) heads_left: Option<Reg<U32>>,
    /// The terms of held rows.
    pub(super) terms: Option<Terms>,
    /// The range in which gradients of scores are kept.
    pub(super) range: Option<Range>,
}

/// Whether another pair follows for the same held tile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Inside,
    Last,
}

/// Gradients of a pair that are in flight.
struct Issued {
    slopes: Option<Acc>,
    first: Pending<(Acc, Fragment)>,
    values: Option<Values>,
    stages: [Stage; 2],
}

/// The same when the gradient of values has ended.
struct Settled {
    slopes: Option<Acc>,
    first: Pending<(Acc, Fragment)>,
    second: Option<Acc>,
    probs: Option<Fragment>,
    stage: Stage,
}

impl Consumer<'_> {
    /// Issues the scores of streamed tile number `count` once it is there.
    pub(super) fn open(&self, b: &mut Builder, scores: Acc, count: Reg<U32>) -> Pending<Acc> {
        let stage = self.streamed_stage(b, 0, count);
        stage.wait_full(b);
        self.product(b, scores, 0, Start::Zero, &stage)
    }

    /// Held rows times streamed ones.
    pub(super) fn product(
        &self,
        b: &mut Builder,
        into: Acc,
        which: usize,
        start: Start,
        stage: &Stage,
    ) -> Pending<Acc> {
        let streamed = self.across[which].plus(b, stage.bytes);
        // As many features at a time as one instruction multiplies; what the tensor does not have was filled with zeros.
        let depth = self.cfg.dims()[which].next_multiple_of(self.cfg.input.element().depth());
        b.wgmma_ss(into, start, [&self.held[which], &streamed], depth)
    }

    /// One pair, with the scores of the next one issued.
    pub(super) fn step(&self, b: &mut Builder, run: &Run<'_>, (scores, work): Opened) -> Opened {
        let (scores, issued) = self.pair(b, run, scores, work, Place::Inside);
        // Probabilities lie where scores will: the product that reads them must have ended before the next one begins.
        let settled = self.settle_second(b, issued);
        let (opened, work) = if self.cfg.shares_scores() {
            // So does dS, then.
            let work = self.settle_first(b, settled);
            (self.open(b, scores, self.count), work)
        } else {
            let next = b.let_(self.count + 1);
            (self.open(b, scores, next), self.settle_first(b, settled))
        };
        run.streamed.advance(b, run.block, run.heads_left, self.args.group);
        (opened, work)
    }

    /// The last pair of a held tile, which is released.
    pub(super) fn last_step(&self, b: &mut Builder, run: &Run<'_>, (scores, work): Opened) -> (Acc, Work) {
        let (scores, issued) = self.pair(b, run, scores, work, Place::Last);
        let settled = self.settle_second(b, issued);
        (scores, self.settle_first(b, settled))
    }

    /// All of a pair but the end of its gradients; the registers of its scores are free again.
    fn pair(
        &self,
        b: &mut Builder,
        run: &Run<'_>,
        scores: Pending<Acc>,
        work: Work,
        place: Place,
    ) -> (Acc, Issued) {
        let Work { slopes, probs, ds, first, second } = work;
        let values = second.zip(probs).map(|(acc, probs)| Values::Due(acc, probs));
        let stages = [0, 1].map(|which| self.streamed_stage(b, which, self.count));
        stages[1].wait_full(b);
        self.wait_for_mover(b);
        let terms = self.streamed_terms(b).or(run.terms).expect("rows are held or streamed");
        // The assembler loses track of products that go round a loop if others are issued before they are waited for.
        let scores = scores.wait(b);
        let (scores, slopes, values) = match slopes {
            Some(slopes) => {
                self.start_slopes(b, &slopes, &terms);
                let slopes = self.product(b, slopes, 1, Start::Accumulate, &stages[1]);
                self.give_back_held(b, 0, place);
                self.weigh(b, run, &terms, &scores, values.as_ref().and_then(Values::probs));
                (scores, Some(slopes.wait(b)), values)
            }
            None => {
                self.give_back_held(b, 0, place);
                self.weigh(b, run, &terms, &scores, values.as_ref().and_then(Values::probs));
                let slopes = self.product(b, scores, 1, Start::Zero, &stages[1]);
                let values = values.map(|values| self.issue_early(b, values, &stages[1]));
                (slopes.wait(b), None, values)
            }
        };
        self.give_back_held(b, 1, place);
        if values.is_none() {
            stages[1].release(b, self.leader);
        }
        if slopes.is_none() {
            self.add_sums(b, &scores, &terms);
        }
        let values = values.map(|values| self.settle_early(b, values, &stages[1]));
        let slopes_at = slopes.as_ref().unwrap_or(&scores);
        self.multiply(b, &scores, slopes_at, values.as_ref().and_then(Values::probs));
        if let Some(range) = run.range {
            range.keep(b, std::slice::from_ref(slopes_at), std::slice::from_ref(&first));
        }
        self.round(b, slopes_at, &ds);
        let values = values.map(|values| self.issue_values(b, values, &stages[1]));
        self.store_for_mover(b, &ds);
        self.hand_range(b, run.range);
        let streamed = self.along[0].plus(b, stages[0].bytes);
        let first = b.wgmma_rs(first, Start::Accumulate, ds, &streamed);
        // Until others can see what was stored, products run.
        self.hand_over(b);
        (scores, Issued { slopes, first, values, stages })
    }

    /// Slopes start from minus the row sums, which so take no registers of their own.
    fn start_slopes(&self, b: &mut Builder, slopes: &Acc, terms: &Terms) {
        for (quad, slopes) in slopes.regs().chunks_exact(QUAD).enumerate() {
            let sums = terms.of_quad(b, Term::MinusSum, quad);
            slopes.iter().zip(sums).for_each(|(&slope, sum)| b.set(slope, sum));
        }
    }

    /// Adds minus the row sums to slopes that did not start from them: where scores were.
    pub(super) fn add_sums(&self, b: &mut Builder, slopes: &Acc, terms: &Terms) {
        for (quad, slopes) in slopes.regs().chunks_exact(QUAD).enumerate() {
            let sums = terms.of_quad(b, Term::MinusSum, quad);
            slopes.iter().zip(sums).for_each(|(&slope, sum)| b.add_to(slope, sum));
        }
    }

    /// Makes probabilities of scores, and rounds them into `probs`.
    pub(super) fn weigh(
        &self,
        b: &mut Builder,
        run: &Run<'_>,
        terms: &Terms,
        scores: &Acc,
        probs: Option<&Fragment>,
    ) {
        self.args.scale.cap(b, scores.regs());
        self.hide(b, run, scores);
        self.hide_unused(b, run, scores);
        self.weights(b, terms, scores, probs);
    }

    /// Waits for the gradient of values, if there is one, and releases dO.
    fn settle_second(&self, b: &mut Builder, issued: Issued) -> Settled {
        let Issued { slopes, first, values, stages } = issued;
        let (second, probs) = values.map(|values| self.settle_values(b, values, &stages[1])).unzip();
        Settled { slopes, first, second, probs, stage: stages[0] }
    }

    /// Waits for the gradient of keys or queries, and releases the rest of the pair.
    fn settle_first(&self, b: &mut Builder, settled: Settled) -> Work {
        let Settled { slopes, first, second, probs, stage } = settled;
        let (first, ds) = first.wait(b);
        stage.release(b, self.leader);
        b.add_to(self.count, 1);
        Work { slopes, probs, ds, first, second }
    }

    /// Releases a held tile after its last product.
    pub(super) fn give_back_held(&self, b: &mut Builder, which: usize, place: Place) {
        if place == Place::Last && (which == 0 || !self.cfg.gathers_in_held()) {
            self.held_stage(b, which).release(b, self.leader);
        }
    }

    /// Masks what the held rows of this thread must not see of a streamed tile.
    fn hide(&self, b: &mut Builder, run: &Run<'_>, scores: &Acc) {
        // Where queries stream, those beyond the last have no probabilities, so that only the mask hides anything.
        let others = self.cfg.hides_others();
        if self.cfg.side == Side::Keys && self.cfg.edges() == [false; 2] && !others {
            return;
        }
        let Streamed { whole_begin, whole_end, .. } = *run.streamed;
        let hides = b.uniform::<Warpgroup>(run.block.lt(whole_begin) | run.block.ge(whole_end));
        b.if_uniform(hides, |b| {
            let tile = if others { self.take_back(b, run.tile) } else { *run.tile };
            let rows = self.thread_rows(b, &tile).map(Reg::signed);
            let column = thread_column(b, self.lane);
            let first = b.let_(run.block * self.cfg.shape.step as i32 + column);
            let seen = tile.visibility(b, self.cfg, self.args).of_thread(b, rows);
            let beyond = others.then(|| self.beyond_use(b, &tile));
            let seen = beyond.map_or(seen, |beyond| seen.without(b, beyond));
            seen.hide(b, scores, first);
        });
    }

    /// Hides held rows that nobody uses, where something goes over all of them: it may only depend on the others.
    fn hide_unused(&self, b: &mut Builder, run: &Run<'_>, scores: &Acc) {
        let sums_rows = self.cfg.fused() || self.cfg.keeps_range() && self.cfg.side == Side::Keys;
        if !sums_rows || self.cfg.hides_others() {
            return;
        }
        let end = run.tile.first_row(b, self.cfg);
        let len = run.tile.held_len(self.cfg);
        let hides = b.uniform::<Warpgroup>((end + self.cfg.held()).gt(Val::from(len)));
        b.if_uniform(hides, |b| {
            let beyond = self.beyond_use(b, run.tile);
            for (i, &score) in scores.regs().iter().enumerate() {
                b.select_into(score, beyond[Acc::row(i)], f32::NEG_INFINITY, score);
            }
        });
    }

    /// Makes probabilities of scores, in their place, and rounds them into `probs` where that is not left for later.
    fn weights(&self, b: &mut Builder, terms: &Terms, scores: &Acc, probs: Option<&Fragment>) {
        for (quad, scores) in scores.regs().chunks_exact(QUAD).enumerate() {
            let minus_lse = terms.of_quad(b, Term::MinusLse, quad);
            // Capped scores are hyperbolic tangents, whose slope is 1 − tanh²; a hidden one is −∞.
            let slopes: Vec<_> = scores
                .iter()
                .filter(|_| self.cfg.softcap)
                .map(|&score| {
                    let minus = b.neg(score);
                    let slope = b.fma(minus, score, 1.0);
                    b.max(slope, 0.0)
                })
                .collect();
            for (&score, minus_lse) in scores.iter().zip(minus_lse) {
                b.fma_into(score, score, self.args.scale.log2, minus_lse);
                b.exp2_into(score, score);
            }
            for (n, pair) in scores.chunks_exact(2).enumerate() {
                if let Some(probs) = probs.filter(|_| self.cfg.rounds_early()) {
                    b.pack_into(probs.regs()[2 * quad + n], self.cfg.input, pair[0], pair[1]);
                }
            }
            scores.iter().zip(slopes).for_each(|(&score, slope)| b.mul_into(score, score, slope));
        }
    }

    /// Makes `weights ∘ slopes` of slopes, in their place. In a fused kernel weights are what was rounded: as they were
    /// before, they would take registers all the while.
    fn multiply(&self, b: &mut Builder, weights: &Acc, slopes: &Acc, probs: Option<&Fragment>) {
        let pairs = weights.regs().chunks_exact(2).zip(slopes.regs().chunks_exact(2));
        for (n, (weights, slopes)) in pairs.enumerate() {
            let weights = match probs {
                Some(probs) if self.cfg.fused() => b.unpack(self.cfg.input, probs.regs()[n]),
                Some(probs) if !self.cfg.rounds_early() => {
                    b.pack_into(probs.regs()[n], self.cfg.input, weights[0], weights[1]);
                    [weights[0], weights[1]]
                }
                _ => [weights[0], weights[1]],
            };
            slopes.iter().zip(weights).for_each(|(&slope, weight)| b.mul_into(slope, slope, weight));
        }
    }

    /// Rounds gradients of scores into `ds`.
    pub(super) fn round(&self, b: &mut Builder, slopes: &Acc, ds: &Fragment) {
        for (&to, slopes) in ds.regs().iter().zip(slopes.regs().chunks_exact(2)) {
            b.pack_into(to, self.cfg.input, slopes[0], slopes[1]);
        }
    }
}

/// Scores in flight, and the other registers of a tile.
pub(super) type Opened = (Pending<Acc>, Work);
