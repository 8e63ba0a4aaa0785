//! What a plan is made of: launches, each a kernel with the problem it computes.
//!
//! A [`KernelConfig`] determines the text of a kernel, whatever the problem; an [`AnyProgram`] is that text, built
//! once; a [`Launch`] knows the problem and so the arguments. A new operation adds a row to each of the enums below.

use std::ops::Deref;

use flashcore_core::{AppendProblem, BackwardProblem, MergeProblem, Problem, QuantiseProblem};
use flashcore_ptx::{launch::LaunchSpec, target::Target};
use flashcore_tile::{BuildError, Code, Extent, Program};

use crate::{
    append,
    backward_rows::{self, sinks},
    backward_sm80, backward_sm90, backward_sums, combine, decode, forward_sm80, forward_sm90, grouped, merge,
    moe, quantise, turn_values,
};

/// The config of a kernel of one family: everything that decides its text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum KernelConfig {
    /// Attention by `mma.sync`, from sm_75 on.
    Sm80(forward_sm80::Config),
    /// Attention by TMA and wgmma, sm_90a.
    Sm90(forward_sm90::Config),
    /// Values of 8 bits, transposed for the kernel above.
    TurnValues(turn_values::Config),
    /// Attention of few queries over many keys, from sm_80 on.
    Decode(decode::Config),
    /// Parts of rows, which the general kernel left, put together.
    Combine(combine::Config),
    /// Partial results put together.
    Merge(merge::Config),
    /// New rows of a cache.
    Append(append::Config),
    /// What kernels of gradients need to know about each row.
    BackwardRows(backward_rows::Config),
    /// Gradients of sinks.
    BackwardSinks(sinks::Config),
    /// Gradients by `mma.sync`, from sm_80 on.
    BackwardSm80(backward_sm80::Config),
    /// Gradients by TMA and wgmma, sm_90a.
    BackwardSm90(backward_sm90::Config),
    /// Sums of dQ become gradients.
    BackwardSums(backward_sums::Config),
    /// A tensor rounded to 8 bits, or a step of it.
    Quantise(quantise::Config),
    /// A mixture of experts, or a step of it.
    Moe(moe::Config),
    /// Grouped products, or what goes before them.
    Grouped(grouped::Config),
}

impl KernelConfig {
    /// The kernel's name.
    pub fn name(&self) -> String {
        match self {
            Self::Sm80(cfg) => cfg.name().to_string(),
            Self::Sm90(cfg) => cfg.name().to_string(),
            Self::TurnValues(cfg) => cfg.name().to_string(),
            Self::Decode(cfg) => cfg.name().to_string(),
            Self::Combine(cfg) => cfg.name().to_string(),
            Self::Merge(cfg) => cfg.name().to_string(),
            Self::Append(cfg) => cfg.name().to_string(),
            Self::BackwardRows(cfg) => cfg.name().to_string(),
            Self::BackwardSinks(cfg) => cfg.name().to_string(),
            Self::BackwardSm80(cfg) => cfg.name().to_string(),
            Self::BackwardSm90(cfg) => cfg.name().to_string(),
            Self::BackwardSums(cfg) => cfg.name().to_string(),
            Self::Quantise(cfg) => cfg.name().to_string(),
            Self::Moe(cfg) => cfg.name(),
            Self::Grouped(cfg) => cfg.name(),
        }
    }

    /// The architecture the kernel is built for.
    pub const fn target(&self) -> Target {
        match self {
            Self::Sm80(cfg) => cfg.target,
            Self::BackwardSm80(cfg) => cfg.target,
            Self::Decode(cfg) => cfg.target,
            Self::Quantise(cfg) => cfg.target,
            Self::Moe(cfg) => cfg.target(),
            Self::Grouped(cfg) => cfg.target(),
            Self::Sm90(_) | Self::TurnValues(_) | Self::BackwardSm90(_) | Self::BackwardSums(_) => {
                Target::Sm90a
            }
            Self::Combine(_)
            | Self::Merge(_)
            | Self::Append(_)
            | Self::BackwardRows(_)
            | Self::BackwardSinks(_) => Target::Sm80,
        }
    }

