//! `flashcore inspect`: which GPU kernel a problem gets and why, how it is launched, what it compiles to.
//!
//! The path: [`Flags`] → [`Subject`] (problem, GPU, plan, program) → build → answer. None of it needs a GPU.

pub mod kernel;

use clap::Args;
use flashcore::DType;
use flashcore_kernels::{Misfit, PlanError};
use flashcore_tile::BuildError;
use serde_json::json;

use self::kernel::Subject;
use crate::{
    error::{CliError, Verdict},
    flags::{AttentionFlags, TensorFlags},
    gpu_flags::GpuFlags,
    output::{Output, Page},
    simulation::merged,
    table_flags::{KernelFlags, TableFlags},
};

const EXAMPLES: &str = "\
Examples:
  flashcore inspect --shape 4x16x4096x128 --causal
  flashcore inspect --shape 1x8x512x64 --gpu sm_86
  flashcore inspect --shape 1x8x512x64 --kernel forward_sm80
  flashcore inspect --shape 4x16x4096x128 --ptx > forward.ptx
  flashcore inspect --list

Only GPU kernels are shown; rows of a table for a CPU are used by `run --backend cpu --table FILE`.
`flashcore profile` also shows hardware counters.
Registers, spills and occupancy need ptxas (pip install nvidia-cuda-nvcc) or a GPU; --sass needs
nvdisasm.";

/// Show which GPU kernel computes a problem, why, and what it compiles to
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Name of a kernel of the covering set, instead of a problem
    #[arg(conflicts_with_all = TensorFlags::NAMES, conflicts_with_all = ["gpu", "general", "family"])]
    kernel: Option<String>,
    #[command(flatten)]
    tensors: TensorFlags,
    /// Element type: f16, bf16 or f32
    #[arg(long, value_name = "TYPE", default_value = "f16", help_heading = "Random tensors")]
    dtype: DType,
    #[command(flatten)]
    attention: AttentionFlags,
    #[command(flatten)]
    gpu: GpuFlags,
    #[command(flatten)]
    table: TableFlags,
    #[command(flatten)]
    family: KernelFlags,
    /// List the kernels of the covering set
    #[arg(long, help_heading = "What to show")]
    list: bool,
    /// Print only the PTX; with --json, include it
    #[arg(long, help_heading = "What to show")]
    ptx: bool,
    /// Print only the machine code (SASS); with --json, include it
    #[arg(long, help_heading = "What to show", conflicts_with = "ptx")]
    sass: bool,
}

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum InspectFailure {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Tile(#[from] Misfit),
    #[error("no kernel of the covering set is called `{0}`; list them with `flashcore inspect --list`")]
    NoKernel(String),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(
        "neither ptxas nor a GPU was found; run pip install nvidia-cuda-nvcc, or set FLASHCORE_PTXAS to a ptxas"
    )]
    NoCompiler,
    #[error("FLASHCORE_CACHE is off, so nothing would be kept; unset it to warm the cache")]
    CacheOff,
    #[error("nvdisasm was not found; install the CUDA toolkit, or set FLASHCORE_NVDISASM to one")]
    NoDisassembler,
    #[error(transparent)]
    Cuda(#[from] flashcore_cuda::Error),
}

/// Looks and tells.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    if flags.list {
        return listed(&kernel::names(), output);
    }
    let subject = flags.subject()?;
    if flags.ptx && !output.is_json() {
        output.raw(subject.program.text())?;
        return Ok(Verdict::Pass);
    }
    let built = subject.build();
    let mut texts = json!({});
    if flags.sass {
        let sass = built.as_ref().ok().map(|(_, cubin)| kernel::sass(cubin)).transpose()?;
        if !output.is_json() {
            output.raw(&sass.map_or_else(|| built.map(|_| String::new()), Ok)?)?;
            return Ok(Verdict::Pass);
        }
        texts = json!({ "sass": sass });
    }
    if flags.ptx {
        texts = json!({ "ptx": subject.program.text() });
    }
    let build = built.as_ref().map(|(build, _)| build);
    output.answer(&merged(subject.json(build), texts), || subject.add_to(Page::default(), build))?;
    Ok(Verdict::Pass)
}

/// Names for people and for `grep`: one a line, never broken.
fn listed(names: &[String], output: &Output) -> Result<Verdict, CliError> {
    match output.is_json() {
        true => output.answer(&json!({ "kernels": names }), Page::default)?,
        false => output.raw(&(names.join("\n") + "\n"))?,
    }
    Ok(Verdict::Pass)
}

impl Flags {
    /// What the flags name.
    fn subject(&self) -> Result<Subject, CliError> {
        if let Some(name) = &self.kernel {
            return Ok(Subject::named(name)?);
        }
        let problem = self.attention.problem(self.dtype, self.tensors.dims())?;
        Ok(Subject::planned(problem, self.gpu.choose(), &self.family.choice(&self.table)?)?)
    }
}
