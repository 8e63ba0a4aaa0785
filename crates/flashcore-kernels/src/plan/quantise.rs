//! How a tensor is rounded to 8 bits on a GPU: means if they are subtracted, largest magnitudes, then the values.

use flashcore_core::{Granularity, QuantiseProblem};
use flashcore_ptx::target::Target;

use super::{Gpu, Plan, PlanError, check_capability};
use crate::{
    launch::{KernelConfig, Launch, Subject},
    quantise::{Config, Stage, ctas, extent, held},
};

/// Most features of transposed heads: as many as attention multiplies.
const MOST_TURNED: usize = 256;

/// Plans to quantise; `alignment` is what the addresses of both tensors are multiples of, in bytes.
pub fn plan_quantise(problem: &QuantiseProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let target = if gpu.capability == (9, 0) { Target::Sm90a } else { Target::Sm80 };
    let once = held(problem, alignment).is_some();
    let rest: &[Stage] = match problem.spec().turned {
        true => &[Stage::Largest, Stage::Turn],
        false if once => &[Stage::Block],
        false => &[Stage::Largest, Stage::Round],
    };
    check_turned(problem, alignment)?;
    let means = problem.spec().centred.then_some(Stage::Sum);
    let stages: Vec<Stage> = means.into_iter().chain(rest.iter().copied()).collect();
    // Kernels number slices, and features of all slices where these are looked at one by one.
    let channels = problem.spec().per == Granularity::PerChannel;
    let numbered = |&stage: &Stage| {
        let by_column = channels || stage == Stage::Sum;
        ctas(problem, stage).saturating_mul(if by_column { problem.dims().dim as u64 } else { 1 })
    };
    if stages.iter().any(|stage| numbered(stage) > i32::MAX as u64) {
        return Err(PlanError::Tiles);
    }
    let launch = |stage: Stage| Launch {
        kernel: KernelConfig::Quantise(Config::of(stage, problem, target, alignment)),
        subject: Subject::Quantise(Box::new(problem.clone())),
        extent: extent(problem, stage, target),
    };
    let launches: Vec<Launch> = stages.into_iter().map(launch).collect();
    let why = if once {
        "a CTA holds a block until it knows its factor, so that rows are read once"
    } else {
        "rows are read once for their largest magnitudes and once more to be rounded"
    };
    Ok(Plan { main: launches.len() - 1, ..Plan::of(launches, gpu, why) })
}

/// What writing transposed values requires.
fn check_turned(problem: &QuantiseProblem, alignment: u64) -> Result<(), PlanError> {
    let spec = problem.spec();
    if !spec.turned {
        return Ok(());
    }
    let odd = problem.out().strides().into_iter().take(3).any(|stride| !stride.is_multiple_of(16));
    let reason = match problem.dims().dim {
        dim if dim > MOST_TURNED => format!("heads of up to {MOST_TURNED} features are turned, not of {dim}"),
        _ if odd || !alignment.is_multiple_of(16) => {
            "turned values are written to addresses and by strides that are multiples of 16 bytes".to_owned()
        }
        _ => return Ok(()),
    };
    Err(PlanError::Kernel { reason })
}
