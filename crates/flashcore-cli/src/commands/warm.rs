//! `flashcore warm`: compiles kernels into the cache before anybody waits for them.
//!
//! The path: [`Flags`] → problems → distinct kernels ([`wanted`]) → compiler and cache → answer.

use std::time::Instant;

use clap::Args;
use flashcore::{DType, Dims, Layout, Mask, Problem, ProblemError};
use flashcore_core::Spec;
use flashcore_cuda::{Compiler, Cubin, cache::Cache};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Gpu, KernelConfig, plan};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::json;

use super::inspect::{InspectFailure, kernel::route};
use crate::{
    error::{CliError, Verdict},
    flags::{AttentionFlags, TensorFlags},
    gpu_flags::{Chosen, GpuFlags},
    interrupt,
    output::{Output, Page, Text, bad, faint},
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore warm --shape 4x16x4096x128 --causal --dtype bf16
  flashcore warm --all
  flashcore warm --all --gpu sm_90        without a GPU: for an H100 with the same ptxas

The cache is per user (FLASHCORE_CACHE_DIR); `flashcore cache ls` lists it.
Exit codes: 0 compiled, 1 a kernel failed to compile, 2 could not compile or was stopped.";

/// Compile kernels ahead of time, so that first calls do not wait
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Compile for the usual head dims, masks and element types instead of one problem
    #[arg(long, conflicts_with_all = TensorFlags::NAMES, conflicts_with = "dtype")]
    all: bool,
    #[command(flatten)]
    tensors: TensorFlags,
    /// Element type: f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f16", help_heading = "Random tensors")]
    dtype: DType,
    #[command(flatten)]
    attention: AttentionFlags,
    #[command(flatten)]
    gpu: GpuFlags,
}

/// Compiles what was asked for and tells how long each kernel took.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let chosen = flags.gpu.choose();
    let problems = problems(flags, &chosen.gpu)?;
    let kernels = wanted(&problems, &chosen)?;
    let compiler = Compiler::from_env().map_err(InspectFailure::from)?;
    // Opened here where it cannot be used, to say why.
    let cache = match &compiler.cache {
        Some(cache) => cache.clone(),
        None if Cache::is_off() => return Err(InspectFailure::CacheOff.into()),
        None => Cache::open_default()?,
    };
    if compiler.ptxas.is_none() && chosen.device.is_none() {
        return Err(InspectFailure::NoCompiler.into());
    }
    let compiler = Compiler { cache: Some(cache.clone()), ..compiler };
    let start = Instant::now();
    let (asked, kernels) = (kernels.len(), compile_all(&kernels, &compiler, &chosen, output));
    let (stopped, seconds) = (kernels.len() < asked, start.elapsed().as_secs_f64());
    let (gpu, folder) = (chosen.describe(), cache.path().display().to_string());
    let json = json!({
        "stopped": stopped, "asked": asked, "gpu": gpu, "folder": folder, "seconds": seconds, "kernels": kernels,
    });
    let ready = kernels.iter().filter(|kernel| kernel.error.is_none()).count();
    output.answer(&json, || {
        let ready = format!("{ready} of {asked} kernels in {seconds:.1} s");
        let facts = [("gpu", Text::from(gpu)), ("cache", folder.into()), ("ready", ready.into())];
        let stop = stopped.then(|| ("result", bad("STOPPED; run the same command to compile the rest")));
        let notes = kernels.iter().flat_map(|kernel| kernel.notes.iter().map(faint));
        Page::default()
            .facts(facts.into_iter().chain(stop))
            .table(kernels.iter().map(Warmed::row))
            .lines(notes)
    })?;
    Ok(if stopped { Verdict::Stopped } else { Verdict::from_bool(ready == kernels.len()) })
}

fn problems(flags: &Flags, gpu: &Gpu) -> Result<Vec<Problem>, CliError> {
    if flags.all {
        return Ok(usual_problems(gpu)?);
    }
    Ok(vec![flags.attention.problem(flags.dtype, flags.tensors.dims())?])
}

/// The distinct kernels of the problems, in their order.
fn wanted(problems: &[Problem], chosen: &Chosen) -> Result<Vec<KernelConfig>, InspectFailure> {
    let mut kernels = Vec::new();
    for problem in problems {
        let config = *plan(problem, &chosen.gpu, ALLOCATED_ALIGNMENT)?.kernel();
        if !kernels.contains(&config) {
            kernels.push(config);
        }
    }
    Ok(kernels)
}

