//! Tensors of a mixture of experts, filled from a seed, with NaN wherever nothing may be read.

use flashcore_core::{
    DType, Data, Dims, Element, ExpertLayout, Ids, Index, Layout, MoeInputs, MoeProblem, MoeSpec, Routed,
    Routing,
};
use half::{bf16, f16};

use super::{Traffic, plain::route};
use crate::{buffers::never_read, rng::Rng, values::for_each_row};

/// Elements after a tensor that must not be read.
const TAIL: usize = 64;

/// Tensors of a call.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    pub(super) problem: MoeProblem,
    x: Vec<T>,
    /// Matrices of both products, then those of the shared expert.
    weights: [Vec<T>; 4],
    biases: [Vec<T>; 2],
    ids: Vec<i64>,
    narrow_ids: Vec<i32>,
    /// Routing weights or logits.
    routing: Numbers,
    bias: Vec<f32>,
}

/// Numbers of a type of their own.
#[derive(Clone, Debug)]
enum Numbers {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
}

impl Numbers {
    fn rounded(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::BF16 => Self::BF16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
            _ => Self::F32(values.to_vec()),
        }
    }

    fn first(&self, len: usize) -> Data<'_> {
        match self {
            Self::F16(values) => Data::F16(&values[..len]),
            Self::BF16(values) => Data::BF16(&values[..len]),
            Self::F32(values) => Data::F32(&values[..len]),
        }
    }
}

impl<T: Element> Inputs<T> {
    /// The tensors of `problem`, filled from `seed`.
    pub fn new(problem: &MoeProblem, traffic: Traffic, seed: u64) -> Self {
        let (spec, mut rng) = (problem.spec(), Rng::new(seed));
        let ids = ids(problem, traffic, &mut rng);
        let (dtype, routing) = match spec.routing {
            Routing::Given { weights, .. } => {
                (weights, (0..problem.entries()).map(|_| rng.uniform() + 0.1).collect())
            }
            Routing::Computed { logits, .. } => (logits, logits_of(problem, &mut rng)),
        };
        let bias = (0..problem.shard().of).map(|_| (rng.range(0..=32) as f32 - 16.0) / 64.0).collect();
        let mut x = vec![never_read::<T>(); spec.x.span() + TAIL];
        for_each_row(&spec.x, |_, start| {
            x[start..][..problem.hidden()].fill_with(|| T::from_f32(rng.normal()));
        });
        let narrow_ids = ids.iter().map(|&id| id as i32).collect();
        let routing = Numbers::rounded(dtype, &routing);
        let (problem, weights, biases) = (problem.clone(), Default::default(), Default::default());
        let mut inputs = Self { problem, x, weights, biases, ids, narrow_ids, routing, bias };
        inputs.fill_weights(&mut rng);
        inputs
    }

    /// Weights of experts that some token goes to are numbers, those of others NaN.
    fn fill_weights(&mut self, rng: &mut Rng) {
        let problem = self.problem.clone();
        let spec = problem.spec();
        let mut used = vec![false; problem.experts()];
        let tokens = route(&problem, &self.bound_routing());
        tokens.iter().flatten().for_each(|&(expert, _)| used[expert] = true);
        self.weights = [
            matrices(&spec.gate_up, &used, rng),
            matrices(&spec.down, &used, rng),
            spec.shared.map_or(Vec::new(), |shared| matrices(&shared.gate_up, &[true], rng)),
            spec.shared.map_or(Vec::new(), |shared| matrices(&shared.down, &[true], rng)),
        ];
        self.biases = [spec.gate_up.rows(), problem.hidden()].map(|rows| {
            let value = |n: usize| if used[n / rows] { T::from_f32(rng.normal()) } else { never_read() };
            (0..problem.experts() * rows).map(value).collect()
        });
    }

