//! `flashcore run --backward` where it differs from forward: how gradients are judged, and the simulator.

use std::time::Instant;

use flashcore::{BackendError, BackwardProblem};
use flashcore_core::Backend;
use flashcore_cpu::Cpu;
use flashcore_lab::{judge::gradients, simulator::Simulator};

use super::{
    Done, HOSTILE_RUNS, LONGEST, Simulated,
    check::Check,
    request::{Request, Tensors},
};
use crate::{
    error::{CliError, Verdict},
    output::Output,
    progress::Progress,
};

/// Multiples of the time that forward takes in the simulator.
const OF_FORWARD: u32 = 4;

/// Judges gradients: those of the output's gradient as it is, or, where that would take too long, of some of its rows,
/// for which they are computed once more. What was computed before stays.
pub fn check(
    problem: &BackwardProblem,
    tensors: &mut Tensors,
    repeatable: bool,
    again: &mut dyn FnMut(&mut Tensors) -> Result<(), BackendError>,
) -> Result<Check, CliError> {
    let kept = tensors.backward.clone();
    if let Some((d_out, _)) = &mut tensors.backward {
        gradients::keep_rows(d_out, problem);
    }
    let whole = kept.as_ref().map(|kept| &kept.0) == tensors.backward.as_ref().map(|now| &now.0);
    if !whole {
        again(tensors)?;
    }
    let check = Check::of_gradients(problem, tensors, repeatable);
    tensors.backward = kept;
    check
}

/// Runs the kernels of a GPU, first tamely and then under hostile schedules; forward is the CPU's.
pub fn simulate(mut request: Request, simulator: &Simulator, output: &Output) -> Result<Verdict, CliError> {
    let runs = 1 + request.times.unwrap_or(HOSTILE_RUNS);
    let often = u32::try_from(runs).unwrap_or(u32::MAX).saturating_mul(OF_FORWARD);
    let estimate = Simulator::estimate(&request.problem).saturating_mul(often);
    if estimate > LONGEST {
        return Err(CliError::TooLong { estimate, most: LONGEST });
    }
    let Some(problem) = request.backward.clone() else { unreachable!("only gradients come here") };
    let plan = simulator.plan_backward(&problem)?;
    let mut tensors = Tensors::prepare(&mut request)?;
    tensors.call(&request.problem, |call| Cpu::new().forward(call))?;
    let progress = Progress::new(runs, output);
    progress.say(format!("simulating: about {:.0} s", estimate.as_secs_f64().max(1.0)));
    let mut launch = |tensors: &mut Tensors| {
        let launched = tensors.gradients(&problem, |call| simulator.launch_backward(call, &plan));
        progress.step();
        launched
    };
    let (begin, mut digests, mut fault) = (Instant::now(), Vec::new(), None);
    while fault.is_none() && digests.len() < runs {
        match launch(&mut tensors) {
            Err(BackendError::Failed { source, .. }) => fault = Some(source.to_string()),
            done => done?,
        }
        digests.push(tensors.digest());
    }
    let (seconds, repeatable) =
        (begin.elapsed().as_secs_f64(), digests.windows(2).all(|pair| pair[0] == pair[1]));
    let mut check = match fault {
        None => check(&problem, &mut tensors, repeatable, &mut launch)?,
        Some(_) => Check::of_gradients(&problem, &tensors, repeatable)?,
    };
    if let Some(fault) = fault {
        (check.pass, check.reason) = (false, Some(format!("the simulator found {fault}")));
    }
    let simulated = Some(Simulated { runs: digests.len(), seconds, last: None });
    let kernel = plan.kernel().name();
    Done { request, tensors, backend: "sim", kernel, check, latency: None, simulated }.end(output)
}
