//! Chooses the experts of each token: one warp per token, its scores in shared memory.
//!
//! Every round takes the best remaining expert, the lowest number among equals. An expert whose score is −∞ or NaN is
//! never taken; if no other is left, the token goes nowhere.

use std::f32::consts::LOG2_E;

use flashcore_core::{DType, MAX_EXPERTS, MoeProblem, Routing, Score, Sigmoid};
use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{
    BuildError, Builder, Extent, F32, Half, Params, Pred, Program, Reg, Scope, Shared, U32, U64, Warp,
};

use super::{Layer, NONE, overlaps};
use crate::slots::moe as slots;

/// Warps of a CTA, each with a token.
const WARPS: u32 = 4;
/// Lanes of a warp.
const LANES: u32 = 32;
/// Most groups: one for each lane.
pub const MAX_GROUPS: usize = LANES as usize;

/// A kernel of this family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The architecture it is built for.
    pub target: Target,
    /// Element type of the logits.
    pub logits: DType,
    /// What they mean.
    pub kind: ScoreKind,
    /// Experts of a token.
    pub top_k: u32,
}

/// What logits mean, without the numbers that a kernel reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScoreKind {
    /// A softmax over all experts.
    Softmax,
    /// A softmax over the chosen ones.
    SoftmaxOfChosen,
    /// A sigmoid.
    Sigmoid {
        /// Whether something is added for the choice.
        bias: bool,
        /// How many groups are kept, where there are groups.
        groups: Option<u32>,
        /// Whether weights are divided by their sum.
        renormalise: bool,
    },
}

impl ScoreKind {
    const fn of(score: Score) -> Self {
        match score {
            Score::Softmax => Self::Softmax,
            Score::SoftmaxOfChosen => Self::SoftmaxOfChosen,
            Score::Sigmoid(Sigmoid { bias, groups, renormalise, .. }) => {
                let groups = match groups {
                    Some(groups) => Some(groups.top as u32),
                    None => None,
                };
                Self::Sigmoid { bias, groups, renormalise }
            }
        }
    }

    fn name(self) -> String {
        match self {
            Self::Softmax => "softmax".to_owned(),
            Self::SoftmaxOfChosen => "chosen".to_owned(),
            Self::Sigmoid { bias, groups, renormalise } => {
                let options = [(bias, "_bias"), (renormalise, "_renorm")];
                let options: String = options.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
                let groups = groups.map_or(String::new(), |top| format!("_g{top}"));
                format!("sigmoid{options}{groups}")
            }
        }
    }
}

impl Config {
    /// The kernel for a problem; `None` where its call brings the experts.
    pub const fn of(problem: &MoeProblem, target: Target) -> Option<Self> {
        match *problem.routing() {
            Routing::Given { .. } => None,
            Routing::Computed { logits, top_k, score } => {
                Some(Self { target, logits, kind: ScoreKind::of(score), top_k: top_k as u32 })
            }
        }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { target, logits, kind, top_k } = self;
        Ident::new(format!("fc_moe_route_{target}_{logits}_{}_k{top_k}", kind.name()))
            .expect("made of legal parts")
    }
}

/// The launch for a layer; `None` where there are no tokens.
pub fn extent(cfg: &Config, layer: &Layer) -> Option<Extent> {
    let ctas = (layer.problem.tokens() as u32).div_ceil(WARPS);
    let (grid, workspace) = ([ctas, 1, 1], layer.workspace.clone());
    (ctas > 0).then(|| Extent { grid, workspace, dependent: overlaps(cfg.target) })
}

/// The options of a problem's sigmoid.
fn sigmoid(layer: &Layer) -> Sigmoid {
    match layer.problem.routing() {
        Routing::Computed { score: Score::Sigmoid(sigmoid), .. } => *sigmoid,
        _ => Sigmoid::PLAIN,
    }
}

