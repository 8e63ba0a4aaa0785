//! The machine code of a kernel: what its build reports, how many fit on a multiprocessor, what it reads like.

use flashcore_cuda::{
    Compiler, Cubin, Route,
    cache::Cache,
    disassemble,
    toolchain::{Search, Tool},
};
use flashcore_kernels::AnyProgram;
use flashcore_lab::profile::occupancy::{Occupancy, Usage};
use serde::Serialize;

use super::{InspectFailure, subject::Subject};

/// A kernel, built.
#[derive(Serialize, Debug)]
pub struct Build {
    pub compiler: String,
    pub route: &'static str,
    pub seconds: f64,
    pub registers: u32,
    /// Most registers of a thread that the kernel's config allows at entry.
    pub register_budget: u32,
    pub stack_bytes: u32,
    pub spill_store_bytes: u32,
    pub spill_load_bytes: u32,
    pub barriers: u32,
    #[serde(flatten)]
    pub occupancy: Occupancy,
    pub warnings: Vec<String>,
}

/// How machine code was obtained, in one word.
pub const fn route(route: Route) -> &'static str {
    match route {
        Route::Cache => "cache",
        Route::Ptxas => "ptxas",
        Route::Jit => "driver",
    }
}

/// Builds the subject's kernel.
pub fn build(subject: &Subject, program: &AnyProgram) -> Result<(Build, Cubin), InspectFailure> {
    let compiler = Compiler::from_env()?;
    if compiler.ptxas.is_none() && subject.chosen.device.is_none() {
        return Err(InspectFailure::NoCompiler);
    }
    let cubin = subject.chosen.compile(&compiler, subject.kernel(), program.text())?;
    let report = cubin.report();
    let kernel = report.kernel(program.entry().as_str()).cloned().unwrap_or_default();
    let shared = program.shared_bytes() + kernel.shared;
    let usage = Usage { threads: program.threads(), registers: kernel.registers, shared };
    let build = Build {
        compiler: report.compiler.clone(),
        route: route(cubin.route()),
        seconds: report.seconds,
        registers: kernel.registers,
        register_budget: subject.kernel().register_budget(),
        stack_bytes: kernel.stack,
        spill_store_bytes: kernel.spill_stores,
        spill_load_bytes: kernel.spill_loads,
        barriers: kernel.barriers,
        occupancy: Occupancy::of(usage, subject.chosen.gpu.capability),
        warnings: report.warnings.clone(),
    };
    Ok((build, cubin))
}

/// Machine code as text.
pub fn sass(cubin: &Cubin) -> Result<String, InspectFailure> {
    let found = Search::from_env(Tool::Nvdisasm).find(Tool::Nvdisasm)?;
    let nvdisasm = found.ok_or(InspectFailure::NoDisassembler)?;
    // The cache's folder belongs to the user alone; without one, the usual place for such files.
    let scratch =
        Cache::open_default().map_or_else(|_| std::env::temp_dir(), |cache| cache.path().to_owned());
    Ok(disassemble(&nvdisasm, cubin, &scratch)?)
}
