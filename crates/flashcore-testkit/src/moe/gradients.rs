//! Gradients of a mixture of experts: the oracle in f64, and one check for every backend.
//!
//! The yardstick is the chain rule over tensors as in an eager loop: results of tensor operations are rounded to their
//! type, and sums run in f32.

use flashcore_core::{
    Activation, Backend, DType, Element, ExpertLayout, MoeGradientCall, MoeGradientsMut, MoeInputs,
    MoeProblem, Routed, Shared,
};
use half::{bf16, f16};

use super::{
    Case, Inputs, Traffic, cases,
    plain::{Rounding, widened},
};
use crate::{
    answer::{Answer, Grid},
    bench::{Trouble, run_caught},
    buffers::{same_bits, unwritten},
    compare::Rule,
    rng::Rng,
    suite::{self, Outcome, Step, fail_if},
    values,
};

/// Elements after a gradient that must not be written.
const GUARD: usize = 64;
/// Tokens up to which cases are cheap enough for products in f64.
const MOST_TOKENS: usize = 70;
/// What the gradients are of, in the order of [`Gradients::parts`].
const NAMES: [&str; 8] =
    ["x", "gate_up", "down", "biases", "biases", "shared gate_up", "shared down", "weights"];

/// The cases whose routing is given, without the largest.
pub fn gradient_cases() -> Vec<Case> {
    let given = |case: &Case| !matches!(case.traffic, Traffic::Logits(_)) && case.tokens <= MOST_TOKENS;
    let given = cases().into_iter().filter(given);
    let oss = Case {
        activation: Activation::Clamped { alpha: 1.5, limit: 0.75 },
        biases: true,
        ..super::cases::USUAL
    };
    given.chain([oss, Case { transposed: true, shared: Some(24), ..oss }]).collect()
}

/// Runs every case on a backend, each with every one of `dtypes`, and says what failed.
pub fn gradient_failures(backend: &dyn Backend, dtypes: &[DType], seed: u64) -> Vec<String> {
    let check = |case: &Case, dtype| check_gradients(backend, case, dtype, seed);
    let failures = suite::failures(&gradient_cases(), dtypes, check);
    failures.into_iter().map(|failure| format!("gradients of {failure}")).collect()
}

