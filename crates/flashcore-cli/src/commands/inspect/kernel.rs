//! The kernel of a problem on a GPU: how it was planned, how it is launched, what its build says. `inspect` and `profile`
//! show it.

use flashcore::Problem;
use flashcore_cuda::{
    Compiler, Cubin, Route,
    cache::Cache,
    disassemble,
    toolchain::{Search, Tool},
};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, AnyProgram, Choice, KernelConfig, Plan, covering_set, slots};
use flashcore_lab::profile::occupancy::{Occupancy, Usage};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};
use serde::Serialize;
use serde_json::{Value, json};

use super::InspectFailure;
use crate::{
    gpu_flags::Chosen,
    output::{Page, Text, bad, faint},
    values::describe,
};

/// A problem, where it would run, and how.
pub struct Subject {
    problem: Problem,
    pub chosen: Chosen,
    plan: Plan,
    pub program: AnyProgram,
    launch: Option<LaunchSpec>,
}

/// A kernel, built.
#[derive(Serialize, Debug)]
pub struct Build {
    compiler: String,
    route: &'static str,
    seconds: f64,
    registers: u32,
    /// Most registers of a thread that the kernel's config allows at entry.
    register_budget: u32,
    stack_bytes: u32,
    spill_store_bytes: u32,
    spill_load_bytes: u32,
    barriers: u32,
    #[serde(flatten)]
    occupancy: Occupancy,
    warnings: Vec<String>,
}

/// How machine code was obtained, in one word.
pub const fn route(route: Route) -> &'static str {
    match route {
        Route::Cache => "cache",
        Route::Ptxas => "ptxas",
        Route::Jit => "driver",
    }
}

/// Names of the kernels of the covering set.
pub fn names() -> Vec<String> {
    let members = covering_set().unwrap_or_default();
    members.iter().filter_map(|member| Some(member.plan().ok()?.kernel().name())).collect()
}

impl Subject {
    /// A problem on a GPU, whose kernel is up to `choice`.
    pub fn planned(problem: Problem, chosen: Chosen, choice: &Choice) -> Result<Self, InspectFailure> {
        let plan = choice.plan(&problem, &chosen.gpu, ALLOCATED_ALIGNMENT)?;
        Self::new(problem, chosen, plan)
    }

    /// A kernel of the covering set.
    pub fn named(name: &str) -> Result<Self, InspectFailure> {
        for member in covering_set().unwrap_or_default() {
            let plan = member.plan()?;
            if plan.kernel().name() == name {
                return Self::new(member.problem, Chosen::assumed(member.gpu), plan);
            }
        }
        Err(InspectFailure::NoKernel(name.to_owned()))
    }

    fn new(problem: Problem, chosen: Chosen, plan: Plan) -> Result<Self, InspectFailure> {
        let program = plan.kernel().program()?;
        let launch = plan.launches()[0].spec(&program);
        Ok(Self { problem, chosen, plan, program, launch })
    }

    /// The kernel.
    pub fn kernel(&self) -> &KernelConfig {
        self.plan.kernel()
    }

    /// Builds the kernel.
    pub fn build(&self) -> Result<(Build, Cubin), InspectFailure> {
        let compiler = Compiler::from_env()?;
        if compiler.ptxas.is_none() && self.chosen.device.is_none() {
            return Err(InspectFailure::NoCompiler);
        }
        let program = &self.program;
        let cubin = self.chosen.compile(&compiler, self.kernel(), program.text())?;
        let report = cubin.report();
        let kernel = report.kernel(program.entry().as_str()).cloned().unwrap_or_default();
        let shared = program.shared_bytes() + kernel.shared;
        let usage = Usage { threads: program.threads(), registers: kernel.registers, shared };
        let build = Build {
            compiler: report.compiler.clone(),
            route: route(cubin.route()),
            seconds: report.seconds,
            registers: kernel.registers,
            register_budget: self.kernel().register_budget(),
            stack_bytes: kernel.stack,
            spill_store_bytes: kernel.spill_stores,
            spill_load_bytes: kernel.spill_loads,
            barriers: kernel.barriers,
            occupancy: Occupancy::of(usage, self.chosen.gpu.capability),
            warnings: report.warnings.clone(),
        };
        Ok((build, cubin))
    }

    /// Name, type and value of each parameter; the value is missing where nothing is launched.
    fn parameters(&self) -> Vec<(String, String, Option<String>)> {
        let values = self.launch.iter().flat_map(|spec| spec.params.iter().map(|p| Some(value(p))));
        let values = values.chain(std::iter::repeat(None));
        let params = self.program.module().kernels[0].params.iter();
        let one = |(param, value): (&flashcore_ptx::module::KernelParam, _)| {
            let len = param.len.map_or(String::new(), |len| format!("[{len}]"));
            (param.name.to_string(), format!("{}{len}", param.ty.text()), value)
        };
        params.zip(values).map(one).collect()
    }

    fn instructions(&self) -> usize {
        self.program.module().kernels[0].instructions().count()
    }

