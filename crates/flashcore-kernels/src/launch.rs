//! What a plan is made of: launches, each a kernel with the problem it computes.
//!
//! A [`KernelConfig`] decides the text of a kernel, whatever the problem; an [`AnyProgram`] is that text, built once; a
//! [`Launch`] knows the problem and so the arguments. A new operation adds a row to each of the enums below.

use std::ops::Deref;

use flashcore_core::{MergeProblem, Problem};
use flashcore_ptx::{launch::LaunchSpec, target::Target};
use flashcore_tile::{BuildError, Code, Extent, Program};

use crate::{forward_sm80, forward_sm90, merge, moe};

/// The config of a kernel of one family: everything that decides its text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum KernelConfig {
    /// Attention by `mma.sync`, from sm_75 on.
    Sm80(forward_sm80::Config),
    /// Attention by TMA and wgmma, sm_90a.
    Sm90(forward_sm90::Config),
    /// Partial results put together.
    Merge(merge::Config),
    /// A mixture of experts, or a step of it.
    Moe(moe::Config),
}

impl KernelConfig {
    /// The kernel's name.
    pub fn name(&self) -> String {
        match self {
            Self::Sm80(cfg) => cfg.name().to_string(),
            Self::Sm90(cfg) => cfg.name().to_string(),
            Self::Merge(cfg) => cfg.name().to_string(),
            Self::Moe(cfg) => cfg.name(),
        }
    }

    /// The architecture the kernel is built for.
    pub const fn target(&self) -> Target {
        match self {
            Self::Sm80(cfg) => cfg.target,
            Self::Sm90(_) => Target::Sm90a,
            Self::Merge(_) => Target::Sm80,
            Self::Moe(cfg) => cfg.target(),
        }
    }

    /// Most registers of a thread when the kernel starts.
    pub const fn register_budget(&self) -> u32 {
        match self {
            Self::Sm80(cfg) => cfg.shape.registers(),
            Self::Sm90(cfg) => cfg.registers_at_entry(),
            Self::Merge(cfg) => cfg.registers(),
            Self::Moe(cfg) => cfg.registers(),
        }
    }

    /// Builds the kernel.
    pub fn program(&self) -> Result<AnyProgram, BuildError> {
        match self {
            Self::Sm80(cfg) => forward_sm80::forward_sm80(cfg).map(AnyProgram::Forward),
            Self::Sm90(cfg) => forward_sm90::forward_sm90(*cfg).map(AnyProgram::Forward),
            Self::Merge(cfg) => merge::merge(cfg).map(AnyProgram::Merge),
            Self::Moe(cfg) => cfg.program().map(AnyProgram::Moe),
        }
    }
}

/// A kernel's program, whatever operation it is of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyProgram {
    /// Attention.
    Forward(Program<Problem>),
    /// Partial results put together.
    Merge(Program<MergeProblem>),
    /// A mixture of experts, or a step of it.
    Moe(Program<moe::Layer>),
}

impl Deref for AnyProgram {
    type Target = Code;

    fn deref(&self) -> &Code {
        match self {
            Self::Forward(program) => program,
            Self::Merge(program) => program,
            Self::Moe(program) => program,
        }
    }
}

/// The problem of a launch.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Subject {
    Forward(Box<Problem>),
    Merge(MergeProblem),
    Moe(Box<moe::Layer>),
}

/// One kernel of a plan, with the problem it computes.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    pub(crate) kernel: KernelConfig,
    pub(crate) subject: Subject,
    /// `None` where there is nothing to compute.
    pub(crate) extent: Option<Extent>,
}

impl Launch {
    /// The kernel.
    pub const fn kernel(&self) -> &KernelConfig {
        &self.kernel
    }

    /// How to launch the kernel's program, as [`KernelConfig::program`] builds it; `None` where there is nothing to
    /// compute.
    pub fn spec(&self, program: &AnyProgram) -> Option<LaunchSpec> {
        let extent = self.extent.clone()?;
        match (program, &self.subject) {
            (AnyProgram::Forward(program), Subject::Forward(problem)) => {
                Some(program.launch(problem, extent))
            }
            (AnyProgram::Merge(program), Subject::Merge(problem)) => Some(program.launch(problem, extent)),
            (AnyProgram::Moe(program), Subject::Moe(layer)) => Some(program.launch(layer, extent)),
            // A program of another operation computes nothing here.
            _ => None,
        }
    }
}
