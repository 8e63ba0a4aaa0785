//! The simulator as a backend: what would be launched on a GPU, run on the CPU with every check on.
//!
//! [`crate::verify`], the kernels' tests and the command line run attention on it. The first run of a simulator has a
//! benign schedule, each later one another hostile schedule, so that "two runs give the same bits" means that no
//! schedule changes them.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use flashcore_core::{
    AppendCall, AppendOutputs, Backend, BackendError, BackwardCall, BackwardProblem, DataMut, GroupedCall,
    HostCall, MergeCall, MoeCall, Problem, QuantiseCall, QuantisedMut, Ran, Routed, RowTerms,
};
use flashcore_kernels::{
    ALLOCATED_ALIGNMENT, AnyProgram, Choice, Gpu, KernelConfig, Plan, append_values, host_values, moe::Cut,
    plan_append, plan_grouped, plan_grouped_tile, plan_merge, plan_moe, plan_moe_tiles, plan_quantise,
    quantise_values, slots,
};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};
use flashcore_sim::{Buffer, Launch, Options, Outcome, Schedule};

/// Findings that an error lists.
const FINDINGS: usize = 3;

/// Bytes that are looked at together when memory is copied.
const CHUNK: usize = 4096;

/// Multiply-adds a second, about: measured on one core of a server, release build, every check on.
const SPEED: f64 = 2e8;

/// Queries that a kernel computes together, whether all are there or not.
const ROW_TILE: usize = 64;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A GPU that is not there.
#[derive(Debug)]
pub struct Simulator {
    gpu: Gpu,
    /// What decides about kernels.
    choice: Choice,
    /// How products of experts are cut, where the rules do not decide.
    experts: Option<[Cut; 2]>,
    /// How grouped products are cut, likewise.
    groups: Option<Cut>,
    seed: u64,
    runs: AtomicU64,
    programs: Mutex<HashMap<KernelConfig, Arc<AnyProgram>>>,
}

impl Simulator {
    /// Runs what would be launched on `gpu`.
    pub fn new(gpu: Gpu) -> Self {
        Self::seeded(gpu, 0)
    }

    /// The same with other hostile schedules.
    pub fn seeded(gpu: Gpu, seed: u64) -> Self {
        Self {
            gpu,
            choice: Choice::Rules,
            experts: None,
            groups: None,
            seed,
            runs: AtomicU64::new(0),
            programs: Mutex::default(),
        }
    }

    /// Lets this decide about kernels.
    #[must_use]
    pub fn choosing(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }

    /// Cuts both products of experts so.
    #[must_use]
    pub fn cutting_experts(mut self, cuts: [Cut; 2]) -> Self {
        self.experts = Some(cuts);
        self
    }

    /// Cuts grouped products so.
    #[must_use]
    pub fn cutting_groups(mut self, cut: Cut) -> Self {
        self.groups = Some(cut);
        self
    }