    fn bound_routing(&self) -> Routed<'_> {
        let (entries, all) = (self.problem.entries(), self.problem.shard().of);
        match self.problem.routing() {
            Routing::Given { ids, .. } => {
                let ids = match ids {
                    Index::I32 => Ids::I32(&self.narrow_ids[..entries]),
                    Index::I64 => Ids::I64(&self.ids[..entries]),
                };
                Routed::Given { ids, weights: self.routing.first(entries) }
            }
            Routing::Computed { .. } => {
                let bias = self.problem.routing().has_bias().then_some(&self.bias[..]);
                Routed::Computed { logits: self.routing.first(self.problem.tokens() * all), bias }
            }
        }
    }

    /// What a call is bound to.
    pub fn bound(&self) -> MoeInputs<'_> {
        let spec = self.problem.spec();
        let [gate_up, down, shared_up, shared_down] =
            self.weights.each_ref().map(|weights| T::erase(weights));
        MoeInputs {
            x: T::erase(&self.x),
            gate_up,
            down,
            biases: spec.biases.then(|| self.biases.each_ref().map(|bias| T::erase(bias))),
            shared: spec.shared.map(|_| [shared_up, shared_down]),
            routed: self.bound_routing(),
        }
    }

    /// The same tensors for the first tokens alone.
    pub(super) fn first_tokens(&self, tokens: usize) -> Self {
        let spec = self.problem.spec();
        let fewer = |layout: Layout| {
            let dims = Dims { seq: tokens, ..layout.dims() };
            Layout::strided(dims, layout.strides()).expect("fewer rows of a legal layout")
        };
        let spec = MoeSpec { x: fewer(spec.x), out: spec.out.map(fewer), ..spec.clone() };
        Self { problem: spec.parse().expect("fewer tokens of a legal problem"), ..self.clone() }
    }
}

/// Matrices whose products keep the size of what they multiply; NaN between them and where `used` says.
fn matrices<T: Element>(layout: &ExpertLayout, used: &[bool], rng: &mut Rng) -> Vec<T> {
    let mut weights = vec![never_read::<T>(); layout.span() + TAIL];
    let scale = 1.0 / (layout.cols() as f32).sqrt();
    for expert in (0..layout.experts()).filter(|&expert| used[expert]) {
        for row in 0..layout.rows() {
            for col in 0..layout.cols() {
                weights[layout.at(expert, row, col)] = T::from_f32(scale * rng.normal());
            }
        }
    }
    weights
}

/// The experts of every token.
fn ids(problem: &MoeProblem, traffic: Traffic, rng: &mut Rng) -> Vec<i64> {
    let (shard, top_k) = (problem.shard(), problem.top_k());
    let here = |n: usize| (shard.first + n) as i64;
    let elsewhere = |rng: &mut Rng| match rng.range(0..=3) {
        0 => -1,
        1 => i64::from(i32::MAX),
        2 => shard.first as i64 - 1,
        _ => here(problem.experts()),
    };
    let mut ids = Vec::with_capacity(problem.entries());
    for _ in 0..problem.tokens() {
        let order = rng.permutation(problem.experts());
        let draw = |slot: usize| order[slot % order.len()];
        for slot in 0..top_k {
            ids.push(match traffic {
                Traffic::OneExpert if slot == 0 => here(problem.experts() / 2),
                Traffic::Repeated => here(draw(slot / 2)),
                Traffic::Outside if rng.one_in(3) => elsewhere(rng),
                Traffic::AllOutside => elsewhere(rng),
                _ => here(draw(slot)),
            });
        }
    }
    ids
}

/// Logits far enough apart that rounding does not decide, or equal.
fn logits_of(problem: &MoeProblem, rng: &mut Rng) -> Vec<f32> {
    let all = problem.shard().of;
    let row = |_| {
        let order = rng.permutation(all);
        // Every fourth is as good as another: the second best of each token is as good as the third.
        let rank = |n: usize| if n % 4 == 2 { n - 1 } else { n };
        order.into_iter().map(|n| (rank(n) as f32 - all as f32 / 2.0) / 8.0).collect::<Vec<_>>()
    };
    (0..problem.tokens()).flat_map(row).collect()
}