/// What the host passes, as registers.
struct Arguments {
    logits: Reg<U64>,
    bias: Option<Reg<U64>>,
    ids: Reg<U64>,
    weights: Reg<U64>,
    experts: Reg<U32>,
    tokens: Reg<U32>,
    scale: Reg<F32>,
    /// Number of groups and experts of a group.
    groups: [Reg<U32>; 2],
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let bias = matches!(cfg.kind, ScoreKind::Sigmoid { bias: true, .. });
        let count = |layer: &Layer| sigmoid(layer).groups.map_or(1, |groups| groups.count);
        Self {
            logits: params.buffer(b, "logits", slots::LOGITS),
            bias: bias.then(|| params.buffer(b, "bias", slots::ROUTING_BIAS)),
            ids: params.buffer(b, "ids", slots::CHOSEN),
            weights: params.buffer(b, "weights", slots::CHOSEN_WEIGHTS),
            experts: params.u32(b, "experts", |layer| layer.problem.shard().of as u32),
            tokens: params.u32(b, "tokens", |layer| layer.problem.tokens() as u32),
            scale: params.f32(b, "scale", |layer| sigmoid(layer).scale),
            groups: [
                params.u32(b, "groups", move |layer| count(layer) as u32),
                params.u32(b, "group_size", move |layer| (layer.problem.shard().of / count(layer)) as u32),
            ],
        }
    }
}

/// Builds the kernel.
pub fn route(cfg: &Config) -> Result<Program<Layer>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, WARPS * LANES, 4);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let scores = b.shared(WARPS * 4 * MAX_EXPERTS as u32, 16);
    let (cta, warp) = (b.cta(), b.warp());
    let token = b.let_(cta * WARPS + warp);
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    let there = b.uniform::<Warp>(token.lt(args.tokens));
    b.if_uniform(there, |b| {
        let scores = b.shared_at(scores).plus(b, warp * (4 * MAX_EXPERTS as u32));
        let logits = b.let_(token.widen() * args.experts.widen());
        let bytes = cfg.logits.bytes() as u64;
        let logits = b.let_(logits * bytes + args.logits);
        Router { cfg: *cfg, args: &args, scores, logits, lane: b.lane() }.run(b, token);
    });
    b.finish(&name, params)
}

/// One warp's token.
struct Router<'a> {
    cfg: Config,
    args: &'a Arguments,
    scores: Shared,
    logits: Reg<U64>,
    lane: Reg<U32>,
}

/// The best of some scores, and its number.
#[derive(Clone, Copy)]
struct Best {
    score: Reg<F32>,
    number: Reg<U32>,
}

impl Best {
    fn none(b: &mut Builder) -> Self {
        Self { score: b.var_in(Scope::Lane, f32::NEG_INFINITY), number: b.var_in(Scope::Lane, NONE) }
    }

    /// Takes another where it is better, or as good with a lower number.
    fn meet(self, b: &mut Builder, score: Reg<F32>, number: Reg<U32>) {
        let better = score.gt(self.score) | (score.eq(self.score) & number.lt(self.number));
        let better: Pred = b.let_(better);
        b.select_into(self.score, better, score, self.score);
        b.select_into(self.number, better, number, self.number);
    }

    /// The best of all lanes.
    fn of_warp(self, b: &mut Builder) {
        for distance in [16, 8, 4, 2, 1] {
            let score = b.shuffle_xor(self.score, distance);
            let bits = b.let_(self.number.signed());
            let bits = b.float_of_bits(bits);
            let other = b.shuffle_xor(bits, distance);
            let number = b.float_bits(other);
            let number = b.let_(number.unsigned());
            self.meet(b, score, number);
        }
    }
}

