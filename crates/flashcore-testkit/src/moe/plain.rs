//! A mixture of experts computed plainly, token by token: in f64 as the oracle, or rounded to the tensors' type after
//! every operation, as an eager loop over tensors does, as the yardstick.

use flashcore_core::{
    Activation, DType, Data, ExpertLayout, Groups, MoeInputs, MoeProblem, Routed, Routing, Score, Sigmoid,
};
use rayon::prelude::*;

use crate::values;

/// The experts of one token that are here, and what each counts for.
pub type Experts = Vec<(usize, f64)>;

/// Every element of a tensor as f32.
pub fn widened(data: Data<'_>) -> Vec<f32> {
    let mut all = Vec::with_capacity(data.len());
    values::row(data, 0, data.len(), &mut all);
    all
}

/// The experts of every token, in the order in which their results are added.
pub fn route(problem: &MoeProblem, routed: &Routed<'_>) -> Vec<Experts> {
    let (top_k, all) = (problem.top_k(), problem.shard().of);
    match (*routed, *problem.routing()) {
        (Routed::Given { ids, weights }, _) => {
            let weights = widened(weights);
            let entry = |n: usize| Some((problem.local(ids.get(n))?, f64::from(weights[n])));
            (0..problem.tokens()).map(|t| (t * top_k..(t + 1) * top_k).filter_map(entry).collect()).collect()
        }
        (Routed::Computed { logits, bias }, Routing::Computed { score, .. }) => {
            let logits = widened(logits);
            let bias: Vec<f64> = bias.map_or(vec![0.0; all], |b| b.iter().map(|&b| f64::from(b)).collect());
            let here = |(id, weight): (usize, f64)| Some((problem.local(id as i64)?, weight));
            let token = |row: &[f32]| {
                let logits: Vec<f64> = row.iter().map(|&logit| f64::from(logit)).collect();
                choose(&logits, &bias, top_k, score).into_iter().filter_map(here).collect()
            };
            logits.chunks_exact(all).map(token).collect()
        }
        _ => unreachable!("`MoeCall::bind` checked the kind of routing"),
    }
}

/// The experts of a token by its logits, best first, and their weights.
fn choose(logits: &[f64], bias: &[f64], top_k: usize, score: Score) -> Vec<(usize, f64)> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match score {
        Score::Softmax | Score::SoftmaxOfChosen => {
            let weights: Vec<f64> = logits.iter().map(|logit| (logit - top).exp()).collect();
            let chosen = best(logits, top_k);
            let over_all = score == Score::Softmax;
            let sum: f64 =
                if over_all { weights.iter().sum() } else { chosen.iter().map(|&e| weights[e]).sum() };
            chosen.into_iter().map(|e| (e, weights[e] / sum)).collect()
        }
        Score::Sigmoid(Sigmoid { groups, renormalise, scale, .. }) => {
            let weights: Vec<f64> = logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
            let mut choice: Vec<f64> = weights.iter().zip(bias).map(|(weight, bias)| weight + bias).collect();
            groups.into_iter().for_each(|groups| leave_groups(&mut choice, groups));
            let chosen = best(&choice, top_k);
            let sum: f64 = if renormalise { chosen.iter().map(|&e| weights[e]).sum() } else { 1.0 };
            chosen.into_iter().map(|e| (e, f64::from(scale) * weights[e] / sum)).collect()
        }
    }
}

/// Masks the experts of all but the best groups.
fn leave_groups(choice: &mut [f64], Groups { count, top }: Groups) {
    let size = choice.len() / count;
    let worth = |group: &[f64]| best(group, 2.min(size)).into_iter().map(|e| group[e]).sum::<f64>();
    let worths: Vec<f64> = choice.chunks(size).map(worth).collect();
    let kept = best(&worths, top);
    let dropped = choice.chunks_mut(size).enumerate().filter(|(n, _)| !kept.contains(n));
    dropped.for_each(|(_, group)| group.fill(f64::NEG_INFINITY));
}

/// The numbers of the `count` largest, largest first, the lowest numbers first among equals.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

/// How a plain computation rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rounding {
    /// Not at all: f64 throughout.
    None,
    /// To this type after every operation on tensors, whose products are summed in f32.
    Eager(DType),
}

impl Rounding {
    pub(super) fn round(self, x: f64) -> f64 {
        match self {
            Self::None => x,
            Self::Eager(dtype) => dtype.round(x),
        }
    }

    fn dot(self, a: impl Iterator<Item = f64>, b: &[f64]) -> f64 {
        let pairs = a.zip(b);
        match self {
            Self::None => pairs.map(|(a, b)| a * b).sum(),
            Self::Eager(_) => {
                self.round(f64::from(pairs.fold(0f32, |sum, (a, b)| sum + a as f32 * *b as f32)))
            }
        }
    }