/// Compiles side by side where ptxas does it, one after another where the driver does, until the user stops it.
fn compile_all(
    kernels: &[KernelConfig],
    compiler: &Compiler,
    chosen: &Chosen,
    output: &Output,
) -> Vec<Warmed> {
    let progress = Progress::stoppable(kernels.len(), output);
    let compile = |config: &KernelConfig| {
        if interrupt::stopped() {
            return None;
        }
        progress.say(config.name());
        let warmed = Warmed::new(config, compiler, chosen);
        progress.step();
        Some(warmed)
    };
    let mut warmed: Vec<Warmed> = if compiler.ptxas.is_some() {
        kernels.par_iter().filter_map(compile).collect()
    } else {
        kernels.iter().filter_map(compile).collect()
    };
    // Ctrl-C ends compilers too, and what they leave undone then says nothing about a kernel.
    warmed.retain(|kernel| kernel.error.is_none() || !interrupt::stopped());
    warmed
}

/// What became of a kernel.
#[derive(Serialize, Debug)]
struct Warmed {
    kernel: String,
    /// Where the machine code came from; `cache` if it was there already.
    route: Option<&'static str>,
    seconds: f64,
    registers: Option<u32>,
    /// What went wrong on the way without harm.
    notes: Vec<String>,
    error: Option<String>,
}

impl Warmed {
    fn new(config: &KernelConfig, compiler: &Compiler, chosen: &Chosen) -> Self {
        let start = Instant::now();
        let built = compile(config, compiler, chosen);
        let (kernel, seconds) = (config.name(), start.elapsed().as_secs_f64());
        let cubin = built.as_ref().ok();
        Self {
            route: cubin.map(|cubin| route(cubin.route())),
            seconds,
            registers: cubin.and_then(|cubin| Some(cubin.report().kernel(&kernel)?.registers)),
            notes: cubin.map_or(Vec::new(), |cubin| cubin.notes().to_vec()),
            error: built.as_ref().err().map(ToString::to_string),
            kernel,
        }
    }

    fn row(&self) -> Vec<Text> {
        let how = self.error.as_ref().map_or(self.route.unwrap_or_default().into(), bad);
        vec![self.kernel.as_str().into(), format!("{:.2} s", self.seconds).into(), how]
    }
}

fn compile(config: &KernelConfig, compiler: &Compiler, chosen: &Chosen) -> Result<Cubin, InspectFailure> {
    let program = config.program()?;
    Ok(chosen.compile(compiler, config, program.text())?)
}

/// Features of queries and keys, and of values.
const HEADS: [(usize, usize); 5] = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
/// Batch, heads and rows: enough to fill a GPU, and too few for that.
const SIZES: [(usize, usize, usize); 2] = [(4, 16, 4096), (1, 8, 512)];
/// Keys that a window shows before each query.
const WINDOW: u32 = 1024;

/// Problems whose kernels most programs need: head dims, masks and element types, long and short.
fn usual_problems(gpu: &Gpu) -> Result<Vec<Problem>, ProblemError> {
    let dtypes: &[_] = if gpu.capability < (8, 0) { &[DType::F16] } else { &[DType::F16, DType::BF16] };
    let mut problems = Vec::new();
    for (qk, v) in HEADS {
        for (batch, heads, seq) in SIZES {
            for &dtype in dtypes {
                for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(WINDOW, 0)] {
                    let layout = |dim| Layout::bhsd(Dims::new(batch, heads, seq, dim));
                    problems.push(
                        Spec { mask, ..Spec::new(dtype, layout(qk)?, layout(qk)?, layout(v)?) }.parse()?,
                    );
                }
            }
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Every problem has a kernel on every kind of GPU, and few of them share one.
    #[test]
    fn all_of_them_have_kernels() {
        for gpu in [Gpu::TURING, Gpu::AMPERE, Gpu::CONSUMER, Gpu::HOPPER, Gpu::BLACKWELL] {
            let problems = usual_problems(&gpu).unwrap();
            let distinct: HashSet<_> =
                problems.iter().map(|p| *plan(p, &gpu, 256).unwrap().kernel()).collect();
            assert!(distinct.len() * 2 >= problems.len(), "{} kernels for {gpu:?}", distinct.len());
        }
    }
}