impl Router<'_> {
    fn run(&self, b: &mut Builder, token: Reg<U32>) {
        self.score(b);
        b.sync_warp();
        if let ScoreKind::Sigmoid { groups: Some(top), .. } = self.cfg.kind {
            self.keep_groups(b, top);
            b.sync_warp();
        }
        let chosen: Vec<_> = (0..self.cfg.top_k).map(|_| self.choose(b)).collect();
        let weights = self.weigh(b, &chosen);
        let first = b.let_(token * self.cfg.top_k);
        for (slot, (best, weight)) in (0..).zip(chosen.iter().zip(weights)) {
            let entry = b.let_(first + slot);
            let (id, to) =
                (b.let_(self.args.ids + entry.mul_wide(4)), b.let_(self.args.weights + entry.mul_wide(4)));
            b.predicated(self.lane.eq(0), |b| {
                b.store_global(id, &[best.number.into()]);
                b.store_global(to, &[weight.into()]);
            });
        }
    }

    fn score_at(&self, b: &mut Builder, number: Reg<U32>) -> Shared {
        self.scores.plus(b, number * 4)
    }

    /// Calls `visit` with every 32nd expert.
    fn each(&self, b: &mut Builder, visit: impl FnOnce(&mut Builder, Reg<U32>)) {
        let number = b.var_in(Scope::Lane, self.lane);
        b.while_(
            |_| number.lt(self.args.experts),
            |b| {
                visit(b, number);
                b.add_to(number, LANES);
            },
        );
    }

    fn logit(&self, b: &mut Builder, number: Reg<U32>) -> Reg<F32> {
        let at = b.let_(self.logits + number.mul_wide(self.cfg.logits.bytes() as u32));
        match self.cfg.logits {
            DType::F16 | DType::BF16 => {
                let half = if self.cfg.logits == DType::F16 { Half::F16 } else { Half::Bf16 };
                let word = b.load_global_16(at);
                b.unpack(half, word)[0]
            }
            _ => b.load_global::<F32, 1>(at)[0],
        }
    }

    /// Puts what experts are chosen by into shared memory.
    fn score(&self, b: &mut Builder) {
        self.each(b, |b, number| {
            let logit = self.logit(b, number);
            let score = match self.cfg.kind {
                ScoreKind::Softmax | ScoreKind::SoftmaxOfChosen => logit,
                ScoreKind::Sigmoid { .. } => sigmoid_of(b, logit),
            };
            let score = match self.args.bias {
                None => score,
                Some(bias) => {
                    let at = b.let_(bias + number.mul_wide(4));
                    let [bias] = b.load_global::<F32, 1>(at);
                    b.let_(score + bias)
                }
            };
            let at = self.score_at(b, number);
            b.store_shared(at, &[score.into()]);
        });
    }

    /// Masks the experts of all but the best groups; a lane has a group.
    fn keep_groups(&self, b: &mut Builder, top: u32) {
        let [count, size] = self.args.groups;
        let first = b.let_(self.lane * size);
        let here: Pred = b.let_(self.lane.lt(count));
        let worth = b.var_in(Scope::Lane, f32::NEG_INFINITY);
        b.if_(here, |b| {
            let value = self.group_worth(b, first, size);
            b.set(worth, value);
        });
        let kept = b.var_in(Scope::Lane, 0u32);
        for _ in 0..top {
            let best = Best { score: b.var_in(Scope::Lane, worth), number: b.var_in(Scope::Lane, self.lane) };
            best.of_warp(b);
            let own: Pred = b.let_(best.number.eq(self.lane));
            b.select_into(kept, own, 1u32, kept);
            b.select_into(worth, own, f32::NEG_INFINITY, worth);
        }
        let hidden = b.let_(self.lane.lt(count) & kept.eq(0));
        b.if_(hidden, |b| {
            each_of(b, first, size, |b, number| {
                let at = self.score_at(b, number);
                b.store_shared(at, &[f32::NEG_INFINITY.into()]);
            });
        });
    }

    /// The sum of a group's two best scores, or its only one.
    fn group_worth(&self, b: &mut Builder, first: Reg<U32>, size: Reg<U32>) -> Reg<F32> {
        let [best, second] = [(); 2].map(|()| b.var_in(Scope::Lane, f32::NEG_INFINITY));
        each_of(b, first, size, |b, number| {
            let at = self.score_at(b, number);
            let [score] = b.load_shared::<F32, 1>(at);
            let lower = b.min(best, score);
            let next = b.max(second, lower);
            b.set(second, next);
            let higher = b.max(best, score);
            b.set(best, higher);
        });
        let alone: Pred = b.let_(size.eq(1));
        let second = b.select(alone, 0.0, second);
        b.let_(best + second)
    }

    /// Takes the best expert that is left.
    fn choose(&self, b: &mut Builder) -> Best {
        let best = Best::none(b);
        self.each(b, |b, number| {
            let at = self.score_at(b, number);
            let [score] = b.load_shared::<F32, 1>(at);
            let better: Pred = b.let_(score.gt(best.score));
            b.select_into(best.score, better, score, best.score);
            b.select_into(best.number, better, number, best.number);
        });
        best.of_warp(b);
        b.sync_warp();
        let taken = b.let_(self.lane.eq(0) & best.number.ne(NONE));
        let within = b.let_(best.number.min(MAX_EXPERTS as u32 - 1));
        let at = self.score_at(b, within);
        b.predicated(taken, |b| b.store_shared(at, &[f32::NEG_INFINITY.into()]));
        b.sync_warp();
        best
    }

    /// The weight of each chosen expert.
    fn weigh(&self, b: &mut Builder, chosen: &[Best]) -> Vec<Reg<F32>> {
        let raw: Vec<_> = match self.cfg.kind {
            ScoreKind::Sigmoid { .. } => chosen.iter().map(|best| self.sigmoid_weight(b, *best)).collect(),
            _ => chosen.iter().map(|best| above(b, best.score, chosen[0].score)).collect(),
        };
        let mut sum = b.var_in(Scope::Lane, 0.0);
        raw.iter().for_each(|&weight| b.add_to(sum, weight));
        let factor = match self.cfg.kind {
            ScoreKind::Sigmoid { renormalise: false, .. } => self.args.scale,
            ScoreKind::Sigmoid { .. } | ScoreKind::SoftmaxOfChosen => {
                let inverse = b.rcp(sum);
                b.mul(inverse, self.args.scale)
            }
            ScoreKind::Softmax => {
                let rest = self.rest(b, chosen[0].score);
                sum = b.let_(sum + rest);
                b.rcp(sum)
            }
        };
        raw.into_iter().map(|weight| b.mul(weight, factor)).collect()
    }

    /// The sigmoid of a chosen expert's own logit, without what was added for the choice.
    fn sigmoid_weight(&self, b: &mut Builder, best: Best) -> Reg<F32> {
        let last = b.let_(self.args.experts - 1);
        let number = b.let_(best.number.min(last));
        let logit = self.logit(b, number);
        sigmoid_of(b, logit)
    }

    /// The exponentials of all experts that were not chosen.
    fn rest(&self, b: &mut Builder, top: Reg<F32>) -> Reg<F32> {
        let sum = b.var_in(Scope::Lane, 0.0);
        self.each(b, |b, number| {
            let at = self.score_at(b, number);
            let [score] = b.load_shared::<F32, 1>(at);
            let term = above(b, score, top);
            b.add_to(sum, term);
        });
        for distance in [16, 8, 4, 2, 1] {
            let other = b.shuffle_xor(sum, distance);
            b.add_to(sum, other);
        }
        sum
    }
}

/// Calls `visit` with `size` numbers from `first` on.
fn each_of(b: &mut Builder, first: Reg<U32>, size: Reg<U32>, visit: impl FnOnce(&mut Builder, Reg<U32>)) {
    let (number, end) = (b.var_in(Scope::Lane, first), b.let_(first + size));
    b.while_(
        |_| number.lt(end),
        |b| {
            visit(b, number);
            b.add_to(number, 1);
        },
    );
}

/// `exp(x − top)`.
fn above(b: &mut Builder, x: Reg<F32>, top: Reg<F32>) -> Reg<F32> {
    let below = b.let_(x - top);
    let exponent = b.mul(below, LOG2_E);
    b.exp2(exponent)
}

fn sigmoid_of(b: &mut Builder, logit: Reg<F32>) -> Reg<F32> {
    let exponent = b.mul(logit, -LOG2_E);
    let e = b.exp2(exponent);
    let sum = b.let_(e + 1.0);
    b.rcp(sum)
}
