//! What `inspect` looks at: a problem on a GPU, or a kernel of the covering set by its name.

use flashcore::{Problem, Values};
use flashcore_core::{Dims, HostCall};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, KernelConfig, Plan, covering_set, plan_by, plan_general};
use flashcore_lab::{
    buffer::{Buffer, filled},
    simulator::Simulator,
    workload::normal_inputs,
};
use flashcore_sim::Outcome;

use super::{Flags, InspectFailure};
use crate::{error::CliError, gpu_flags::Chosen};

/// The most of each extent that is simulated: a few tiles.
const SIMULATED: Dims = Dims { batch: 1, heads: 2, seq: 192, dim: usize::MAX };

/// A problem, where it would run, and how.
pub struct Subject {
    pub problem: Problem,
    /// The same with few rows, for the simulator.
    small: Problem,
    values: Values,
    pub chosen: Chosen,
    pub plan: Plan,
}

impl Subject {
    /// What the flags name.
    pub fn find(flags: &Flags) -> Result<Self, CliError> {
        match &flags.kernel {
            Some(name) => Ok(Self::named(name)?),
            None => Self::asked(flags),
        }
    }

    fn asked(flags: &Flags) -> Result<Self, CliError> {
        let chosen = flags.gpu.choose();
        let dims = flags.tensors.dims();
        let problem = flags.attention.problem(flags.dtype, dims)?;
        let small = flags.attention.problem(flags.dtype, shrunk(dims))?;
        let table = flags.table.load()?.unwrap_or_default();
        let plan = match flags.general {
            true => plan_general(&problem, &chosen.gpu, ALLOCATED_ALIGNMENT),
            false => plan_by(&problem, &chosen.gpu, ALLOCATED_ALIGNMENT, &table),
        };
        let values = flags.attention.values(small.heads_q(), 0);
        Ok(Self { problem, small, values, chosen, plan: plan.map_err(InspectFailure::from)? })
    }

    fn named(name: &str) -> Result<Self, InspectFailure> {
        for member in covering_set().unwrap_or_default() {
            let plan = member.plan()?;
            if plan.kernel().name() == name {
                let (problem, small, values) = (member.problem.clone(), member.problem, member.values);
                return Ok(Self { problem, small, values, chosen: Chosen::assumed(member.gpu), plan });
            }
        }
        Err(InspectFailure::NoKernel(name.to_owned()))
    }

    /// The kernel.
    pub fn kernel(&self) -> &KernelConfig {
        self.plan.kernel()
    }

    /// The problem that is simulated.
    pub const fn small(&self) -> &Problem {
        &self.small
    }

    /// Runs the plan's kernel on the small problem; `None` where there is nothing to compute.
    pub fn simulate(&self) -> Result<Option<Outcome>, CliError> {
        let small = &self.small;
        let inputs = normal_inputs(small, 0)?;
        let mut out = Buffer::poisoned(small.dtype(), small.out().span())?;
        let mut lse = filled(f32::NAN, small.rows())?;
        let inputs = inputs.each_ref().map(Buffer::data);
        let mut call = HostCall::bind_erased(small, &self.values, inputs, out.data_mut(), Some(&mut lse))?;
        Ok(Simulator::new(self.chosen.gpu).launch(&mut call, &self.plan)?)
    }
}

/// Names of the kernels of the covering set.
pub fn names() -> Vec<String> {
    let members = covering_set().unwrap_or_default();
    members.iter().filter_map(|member| Some(member.plan().ok()?.kernel().name())).collect()
}

/// The same heads' dims and kind of grouping, few rows.
fn shrunk([q, k, v]: [Dims; 3]) -> [Dims; 3] {
    let groups = (q.heads / k.heads.max(1)).clamp(1, SIMULATED.heads);
    let small = |dims: Dims, heads: usize| Dims {
        batch: dims.batch.min(SIMULATED.batch),
        heads: dims.heads.min(heads),
        seq: dims.seq.min(SIMULATED.seq),
        ..dims
    };
    [small(q, groups), small(k, 1), small(v, 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_problems_keep_their_kind() {
        let dims = |q: [usize; 4], kv: [usize; 4]| {
            let [q, kv] = [q, kv].map(|[b, h, s, d]| Dims::new(b, h, s, d));
            shrunk([q, kv, kv]).map(Dims::array)
        };
        let [q, k, _] = dims([4, 32, 4096, 128], [4, 8, 4096, 128]);
        assert_eq!((q, k), ([1, 2, 192, 128], [1, 1, 192, 128]));
        let [q, k, _] = dims([1, 8, 1, 64], [1, 8, 9000, 64]);
        assert_eq!((q, k), ([1, 1, 1, 64], [1, 1, 192, 64]));
        let [q, _, _] = dims([0, 1, 5, 64], [0, 1, 5, 64]);
        assert_eq!(q, [0, 1, 5, 64]);
    }
}