    /// The kernel that would be launched.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, BackendError> {
        self.choice.plan(problem, &self.gpu, ALLOCATED_ALIGNMENT).map_err(unsupported)
    }

    /// The kernels that would be launched for gradients.
    pub fn plan_backward(&self, problem: &BackwardProblem) -> Result<Plan, BackendError> {
        self.choice.plan_backward(problem, &self.gpu, ALLOCATED_ALIGNMENT).map_err(unsupported)
    }

    /// The program of a kernel, built at the first call.
    pub fn program(&self, kernel: &KernelConfig) -> Result<Arc<AnyProgram>, BackendError> {
        let known = || self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = known().get(kernel) {
            return Ok(program.clone());
        }
        let program = Arc::new(kernel.program().map_err(failed)?);
        known().insert(*kernel, program.clone());
        Ok(program)
    }

    /// About how long one run of a problem takes.
    pub fn estimate(problem: &Problem) -> Duration {
        let queries = problem.seq_q().max(1);
        let padding = queries.next_multiple_of(ROW_TILE) as f64 / queries as f64;
        Duration::from_secs_f64(problem.flops() / 2.0 * padding / SPEED)
    }

    /// Launches a plan's kernels over a call's tensors, one after another; nothing comes of it where there is nothing to
    /// compute. The outcome is that of the first with a fault, or of the last.
    ///
    /// Faults are findings of the outcome, not errors. The call's outputs are written unless one ended the launch.
    pub fn launch(&self, call: &mut HostCall<'_>, plan: &Plan) -> Result<Option<Outcome>, BackendError> {
        let (plan, mut last) = (plan.rebound(call.problem()), None::<Outcome>);
        for launch in plan.launches() {
            let program = self.program(launch.kernel())?;
            let Some(mut spec) = launch.spec(&program) else { continue };
            if call.outputs().1.is_none() {
                without(&mut spec, slots::LSE);
            }
            let mut given = buffers(call);
            // What one has transposed, or left in parts, the next reads.
            let kept = |buffer: &Buffer| [slots::TURNED, slots::PARTS].contains(&buffer.slot);
            given.extend(last.take().into_iter().flat_map(|last| last.buffers).filter(kept));
            let outcome = self.run(&program, &spec, given)?;
            if !outcome.halted {
                write_back(call.outputs(), &outcome, [slots::OUT, slots::LSE]);
            }
            let faulty = judge(&outcome).is_err();
            if !faulty {
                left_zero(&zeroed_slots(&spec), &outcome.buffers)?;
            }
            last = Some(outcome);
            if faulty {
                break;
            }
        }
        Ok(last)
    }

    /// Launches a plan's kernels over a call's tensors, one after another; each must be without fault.
    pub fn launch_backward(&self, call: &mut BackwardCall<'_>, plan: &Plan) -> Result<(), BackendError> {
        let buffers = backward_buffers(call);
        let unwanted = call.gradients().sinks.is_none().then_some(slots::backward::D_SINKS);
        let buffers = self.in_turn(plan.launches(), buffers, unwanted)?;
        write_gradients(call, &buffers);
        Ok(())
    }

    /// Launches kernels one after another, each without fault, with the null address for a buffer that nobody wants. What
    /// one leaves in scratch memory the next may read; what must be zero is zero again in the end.
    fn in_turn(
        &self,
        launches: &[flashcore_kernels::Launch],
        mut buffers: Vec<Buffer>,
        unwanted: Option<Slot>,
    ) -> Result<Vec<Buffer>, BackendError> {
        let mut zeroed = Vec::new();
        for launch in launches {
            let program = self.program(launch.kernel())?;
            let Some(mut spec) = launch.spec(&program) else { continue };
            unwanted.iter().for_each(|&slot| without(&mut spec, slot));
            let outcome = self.run(&program, &spec, buffers)?;
            judge(&outcome)?;
            zeroed.extend(zeroed_slots(&spec));
            buffers = outcome.buffers;
        }
        left_zero(&zeroed, &buffers).map(|()| buffers)
    }

    fn run(
        &self,
        program: &AnyProgram,
        spec: &LaunchSpec,
        buffers: Vec<Buffer>,
    ) -> Result<Outcome, BackendError> {
        let (module, provenance) = (program.module(), Some(program.provenance()));
        Launch { module, provenance, spec, buffers }.run(&self.options()).map_err(failed)
    }

    fn options(&self) -> Options {
        match self.runs.fetch_add(1, Relaxed) {
            0 => Options::new(),
            n => {
                let seed = self.seed.wrapping_add(n);
                Options::gauntlet(seed).swap_remove(seed as usize % Schedule::ALL.len())
            }
        }
    }
}

