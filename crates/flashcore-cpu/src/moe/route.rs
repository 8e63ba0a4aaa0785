//! The experts of every token, and the tokens of every expert. Called by `moe`.

use std::ops::Range;

use flashcore_core::{Data, Groups, MoeProblem, Routed, Routing, Score, Sigmoid};

use crate::crew::Crew;

/// Pairs of tokens and experts.
pub(super) struct Routes {
    /// For each token and slot, the expert, where its weights are here, and what it counts for.
    chosen: Vec<(Option<u32>, f32)>,
    top_k: usize,
}

impl Routes {
    pub(super) fn new(problem: &MoeProblem, routed: &Routed<'_>, crew: Crew) -> Self {
        let top_k = problem.top_k();
        let here = |id: i64| problem.local(id).map(|expert| expert as u32);
        let chosen = match (*routed, problem.routing()) {
            (Routed::Given { ids, weights }, _) => {
                (0..problem.entries()).map(|n| (here(ids.get(n)), value(weights, n))).collect()
            }
            (Routed::Computed { logits, bias }, Routing::Computed { score, .. }) => {
                let mut chosen = vec![(None, 0.0); problem.entries()];
                crew.chunks(&mut chosen, top_k, |token, chosen| {
                    let router = Router { score: *score, bias };
                    let weighed = router.choose(&logits_of(problem, logits, token), top_k);
                    for (to, (id, weight)) in chosen.iter_mut().zip(weighed) {
                        *to = (here(id as i64), weight as f32);
                    }
                });
                chosen
            }
            _ => unreachable!("binding checked the kind of routing"),
        };
        Self { chosen, top_k }
    }

    /// The experts of a token, by slot.
    pub(super) fn of(&self, token: usize) -> &[(Option<u32>, f32)] {
        &self.chosen[token * self.top_k..][..self.top_k]
    }
}

fn value(data: Data<'_>, n: usize) -> f32 {
    match data {
        Data::F16(values) => values[n].to_f32(),
        Data::BF16(values) => values[n].to_f32(),
        Data::F32(values) => values[n],
        _ => f32::NAN,
    }
}

fn logits_of(problem: &MoeProblem, logits: Data<'_>, token: usize) -> Vec<f64> {
    let all = problem.shard().of;
    (token * all..(token + 1) * all).map(|n| f64::from(value(logits, n))).collect()
}

/// How logits become experts and weights, in f64: so few numbers that precision is free.
struct Router<'a> {
    score: Score,
    bias: Option<&'a [f32]>,
}

impl Router<'_> {
    /// The best experts of a token, best first, and their weights.
    fn choose(&self, logits: &[f64], top_k: usize) -> Vec<(usize, f64)> {
        match self.score {
            Score::Softmax | Score::SoftmaxOfChosen => {
                let chosen = best(logits, top_k);
                let top = logits[chosen[0]];
                let weight = |e: usize| (logits[e] - top).exp();
                let sum: f64 = match self.score {
                    Score::Softmax => (0..logits.len()).map(weight).sum(),
                    _ => chosen.iter().map(|&e| weight(e)).sum(),
                };
                chosen.into_iter().map(|e| (e, weight(e) / sum)).collect()
            }
            Score::Sigmoid(options) => self.choose_by_sigmoid(logits, top_k, options),
        }
    }

    fn choose_by_sigmoid(&self, logits: &[f64], top_k: usize, options: Sigmoid) -> Vec<(usize, f64)> {
        let weights: Vec<f64> = logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        let mut choice = weights.clone();
        if let Some(bias) = self.bias {
            choice.iter_mut().zip(bias).for_each(|(choice, &bias)| *choice += f64::from(bias));
        }
        options.groups.into_iter().for_each(|groups| keep_groups(&mut choice, groups));
        let chosen = best(&choice, top_k);
        let sum = if options.renormalise { chosen.iter().map(|&e| weights[e]).sum() } else { 1.0 };
        chosen.into_iter().map(|e| (e, f64::from(options.scale) * weights[e] / sum)).collect()
    }
}

/// Makes all experts but those of the best groups the worst there are.
fn keep_groups(choice: &mut [f64], Groups { count, top }: Groups) {
    let size = choice.len() / count;
    let worth = |group: &[f64]| best(group, size.min(2)).into_iter().map(|e| group[e]).sum::<f64>();
    let worths: Vec<f64> = choice.chunks(size).map(worth).collect();
    let kept = best(&worths, top);
    let dropped = choice.chunks_mut(size).enumerate().filter(|(n, _)| !kept.contains(n));
    dropped.for_each(|(_, group)| group.fill(f64::NEG_INFINITY));
}

/// The numbers of the `count` largest, largest first, the lowest number first among equals; NaN is least.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(count);
    for _ in 0..count {
        let rest = (0..values.len()).filter(|n| !chosen.contains(n));
        let better = |best: usize, n: usize| {
            let ahead = values[n] > values[best] || values[best].is_nan() && !values[n].is_nan();
            if ahead { n } else { best }
        };
        chosen.extend(rest.reduce(better));
    }
    chosen
}

/// The rows of a product, expert by expert.
pub(super) struct Buckets {
    /// Where the rows of each expert start, and one past the last.
    pub(super) starts: Vec<usize>,
    /// The token of each row.
    pub(super) tokens: Vec<usize>,
    /// For each token and slot, its row.
    pub(super) rows: Vec<Option<usize>>,
}

impl Buckets {
    /// The tokens of a range, in their order, under each of their experts.
    pub(super) fn new(routes: &Routes, range: Range<usize>, experts: usize) -> Self {
        let mut starts = vec![0; experts + 1];
        let entries = || range.clone().flat_map(|t| routes.of(t).iter().map(move |&(expert, _)| (t, expert)));
        entries().filter_map(|(_, expert)| expert).for_each(|expert| starts[expert as usize + 1] += 1);
        (0..experts).for_each(|expert| starts[expert + 1] += starts[expert]);
        let (mut next, mut tokens) = (starts.clone(), vec![0; starts[experts]]);
        let place = |(token, expert): (usize, Option<u32>)| {
            let row = &mut next[expert? as usize];
            tokens[*row] = token;
            *row += 1;
            Some(*row - 1)
        };
        let rows = entries().map(place).collect();
        Self { starts, tokens, rows }
    }

    /// Every token of a range under one expert.
    pub(super) fn all(range: Range<usize>) -> Self {
        Self { starts: vec![0, range.len()], tokens: range.collect(), rows: Vec::new() }
    }

    /// Experts that have rows, and what is made of each and its rows.
    pub(super) fn used<R>(&self, of: impl Fn(usize, Range<usize>) -> R) -> (Vec<usize>, Vec<R>) {
        let rows = self.starts.windows(2).map(|ends| ends[0]..ends[1]).enumerate();
        rows.filter(|(_, rows)| !rows.is_empty()).map(|(expert, rows)| (expert, of(expert, rows))).unzip()
    }
}