    /// Everything that is known, with what building came to.
    pub fn json(&self, build: Result<&Build, &InspectFailure>) -> Value {
        let launch = self.launch.as_ref().map(|spec| {
            json!({
                "grid": spec.grid, "block": spec.block, "cluster": spec.cluster, "shared_bytes": spec.shared_bytes,
                "workspace_bytes": spec.workspace.iter().map(|w| w.bytes).sum::<u64>(), "dependent": spec.dependent,
            })
        });
        let parameter = |(name, ty, value)| json!({ "name": name, "type": ty, "value": value });
        json!({
            "problem": describe(&self.problem), "gpu": self.chosen.describe(), "kernel": self.kernel().name(),
            "target": self.kernel().target().to_string(), "why": self.plan.why(), "row": self.plan.row(),
            "passed_over": self.plan.passed_over(), "launch": launch,
            "parameters": self.parameters().into_iter().map(parameter).collect::<Vec<_>>(),
            "instructions": self.instructions(),
            "build": build.ok(), "not_built": build.err().map(ToString::to_string),
        })
    }

    /// The same for people.
    pub fn add_to(&self, page: Page, build: Result<&Build, &InspectFailure>) -> Page {
        let mut facts = vec![
            ("problem", Text::from(describe(&self.problem))),
            ("gpu", self.chosen.describe().into()),
            ("kernel", format!("{} for {}", self.kernel().name(), self.kernel().target()).into()),
            ("why", self.plan.why().into()),
        ];
        facts.extend(self.plan.row().map(|row| ("by", row.into())));
        facts.extend(self.plan.passed_over().iter().map(|reason| ("not", reason.as_str().into())));
        let parameter = |(name, ty, value): (String, String, Option<String>)| {
            vec![faint(name), ty.into(), value.unwrap_or_default().into()]
        };
        let page = page.facts(facts).facts(self.launch_facts());
        let page = page.table(self.parameters().into_iter().map(parameter));
        match build {
            Ok(build) => page.facts(build.facts(self.instructions())),
            Err(reason) => page.facts([("not built", reason.to_string())]),
        }
    }

    fn launch_facts(&self) -> Vec<(&'static str, String)> {
        let Some(spec) = &self.launch else { return vec![("launch", "nothing to compute".to_owned())] };
        let text = |[x, y, z]: [u32; 3]| format!("{x} x {y} x {z}");
        let workspace: u64 = spec.workspace.iter().map(|w| w.bytes).sum();
        let mut facts = vec![
            ("grid", text(spec.grid)),
            ("block", text(spec.block)),
            ("shared", format!("{} bytes", spec.shared_bytes)),
        ];
        facts.extend((spec.cluster != [1, 1, 1]).then(|| ("cluster", text(spec.cluster))));
        facts.extend((workspace > 0).then(|| ("workspace", format!("{workspace} bytes"))));
        facts
    }
}

impl Build {
    fn facts(&self, instructions: usize) -> Vec<(&'static str, Text)> {
        let Self { registers, register_budget, stack_bytes, spill_store_bytes, spill_load_bytes, .. } = self;
        let Occupancy { ctas_per_sm, warps_per_sm, limited_by } = self.occupancy;
        let spills =
            format!("{spill_store_bytes} bytes stored, {spill_load_bytes} loaded, stack {stack_bytes}");
        let spilled = spill_store_bytes + spill_load_bytes + stack_bytes > 0;
        let fit = format!("{ctas_per_sm} on an SM, that is {warps_per_sm} warps, limited by {limited_by}");
        let mut facts = vec![
            ("built by", format!("{} ({}, {:.2} s)", self.compiler, self.route, self.seconds).into()),
            ("registers", format!("{registers} of {register_budget} at entry").into()),
            ("spills", if spilled { bad(spills) } else { spills.into() }),
            ("occupancy", fit.into()),
            ("ptx", format!("{instructions} instructions").into()),
        ];
        facts.extend(self.warnings.iter().map(|warning| ("warning", bad(warning))));
        facts
    }
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

fn value(param: &Param) -> String {
    match param {
        Param::U32(value) => value.to_string(),
        Param::U64(value) => value.to_string(),
        Param::F32(value) => value.to_string(),
        Param::Buffer(slot) => format!("address of {}", slot_name(*slot)),
        Param::TensorMap(map) => {
            format!("map of {}: {:?}, box {:?}", slot_name(map.slot), map.dims, map.box_dims)
        }
        other => format!("{other:?}"),
    }
}

fn slot_name(slot: Slot) -> String {
    let names = [
        (slots::Q, "q"),
        (slots::K, "k"),
        (slots::V, "v"),
        (slots::OUT, "out"),
        (slots::LSE, "lse"),
        (slots::SINKS, "sinks"),
        (slots::BIAS, "bias"),
        (slots::SEED, "seed"),
        (slots::LENGTHS_Q, "lengths of q"),
        (slots::LENGTHS_KV, "lengths of k and v"),
        (slots::TILE_COUNTER, "the tile counter"),
    ];
    let found = names.into_iter().find(|(known, _)| *known == slot);
    found.map_or_else(|| format!("buffer {}", slot.0), |(_, name)| name.to_owned())
}
