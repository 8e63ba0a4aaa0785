//! What decides which kernel computes a problem: the rules, a table of measured tiles, or an explicit choice.

use std::{fmt, str::FromStr, sync::Arc};

use flashcore_core::{BackwardProblem, Problem};
use serde::{Deserialize, Serialize};

use super::{
    Form, Gpu, NarrowForm, Plan, PlanError, plan, plan_backward, plan_backward_by, plan_backward_general,
    plan_by, plan_few, plan_general, plan_many, tuned::Table,
};
use crate::launch::KernelConfig;

/// A forward kernel, by the name that plans give it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[non_exhaustive]
pub enum Family {
    /// The kernel for Hopper.
    #[serde(rename = "forward_sm90")]
    Sm90,
    /// The kernel for few queries over many keys.
    #[serde(rename = "decode")]
    Decode,
    /// The kernel that runs on every GPU.
    #[serde(rename = "forward_sm80")]
    Sm80,
}

impl Family {
    /// Every kernel, the most special first.
    pub const ALL: [Self; 3] = [Self::Decode, Self::Sm90, Self::Sm80];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm90 => "forward_sm90",
            Self::Decode => "decode",
            Self::Sm80 => "forward_sm80",
        }
    }

    /// All names, in words.
    pub(super) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no kernel has.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no kernel `{0}`; the kernels are {names}", names = Family::names())]
pub struct UnknownKernel(String);

impl FromStr for Family {
    type Err = UnknownKernel;

    fn from_str(name: &str) -> Result<Self, UnknownKernel> {
        let found = Self::ALL.into_iter().find(|family| family.name() == name);
        found.ok_or_else(|| UnknownKernel(name.to_owned()))
    }
}

/// What decides about kernels and tiles.
#[derive(Clone, Debug, Default)]
pub enum Choice {
    /// The rules.
    #[default]
    Rules,
    /// A table of measured tiles, then the rules.
    Table(Arc<Table>),
    /// One kernel for every problem, or an error that says why it cannot take one: for comparisons.
    Kernel(Family),
    /// One form of gradients on a Hopper, and the rules: for comparisons.
    Gradients(Form),
    /// One form of the kernel for tensors of 8 bits, and the rules: for comparisons.
    Narrow(NarrowForm),
}

impl Choice {
    /// A plan for gradients, as [`plan_backward`] makes one; tables know nothing of them.
    pub fn plan_backward(
        &self,
        problem: &BackwardProblem,
        gpu: &Gpu,
        alignment: u64,
    ) -> Result<Plan, PlanError> {
        match self {
            Self::Kernel(Family::Sm80) => plan_backward_general(problem, gpu, alignment),
            Self::Gradients(form) => plan_backward_by(problem, gpu, alignment, *form),
            _ => plan_backward(problem, gpu, alignment),
        }
    }

    /// A plan for `problem`, as [`plan`] makes one.
    pub fn plan(&self, problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
        match self {
            Self::Rules | Self::Gradients(_) => plan(problem, gpu, alignment),
            Self::Narrow(form) => form.plan(problem, plan(problem, gpu, alignment)?),
            Self::Table(table) => plan_by(problem, gpu, alignment, table),
            Self::Kernel(Family::Sm80) => plan_general(problem, gpu, alignment),
            Self::Kernel(Family::Sm90) => {
                let plan = plan_many(problem, gpu, alignment)?;
                match plan.kernel() {
                    KernelConfig::Sm90(_) => Ok(plan),
                    _ => Err(PlanError::Kernel { reason: plan.passed_over.join("; ") }),
                }
            }
            Self::Kernel(Family::Decode) => plan_few(problem, gpu, alignment)?
                .map_err(|reason| PlanError::Kernel { reason: format!("decode: {reason}") }),
        }
    }
}
