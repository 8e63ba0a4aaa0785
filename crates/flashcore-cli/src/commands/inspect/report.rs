//! The answer of `inspect`.

use flashcore::Problem;
use flashcore_kernels::AnyProgram;
use flashcore_kernels::slots;
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};
use flashcore_sim::Outcome;
use serde::Serialize;

use super::{InspectFailure, machine_code::Build, subject::Subject};
use crate::{
    output::{Page, Report, Text, Tone},
    simulation::Simulated,
};

/// Everything `inspect` tells.
#[derive(Serialize, Debug)]
pub struct InspectReport {
    problem: String,
    gpu: String,
    kernel: String,
    target: String,
    why: &'static str,
    /// The row of a table of measured tiles that decided.
    row: Option<String>,
    passed_over: Vec<String>,
    /// `None` where there is nothing to compute.
    launch: Option<LaunchReport>,
    parameters: Vec<Parameter>,
    instructions: usize,
    build: Option<Build>,
    /// Why there is no build.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_built: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    simulation: Option<SimulationReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ptx: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sass: Option<String>,
}

/// The answer of `inspect --list`.
#[derive(Serialize, Debug)]
pub struct KernelList {
    pub kernels: Vec<String>,
}

impl Report for KernelList {
    fn page(&self) -> Page {
        Page::default().table(self.kernels.iter().map(|name| vec![name.as_str().into()]))
    }
}

#[derive(Serialize, Debug)]
struct LaunchReport {
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared_bytes: u32,
    workspace_bytes: u64,
    dependent: bool,
}

#[derive(Serialize, Debug)]
struct Parameter {
    name: String,
    #[serde(rename = "type")]
    ty: String,
    value: Option<String>,
}

#[derive(Serialize, Debug)]
struct SimulationReport {
    problem: String,
    #[serde(flatten)]
    simulated: Simulated,
}

impl InspectReport {
    /// What is known without building or running anything.
    pub fn new(subject: &Subject, program: &AnyProgram) -> Self {
        let launch = subject.plan.launches()[0].spec(program);
        let kernel = &program.module().kernels[0];
        let values = launch.iter().flat_map(|spec| spec.params.iter().map(|p| Some(value(p))));
        let values = values.chain(std::iter::repeat(None));
        let parameter = |(param, value): (&flashcore_ptx::module::KernelParam, _)| {
            let len = param.len.map_or(String::new(), |len| format!("[{len}]"));
            Parameter { name: param.name.to_string(), ty: format!("{}{len}", param.ty.text()), value }
        };
        Self {
            problem: describe(&subject.problem),
            gpu: subject.chosen.describe(),
            kernel: subject.kernel().name(),
            target: subject.kernel().target().to_string(),
            why: subject.plan.why(),
            row: subject.plan.row().map(str::to_owned),
            passed_over: subject.plan.passed_over().to_vec(),
            parameters: kernel.params.iter().zip(values).map(parameter).collect(),
            instructions: kernel.instructions().count(),
            launch: launch.as_ref().map(LaunchReport::from),
            build: None,
            not_built: None,
            simulation: None,
            ptx: None,
            sass: None,
        }
    }

    /// Adds what a compiler said, or why none was asked.
    pub fn add_build(&mut self, build: Result<Build, InspectFailure>) {
        match build {
            Ok(build) => self.build = Some(build),
            Err(reason) => self.not_built = Some(reason.to_string()),
        }
    }

    /// Adds what the simulator said.
    pub fn add_simulation(&mut self, subject: &Subject, outcome: Option<&Outcome>) {
        let problem = describe(subject.small());
        self.simulation = outcome.map(|o| SimulationReport { problem, simulated: o.into() });
    }

    /// Adds the kernel as text.
    pub fn add_texts(&mut self, ptx: Option<String>, sass: Option<String>) {
        (self.ptx, self.sass) = (ptx, sass);
    }
}

impl From<&LaunchSpec> for LaunchReport {
    fn from(spec: &LaunchSpec) -> Self {
        Self {
            grid: spec.grid,
            block: spec.block,
            cluster: spec.cluster,
            shared_bytes: spec.shared_bytes,
            workspace_bytes: spec.workspace.iter().map(|w| w.bytes).sum(),
            dependent: spec.dependent,
        }
    }
}

