//! The suite of mixtures of experts against a plain backend, right and wrong in single ways.

use flashcore_core::{
    Activation, Backend, BackendError, DType, Data, Element, GateUp, HostCall, MoeCall, MoeInputs,
    MoeProblem, MoeSpec, Ran, Routed, Routing, Score,
};
use flashcore_testkit::{
    Outcome, moe,
    moe::plain::{Experts, Rounding, compute_routed, route, widened},
};
use half::{bf16, f16};

faults! {
    /// Gates and ups lie the other way.
    OtherOrder,
    /// Every expert counts for the same.
    Unweighted,
    /// A token's last expert is left out.
    LastExpert,
    /// An expert that a token has twice is taken once.
    OnceEach,
    /// Experts that are elsewhere are taken for the first one here.
    EveryoneIsHere,
    /// Experts that nobody asked for are multiplied by 0.
    NanTimesZero,
    /// The highest number wins among equal logits.
    TiesToHighest,
    /// Weights are a softmax over the chosen experts instead of all.
    OtherSoftmax,
    NoBiases,
    NoClamp,
    NoSharedExpert,
    /// Sums are rounded to bf16 and then some.
    Imprecise,
    /// Tokens without experts are not written.
    Unwritten,
    /// One element too many is written.
    Overrun,
    /// A token's bits depend on how many there are.
    DependsOnTokens,
}

struct Plain(Fault);

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only mixtures of experts are asked for")
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        match call.problem().dtype() {
            DType::F16 => self.compute::<f16>(call),
            DType::BF16 => self.compute::<bf16>(call),
            _ => self.compute::<f32>(call),
        }
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

impl Plain {
    fn compute<T: Element>(&self, call: &mut MoeCall<'_>) {
        let (problem, inputs) = (call.problem(), *call.inputs());
        let experts = self.experts(problem, &inputs);
        let empty: Vec<bool> = experts.iter().map(|experts| experts.is_empty()).collect();
        let (wrong, rebound) = self.changed(problem, inputs);
        let values = compute_routed(&wrong, &rebound, experts, Rounding::None);
        let out = call.out().into_slice::<T>().expect("the problem's type");
        for (token, row) in values.chunks_exact(problem.hidden()).enumerate() {
            if self.0 == Fault::Unwritten && empty[token] {
                continue;
            }
            let start = problem.out().row(0, 0, token);
            for (n, &value) in row.iter().enumerate() {
                out[start + n] = T::from_f32(self.spoilt(problem, value) as f32);
            }
            if self.0 == Fault::Overrun {
                out[start + row.len()] = T::from_f32(1.0);
            }
        }
    }

    fn spoilt(&self, problem: &MoeProblem, value: f64) -> f64 {
        match self.0 {
            Fault::Imprecise => value + 4.0 * (DType::BF16.round(value) - value) + 0.02,
            Fault::DependsOnTokens if problem.tokens() > 20 => value * 1.002,
            _ => value,
        }
    }

    /// The problem and its tensors, in which what the fault forgets is missing.
    fn changed<'a>(&self, problem: &MoeProblem, inputs: MoeInputs<'a>) -> (MoeProblem, MoeInputs<'a>) {
        let (mut spec, mut inputs): (MoeSpec, _) = (problem.spec().clone(), inputs);
        match self.0 {
            Fault::OtherOrder => {
                let interleaved = spec.order == GateUp::Interleaved;
                spec.order = if interleaved { GateUp::Halves } else { GateUp::Interleaved };
            }
            Fault::NoClamp => {
                if let Activation::Clamped { limit, .. } = &mut spec.activation {
                    *limit = 1e6;
                }
            }
            Fault::NoBiases => (spec.biases, inputs.biases) = (false, None),
            Fault::NoSharedExpert => (spec.shared, inputs.shared) = (None, None),
            _ => {}
        }
        (spec.parse().expect("a legal problem"), inputs)
    }

    fn experts(&self, problem: &MoeProblem, inputs: &MoeInputs<'_>) -> Vec<Experts> {
        let mut tokens = self.routed(problem, &inputs.routed);
        for experts in &mut tokens {
            match self.0 {
                Fault::Unweighted => experts.iter_mut().for_each(|(_, weight)| *weight = 0.5),
                Fault::LastExpert => drop(experts.pop()),
                Fault::OnceEach => experts.dedup_by_key(|(expert, _)| *expert),
                Fault::EveryoneIsHere => experts.resize(problem.top_k(), (0, 0.5)),
                Fault::NanTimesZero => experts.extend((0..problem.experts()).map(|expert| (expert, 0.0))),
                _ => {}
            }
        }
        tokens
    }

    fn routed(&self, problem: &MoeProblem, routed: &Routed<'_>) -> Vec<Experts> {
        let (all, whole) = (problem.shard().of, problem.shard().of == problem.experts());
        match (self.0, *routed, *problem.routing()) {
            (Fault::TiesToHighest, Routed::Computed { logits, bias: None }, _) if whole => {
                let backwards: Vec<f32> =
                    widened(logits).chunks_exact(all).flat_map(|row| row.iter().rev().copied()).collect();
                let mut spec = problem.spec().clone();
                if let Routing::Computed { logits, .. } = &mut spec.routing {
                    *logits = DType::F32;
                }
                let problem = spec.parse().expect("a legal problem");
                let mut tokens =
                    route(&problem, &Routed::Computed { logits: Data::F32(&backwards), bias: None });
                tokens.iter_mut().flatten().for_each(|(expert, _)| *expert = all - 1 - *expert);
                tokens
            }
            (Fault::OtherSoftmax, _, Routing::Computed { logits, top_k, score: Score::Softmax }) => {
                let routing = Routing::Computed { logits, top_k, score: Score::SoftmaxOfChosen };
                let spec = MoeSpec { routing, ..problem.spec().clone() };
                route(&spec.parse().expect("a legal problem"), routed)
            }
            _ => route(problem, routed),
        }
    }
}

