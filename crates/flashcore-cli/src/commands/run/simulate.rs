//! `run --backend sim`: the kernel that a GPU would run, on the CPU, first tamely and then under hostile schedules.
//!
//! [`super::execute`] calls this; results are judged as those of any other backend, findings of the checkers besides.

use std::time::{Duration, Instant};

use flashcore::BackendError;
use flashcore_core::HostCall;
use flashcore_lab::simulator::Simulator;
use flashcore_sim::Outcome;

use super::{
    check::Check,
    report::{Computed, Effort, RunReport},
    request::Request,
    tensors::Tensors,
};
use crate::{
    error::{CliError, Verdict},
    output::Output,
    progress::Progress,
};

/// Hostile runs unless another number is asked for.
const USUAL_RUNS: usize = 1;
/// Problems that take longer are for a real GPU.
const MOST: Duration = Duration::from_secs(10 * 60);

/// Runs the kernel of the GPU that `simulator` stands for.
pub fn execute(request: Request, simulator: Simulator, output: &Output) -> Result<Verdict, CliError> {
    let runs = 1 + request.times.unwrap_or(USUAL_RUNS);
    let estimate =
        Simulator::estimate(&request.problem).saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX));
    if estimate > MOST {
        return Err(CliError::TooLong { estimate, most: MOST });
    }
    let plan = simulator.plan(&request.problem)?;
    let progress = Progress::new(runs, output);
    progress.say(format!("simulating: about {:.0} s", estimate.as_secs_f64().max(1.0)));
    let launch = |call: &mut HostCall<'_>| {
        let outcome = simulator.launch(call, &plan);
        progress.step();
        outcome
    };
    run(request, runs, plan.kernel().name(), launch, output)
}

/// Launches up to the first run with a fault, judges, reports.
pub(super) fn run(
    mut request: Request,
    runs: usize,
    kernel: String,
    mut launch: impl FnMut(&mut HostCall<'_>) -> Result<Option<Outcome>, BackendError>,
    output: &Output,
) -> Result<Verdict, CliError> {
    let mut tensors = Tensors::prepare(&mut request)?;
    let begin = Instant::now();
    let (mut digests, mut last) = (Vec::new(), None);
    for _ in 0..runs {
        last = tensors.call(&request.problem, &mut launch)?;
        digests.push(tensors.digest());
        if last.as_ref().is_some_and(|outcome| !outcome.is_clean()) {
            break;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let repeatable = digests.windows(2).all(|pair| pair[0] == pair[1]);
    let mut check = Check::of(&request.problem, &tensors, repeatable)?;
    check.pass &= last.as_ref().is_none_or(Outcome::is_clean);
    if check.pass {
        request.save(&tensors)?;
    }
    let effort = Effort::Simulated { runs: digests.len(), seconds, last: last.as_ref().map(Into::into) };
    let report = RunReport::new(&request, Computed { backend: "sim", kernel }, &check, effort);
    output.show(&report)?;
    Ok(Verdict::from_bool(check.pass))
}
