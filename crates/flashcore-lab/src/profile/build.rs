//! What a kernel's build says: registers, spills, shared memory, how many fit on a multiprocessor.
//!
//! Works without a GPU: the plan is made for a given one, and a ptxas that is found assembles it.

use flashcore::cuda::driver::{
    Arch, BuildReport, Compiler,
    toolchain::{Search, Tool},
};
use flashcore_kernels::{Gpu, Plan, Tile};
use flashcore_ptx::launch::LaunchSpec;
use serde::Serialize;

use super::occupancy::{Occupancy, Usage};
use crate::error::LabError;

/// What is known about a kernel before it runs.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Build {
    /// The kernel.
    pub kernel: String,
    /// How it cuts the work.
    pub tile: Tile,
    /// Why this one.
    pub why: String,
    /// What assembled it; missing where nothing could.
    pub compiler: Option<String>,
    /// Registers of a thread at entry.
    pub registers: Option<u32>,
    /// Bytes spilled to memory and read back.
    pub spilled: Option<u32>,
    /// Warnings of the assembler.
    pub warnings: Vec<String>,
    /// Threads of a CTA.
    pub threads: u32,
    /// Shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// CTAs that are launched.
    pub ctas: u64,
    /// CTAs that fit on a multiprocessor.
    pub ctas_per_sm: Option<u32>,
    /// Share of a multiprocessor's warps that are in use.
    pub occupancy: Option<f64>,
}

impl Build {
    /// The kernel of `plan` on `gpu`, assembled by what is found.
    pub fn of(gpu: &Gpu, plan: &Plan) -> Result<Self, LabError> {
        let program = plan.kernel().program().map_err(|e| failed(&e))?;
        let spec = plan.launches()[0].spec(&program);
        let report = assemble(program.text(), plan);
        Ok(Self::describe(plan, spec.as_ref(), gpu, report))
    }

    fn describe(
        plan: &Plan,
        spec: Option<&LaunchSpec>,
        gpu: &Gpu,
        report: Result<BuildReport, String>,
    ) -> Self {
        let kernel = plan.kernel().name();
        let found = report.as_ref().ok().and_then(|report| report.kernels.first());
        let product = |sizes: [u32; 3]| sizes.into_iter().map(u64::from).product::<u64>();
        let threads = spec.map_or(0, |spec| product(spec.block) as u32);
        let shared_bytes = spec.map_or(0, |spec| spec.shared_bytes);
        let registers = found.map(|found| found.registers);
        let usage = |registers| Usage { threads, registers, shared: shared_bytes };
        let fitting = registers.filter(|_| threads > 0).map(|r| Occupancy::of(usage(r), gpu.capability));
        Self {
            kernel,
            tile: plan.kernel().tile(),
            why: plan.row().unwrap_or(plan.why()).to_owned(),
            compiler: report.as_ref().ok().map(|report| report.compiler.clone()),
            registers,
            spilled: found.map(|found| found.spill_stores + found.spill_loads),
            warnings: report.map_or_else(|reason| vec![reason], |report| report.warnings),
            threads,
            shared_bytes,
            ctas: spec.map_or(0, |spec| product(spec.grid)),
            ctas_per_sm: fitting.map(|fitting| fitting.ctas_per_sm),
            occupancy: fitting.map(|fitting| fitting.share(gpu.capability)),
        }
    }
}

fn failed(error: &dyn std::fmt::Display) -> LabError {
    LabError::Failed { arm: "the kernel's build".to_owned(), reason: error.to_string() }
}

/// Assembles without a GPU; `Err` says why nothing could.
fn assemble(ptx: &str, plan: &Plan) -> Result<BuildReport, String> {
    let found = Search::from_env(Tool::Ptxas).find(Tool::Ptxas).map_err(|e| e.to_string())?;
    if found.is_none() {
        return Err(
            "no ptxas, so registers and spills are not known: pip install nvidia-cuda-nvcc".to_owned()
        );
    }
    let compiler = Compiler::from_env().map_err(|e| e.to_string())?;
    let arch = Arch::from(plan.kernel().target());
    let cubin = compiler.compile_offline(ptx, arch).map_err(|e| e.to_string())?;
    Ok(cubin.report().clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::cuda::driver::KernelReport;
    use flashcore_core::{DType, Mask};
    use flashcore_kernels::{ALLOCATED_ALIGNMENT, plan};

    use crate::task::Task;

    /// A kernel of 128 threads with few registers, as a compiler might report it.
    fn build(gpu: &Gpu) -> Build {
        let task = Task::square(DType::F16, [1, 8, 64, 64], Mask::NONE).unwrap();
        let plan = plan(task.problem(), gpu, ALLOCATED_ALIGNMENT).unwrap();
        let program = plan.kernel().program().unwrap();
        let spec = plan.launches()[0].spec(&program).unwrap();
        let spec = LaunchSpec { block: [128, 1, 1], shared_bytes: 0, ..spec };
        let kernels = vec![KernelReport { registers: 32, ..KernelReport::default() }];
        Build::describe(&plan, Some(&spec), gpu, Ok(BuildReport { kernels, ..BuildReport::default() }))
    }

    #[test]
    fn what_fits_depends_on_the_gpu() {
        for (gpu, ctas) in [(Gpu::HOPPER, 16), (Gpu::AMPERE, 16), (Gpu::CONSUMER, 12)] {
            let build = build(&gpu);
            assert_eq!((build.ctas_per_sm, build.occupancy), (Some(ctas), Some(1.0)), "{build:?}");
        }
    }
}
