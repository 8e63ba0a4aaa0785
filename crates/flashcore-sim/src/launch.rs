//! The public launch: buffers in, outcome out. Checks the arguments, lays out memory, runs the machine.

use crate::{
    counters::Counters,
    error::SimError,
    finding::{Finding, Severity},
    geometry::Geometry,
    machine::{Context, Machine},
    memory::GlobalMemory,
    options::Options,
    parts,
    program::Program,
    suspect::{MOST_RUNS, Suspects},
    tensor_map::{MapBytes, TensorMap},
};
use flashcore_ptx::{
    launch::{LaunchSpec, Param, Slot},
    module::{Kernel, Module},
    provenance::Provenance,
};

/// What `cooperative_groups` expects of a grid's own memory: its size and a counter.
const GRID_BYTES: usize = 64;

/// Memory that the caller binds to a slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// The slot that parameters and tensor maps name.
    pub slot: Slot,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Whether the bytes mean something: reading others is a finding.
    pub initialised: bool,
    /// What findings call it; the argument it is, unless something is said here.
    pub name: Option<String>,
}

impl Buffer {
    /// Memory that the kernel may read.
    pub fn input(slot: Slot, bytes: impl Into<Vec<u8>>) -> Self {
        Self { slot, bytes: bytes.into(), initialised: true, name: None }
    }

    /// Memory that the kernel must write before it reads; filled with a pattern that reads as NaN in every format.
    pub fn output(slot: Slot, bytes: usize) -> Self {
        Self { slot, bytes: vec![0xff; bytes], initialised: false, name: None }
    }

    /// The same memory under the name that its owner knows it by.
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The program.
    pub module: &'a Module,
    /// Source lines of its statements, where known.
    pub provenance: Option<&'a Provenance>,
    /// Grid, block, arguments.
    pub spec: &'a LaunchSpec,
    /// Memory for every slot that the spec names; workspace that is missing here is provided.
    pub buffers: Vec<Buffer>,
}

/// What came of a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The buffers, in the order in which they were given, then workspace, then the module's variables if it has any.
    pub buffers: Vec<Buffer>,
    /// What was wrong, in order of appearance.
    pub findings: Vec<Finding>,
    /// What was done.
    pub counters: Counters,
    /// How often each statement of the kernel's body was executed, by warps.
    pub executions: Vec<u64>,
    /// What the kernel printed, warp by warp as they ran.
    pub printed: String,
    /// Whether a finding ended the launch before its time: then the buffers mean nothing.
    pub halted: bool,
}

impl Outcome {
    /// Whether nothing was wrong; notes do not count.
    pub fn is_clean(&self) -> bool {
        self.errors().next().is_none()
    }

    /// The findings that are errors.
    pub fn errors(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.severity() == Severity::Error)
    }

    /// The bytes of a slot.
    pub fn bytes(&self, slot: Slot) -> Option<&[u8]> {
        self.buffers.iter().find(|b| b.slot == slot).map(|b| b.bytes.as_slice())
    }
}

impl Launch<'_> {
    /// The slot of the module's own variables: bound to what the last launch left there, they keep their values.
    pub const MODULE: Slot = Slot(255);

    /// The slot of the barrier of a cooperative grid.
    pub(crate) const GRID: Slot = Slot(254);

    /// Simulates the launch.
    pub fn run(self, options: &Options) -> Result<Outcome, SimError> {
        self.run_while(options, &|| true)
    }

    /// Simulates the launch while `going`, polled several times a second, is true.
    pub fn run_while(
        self,
        options: &Options,
        going: &(dyn Fn() -> bool + Sync),
    ) -> Result<Outcome, SimError> {
        let entry = self.spec.entry.as_str();
        let program = Program::decode(self.module, self.provenance, entry)?;
        let index = self.module.kernels.iter().position(|k| k.name.as_str() == entry).unwrap_or(0);
        let geometry =
            Geometry::new(&program, self.spec, &self.module.kernels[index].directives, self.module.target)?;
        let mut global = GlobalMemory::default();
        let names: Vec<_> = self.buffers.iter().map(|buffer| buffer.name.clone()).collect();
        let kernel = &self.module.kernels[index];
        let slots = place_buffers(&mut global, &program, (self.spec, kernel), self.buffers);
        let params = encode_params(&program, self.module, self.spec, &global)?;
        let provenance = self.provenance;
        let (program, suspects, may_run_again) = (&program, Suspects::new(), true);
        let mut context =
            Context { program, options, geometry, params, provenance, going, suspects, may_run_again };
        let mut outcome = run_until_sure(&mut context, self.module, &global, &slots)?;
        outcome.buffers.iter_mut().zip(names).for_each(|(buffer, name)| buffer.name = name);
        Ok(outcome)
    }
}

/// Runs the launch, and again as long as there are reads of which the last run could not say whether they are faults.
fn run_until_sure(
    context: &mut Context<'_>,
    module: &Module,
    global: &GlobalMemory,
    slots: &[Slot],
) -> Result<Outcome, SimError> {
    let mut runs = 1;
    loop {
        let mut machine = parts::run(context, module, global.copy())?;
        let suspects = machine.take_suspects();
        if suspects.is_empty() {
            if !machine.halted {
                machine.note_unreached();
            }
            return Ok(collect(machine, context.program, slots));
        }
        drop(machine);
        context.suspects.extend(suspects);
        runs += 1;
        context.may_run_again = runs < MOST_RUNS;
    }
}

/// What `CUtensorMap` is aligned to.
const TENSOR_MAP_ALIGN: usize = 64;