    /// One feature between the products.
    pub(super) fn activate(self, activation: Activation, gate: f64, up: f64) -> f64 {
        let r = |x: f64| self.round(x);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match activation {
            Activation::SwiGlu => r(r(gate * sigmoid(gate)) * up),
            Activation::GeGlu => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                r(r(0.5 * gate * (1.0 + inner.tanh())) * up)
            }
            Activation::Clamped { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                r(r(up + 1.0) * r(gate * r(sigmoid(r(gate * alpha)))))
            }
        }
    }
}

/// Weights and biases of a kind of experts.
struct Networks<'a> {
    layouts: [ExpertLayout; 2],
    weights: [Data<'a>; 2],
    biases: Option<[Vec<f32>; 2]>,
}

impl Networks<'_> {
    /// The result of one expert for one token.
    fn apply(&self, problem: &MoeProblem, rounding: Rounding, expert: usize, x: &[f64]) -> Vec<f64> {
        let spec = problem.spec();
        let half = self.layouts[0].rows() / 2;
        let feature = |n: usize| {
            let [gate, up] =
                [false, true].map(|up| self.product(0, rounding, (expert, spec.order.row(n, half, up)), x));
            rounding.activate(spec.activation, gate, up)
        };
        let h: Vec<f64> = (0..half).into_par_iter().with_min_len(ROWS).map(feature).collect();
        let out = (0..x.len()).into_par_iter().with_min_len(ROWS);
        out.map(|n| self.product(1, rounding, (expert, n), &h)).collect()
    }

    fn product(&self, which: usize, rounding: Rounding, (expert, row): (usize, usize), x: &[f64]) -> f64 {
        let layout = &self.layouts[which];
        let elements = self.elements(which, (expert, row), x.len());
        let sum = rounding.dot(elements.into_iter().map(f64::from), x);
        match &self.biases {
            Some(biases) => rounding.round(sum + f64::from(biases[which][expert * layout.rows() + row])),
            None => sum,
        }
    }

    /// A row of a matrix.
    fn elements(&self, which: usize, (expert, row): (usize, usize), cols: usize) -> Vec<f32> {
        let (layout, data, mut elements) = (&self.layouts[which], self.weights[which], Vec::new());
        let start = layout.at(expert, row, 0);
        if cols > 1 && layout.at(expert, row, 1) == start + 1 {
            values::row(data, start, cols, &mut elements);
        } else {
            (0..cols).for_each(|col| values::row(data, layout.at(expert, row, col), 1, &mut elements));
        }
        elements
    }
}

/// Rows of a matrix that are worth a task of their own.
const ROWS: usize = 64;

/// The whole result, dense.
pub fn compute(problem: &MoeProblem, inputs: &MoeInputs<'_>, rounding: Rounding) -> Vec<f64> {
    compute_routed(problem, inputs, route(problem, &inputs.routed), rounding)
}

/// Some tokens of it.
pub fn compute_tokens(
    problem: &MoeProblem,
    inputs: &MoeInputs<'_>,
    tokens: &[usize],
    rounding: Rounding,
) -> Vec<f64> {
    let experts = route(problem, &inputs.routed);
    compute_some(
        problem,
        inputs,
        tokens.iter().map(|&token| (token, experts[token].clone())).collect(),
        rounding,
    )
}

/// The same with each token's experts given.
pub fn compute_routed(
    problem: &MoeProblem,
    inputs: &MoeInputs<'_>,
    experts: Vec<Experts>,
    rounding: Rounding,
) -> Vec<f64> {
    compute_some(problem, inputs, experts.into_iter().enumerate().collect(), rounding)
}

fn compute_some(
    problem: &MoeProblem,
    inputs: &MoeInputs<'_>,
    tokens: Vec<(usize, Experts)>,
    rounding: Rounding,
) -> Vec<f64> {
    let spec = problem.spec();
    let routed = Networks {
        layouts: [spec.gate_up, spec.down],
        weights: [inputs.gate_up, inputs.down],
        biases: inputs.biases.map(|biases| biases.map(widened)),
    };
    let shared = inputs.shared.zip(spec.shared).map(|(weights, layouts)| Networks {
        layouts: [layouts.gate_up, layouts.down],
        weights,
        biases: None,
    });
    let token = |(token, experts): (usize, Experts)| {
        let mut x = Vec::new();
        values::row(inputs.x, problem.x().row(0, 0, token), problem.hidden(), &mut x);
        let x: Vec<f64> = x.into_iter().map(f64::from).collect();
        let mut sum = vec![0.0; x.len()];
        for (expert, weight) in experts {
            add(&mut sum, &routed.apply(problem, rounding, expert, &x), weight, rounding);
        }
        if let Some(shared) = &shared {
            add(&mut sum, &shared.apply(problem, rounding, 0, &x), 1.0, rounding);
        }
        sum
    };
    tokens.into_par_iter().flat_map_iter(token).collect()
}

fn add(sum: &mut [f64], values: &[f64], weight: f64, rounding: Rounding) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum = rounding.round(*sum + rounding.round(value * weight));
    }
}
