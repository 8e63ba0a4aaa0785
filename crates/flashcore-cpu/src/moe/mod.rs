//! Mixtures of experts: tokens are put under their experts, each expert's weights pass through the cache once, and a
//! token's results are added up in the order of its experts. Called by `cpu`; calls `simd`.
//!
//! The path of a call: `route` (experts of tokens, tokens of experts) → `network` (both products) → here (sums). Bits of
//! a token depend on its own features and experts alone.

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
        dots::depth_padded,
        runner::Runner,
    },
};
pub(crate) use gradient::gradients;
use network::{Path, Rows, Weights};
use route::{Buckets, Routes};

/// Floats of working memory that a chunk of tokens may use: what is beyond it comes in a second chunk, for which weights
/// stream again.
const CHUNK: usize = 1 << 25;

/// Computes on all threads; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn moe(call: &mut MoeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    let spec = call.problem().spec();
    let layouts = spec.shared.iter().flat_map(|shared| [shared.gate_up, shared.down]);
    let row_major = layouts.chain([spec.gate_up, spec.down]).all(|layout| layout.is_row_major());
    match call.problem().dtype() {
        DType::F32 => compute::<f32, f32>(call, with),
        DType::F16 => compute::<f16, f32>(call, with),
        DType::BF16 if with.0.has_pairs() && row_major => compute::<bf16, bf16>(call, with),
        DType::BF16 => compute::<bf16, f32>(call, with),
        _ => None,
    }
}

/// A call with its element types known: those of tensors, and those in which rows are multiplied.
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

fn compute<T: Lane, X: Path<T>>(call: &mut MoeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
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
    fn compute<X: Path<T>>(&self, routes: &Routes, tokens: Range<usize>, out: &Shared<'_, T>) {
        let taken = self.take::<X>(tokens.clone());
        let buckets = Buckets::new(routes, tokens.clone(), self.problem.experts());
        let results = self.apply(&self.experts, &taken, &buckets, tokens.start);
        let all = Buckets::all(tokens.clone());
        let shared = self.shared.as_ref().map(|shared| self.apply(shared, &taken, &all, tokens.start));
        let hidden = self.problem.hidden();
        self.crew.each(tokens.len(), |n| {
            let (mut sum, token) = (vec![0f32; hidden], tokens.start + n);
            let rows = &buckets.rows[n * self.problem.top_k()..];
            for (&(_, weight), row) in routes.of(token).iter().zip(rows) {
                row.iter().for_each(|row| self.add(&mut sum, &results[row * hidden..][..hidden], weight));
            }
            shared.iter().for_each(|rows| self.add(&mut sum, &rows[n * hidden..][..hidden], 1.0));
            // SAFETY: tokens are disjoint, and so are the rows of an output (`MoeSpec::parse`).
            let to = unsafe { out.range(self.problem.out().row(0, 0, token), hidden) };
            self.runner.run(Narrow { from: &sum, factor: 1.0, to });
        });
    }

    fn add(&self, to: &mut [f32], from: &[f32], factor: f32) {
        self.runner.run(Accumulate { from, factor, to, kept: 1.0 });
    }

    /// Tokens as products want them, padded with zeros.
    fn take<X: Path<T>>(&self, tokens: Range<usize>) -> Vec<X> {
        let (hidden, stride) = (self.problem.hidden(), depth_padded(self.problem.hidden()));
        let mut taken = vec![X::ZERO; tokens.len() * stride];
        self.crew.chunks(&mut taken, stride, |n, to| {
            let from = &self.x[self.problem.x().row(0, 0, tokens.start + n)..][..hidden];
            X::take(self.runner, from, &mut to[..hidden]);
        });
        taken
    }

    /// One row of results for each row of the buckets.
    fn apply<X: Path<T>>(
        &self,
        networks: &Networks<'_, T>,
        taken: &[X],
        buckets: &Buckets,
        first: usize,
    ) -> Vec<f32> {
        let spec = self.problem.spec();
        let (stride, rows) = (depth_padded(self.problem.hidden()), buckets.tokens.len());
        let starts = buckets.tokens.iter().map(|token| (token - first) * stride).collect();
        let between = depth_padded(networks.down.layout.cols());
        let mut joined = vec![X::ZERO; rows * between];
        let up = (&networks.gate_up, spec.order, spec.activation);
        network::up(up, (&Rows { data: taken, starts }, buckets), &mut joined, (self.runner, self.crew));
        let starts = (0..rows).map(|row| row * between).collect();
        let mut results = vec![0f32; rows * self.problem.hidden()];
        let joined = Rows { data: &joined, starts };
        network::down(&networks.down, (&joined, buckets), &mut results, (self.runner, self.crew));
        results
    }
}
