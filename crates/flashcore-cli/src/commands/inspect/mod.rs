//! `flashcore inspect`: which GPU kernel a problem gets and why, how it is launched, what it compiles to.
//!
//! The path: [`Flags`] → [`Subject`] (problem, GPU, plan) → program → [`machine_code`], simulator → [`report`]. None of
//! it needs a GPU.

pub mod machine_code;
mod report;
mod subject;

use clap::Args;
use flashcore::DType;
use flashcore_kernels::{Misfit, PlanError};
use flashcore_tile::BuildError;

use self::{
    report::{InspectReport, KernelList},
    subject::Subject,
};
use crate::{
    error::{CliError, Verdict},
    flags::{AttentionFlags, TensorFlags},
    gpu_flags::GpuFlags,
    output::Output,
    table_flags::TableFlags,
};

const EXAMPLES: &str = "\
Examples:
  flashcore inspect --shape 4x16x4096x128 --causal
  flashcore inspect --shape 1x8x512x64 --gpu sm_86 --simulate
  flashcore inspect --shape 4x16x4096x128 --ptx > forward.ptx
  flashcore inspect --list

Registers, spills and occupancy need a ptxas (pip install nvidia-cuda-nvcc) or a GPU; --sass needs nvdisasm.";

/// Show which GPU kernel computes a problem, why, and what it compiles to
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// A kernel of the covering set, by name, instead of a problem
    #[arg(conflicts_with_all = TensorFlags::NAMES, conflicts_with = "gpu")]
    kernel: Option<String>,
    #[command(flatten)]
    tensors: TensorFlags,
    /// Element type: f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f16", help_heading = "Random tensors")]
    dtype: DType,
    #[command(flatten)]
    attention: AttentionFlags,
    #[command(flatten)]
    gpu: GpuFlags,
    #[command(flatten)]
    table: TableFlags,
    /// The kernel that runs on every GPU even where a more special one would be chosen
    #[arg(long, conflicts_with_all = ["kernel", "table", "list"], help_heading = "Which GPU")]
    general: bool,
    /// List the kernels of the covering set
    #[arg(long, help_heading = "What to show")]
    list: bool,
    /// Print the PTX text and nothing else; with --json, add it
    #[arg(long, help_heading = "What to show")]
    ptx: bool,
    /// Print the machine code and nothing else; with --json, add it
    #[arg(long, help_heading = "What to show", conflicts_with = "ptx")]
    sass: bool,
    /// Run a small version of the problem in the simulator: counts, and findings if there are any
    #[arg(long, help_heading = "What to show")]
    simulate: bool,
}

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum InspectFailure {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Tile(#[from] Misfit),
    #[error("no kernel of the covering set is called `{0}`; `flashcore inspect --list` names them")]
    NoKernel(String),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(
        "neither a ptxas nor a GPU was found: pip install nvidia-cuda-nvcc, or name one in FLASHCORE_PTXAS"
    )]
    NoCompiler,
    #[error("FLASHCORE_CACHE is off, so that nothing would be kept; unset it to warm the cache")]
    CacheOff,
    #[error("nvdisasm was not found: install the CUDA toolkit, or name one in FLASHCORE_NVDISASM")]
    NoDisassembler,
    #[error(transparent)]
    Cuda(#[from] flashcore_cuda::Error),
}

/// Looks and tells.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    if flags.list {
        output.show(&KernelList { kernels: subject::names() })?;
        return Ok(Verdict::Pass);
    }
    let subject = Subject::find(flags)?;
    let program = subject.kernel().program().map_err(InspectFailure::from)?;
    if flags.ptx && !output.is_json() {
        output.raw(program.text())?;
        return Ok(Verdict::Pass);
    }
    let built = machine_code::build(&subject, &program);
    let sass = flags.sass.then(|| built.as_ref().ok().map(|(_, cubin)| machine_code::sass(cubin))).flatten();
    let sass = sass.transpose()?;
    if let (true, false) = (flags.sass, output.is_json()) {
        let text = sass.map(Ok).unwrap_or_else(|| built.map(|_| String::new()))?;
        output.raw(&text)?;
        return Ok(Verdict::Pass);
    }
    let simulated = if flags.simulate { subject.simulate()? } else { None };
    let mut report = InspectReport::new(&subject, &program);
    report.add_build(built.map(|(build, _)| build));
    report.add_simulation(&subject, simulated.as_ref());
    report.add_texts(flags.ptx.then(|| program.text().to_owned()), sass);
    output.show(&report)?;
    Ok(Verdict::from_bool(simulated.is_none_or(|outcome| outcome.is_clean())))
}