impl Backend for Simulator {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let plan = self.plan(call.problem())?;
        let outcome = self.launch(call, &plan)?;
        outcome.as_ref().map_or(Ok(()), judge)?;
        Ok(Ran { kernel: plan.kernel().name() })
    }

    fn merge(&self, call: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        let plan = plan_merge(call.problem(), &self.gpu, ALLOCATED_ALIGNMENT).map_err(unsupported)?;
        let ran = Ran { kernel: plan.kernel().name() };
        let program = self.program(plan.kernel())?;
        let Some(mut spec) = plan.launches()[0].spec(&program) else { return Ok(ran) };
        if call.outputs().1.is_none() {
            without(&mut spec, slots::merge::LSE);
        }
        let outcome = self.run(&program, &spec, merge_buffers(call))?;
        judge(&outcome)?;
        write_back(call.outputs(), &outcome, [slots::merge::OUT, slots::merge::LSE]);
        Ok(ran)
    }

    fn append(&self, call: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        let plan = plan_append(call.problem(), &self.gpu).map_err(unsupported)?;
        let ran = Ran { kernel: plan.kernel().name() };
        let program = self.program(plan.kernel())?;
        let Some(spec) = plan.launches()[0].spec(&program) else { return Ok(ran) };
        let outcome = self.run(&program, &spec, append_buffers(call))?;
        judge(&outcome)?;
        for (slot, mut data) in cache_outputs(call) {
            copy_changes(data.bytes_mut(), outcome.bytes(slot).unwrap_or_default());
        }
        Ok(ran)
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        let plan = self.plan_backward(call.problem())?;
        self.launch_backward(call, &plan)?;
        Ok(Ran { kernel: plan.kernel().name() })
    }

    fn quantise(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        let plan = plan_quantise(call.problem(), &self.gpu, ALLOCATED_ALIGNMENT).map_err(unsupported)?;
        let buffers = quantise_buffers(call);
        let buffers = self.in_turn(plan.launches(), buffers, None)?;
        write_quantised(call, &buffers);
        Ok(Ran { kernel: plan.kernel().name() })
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        let (problem, alignment) = (call.problem(), ALLOCATED_ALIGNMENT);
        let plan = match self.experts {
            None => plan_moe(problem, &self.gpu, alignment).map_err(unsupported)?,
            Some(cuts) => plan_moe_tiles(problem, &self.gpu, alignment, cuts).map_err(failed)?,
        };
        let buffers = moe_buffers(call);
        let buffers = self.in_turn(plan.launches(), buffers, None)?;
        let out = buffers.iter().find(|buffer| buffer.slot == slots::moe::OUT);
        out.into_iter().for_each(|out| copy_changes(call.out().bytes_mut(), &out.bytes));
        Ok(Ran { kernel: plan.kernel().name() })
    }

    fn grouped(&self, call: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        use slots::grouped::{A, B, OFFSETS, OUT};
        let (problem, alignment) = (call.problem(), ALLOCATED_ALIGNMENT);
        let plan = match self.groups {
            None => plan_grouped(problem, &self.gpu, alignment).map_err(unsupported)?,
            Some(cut) => plan_grouped_tile(problem, &self.gpu, alignment, cut).map_err(unsupported)?,
        };
        let inputs = *call.inputs();
        let mut bound = vec![(A, copied(inputs.a.bytes())), (B, copied(inputs.b.bytes()))];
        bound.extend(inputs.offsets.map(|offsets| (OFFSETS, bytemuck::cast_slice(offsets).to_vec())));
        bound.push((OUT, copied(call.out().bytes_mut())));
        let buffers: Vec<_> = bound.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)).collect();
        let buffers = self.in_turn(plan.launches(), buffers, None)?;
        let out = buffers.iter().find(|buffer| buffer.slot == OUT);
        out.into_iter().for_each(|out| copy_changes(call.out().bytes_mut(), &out.bytes));
        Ok(Ran { kernel: plan.kernel().name() })
    }
}

/// The buffers of an append; caches go in as they are.
fn append_buffers(call: &mut AppendCall<'_>) -> Vec<Buffer> {
    use slots::append::{COS, K, Q, SIN, V};
    let inputs = call.inputs();
    let mut bound = append_values(call);
    bound.extend([(K, copied(inputs.k.bytes())), (V, copied(inputs.v.bytes()))]);
    let tables = inputs.rotary.into_iter().flatten().map(|table| copied(table.bytes()));
    bound.extend([COS, SIN].into_iter().zip(tables));
    bound.extend(inputs.q.map(|q| (Q, copied(q.bytes()))));
    bound.extend(cache_outputs(call).map(|(slot, mut data)| (slot, copied(data.bytes_mut()))));
    bound.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

/// What an append writes.
fn cache_outputs<'a>(call: &'a mut AppendCall<'_>) -> impl Iterator<Item = (Slot, DataMut<'a>)> {
    use slots::append::{CACHE_K, CACHE_V, OUT};
    let AppendOutputs { cache_k, cache_v, q } = call.outputs();
    [(CACHE_K, cache_k), (CACHE_V, cache_v)].into_iter().chain(q.map(|q| (OUT, q)))
}