#[test]
fn a_plain_backend_passes() {
    let failures = moe::failures(&Plain(Fault::None), &DType::COMMON, 1);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        let shows = |case| moe::check(&Plain(fault), case, DType::BF16, 1).is_failure();
        assert!(moe::cases().iter().any(shows), "{fault:?} went unnoticed");
    }
}

/// The oracle of gradients is the slope of the oracle of results.
#[test]
fn gradients_are_slopes() {
    const STEP: f32 = 1.0 / 1024.0;
    for case in moe::gradient_cases().iter().filter(|case| case.tokens > 0 && case.tokens < 12) {
        let problem = case.problem(DType::F32).unwrap();
        let inputs = moe::Inputs::<f32>::new(&problem, case.traffic, 3);
        let bound = inputs.bound();
        let count = problem.tokens() * problem.hidden();
        let d_out: Vec<f64> = (0..count).map(|n| ((n * 37 % 23) as f64 - 11.0) / 8.0).collect();
        let exact = moe::gradients::gradients(&problem, &bound, &d_out, Rounding::None);
        let loss = |inputs: &MoeInputs<'_>| -> f64 {
            let out = moe::plain::compute(&problem, inputs, Rounding::None);
            out.iter().zip(&d_out).map(|(y, d)| y * d).sum()
        };
        // Along one element of x and one of the routing weights at a time.
        let Routed::Given { ids, weights } = bound.routed else { unreachable!("routings are given") };
        let (x, weights) = (widened(bound.x), widened(weights));
        for n in 0..2 {
            let (token, col) = (n * 5 % problem.tokens(), n * 7 % problem.hidden());
            let slope = |sign: f32| {
                let mut moved = x.clone();
                moved[problem.x().row(0, 0, token) + col] += sign * STEP;
                loss(&MoeInputs { x: Data::F32(&moved), ..bound })
            };
            let slope = (slope(1.0) - slope(-1.0)) / f64::from(2.0 * STEP);
            let wanted = exact.x[token * problem.hidden() + col];
            assert!((slope - wanted).abs() < 2e-2 * (1.0 + wanted.abs()), "{case}: x {slope}, not {wanted}");
            let entry = n * 3 % problem.entries();
            let slope = |sign: f32| {
                let mut moved = weights.clone();
                moved[entry] += sign * STEP;
                let routed = Routed::Given { ids, weights: Data::F32(&moved) };
                loss_of(&problem, &MoeInputs { routed, ..bound }, &d_out)
            };
            let slope = (slope(1.0) - slope(-1.0)) / f64::from(2.0 * STEP);
            let wanted = exact.weights[entry];
            assert!(
                (slope - wanted).abs() < 2e-2 * (1.0 + wanted.abs()),
                "{case}: weight {slope}, not {wanted}"
            );
        }
    }
}

/// The loss where routing weights are f32, whatever the problem says.
fn loss_of(problem: &MoeProblem, inputs: &MoeInputs<'_>, d_out: &[f64]) -> f64 {
    let mut spec = problem.spec().clone();
    if let Routing::Given { weights, .. } = &mut spec.routing {
        *weights = DType::F32;
    }
    let out = moe::plain::compute(&spec.parse().expect("a legal problem"), inputs, Rounding::None);
    out.iter().zip(d_out).map(|(y, d)| y * d).sum()
}

#[test]
fn a_backend_without_experts_is_skipped() {
    struct Without;
    impl Backend for Without {
        fn name(&self) -> &'static str {
            "without"
        }

        fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            unreachable!("only mixtures of experts are asked for")
        }
    }
    let outcome = moe::check(&Without, &moe::cases()[0], DType::F32, 1);
    assert!(matches!(outcome, Outcome::Skipped(_)), "{outcome}");
}
