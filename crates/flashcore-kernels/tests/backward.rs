//! Kernels of gradients in the simulator, every check on, against the f64 oracle of the testkit.

use flashcore_core::DType;
use flashcore_kernels::Gpu;
use flashcore_lab::simulator::Simulator;
use flashcore_testkit::{
    Outcome,
    backward::{self, laws::LAWS},
    cases::Cost,
};

/// Element types that kernels of gradients take.
const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// The conformance suite's tiny cases; element types alternate, and so do hostile schedules.
#[test]
fn kernels_pass_the_conformance_suite() {
    let (simulator, cases) = (Simulator::new(Gpu::AMPERE), backward::cases(Cost::Tiny));
    all_pass(&cases, |(n, case)| {
        let dtype = HALVES[n % 2];
        let outcome = case.forward.dtypes.contains(&dtype).then(|| backward::check(&simulator, case, dtype, 1))?;
        (outcome != Outcome::Passed).then(|| format!("{case} {dtype}: {outcome}"))
    });
}

#[test]
fn kernels_obey_the_laws() {
    let simulator = Simulator::new(Gpu::AMPERE);
    all_pass(LAWS, |(n, law)| {
        let outcome = law.check(&simulator, HALVES[n % 2], 1);
        (outcome != Outcome::Passed).then(|| format!("{}: {outcome}", law.name))
    });
}

/// Checks everything, on all cores, and reports all failures together.
fn all_pass<T: Sync>(items: &[T], check: impl Fn((usize, &T)) -> Option<String> + Sync + Send) {
    use rayon::prelude::*;
    let failures: Vec<_> = items.par_iter().enumerate().filter_map(check).collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), items.len(), failures.join("\n"));
}
