//! How partial results are merged on a GPU: one kernel, whose loads are as wide as layouts and addresses allow.

use flashcore_core::{DType, MergeProblem};

use super::{Gpu, Plan, PlanError, check_capability};
use crate::{
    launch::{KernelConfig, Launch, Subject},
    merge::{self, Config},
};

/// Plans a merge; `alignment` is what all addresses of parts and output are multiples of, in bytes.
pub fn plan_merge(problem: &MergeProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let known = |dtype: &DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    if let Some(other) = [problem.dtype(), problem.out_dtype()].into_iter().find(|dtype| !known(dtype)) {
        return Err(PlanError::DType(other));
    }
    if problem.rows() > i32::MAX as usize {
        return Err(PlanError::Tiles);
    }
    let config = Config::of(problem, alignment);
    let (extent, subject) = (merge::extent(&config, problem), Subject::Merge(problem.clone()));
    let launch = Launch { kernel: KernelConfig::Merge(config), subject, extent };
    let why = "each row is read once by neighbouring lanes, with the widest loads that its alignment allows";
    Ok(Plan::of(vec![launch], gpu, why))
}
