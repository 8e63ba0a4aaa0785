//! Why a launch could not be simulated. What a kernel does wrong is a [`Finding`](crate::Finding), not an error.

use flashcore_ptx::launch::Slot;

/// A launch that cannot be simulated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The module has no kernel of that name.
    #[error("no kernel `{0}` in the module; it has: {1}")]
    NoKernel(String, String),
    /// An instruction outside of what the simulator executes.
    #[error("{place}, in `{kernel}`: `{text}` is not supported: {reason}")]
    Unsupported {
        /// The kernel or function that contains it.
        kernel: String,
        /// Its line, or its number among the statements where lines are not known.
        place: String,
        /// The instruction.
        text: String,
        /// What is missing.
        reason: String,
    },
    /// An instruction that the table of instructions lacks was executed.
    #[error(
        "line {line}: `{text}`, which `{kernel}` executed, is not supported by the simulator: {reason}. Choose arguments that do \
         not reach it, or replace it; docs/adding-an-instruction.md says how to add it"
    )]
    Unknown {
        /// The kernel or function that contains it.
        kernel: String,
        /// Its line in the text.
        line: u32,
        /// The instruction.
        text: String,
        /// What is unknown about it.
        reason: String,
    },
    /// PTX that no assembler accepts was executed.
    #[error(
        "{place}: `{text}`, which `{kernel}` executed, is not valid PTX: {reason}. If ptxas accepts it, the simulator's table \
         of instructions is wrong: docs/adding-an-instruction.md says how to correct it"
    )]
    Invalid {
        /// The kernel or function that contains it.
        kernel: String,
        /// Its line, or its number among the statements where lines are not known.
        place: String,
        /// The instruction.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// A branch to nowhere, an unknown variable.
    #[error("{place}, in `{kernel}`: `{name}` is not declared")]
    Undeclared {
        /// The kernel or function that contains it.
        kernel: String,
        /// Its line, or its number among the statements where lines are not known.
        place: String,
        /// The name.
        name: String,
    },
    /// The arguments do not fit the kernel's parameters.
    #[error("argument {index} of `{kernel}`: {reason}")]
    Argument {
        /// The kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// A parameter names a buffer that was not bound.
    #[error("slot {} has no buffer: bind one, or list it as workspace", .0.0)]
    UnboundSlot(Slot),
    /// Grid, block, cluster or shared memory are outside of the hardware's limits.
    #[error("cannot launch `{kernel}`: {reason}")]
    Geometry {
        /// The kernel.
        kernel: String,
        /// What is wrong.
        reason: String,
    },
    /// The kernel ran longer than [`Options::step_limit`](crate::Options) allows.
    #[error(
        "`{kernel}` executed {steps} warp instructions without ending, most of them `{place}`: an endless loop, or \
         more work than the limit allows; make the problem smaller or raise the limit (--max-steps, in Python max_steps)"
    )]
    StepLimit {
        /// The kernel.
        kernel: String,
        /// How many instructions were executed.
        steps: u64,
        /// The instruction that was executed most.
        place: String,
    },
    /// The caller stopped the launch.
    #[error("`{kernel}` was interrupted")]
    Interrupted {
        /// The kernel.
        kernel: String,
    },
}
