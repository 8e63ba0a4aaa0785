//! Gradients of f32 tensors: which kernels and tiles they get, how refusals read, and that they are as exact as f32.

use flashcore_core::{BackwardProblem, BackwardSpec, DType, Dims, Layout, Mask, Spec};
use flashcore_kernels::{Gpu, PlanError, plan_backward};
use flashcore_lab::simulator::Simulator;
use flashcore_testkit::{
    Answer, Kind, Outcome,
    backward::{self, Case, Wish, bench::Bench, plain::Gradients},
    cases::{self, Tag},
    inputs::Inputs,
};
use rayon::prelude::*;

/// Random problems.
const RANDOM: u64 = 60;

/// What relative root mean squares of errors stay below. With one of a product's three parts left out, or with weights rounded
/// to TF32, they would be 2e-4. Where scores are large, an f32 keeps less of the LSE.
const fn most(kind: Kind) -> f64 {
    match kind {
        Kind::Sharp | Kind::Sink | Kind::Drift => 5e-6,
        _ => 1e-6,
    }
}

fn problem(dim: usize) -> BackwardProblem {
    let layout = |heads| Layout::bshd(Dims::new(2, heads, 300, dim)).unwrap();
    BackwardSpec::new(Spec::new(DType::F32, layout(4), layout(2), layout(2))).parse().unwrap()
}

/// Names of the kernels of the products, those of keys first.
fn kernels(dim: usize, gpu: &Gpu) -> [String; 2] {
    let plan =
        plan_backward(&problem(dim), gpu, 4).unwrap_or_else(|error| panic!("{dim} on {gpu:?}: {error}"));
    let names: Vec<_> = plan.launches().iter().map(|launch| launch.kernel().name()).collect();
    let [rows, products @ ..] = &names[..] else { panic!("{plan}") };
    assert!(rows.starts_with("fc_backward_rows_f32_"), "{plan}");
    products.to_vec().try_into().unwrap()
}

#[test]
fn f32_gradients_have_tiles_everywhere() {
    for gpu in [Gpu::AMPERE, Gpu::CONSUMER, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX] {
        for dim in [1, 8, 64, 72, 128, 192, 256] {
            let [keys, queries] = kernels(dim, &gpu);
            assert!(keys.starts_with("fc_backward_dkv_sm_") && keys.contains("_f32_"), "{keys}");
            assert!(queries.starts_with("fc_backward_dq_sm_") && queries.contains("_f32_"), "{queries}");
        }
    }
    let [keys, queries] = kernels(128, &Gpu::HOPPER);
    assert!(keys.starts_with("fc_backward_dkv_sm_90_f32_d128v128_w8x1t32x16s2c1_full"), "{keys}");
    assert!(queries.starts_with("fc_backward_dq_sm_90_f32_d128v128_w8x1t32x32s2c1_full"), "{queries}");
}

#[test]
fn what_f32_gradients_do_not_get_says_so() {
    let plan = plan_backward(&problem(64), &Gpu::HOPPER, 16).unwrap();
    assert_eq!(plan.passed_over(), ["backward_sm90: it multiplies f16 and bf16, not f32"]);
    let refused = |dim, gpu: &Gpu| plan_backward(&problem(dim), gpu, 16).unwrap_err();
    assert_eq!(refused(64, &Gpu::TURING), PlanError::Capability { given: (7, 5), needed: (8, 0) });
    let shared_bytes = Gpu::HOPPER.shared_bytes;
    assert_eq!(refused(264, &Gpu::HOPPER), PlanError::SharedMemory { qk: 264, v: 264, shared_bytes });
}

/// Random problems on GPUs with much, less and little shared memory.
#[test]
fn random_problems_have_f32_gradients() {
    let simulators = [Gpu::AMPERE, Gpu::HOPPER, Gpu::CONSUMER].map(Simulator::new);
    let failures: Vec<_> = (0..RANDOM)
        .into_par_iter()
        .filter_map(|n| {
            let case = backward::random_case(23, n);
            let outcome = backward::check(&simulators[n as usize % simulators.len()], &case, DType::F32, n);
            let wide = case.forward.q.dim.max(case.forward.dim_v) > 256;
            let passed = outcome == Outcome::Passed || (wide && !outcome.is_failure());
            (!passed).then(|| format!("{n}: {case}: {outcome}"))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Every kind of data, by whole tiles and by cut ones.
#[test]
fn f32_gradients_are_as_exact_as_f32() {
    let kinds = [Kind::Normal, Kind::Outliers, Kind::Sharp, Kind::Sink, Kind::Mean, Kind::Drift];
    for (dim, gpu) in [(64, Gpu::HOPPER), (128, Gpu::AMPERE), (256, Gpu::CONSUMER)] {
        for (n, kind) in kinds.into_iter().enumerate() {
            let forward = cases::Case {
                inputs: Inputs::Of(kind),
                mask: [Mask::NONE, Mask::CAUSAL][n % 2],
                ..cases::Case::new(Tag::Random, "exact", [1, 1, 1, 72, 100], dim)
            };
            let bench = Bench::<f32>::new(&Case::new(forward, Wish::Plain), 3).unwrap();
            let run = bench.run::<f32>(&Simulator::new(gpu)).unwrap();
            for (name, error) in errors(&run.gradients(bench.problem()), &bench.oracle()) {
                assert!(error < most(kind), "{name} of {dim} features, {kind:?}: {error:.1e}");
            }
        }
    }
}

/// Root mean squares of the errors of dQ, dK and dV, relative to what they are of.
fn errors(got: &Gradients, exact: &Gradients) -> Vec<(&'static str, f64)> {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let relative = |((name, got), (_, exact)): ((&'static str, &Answer), (&str, &Answer))| {
        let error = squares(&mut got.out.iter().zip(&exact.out).map(|(a, b)| a - b));
        (name, (error / squares(&mut exact.out.iter().copied())).sqrt())
    };
    got.named().into_iter().zip(exact.named()).take(3).map(relative).collect()
}