    /// Most registers of a thread when the kernel starts.
    pub const fn register_budget(&self) -> u32 {
        match self {
            Self::Sm80(cfg) => cfg.shape.registers(),
            Self::Sm90(cfg) => cfg.registers_at_entry(),
            Self::Decode(cfg) => cfg.shape.registers(),
            Self::TurnValues(cfg) => cfg.registers(),
            Self::Combine(cfg) => cfg.registers(),
            Self::Merge(cfg) => cfg.registers(),
            Self::Append(cfg) => cfg.registers(),
            Self::BackwardRows(cfg) => cfg.registers(),
            Self::BackwardSinks(cfg) => cfg.registers(),
            Self::BackwardSm80(cfg) => cfg.shape.registers(),
            Self::BackwardSm90(cfg) => cfg.registers_at_entry(),
            Self::BackwardSums(cfg) => cfg.registers(),
            Self::Quantise(cfg) => cfg.registers(),
            Self::Moe(cfg) => cfg.registers(),
            Self::Grouped(cfg) => cfg.registers(),
        }
    }

    /// Builds the kernel.
    pub fn program(&self) -> Result<AnyProgram, BuildError> {
        match self {
            Self::Sm80(cfg) => forward_sm80::forward_sm80(cfg).map(AnyProgram::Forward),
            Self::Sm90(cfg) => forward_sm90::forward_sm90(*cfg).map(AnyProgram::Forward),
            Self::TurnValues(cfg) => turn_values::turn_values(cfg).map(AnyProgram::Forward),
            Self::Decode(cfg) => decode::decode(cfg).map(AnyProgram::Forward),
            Self::Combine(cfg) => combine::combine(cfg).map(AnyProgram::Forward),
            Self::Merge(cfg) => merge::merge(cfg).map(AnyProgram::Merge),
            Self::Append(cfg) => append::append(cfg).map(AnyProgram::Append),
            Self::BackwardRows(cfg) => backward_rows::backward_rows(cfg).map(AnyProgram::Backward),
            Self::BackwardSinks(cfg) => sinks::backward_sinks(cfg).map(AnyProgram::Backward),
            Self::BackwardSm80(cfg) => backward_sm80::backward_sm80(cfg).map(AnyProgram::Backward),
            Self::BackwardSm90(cfg) => backward_sm90::backward_sm90(*cfg).map(AnyProgram::Backward),
            Self::BackwardSums(cfg) => backward_sums::backward_sums(cfg).map(AnyProgram::Backward),
            Self::Quantise(cfg) => quantise::quantise(cfg).map(AnyProgram::Quantise),
            Self::Moe(cfg) => cfg.program().map(AnyProgram::Moe),
            Self::Grouped(cfg) => cfg.program().map(AnyProgram::Grouped),
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
    /// New rows of a cache.
    Append(Program<AppendProblem>),
    /// Gradients.
    Backward(Program<BackwardProblem>),
    /// A tensor rounded to 8 bits, or a step of it.
    Quantise(Program<QuantiseProblem>),
    /// A mixture of experts, or a step of it.
    Moe(Program<moe::Layer>),
    /// Grouped products, or what goes before them.
    Grouped(Program<grouped::Work>),
}

impl Deref for AnyProgram {
    type Target = Code;

    fn deref(&self) -> &Code {
        match self {
            Self::Forward(program) => program,
            Self::Merge(program) => program,
            Self::Append(program) => program,
            Self::Backward(program) => program,
            Self::Quantise(program) => program,
            Self::Moe(program) => program,
            Self::Grouped(program) => program,
        }
    }
}

/// The problem of a launch.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Subject {
    Forward(Box<Problem>),
    Merge(MergeProblem),
    Append(Box<AppendProblem>),
    Backward(Box<BackwardProblem>),
    Quantise(Box<QuantiseProblem>),
    Moe(Box<moe::Layer>),
    Grouped(Box<grouped::Work>),
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
            (AnyProgram::Append(program), Subject::Append(problem)) => Some(program.launch(problem, extent)),
            (AnyProgram::Backward(program), Subject::Backward(problem)) => {
                Some(program.launch(problem, extent))
            }
            (AnyProgram::Quantise(program), Subject::Quantise(problem)) => {
                Some(program.launch(problem, extent))
            }
            (AnyProgram::Moe(program), Subject::Moe(layer)) => Some(program.launch(layer, extent)),
            (AnyProgram::Grouped(program), Subject::Grouped(work)) => Some(program.launch(work, extent)),
            // A program of another operation computes nothing here.
            _ => None,
        }
    }
}
