//! Mixtures of experts: tokens are grouped by expert, each expert's weights pass through the cache once, and a
//! token's results are summed in the order of its experts. Called by `cpu`; calls `simd`.
//!
//! The path of a call: `route` (experts of tokens, tokens of experts) → `network` (both products) → here (sums). The
//! bits of a token depend only on its own features and experts.

mod gradient;
mod network;
mod route;

use std::ops::Range;

use flashcore_core::{DType, Data, ExpertLayout, MoeCall, MoeProblem};
use half::{bf16, f16};

use crate::{
    crew::Crew,
    output::Shared,
    simd::{
        Lane,
        convert::{Accumulate, Narrow},
        runner::Runner,
    },
};
pub(crate) use gradient::gradients;
use network::{How, Weights};
use route::{Buckets, Routes};

/// Floats of working memory that a chunk of tokens may use: what is beyond it comes in a second chunk, for which weights
/// stream again.
const CHUNK: usize = 1 << 25;

/// Computes on all threads; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn moe(call: &mut MoeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    match call.problem().dtype() {
        DType::F32 => compute::<f32, f32>(call, with),
        DType::F16 => compute::<f16, f32>(call, with),
        DType::BF16 if with.0.has_pairs() => compute::<bf16, bf16>(call, with),
        DType::BF16 => compute::<bf16, f32>(call, with),
        _ => None,
    }
}

/// A call with its element type known.
struct Layer<'a, T> {
    problem: &'a MoeProblem,
    x: &'a [T],
    experts: Networks<'a, T>,
    shared: Option<Networks<'a, T>>,
    runner: Runner,
    crew: Crew,
}

/// Both products of some experts.
struct Networks<'a, T> {
    gate_up: Weights<'a, T>,
    down: Weights<'a, T>,
}

impl<'a, T: Lane> Networks<'a, T> {
    fn new(layouts: [ExpertLayout; 2], data: [Data<'a>; 2], biases: Option<[Data<'a>; 2]>) -> Option<Self> {
        let [first, second] = biases.map_or([None, None], |biases| biases.map(Some));
        let weights = |layout: ExpertLayout, data: Data<'a>, bias: Option<Data<'a>>| {
            Some(Weights { layout, data: data.slice()?, bias: bias.and_then(|bias| bias.slice()) })
        };
        let [gate_up, down] = layouts;
        Some(Self { gate_up: weights(gate_up, data[0], first)?, down: weights(down, data[1], second)? })
    }
}

/// Computes on tensors of `T`; what joins gate and up is rounded to `X`.
fn compute<T: Lane, X: Lane>(call: &mut MoeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    let (problem, inputs) = (call.problem(), *call.inputs());
    let spec = problem.spec();
    let shared = inputs.shared.zip(spec.shared);
    let layer = Layer {
        problem,
        x: inputs.x.slice()?,
        experts: Networks::new([spec.gate_up, spec.down], [inputs.gate_up, inputs.down], inputs.biases)?,
        shared: shared.and_then(|(data, layouts)| Networks::new([layouts.gate_up, layouts.down], data, None)),
        runner: with.0,
        crew: with.1,
    };
    let routes = Routes::new(problem, &inputs.routed, with.1);
    let out = Shared::new(call.out().into_slice::<T>()?);
    let each = problem.top_k() * (problem.hidden() + problem.intermediate()) + problem.hidden();
    let tokens = (CHUNK / each).max(1);
    for first in (0..problem.tokens()).step_by(tokens) {
        layer.compute::<X>(&routes, first..problem.tokens().min(first + tokens), &out);
    }
    Some("moe")
}

impl<T: Lane> Layer<'_, T> {
    fn compute<X: Lane>(&self, routes: &Routes, tokens: Range<usize>, out: &Shared<'_, T>) {
        let buckets = Buckets::new(routes, tokens.clone(), self.problem.experts());
        let results = self.apply::<X>(&self.experts, &buckets);
        let all = Buckets::all(tokens.clone());
        let shared = self.shared.as_ref().map(|shared| self.apply::<X>(shared, &all));
        let hidden = self.problem.hidden();
        self.crew.each_with(tokens.len(), |sum: &mut Vec<f32>, n| {
            sum.clear();
            sum.resize(hidden, 0.0);
            let token = tokens.start + n;
            let rows = &buckets.rows[n * self.problem.top_k()..];
            for (&(_, weight), row) in routes.of(token).iter().zip(rows) {
                row.iter().for_each(|row| self.add(sum, &results[row * hidden..][..hidden], weight));
            }
            shared.iter().for_each(|rows| self.add(sum, &rows[n * hidden..][..hidden], 1.0));
            // SAFETY: tokens are disjoint, and so are the rows of an output (`MoeSpec::parse`).
            let to = unsafe { out.range(self.problem.out().row(0, 0, token), hidden) };
            self.runner.run(Narrow { from: sum, factor: 1.0, to });
        });
    }

    fn add(&self, to: &mut [f32], from: &[f32], factor: f32) {
        self.runner.run(Accumulate { from, factor, to, kept: 1.0 });
    }

    /// One row of results for each row of the buckets.
    fn apply<X: Lane>(&self, networks: &Networks<'_, T>, buckets: &Buckets) -> Vec<f32> {
        let (spec, rows) = (self.problem.spec(), buckets.tokens.len());
        let starts: Vec<usize> =
            buckets.tokens.iter().map(|&token| self.problem.x().row(0, 0, token)).collect();
        let how = How { alike: spec.batch_invariant, runner: self.runner, crew: self.crew };
        let mut joined = vec![X::ZERO; rows * networks.down.layout.cols()];
        let up = (&networks.gate_up, spec.order, spec.activation);
        network::up(up, (self.x, &starts, buckets), &mut joined, how);
        let mut results = vec![0f32; rows * self.problem.hidden()];
        network::down(&networks.down, (&joined, buckets), &mut results, how);
        results
    }
}
