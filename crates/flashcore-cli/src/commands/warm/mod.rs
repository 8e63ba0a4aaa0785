//! `flashcore warm`: compiles kernels into the cache before anybody waits for them.
//!
//! The path: [`Flags`] → problems → distinct kernels ([`wanted`]) → compiler and cache → [`WarmReport`].

mod usual;

use std::time::Instant;

use clap::Args;
use flashcore::{DType, Problem};
use flashcore_cuda::{Compiler, Cubin, cache::Cache};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, KernelConfig, plan};
use rayon::prelude::*;
use serde::Serialize;

use super::inspect::{InspectFailure, machine_code::route};
use crate::{
    error::{CliError, Verdict},
    flags::{AttentionFlags, TensorFlags},
    gpu_flags::{Chosen, GpuFlags},
    interrupt,
    output::{Output, Page, Report, Text, Tone},
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore warm --shape 4x16x4096x128 --causal --dtype bf16
  flashcore warm --all
  flashcore warm --all --gpu sm_90        without a GPU, by ptxas, for an H100 with the same ptxas

The cache is per user (FLASHCORE_CACHE_DIR); `flashcore cache ls` lists it.
Exit codes: 0 compiled, 1 some kernel does not compile, 2 could not compile, or was stopped.";

/// Compile kernels ahead of time, so that first calls need not wait
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// The usual head dims, masks and element types instead of one problem
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
    let problems = problems(flags)?;
    let chosen = flags.gpu.choose();
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
    let report = WarmReport {
        stopped: kernels.len() < asked,
        asked,
        gpu: chosen.describe(),
        folder: cache.path().display().to_string(),
        seconds: start.elapsed().as_secs_f64(),
        kernels,
    };
    output.show(&report)?;
    Ok(report.verdict())
}

fn problems(flags: &Flags) -> Result<Vec<Problem>, CliError> {
    if flags.all {
        return Ok(usual::problems()?);
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

/// Everything `warm` tells.
#[derive(Serialize, Debug)]
struct WarmReport {
    /// Whether the user stopped it before all were compiled.
    stopped: bool,
    /// Kernels that were asked for.
    asked: usize,
    gpu: String,
    folder: String,
    seconds: f64,
    kernels: Vec<Warmed>,
}

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
        match built {
            Ok(cubin) => Self {
                route: Some(route(cubin.route())),
                seconds,
                registers: cubin.report().kernel(&kernel).map(|k| k.registers),
                notes: cubin.notes().to_vec(),
                error: None,
                kernel,
            },
            Err(error) => Self {
                kernel,
                route: None,
                seconds,
                registers: None,
                notes: vec![],
                error: Some(error.to_string()),
            },
        }
    }

    fn row(&self) -> Vec<Text> {
        let how = match (&self.error, self.route) {
            (Some(error), _) => Text::new(error, Tone::Bad),
            (None, route) => route.unwrap_or_default().into(),
        };
        vec![self.kernel.as_str().into(), format!("{:.2} s", self.seconds).into(), how]
    }
}

fn compile(config: &KernelConfig, compiler: &Compiler, chosen: &Chosen) -> Result<Cubin, InspectFailure> {
    let program = config.program()?;
    Ok(chosen.compile(compiler, config, program.text())?)
}

impl WarmReport {
    fn verdict(&self) -> Verdict {
        let good = self.kernels.iter().all(|kernel| kernel.error.is_none());
        if self.stopped { Verdict::Stopped } else { Verdict::from_bool(good) }
    }
}

impl Report for WarmReport {
    fn page(&self) -> Page {
        let ready = self.kernels.iter().filter(|kernel| kernel.error.is_none()).count();
        let ready = format!("{ready} of {} kernels in {:.1} s", self.asked, self.seconds);
        let notes = self.kernels.iter().flat_map(|kernel| &kernel.notes);
        let stopped =
            self.stopped.then(|| ("result", Text::new("STOPPED; the same command does the rest", Tone::Bad)));
        let facts = [("gpu", self.gpu.as_str()), ("cache", &self.folder), ("ready", &ready)];
        Page::default()
            .facts(facts.map(|(name, value)| (name, Text::from(value))).into_iter().chain(stopped))
            .table(self.kernels.iter().map(Warmed::row))
            .table(notes.map(|note| vec![Text::new(note, Tone::Faint)]))
    }
}
