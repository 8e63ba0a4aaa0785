//! Tensors rounded to 8 bits and attention over blocks with factors: plans as data, kernels in the simulator under hostile
//! schedules.

use flashcore_core::{DType, Dims, Granularity, Layout, QuantiseSpec, Scales, Spec};
use flashcore_kernels::{Gpu, KernelConfig, PlanError, covering_quantised, plan, plan_quantise};
use flashcore_lab::simulator::Simulator;
use flashcore_testkit::{Outcome, narrow, quantise};
use rayon::prelude::*;

fn dense(dims: [usize; 4]) -> Layout {
    let [batch, heads, seq, dim] = dims;
    Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap()
}

#[track_caller]
fn all_pass(failures: Vec<String>) {
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The covering set, by instructions and by integers.
#[test]
fn covering_problems_are_right_under_every_schedule() {
    let problems = covering_quantised().unwrap();
    let failed = problems.par_iter().enumerate().filter_map(|(n, problem)| {
        let simulator = Simulator::seeded([Gpu::HOPPER, Gpu::AMPERE][n % 2], n as u64);
        let outcome = quantise::check_problem(&simulator, problem, quantise::Numbers::Uneven, n as u64);
        (outcome != Outcome::Passed).then(|| format!("{problem:?}: {outcome}"))
    });
    all_pass(failed.collect());
}

#[test]
fn the_suite_is_right_on_both_kinds_of_gpu() {
    let on = [(Gpu::HOPPER, DType::BF16), (Gpu::AMPERE, DType::F32)];
    all_pass(
        on.par_iter()
            .flat_map(|&(gpu, dtype)| quantise::failures(&Simulator::new(gpu), &[dtype], 1))
            .collect(),
    );
}

/// Tensors of 16 bits that are quantised on the way.
#[test]
fn quantised_attention_is_near_enough() {
    let shapes = [([1, 2, 1, 70, 300], 64), ([1, 1, 1, 64, 130], 128)];
    all_pass(narrow::end_to_end(&Simulator::new(Gpu::HOPPER), &shapes));
}

/// Steps of a plan, by their names.
fn steps(per: Granularity, seq: usize, centred: bool) -> Vec<String> {
    names(&QuantiseSpec { per, centred, ..QuantiseSpec::new(DType::BF16, dense([2, 2, seq, 64])) }, 16)
        .unwrap()
}

/// The same of any plan.
fn names(spec: &QuantiseSpec, alignment: u64) -> Result<Vec<String>, PlanError> {
    let plan = plan_quantise(&spec.clone().parse().unwrap(), &Gpu::HOPPER, alignment)?;
    let name = |kernel: &KernelConfig| {
        let name = kernel.name();
        name.trim_start_matches("fc_quantise_").split("_sm_").next().unwrap_or_default().to_owned()
    };
    Ok(plan.launches().iter().map(|launch| name(launch.kernel())).collect())
}

#[test]
fn plans_have_the_steps_they_need() {
    use Granularity::*;
    for (per, seq) in [(PerHead, 64), (PerHead, 65), (PerChannel, 1000), (PerTensor, 10)] {
        assert_eq!(steps(per, seq, false), ["largest", "round"]);
    }
    // Blocks that a CTA holds are read once, with means or without.
    assert_eq!(steps(PerBlock(64), 1000, false), ["block"]);
    assert_eq!(steps(PerBlock(128), 1000, true), ["sum", "block"]);
    assert_eq!(steps(PerBlock(1000), 1000, true), ["sum", "largest", "round"]);
    let turned = QuantiseSpec {
        turned: true,
        per: PerChannel,
        ..QuantiseSpec::new(DType::BF16, dense([2, 2, 300, 64]))
    };
    assert_eq!(names(&turned, 16).unwrap(), ["largest", "turn"]);
    let refused = names(&turned, 8).unwrap_err().to_string();
    assert!(refused.contains("multiples of 16 bytes"), "{refused}");
    let spec = QuantiseSpec::new(DType::F32, dense([1, 1, 8, 8]));
    let refused = plan_quantise(&spec.parse().unwrap(), &Gpu::TURING, 16).unwrap_err();
    assert_eq!(refused, PlanError::Capability { given: (7, 5), needed: (8, 0) });
}

#[test]
fn blocks_are_whole_tiles_on_a_hopper() {
    let kernel = |q: usize, k: usize| {
        let (of_q, of_k) = (dense([1, 4, 300, 64]), dense([1, 2, 500, 64]));
        let scales = Some(Scales::PerBlock { q, k });
        let spec = Spec { scales, ..Spec::new(DType::E4M3, of_q, of_k, of_k) };
        plan(&spec.parse().unwrap(), &Gpu::HOPPER, 16).map(|plan| plan.kernel().name())
    };
    for (q, k) in [(64, 128), (192, 384), (300, 500), (1000, 1000)] {
        assert!(kernel(q, k).unwrap().contains("_blocks"), "{q} {k}");
    }
    for (q, k) in [(32, 128), (64, 64), (65, 128), (64, 300)] {
        let refused = kernel(q, k).unwrap_err();
        assert!(refused.to_string().contains(&format!("not {q} and {k}")), "{refused}");
    }
}
