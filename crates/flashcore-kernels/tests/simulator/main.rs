//! Kernels in the simulator, every check on, against the f64 oracle of the testkit.

mod backend;

use backend::Simulator;
use flashcore_core::{Backend, DType, Element, HostCall, Layout, Problem};
use flashcore_kernels::{Gpu, Member, Plan, covering_set, plan};
use flashcore_sim::Options;
use flashcore_testkit::{Rng, Rows, cases, judge, suite, values};
use half::{bf16, f16};

/// The conformance suite's tiny cases on the general kernel; element types alternate.
#[test]
fn general_kernel_computes_every_tiny_case() {
    let ampere = |problem: &Problem| plan(problem, &Gpu::AMPERE, 16).map_err(|e| e.to_string());
    let simulator = Simulator { plan: ampere, options: vec![Options::new()] };
    let check = |(n, case): (usize, &cases::Case)| {
        let dtype = [DType::F16, DType::BF16][n % 2];
        let report = case.dtypes.contains(&dtype).then(|| suite::check_case(&simulator, case, dtype, 1))?;
        report.outcome.is_failure().then(|| report.to_string())
    };
    all_pass(&cases::up_to(cases::Cost::Tiny), check);
}

/// Every kernel of the covering set, once tamely and once under a hostile schedule.
#[test]
fn kernels_are_right_under_every_schedule() {
    let members = covering_set().unwrap();
    all_pass(&members, |(n, member)| {
        let plan = member.plan().unwrap();
        let hostile = Options::gauntlet(n as u64).swap_remove(n % 4);
        let error = match member.problem.dtype() {
            DType::F16 => wrong::<f16>(member, &plan, hostile),
            _ => wrong::<bf16>(member, &plan, hostile),
        };
        error.map(|error| format!("{}: {error}", plan.kernel().name()))
    });
}

/// Checks everything, on all cores, and reports all failures together.
fn all_pass<T: Sync>(items: &[T], check: impl Fn((usize, &T)) -> Option<String> + Sync + Send) {
    use rayon::prelude::*;
    let failures: Vec<_> = items.par_iter().enumerate().filter_map(check).collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), items.len(), failures.join("\n"));
}

/// What is wrong with a plan's result, if anything.
fn wrong<T: Element>(member: &Member, plan: &Plan, hostile: Options) -> Option<String> {
    let problem = &member.problem;
    let mut rng = Rng::new(7);
    let inputs = [problem.q(), problem.k(), problem.v()].map(|layout| tensor::<T>(layout, || rng.normal()));
    let mut out = tensor::<T>(problem.out(), || f32::NAN);
    let mut lse = vec![f32::NAN; problem.rows()];
    let slices = inputs.each_ref().map(Vec::as_slice);
    let mut call = HostCall::bind(problem, slices, &mut out, Some(&mut lse)).ok()?;
    let simulator =
        Simulator { plan: |_: &Problem| Ok(plan.clone()), options: vec![Options::new(), hostile] };
    if let Err(error) = simulator.forward(&mut call) {
        let cause = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
        return Some(format!("{error}: {cause}"));
    }
    let verdict = judge(problem, slices.map(T::erase), T::erase(&out), Some(&lse), Rows::ALL);
    verdict.reason.map(|reason| reason.to_string())
}

/// A tensor whose rows hold `value`s and whose gaps hold NaN.
fn tensor<T: Element>(layout: &Layout, mut value: impl FnMut() -> f32) -> Vec<T> {
    let mut elements = vec![T::from_f32(f32::NAN); layout.span()];
    values::for_each_row(layout, |_, start| {
        elements[start..start + layout.dims().dim].fill_with(|| T::from_f32(value()));
    });
    elements
}