fn describe(problem: &Problem) -> String {
    let (q, k) = (problem.q().dims(), problem.k().dims());
    let [b, h, s, d] = q.array();
    let mut text = format!("{b}x{h}x{s}x{d} {}", problem.dtype());
    let others = [(k.heads, h, "kv heads"), (k.seq, s, "keys"), (problem.dim_v(), d, "value dim")];
    for (other, _, name) in others.into_iter().filter(|(other, usual, _)| other != usual) {
        text += &format!(", {other} {name}");
    }
    text + &format!(", mask {}", problem.mask())
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
        (slots::LENGTHS_Q, "lengths of q"),
        (slots::LENGTHS_KV, "lengths of k and v"),
        (slots::TILE_COUNTER, "the tile counter"),
    ];
    let found = names.into_iter().find(|(known, _)| *known == slot);
    found.map_or_else(|| format!("buffer {}", slot.0), |(_, name)| name.to_owned())
}

impl Report for InspectReport {
    fn page(&self) -> Page {
        let mut plan = vec![
            ("problem", Text::from(self.problem.as_str())),
            ("gpu", self.gpu.as_str().into()),
            ("kernel", format!("{} for {}", self.kernel, self.target).into()),
            ("why", self.why.into()),
        ];
        plan.extend(self.row.as_deref().map(|row| ("by", row.into())));
        plan.extend(self.passed_over.iter().map(|reason| ("not", reason.as_str().into())));
        let page = Page::default().facts(plan).facts(self.launch_facts());
        let parameters = self.parameters.iter().map(Parameter::row);
        let page = page.table(parameters).facts(self.build_facts());
        match &self.simulation {
            Some(part) => {
                let head =
                    [("simulated", Text::from(part.problem.as_str())), ("result", part.simulated.verdict())];
                part.simulated.add_to(page.facts(head))
            }
            None => page,
        }
    }
}

impl InspectReport {
    fn launch_facts(&self) -> Vec<(&'static str, Text)> {
        let Some(launch) = &self.launch else { return vec![("launch", "nothing to compute".into())] };
        let text = |[x, y, z]: [u32; 3]| format!("{x} x {y} x {z}");
        let mut facts = vec![
            ("grid", text(launch.grid).into()),
            ("block", text(launch.block).into()),
            ("shared", format!("{} bytes", launch.shared_bytes).into()),
        ];
        if launch.cluster != [1, 1, 1] {
            facts.push(("cluster", text(launch.cluster).into()));
        }
        if launch.workspace_bytes > 0 {
            facts.push(("workspace", format!("{} bytes", launch.workspace_bytes).into()));
        }
        facts
    }

    fn build_facts(&self) -> Vec<(&'static str, Text)> {
        let Some(build) = &self.build else {
            return vec![("not built", self.not_built.as_deref().unwrap_or_default().into())];
        };
        let spilled = build.spill_store_bytes + build.spill_load_bytes + build.stack_bytes;
        let tone = if spilled > 0 { Tone::Bad } else { Tone::Plain };
        let spills = format!(
            "{} bytes stored, {} loaded, stack {}",
            build.spill_store_bytes, build.spill_load_bytes, build.stack_bytes
        );
        let occupancy = build.occupancy;
        let fit = format!(
            "{} on an SM, that is {} warps, limited by {}",
            occupancy.ctas_per_sm,
            occupancy.warps_per_sm,
            occupancy.limited_by.name()
        );
        let mut facts = vec![
            ("built by", format!("{} ({}, {:.2} s)", build.compiler, build.route, build.seconds).into()),
            ("registers", format!("{} of {} at entry", build.registers, build.register_budget).into()),
            ("spills", Text::new(spills, tone)),
            ("occupancy", fit.into()),
            ("ptx", format!("{} instructions", self.instructions).into()),
        ];
        facts.extend(build.warnings.iter().map(|warning| ("warning", Text::new(warning, Tone::Bad))));
        facts
    }
}

impl Parameter {
    fn row(&self) -> Vec<Text> {
        let value = self.value.as_deref().unwrap_or_default();
        vec![Text::new(&self.name, Tone::Faint), self.ty.as_str().into(), value.into()]
    }
}