/// Checks one case on one backend.
pub fn check_gradients(backend: &dyn Backend, case: &Case, dtype: DType, seed: u64) -> Outcome {
    let problem = match case.problem(dtype) {
        Ok(problem) => problem,
        Err(error) => return Outcome::failed(Step::Launch, format!("the case is refused: {error}")),
    };
    let checked = match dtype {
        DType::F16 => Task::<f16>::new(&problem, case.traffic, seed).check(backend),
        DType::BF16 => Task::<bf16>::new(&problem, case.traffic, seed).check(backend),
        DType::F32 => Task::<f32>::new(&problem, case.traffic, seed).check(backend),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

/// All gradients of a case in f32 as one list of numbers: for comparing backends bit by bit.
pub fn gradient_bits(backend: &dyn Backend, case: &Case, seed: u64) -> Result<Vec<u32>, String> {
    let problem = case.problem(DType::F32).map_err(|error| error.to_string())?;
    let task = Task::<f32>::new(&problem, case.traffic, seed);
    let grads = task.run(backend).map_err(|trouble| Outcome::from(trouble).to_string())?;
    Ok(grads.parts.iter().flatten().chain(&grads.weights).map(|x| x.to_bits()).collect())
}

/// A call: its tensors, and the gradient of its result.
struct Task<T> {
    inputs: Inputs<T>,
    d_out: Vec<T>,
}

/// Gradients as a backend wrote them: x, gate_up, down, biases, shared expert; parts that are not there are empty.
struct Written<T> {
    parts: [Vec<T>; 7],
    weights: Vec<f32>,
}

impl<T: Element> Task<T> {
    fn new(problem: &MoeProblem, traffic: Traffic, seed: u64) -> Self {
        let (inputs, mut rng) = (Inputs::new(problem, traffic, seed), Rng::new(seed + 1));
        let mut d_out = vec![crate::buffers::never_read::<T>(); problem.out().span() + GUARD];
        values::for_each_row(problem.out(), |_, start| {
            d_out[start..][..problem.hidden()].fill_with(|| T::from_f32(rng.normal()));
        });
        Self { inputs, d_out }
    }

    fn check(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let (first, again) = (self.run(backend)?, self.run(backend)?);
        let lens = lengths(&self.inputs.problem);
        for (n, (part, &len)) in first.parts.iter().zip(&lens).enumerate() {
            let blank = |x: &T| same_bits(*x, unwritten());
            let hole = part[..len].iter().position(blank);
            fail_if(Step::Sanity, hole.map(|at| format!("element {at} of {} was not written", NAMES[n])))?;
            let beyond = part[len..].iter().any(|x| !blank(x));
            fail_if(Step::Isolation, beyond.then(|| format!("more than all of {} was written", NAMES[n])))?;
        }
        let hole = first.weights.iter().position(|x| same_bits(*x, unwritten()));
        fail_if(Step::Sanity, hole.map(|at| format!("the gradient of weight {at} was not written")))?;
        fail_if(Step::Correctness, self.first_wrong(&first))?;
        let pairs = || first.parts.iter().flatten().zip(again.parts.iter().flatten());
        let mut same = pairs().all(|(&a, &b)| same_bits(a, b));
        same &= first.weights.iter().zip(&again.weights).all(|(&a, &b)| same_bits(a, b));
        fail_if(Step::Determinism, (!same).then(|| "a second run has other bits".to_owned()))
    }

    fn run(&self, backend: &dyn Backend) -> Result<Written<T>, Trouble> {
        let problem = &self.inputs.problem;
        let lens = lengths(problem);
        let mut parts = lens.map(|len| vec![unwritten::<T>(); len + GUARD]);
        let mut weights = vec![unwritten::<f32>(); problem.entries()];
        let [x, gate_up, down, first, second, shared_up, shared_down] =
            parts.each_mut().map(|part| T::erase_mut(part));
        let spec = problem.spec();
        let grads = MoeGradientsMut {
            x,
            gate_up,
            down,
            biases: spec.biases.then_some([first, second]),
            shared: spec.shared.is_some().then_some([shared_up, shared_down]),
            weights: &mut weights,
        };
        let mut call = MoeGradientCall::bind(problem, self.inputs.bound(), T::erase(&self.d_out), grads)?;
        run_caught(|| backend.moe_gradients(&mut call))?;
        Ok(Written { parts, weights })
    }

    /// What the error rule finds, gradient by gradient.
    fn first_wrong(&self, written: &Written<T>) -> Option<String> {
        let (problem, inputs) = (&self.inputs.problem, self.inputs.bound());
        let d_out: Vec<f64> =
            values::gather(T::erase(&self.d_out), problem.out()).into_iter().map(f64::from).collect();
        let [exact, eager] = [Rounding::None, Rounding::Eager(problem.dtype())]
            .map(|rounding| gradients(problem, &inputs, &d_out, rounding).parts());
        let spec = problem.spec();
        let shared = spec.shared.map(|Shared { gate_up, down }| [gate_up, down]);
        let layouts = [None, Some(spec.gate_up), Some(spec.down), None, None]
            .into_iter()
            .chain(shared.map_or([None; 2], |layouts| layouts.map(Some)));
        let lens = lengths(problem);
        let mut got: Vec<Vec<f64>> = written
            .parts
            .iter()
            .zip(lens)
            .zip(layouts)
            .map(|((part, len), layout)| logical(&widened(T::erase(&part[..len])), layout))
            .collect();
        got.push(written.weights.iter().map(|&x| f64::from(x)).collect());
        (0..NAMES.len()).find_map(|n| {
            // A weight's gradient is one number out of two sums, taken in either order: it errs more by chance than a tensor.
            let (dtype, factor) = if n == 7 { (DType::F32, 4.0) } else { (problem.dtype(), 2.0) };
            let grid = Grid { batch: 1, heads: 1, rows: got[n].len(), step: 1, dim: 1 };
            let answer = |out: &Vec<f64>| Answer { out: out.clone(), ..Answer::empty(grid) };
            let oracle = Answer { sees_nothing: vec![false; got[n].len()], ..answer(&exact[n]) };
            let verdict = Rule::new(dtype, factor).judge(&answer(&got[n]), &oracle, &answer(&eager[n]));
            (!verdict.pass()).then(|| format!("{}: {verdict}", NAMES[n]))
        })
    }
}

/// Elements of each gradient but that of the weights.
fn lengths(problem: &MoeProblem) -> [usize; 7] {
    let spec = problem.spec();
    let bias = |rows: usize| if spec.biases { problem.experts() * rows } else { 0 };
    let shared =
        spec.shared.map_or([0; 2], |shared| [shared.gate_up, shared.down].map(|layout| layout.elements()));
    [
        problem.tokens() * problem.hidden(),
        spec.gate_up.elements(),
        spec.down.elements(),
        bias(spec.gate_up.rows()),
        bias(problem.hidden()),
        shared[0],
        shared[1],
    ]
}

/// A gradient in the order experts, rows, columns.
fn logical(values: &[f32], layout: Option<ExpertLayout>) -> Vec<f64> {
    let Some(layout) = layout.map(|layout| layout.without_gaps()) else {
        return values.iter().map(|&x| f64::from(x)).collect();
    };
    let rows = (0..layout.experts()).flat_map(|e| (0..layout.rows()).map(move |row| (e, row)));
    let places = rows.flat_map(|(e, row)| (0..layout.cols()).map(move |col| (e, row, col)));
    places.map(|(e, row, col)| f64::from(values[layout.at(e, row, col)])).collect()
}

/// Gradients in logical order.
pub struct Gradients {
    pub x: Vec<f64>,
    pub experts: NetworkGradients,
    pub shared: NetworkGradients,
    pub weights: Vec<f64>,
}

/// Gradients of some experts' tensors.
#[derive(Default)]
pub struct NetworkGradients {
    pub weights: [Vec<f64>; 2],
    pub biases: [Vec<f64>; 2],
}

impl Gradients {
    fn parts(self) -> [Vec<f64>; 8] {
        let Self { x, experts, shared, weights } = self;
        let [gate_up, down] = experts.weights;
        let [first, second] = experts.biases;
        let [shared_up, shared_down] = shared.weights;
        [x, gate_up, down, first, second, shared_up, shared_down, weights]
    }
}

/// One pair of a token and an expert.
struct Pair {
    token: usize,
    expert: usize,
    weight: f64,
    entry: usize,
}

/// The chain rule, pair by pair.
pub fn gradients(
    problem: &MoeProblem,
    inputs: &MoeInputs<'_>,
    d_out: &[f64],
    rounding: Rounding,
) -> Gradients {
    let (spec, top_k) = (problem.spec(), problem.top_k());
    let Routed::Given { ids, weights } = inputs.routed else {
        unreachable!("gradients are of given routings")
    };
    let factors = widened(weights);
    let here = |entry: usize| {
        let (expert, weight) = (problem.local(ids.get(entry))?, f64::from(factors[entry]));
        Some(Pair { token: entry / top_k, expert, weight, entry })
    };
    let pairs: Vec<Pair> = (0..problem.entries()).filter_map(here).collect();
    let mut x = vec![0.0; problem.tokens() * problem.hidden()];
    let mut weights = vec![0.0; problem.entries()];
    let experts = Network {
        problem,
        layouts: [spec.gate_up, spec.down],
        weights: [inputs.gate_up, inputs.down].map(widened),
        biases: inputs.biases.map(|biases| biases.map(widened)),
        x: values::gather(inputs.x, problem.x()),
        d_out,
        rounding,
    };
    let of_experts = experts.gradients(&pairs, &mut x, &mut weights);
    let shared = inputs.shared.zip(spec.shared).map(|(data, Shared { gate_up, down })| {
        let all = (0..problem.tokens()).map(|token| Pair { token, expert: 0, weight: 1.0, entry: token });
        let network = Network {
            layouts: [gate_up, down],
            weights: data.map(widened),
            biases: None,
            x: experts.x.clone(),
            ..experts
        };
        network.gradients(&all.collect::<Vec<_>>(), &mut x, &mut vec![0.0; problem.tokens()])
    });
    Gradients { x, experts: of_experts, shared: shared.unwrap_or_default(), weights }
}

/// Some experts.
struct Network<'a> {
    problem: &'a MoeProblem,
    layouts: [ExpertLayout; 2],
    weights: [Vec<f32>; 2],
    biases: Option<[Vec<f32>; 2]>,
    x: Vec<f32>,
    d_out: &'a [f64],
    rounding: Rounding,
}

/// What a pair adds to the gradients of weights: the right factor of both products, and the gradients of their results.
struct Passed {
    expert: usize,
    factors: [Vec<f64>; 2],
    slopes: [Vec<f64>; 2],
}

impl Network<'_> {
    fn gradients(&self, pairs: &[Pair], x: &mut [f64], weights: &mut [f64]) -> NetworkGradients {
        let passed: Vec<Passed> = pairs.iter().map(|pair| self.pass(pair, x, weights)).collect();
        let mut grads = NetworkGradients::default();
        for (which, expert) in
            [0, 1].into_iter().flat_map(|n| (0..self.layouts[n].experts()).map(move |e| (n, e)))
        {
            let own: Vec<&Passed> = passed.iter().filter(|pass| pass.expert == expert).collect();
            for row in 0..self.layouts[which].rows() {
                let sum = |factor: &dyn Fn(&Passed) -> f64| {
                    self.sum(own.iter().map(|pass| (pass.slopes[which][row], factor(pass))))
                };
                let columns = 0..self.layouts[which].cols();
                grads.weights[which].extend(columns.map(|col| sum(&|pass| pass.factors[which][col])));
                if self.biases.is_some() {
                    grads.biases[which].push(sum(&|_| 1.0));
                }
            }
        }
        grads
    }

    /// One pair: adds to the gradient of its token and writes that of its weight.
    fn pass(&self, pair: &Pair, d_x: &mut [f64], d_weights: &mut [f64]) -> Passed {
        let (spec, hidden) = (self.problem.spec(), self.problem.hidden());
        let (half, rounding) = (self.layouts[1].cols(), self.rounding);
        let own = pair.token * hidden..(pair.token + 1) * hidden;
        let x: Vec<f64> = self.x[own.clone()].iter().map(|&x| f64::from(x)).collect();
        let joined: Vec<f64> = (0..2 * half).map(|row| self.product(0, pair.expert, row, &x)).collect();
        let rows = |n: usize| [false, true].map(|up| spec.order.row(n, half, up));
        let activate = |n: usize| {
            let [gate, up] = rows(n).map(|row| joined[row]);
            rounding.activate(spec.activation, gate, up)
        };
        let h: Vec<f64> = (0..half).map(activate).collect();
        let y: Vec<f64> = (0..hidden).map(|row| self.product(1, pair.expert, row, &h)).collect();
        let d_out = &self.d_out[own.clone()];
        d_weights[pair.entry] = self.sum(d_out.iter().copied().zip(y));
        let dy: Vec<f64> = d_out.iter().map(|d| rounding.round(pair.weight * d)).collect();
        let dh: Vec<f64> = (0..half).map(|col| self.turned(1, pair.expert, col, &dy)).collect();
        let mut d_joined = vec![0.0; 2 * half];
        for (n, dh) in dh.into_iter().enumerate() {
            let [gate, up] = rows(n);
            let [by_gate, by_up] = slopes(spec.activation, joined[gate], joined[up]);
            d_joined[gate] = rounding.round(by_gate * dh);
            d_joined[up] = rounding.round(by_up * dh);
        }
        for (col, to) in d_x[own].iter_mut().enumerate() {
            *to = rounding.round(*to + self.turned(0, pair.expert, col, &d_joined));
        }
        Passed { expert: pair.expert, factors: [x, h], slopes: [d_joined, dy] }
    }

    fn element(&self, which: usize, expert: usize, row: usize, col: usize) -> f64 {
        f64::from(self.weights[which][self.layouts[which].at(expert, row, col)])
    }

    /// A row of an expert's matrix times a vector, plus the bias.
    fn product(&self, which: usize, expert: usize, row: usize, vector: &[f64]) -> f64 {
        let terms = vector.iter().enumerate().map(|(col, &v)| (self.element(which, expert, row, col), v));
        let bias =
            self.biases.as_ref().map(|biases| biases[which][expert * self.layouts[which].rows() + row]);
        let sum = self.sum(terms);
        bias.map_or(sum, |bias| self.rounding.round(sum + f64::from(bias)))
    }

    /// A column of an expert's matrix times a vector.
    fn turned(&self, which: usize, expert: usize, col: usize, vector: &[f64]) -> f64 {
        self.sum(vector.iter().enumerate().map(|(row, &v)| (self.element(which, expert, row, col), v)))
    }

    fn sum(&self, terms: impl Iterator<Item = (f64, f64)>) -> f64 {
        match self.rounding {
            Rounding::None => terms.map(|(a, b)| a * b).sum(),
            Rounding::Eager(_) => {
                let sum = terms.fold(0f32, |sum, (a, b)| sum + a as f32 * b as f32);
                self.rounding.round(f64::from(sum))
            }
        }
    }
}

/// How what joins gate and up changes with each of them.
fn slopes(activation: Activation, gate: f64, up: f64) -> [f64; 2] {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu => {
            let s = sigmoid(gate);
            [up * s * (1.0 + gate * (1.0 - s)), gate * s]
        }
        Activation::GeGlu => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let t = (root * (gate + 0.044715 * gate.powi(3))).tanh();
            let slope =
                0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * gate * gate);
            [up * slope, 0.5 * gate * (1.0 + t)]
        }
        Activation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
            let s = sigmoid(alpha * g);
            let by_gate = if gate <= limit { (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)) } else { 0.0 };
            [by_gate, if up.abs() <= limit { g * s } else { 0.0 }]
        }
    }
}
