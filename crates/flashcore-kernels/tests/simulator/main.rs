//! Kernels in the simulator, against the f64 oracle of the testkit.

mod backend;

use backend::Simulator;
use flashcore_core::{DType, Problem};
use flashcore_kernels::{Gpu, Plan, plan};
use flashcore_sim::Options;
use flashcore_testkit::{cases, suite};

fn ampere(problem: &Problem) -> Result<Plan, String> {
    plan(problem, &Gpu::AMPERE, 16).map_err(|e| e.to_string())
}

#[test]
fn general_kernel_computes_every_tiny_case() {
    let simulator = Simulator { plan: ampere, options: vec![Options::new()] };
    let mut failures = Vec::new();
    let started = std::time::Instant::now();
    for case in cases::up_to(cases::Cost::Tiny) {
        for dtype in [DType::F16, DType::BF16] {
            if case.dtypes.contains(&dtype) {
                let report = suite::check_case(&simulator, &case, dtype, 1);
                println!("{:?} {report} {:?}", started.elapsed(), report.kernel);
                if report.outcome.is_failure() {
                    failures.push(report.to_string());
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