/// The buffers of a tensor that is quantised; outputs go in as they are.
fn quantise_buffers(call: &mut QuantiseCall<'_>) -> Vec<Buffer> {
    use slots::quantise::{FACTORS, MEANS, OUT, X};
    let mut bound = quantise_values(call);
    bound.push((X, copied(call.x().bytes())));
    let QuantisedMut { mut out, factors, means } = call.outputs();
    bound.push((OUT, copied(out.bytes_mut())));
    bound.push((FACTORS, bytemuck::cast_slice(factors).to_vec()));
    bound.extend(means.map(|means| (MEANS, bytemuck::cast_slice(means).to_vec())));
    bound.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

fn write_quantised(call: &mut QuantiseCall<'_>, buffers: &[Buffer]) {
    use slots::quantise::{FACTORS, MEANS, OUT};
    let bytes = |slot: Slot| buffers.iter().find(|b| b.slot == slot).map_or(&[][..], |b| &b.bytes);
    let QuantisedMut { mut out, factors, means } = call.outputs();
    copy_changes(out.bytes_mut(), bytes(OUT));
    copy_changes(bytemuck::cast_slice_mut(factors), bytes(FACTORS));
    if let Some(means) = means {
        copy_changes(bytemuck::cast_slice_mut(means), bytes(MEANS));
    }
}

/// Whether a launch was without fault; the error lists some.
pub fn judge(outcome: &Outcome) -> Result<(), BackendError> {
    let findings: Vec<String> = outcome.errors().take(FINDINGS).map(ToString::to_string).collect();
    if findings.is_empty() { Ok(()) } else { Err(failed(findings.join("; "))) }
}

/// Scratch memory that a launch finds zero and leaves zero.
fn zeroed_slots(spec: &LaunchSpec) -> Vec<Slot> {
    spec.workspace.iter().filter(|scratch| scratch.zeroed).map(|scratch| scratch.slot).collect()
}

/// Whether that is so: the next call finds it as it was left.
fn left_zero(zeroed: &[Slot], buffers: &[Buffer]) -> Result<(), BackendError> {
    let dirty =
        |buffer: &&Buffer| zeroed.contains(&buffer.slot) && buffer.bytes.iter().any(|&byte| byte != 0);
    let found = buffers.iter().find(dirty);
    found.map_or(Ok(()), |buffer| Err(failed(format!("scratch memory {} is not left zero", buffer.slot.0))))
}

fn failed(source: impl Into<Failure>) -> BackendError {
    BackendError::Failed { backend: "sim", source: source.into() }
}

fn unsupported(refusal: impl std::fmt::Display) -> BackendError {
    let (what, instead) = ("this problem".to_owned(), refusal.to_string());
    BackendError::Unsupported { backend: "sim", what, instead }
}

/// Passes the null address for a buffer that is not there.
fn without(spec: &mut LaunchSpec, slot: Slot) {
    let wanted = spec.params.iter_mut().filter(|param| **param == Param::Buffer(slot));
    wanted.for_each(|param| *param = Param::U64(0));
}

/// The buffers of a merge; the output goes in as it is, so that writing between its rows shows.
fn merge_buffers(call: &mut MergeCall<'_>) -> Vec<Buffer> {
    let (parts, lses) = (call.parts(), call.lses());
    let (mut out, lse) = call.outputs();
    let mut bound = vec![(slots::merge::OUT, copied(out.bytes_mut()))];
    bound.extend(lse.map(|lse| (slots::merge::LSE, bytemuck::cast_slice(lse).to_vec())));
    for (n, (part, lse)) in (0..).zip(parts.iter().zip(lses)) {
        bound.push((slots::merge::part(n), copied(part.bytes())));
        bound.push((slots::merge::part_lse(n), bytemuck::cast_slice(lse).to_vec()));
    }
    bound.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

/// The buffers of gradients, which go in as they are, so that writing between their rows shows.
fn backward_buffers(call: &mut BackwardCall<'_>) -> Vec<Buffer> {
    use slots::backward as slot;
    let (inputs, values) = (call.inputs(), host_values(call.instance()));
    let [q, k, v] = inputs.qkv.map(|data| copied(data.bytes()));
    let (d_out, lse) = (copied(inputs.d_out.bytes()), bytemuck::cast_slice(inputs.lse).to_vec());
    let mut bound = vec![(slot::Q, q), (slot::K, k), (slot::V, v), (slot::D_OUT, d_out), (slot::LSE, lse)];
    bound.push(match inputs.terms {
        RowTerms::Out(out) => (slot::OUT, copied(out.bytes())),
        RowTerms::Sums(sums) => (slot::ROW_SUMS, bytemuck::cast_slice(sums).to_vec()),
    });
    let mut gradients = call.gradients();
    let tensors = GRADIENTS.into_iter().zip(&mut gradients.qkv);
    bound.extend(tensors.map(|(slot, data)| (slot, copied(data.bytes_mut()))));
    bound.extend(gradients.sinks.map(|sinks| (slot::D_SINKS, bytemuck::cast_slice(sinks).to_vec())));
    bound.into_iter().chain(values).map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

/// The slots of the gradients of Q, K and V.
const GRADIENTS: [Slot; 3] = [slots::backward::DQ, slots::backward::DK, slots::backward::DV];

fn write_gradients(call: &mut BackwardCall<'_>, buffers: &[Buffer]) {
    let bytes = |slot: Slot| buffers.iter().find(|b| b.slot == slot).map_or(&[][..], |b| &b.bytes);
    let mut gradients = call.gradients();
    for (slot, data) in GRADIENTS.into_iter().zip(&mut gradients.qkv) {
        copy_changes(data.bytes_mut(), bytes(slot));
    }
    if let Some(sinks) = gradients.sinks {
        bytemuck::cast_slice_mut(sinks).copy_from_slice(bytes(slots::backward::D_SINKS));
    }
}

/// The buffers of a mixture of experts; the output goes in as it is, so that writing between its rows shows.
fn moe_buffers(call: &mut MoeCall<'_>) -> Vec<Buffer> {
    use slots::moe::*;
    let inputs = *call.inputs();
    let mut bound = vec![
        (X, copied(inputs.x.bytes())),
        (GATE_UP, copied(inputs.gate_up.bytes())),
        (DOWN, copied(inputs.down.bytes())),
        (OUT, copied(call.out().bytes_mut())),
    ];
    match inputs.routed {
        Routed::Given { ids, weights } => {
            bound.extend([(IDS, ids.bytes().to_vec()), (WEIGHTS, weights.bytes().to_vec())]);
        }
        Routed::Computed { logits, bias } => {
            bound.push((LOGITS, logits.bytes().to_vec()));
            bound.extend(bias.map(|bias| (ROUTING_BIAS, bytemuck::cast_slice(bias).to_vec())));
        }
    }
    let shared = inputs.shared.into_iter().flatten().zip([SHARED_GATE_UP, SHARED_DOWN]);
    bound.extend(shared.map(|(weights, slot)| (slot, copied(weights.bytes()))));
    let biases = inputs.biases.into_iter().flatten().zip([GATE_UP_BIAS, DOWN_BIAS]);
    bound.extend(biases.map(|(bias, slot)| (slot, bias.bytes().to_vec())));
    bound.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

fn buffers(call: &mut HostCall<'_>) -> Vec<Buffer> {
    let [q, k, v] = call.inputs().map(|data| copied(data.bytes()));
    let (mut out, lse) = call.outputs();
    let lse = lse.map(|lse| bytemuck::cast_slice(lse).to_vec());
    // What lies between the output's rows goes in as it is, so that writing there shows.
    let bound: [(Slot, Option<Vec<u8>>); 5] = [
        (slots::Q, Some(q)),
        (slots::K, Some(k)),
        (slots::V, Some(v)),
        (slots::OUT, Some(copied(out.bytes_mut()))),
        (slots::LSE, lse),
    ];
    let tensors = bound.into_iter().filter_map(|(slot, bytes)| Some((slot, bytes?)));
    let all = tensors.chain(host_values(call.instance()));
    all.map(|(slot, bytes)| Buffer::input(slot, bytes)).collect()
}

fn write_back((mut out, lse): (DataMut<'_>, Option<&mut [f32]>), outcome: &Outcome, slots: [Slot; 2]) {
    let [out_bytes, lse_bytes] = slots.map(|slot| outcome.bytes(slot).unwrap_or_default());
    copy_changes(out.bytes_mut(), out_bytes);
    if let Some(lse) = lse {
        bytemuck::cast_slice_mut(lse).copy_from_slice(lse_bytes);
    }
}

/// A copy that takes no memory for zeros: tensors with gigabytes between their rows cost what their rows cost.
fn copied(bytes: &[u8]) -> Vec<u8> {
    let mut copy = vec![0; bytes.len()];
    copy_changes(&mut copy, bytes);
    copy
}

/// Copies the parts that differ and touches no others.
fn copy_changes(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.chunks_mut(CHUNK).zip(from.chunks(CHUNK)).filter(|(to, from)| to != from) {
        to.copy_from_slice(from);
    }
}
