//! Whether a mixture of experts is right, in bounded time: on evenly spaced tokens.

use flashcore_core::{Data, MoeInputs, MoeProblem};
use flashcore_testkit::{
    Answer, Rule, Verdict,
    answer::Grid,
    moe::plain::{Rounding, compute_tokens},
    values,
};

/// Multiply-adds of the f64 computation, and tokens that are judged whatever they cost.
const BUDGET: f64 = (1u64 << 28) as f64;
const LEAST_TOKENS: usize = 2;

/// What some tokens should come to.
pub struct Expected {
    tokens: Vec<usize>,
    hidden: usize,
    rule: Rule,
    oracle: Answer,
    yardstick: Answer,
}

impl Expected {
    /// Computes them in f64 and as an eager loop does.
    pub fn new(problem: &MoeProblem, inputs: &MoeInputs<'_>) -> Self {
        let (all, hidden, dtype) = (problem.tokens(), problem.hidden(), problem.dtype());
        let each = problem.flops() / 2.0 / all.max(1) as f64;
        let count = ((BUDGET / each.max(1.0)) as usize).max(LEAST_TOKENS).min(all);
        let tokens: Vec<usize> = (0..count).map(|n| n * (all - 1) / (count - 1).max(1)).collect();
        let oracle = answer(compute_tokens(problem, inputs, &tokens, Rounding::None), hidden);
        let oracle = Answer { sees_nothing: vec![false; count], ..oracle };
        let yardstick = answer(compute_tokens(problem, inputs, &tokens, Rounding::Eager(dtype)), hidden);
        Self { tokens, hidden, rule: Rule::new(dtype, 2.0), oracle, yardstick }
    }

    /// Tokens that are judged.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Applies the error rule to a dense result.
    pub fn judge(&self, out: Data<'_>) -> Verdict {
        let mut got = Vec::new();
        self.tokens.iter().for_each(|token| values::row(out, token * self.hidden, self.hidden, &mut got));
        let got = answer(got.into_iter().map(f64::from).collect(), self.hidden);
        self.rule.judge(&got, &self.oracle, &self.yardstick)
    }
}

fn answer(out: Vec<f64>, hidden: usize) -> Answer {
    let grid = Grid { batch: 1, heads: 1, rows: out.len() / hidden, step: 1, dim: hidden };
    Answer { out, ..Answer::empty(grid) }
}