/// The argument that a slot is the memory of, counted as in the names that compilers give to parameters.
fn argument(spec: &LaunchSpec, kernel: &Kernel, slot: Slot) -> String {
    fn is_of(param: &Param, slot: Slot) -> bool {
        match param {
            Param::Buffer(of) => *of == slot,
            Param::TensorMap(map) => map.slot == slot,
            Param::Struct(members) => members.iter().any(|member| is_of(member, slot)),
            _ => false,
        }
    }
    let found = spec
        .params
        .iter()
        .position(|param| is_of(param, slot))
        .and_then(|at| Some((at, kernel.params.get(at)?)));
    found
        .map_or_else(|| format!("buffer {}", slot.0), |(at, param)| format!("argument {at} ({})", param.name))
}

fn place_buffers(
    global: &mut GlobalMemory,
    program: &Program,
    (spec, kernel): (&LaunchSpec, &Kernel),
    buffers: Vec<Buffer>,
) -> Vec<Slot> {
    let mut slots = Vec::new();
    for buffer in buffers {
        let name = buffer.name.unwrap_or_else(|| argument(spec, kernel, buffer.slot));
        global.insert(buffer.slot.0, name, buffer.bytes, buffer.initialised);
        slots.push(buffer.slot);
    }
    for scratch in spec.workspace.iter().filter(|w| !slots.contains(&w.slot)).collect::<Vec<_>>() {
        let fill = if scratch.zeroed { 0 } else { 0xff };
        let bytes = vec![fill; scratch.bytes as usize];
        global.insert(scratch.slot.0, format!("workspace {}", scratch.slot.0), bytes, scratch.zeroed);
        slots.push(scratch.slot);
    }
    if program.cooperative && !slots.contains(&Launch::GRID) {
        global.insert(Launch::GRID.0, "the barrier of the grid".into(), vec![0; GRID_BYTES], true);
    }
    let variables = &program.layout.globals;
    if !slots.contains(&Launch::MODULE) {
        global.insert(Launch::MODULE.0, "the module's variables".into(), variables.clone(), true);
        slots.extend((!variables.is_empty()).then_some(Launch::MODULE));
    }
    slots
}

/// The parameter block.
fn encode_params(
    program: &Program,
    module: &Module,
    spec: &LaunchSpec,
    global: &GlobalMemory,
) -> Result<Vec<u8>, SimError> {
    let kernel = program.kernel.clone();
    let wrong = |index: usize, reason: String| SimError::Argument { kernel: kernel.clone(), index, reason };
    let declared = module.kernel(&program.kernel).map(|k| k.params.as_slice()).unwrap_or_default();
    if declared.len() != spec.params.len() {
        let reason = format!("{} arguments for {} parameters", spec.params.len(), declared.len());
        return Err(wrong(spec.params.len().min(declared.len()), reason));
    }
    let mut block = vec![0; program.layout.param_bytes as usize];
    for (index, (param, declared)) in spec.params.iter().zip(declared).enumerate() {
        let (bytes, _) = encode(param, global, &|reason| wrong(index, reason))?;
        if bytes.len() != declared.bytes() as usize {
            let reason = format!("{} bytes for a parameter of {}", bytes.len(), declared.bytes());
            return Err(wrong(index, reason));
        }
        let start = program.layout.param_offsets[index] as usize;
        block[start..start + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(block)
}

/// The bytes of a parameter, and what their address must be a multiple of.
fn encode(
    param: &Param,
    global: &GlobalMemory,
    wrong: &dyn Fn(String) -> SimError,
) -> Result<(Vec<u8>, usize), SimError> {
    Ok(match param {
        Param::U32(value) => (value.to_le_bytes().to_vec(), 4),
        Param::U64(value) => (value.to_le_bytes().to_vec(), 8),
        Param::F32(value) => (value.to_le_bytes().to_vec(), 4),
        Param::Bytes(bytes) => (bytes.clone(), 1),
        Param::Buffer(slot) => (address_of(global, *slot)?.to_le_bytes().to_vec(), 8),
        Param::TensorMap(map) => {
            let address = address_of(global, map.slot)?;
            let map = TensorMap::new(map, address).map_err(wrong)?;
            (MapBytes::from(&map).0.to_vec(), TENSOR_MAP_ALIGN)
        }
        Param::Struct(members) => {
            let (mut bytes, mut widest) = (Vec::new(), 1);
            for member in members {
                let (part, align) = encode(member, global, wrong)?;
                bytes.resize(bytes.len().next_multiple_of(align), 0);
                bytes.extend(part);
                widest = align.max(widest);
            }
            bytes.resize(bytes.len().next_multiple_of(widest), 0);
            (bytes, widest)
        }
        other => return Err(wrong(format!("{other:?} is not supported"))),
    })
}

fn address_of(global: &GlobalMemory, slot: Slot) -> Result<u64, SimError> {
    global.address(slot.0).ok_or(SimError::UnboundSlot(slot))
}

fn collect(mut machine: Machine<'_>, program: &Program, slots: &[Slot]) -> Outcome {
    machine.counters.instructions = machine.hits.fold(|pc| program.origins[pc].class);
    let kernel = program.origins.iter().enumerate().skip(program.entry as usize);
    let statements = program.origins.last().map_or(0, |origin| origin.statement + 1);
    let mut executions = vec![0; statements];
    for (pc, origin) in kernel {
        executions[origin.statement] = machine.hits.at(pc);
    }
    let buffer = |slot: &Slot| {
        let allocation = machine.global.remove(slot.0)?;
        Some(Buffer { slot: *slot, bytes: allocation.bytes, initialised: true, name: None })
    };
    Outcome {
        buffers: slots.iter().filter_map(buffer).collect(),
        findings: machine.findings.into_list(),
        counters: machine.counters,
        executions,
        printed: machine.printed,
        halted: machine.halted,
    }
}
