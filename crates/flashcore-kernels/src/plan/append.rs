//! How new rows are written to a cache on a GPU: one kernel, one warp per row.

use flashcore_core::{AppendProblem, DType};

use super::{Gpu, Plan, PlanError, check_capability};
use crate::{
    append::{self, Config},
    launch::{KernelConfig, Launch, Subject},
    parts::mask::MAX_SEQUENCE,
};

/// Plans an append.
pub fn plan_append(problem: &AppendProblem, gpu: &Gpu) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let dtype = problem.spec().dtype;
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(PlanError::DType(dtype));
    }
    if append::rows(problem) > i32::MAX as usize {
        return Err(PlanError::Tiles);
    }
    let given = problem.capacity();
    if given > MAX_SEQUENCE {
        return Err(PlanError::Sequence { given, max: MAX_SEQUENCE });
    }
    let config = Config::of(problem);
    let (extent, subject) = (append::extent(&config, problem), Subject::Append(Box::new(problem.clone())));
    let launch = Launch { kernel: KernelConfig::Append(config), subject, extent };
    Ok(Plan::of(vec![launch], gpu, "a warp moves a row; keys, values and queries go in one launch"))
}
