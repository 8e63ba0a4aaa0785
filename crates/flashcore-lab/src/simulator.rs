//! The simulator as a backend: what would be launched on a GPU, run on the CPU with every check on.
//!
//! [`crate::verify`] runs the conformance suite on it. The first run of a process is tame, each later one is under
//! another hostile schedule, so that "two runs give the same bits" means that no schedule changes them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use flashcore_core::{Backend, BackendError, HostCall, Problem, Ran};
use flashcore_kernels::{Gpu, Plan, SideArrays, plan, slots};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};
use flashcore_sim::{Buffer, Counters, Launch, Options, Outcome};

/// What every address is a multiple of: as in memory from a GPU's allocator.
const ALIGNMENT: u64 = 256;

/// Findings that an error lists.
const FINDINGS: usize = 3;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A GPU that is not there.
#[derive(Debug)]
pub struct Simulator {
    gpu: Gpu,
    runs: AtomicU64,
}

impl Simulator {
    /// Runs what would be launched on `gpu`.
    pub const fn new(gpu: Gpu) -> Self {
        Self { gpu, runs: AtomicU64::new(0) }
    }

    /// The kernel that would be launched.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, BackendError> {
        plan(problem, &self.gpu, ALIGNMENT).map_err(|refusal| BackendError::Unsupported {
            backend: "sim",
            what: "this problem".to_owned(),
            instead: refusal.to_string(),
        })
    }

    fn options(&self) -> Options {
        match self.runs.fetch_add(1, Relaxed) {
            0 => Options::new(),
            n => Options::gauntlet(n).swap_remove(n as usize % 4),
        }
    }

    /// Computes the call and says what that took; nothing where there is nothing to compute.
    pub fn count(&self, call: &mut HostCall<'_>) -> Result<Option<Counters>, BackendError> {
        let plan = self.plan(call.problem())?;
        self.run(call, &plan).map_err(|source| BackendError::Failed { backend: "sim", source })
    }

    /// What comes of launching a plan's kernel over a call's tensors, findings and all; nothing where there is nothing
    /// to compute. The call's outputs stay as they are.
    pub fn outcome(&self, call: &mut HostCall<'_>, plan: &Plan) -> Result<Option<Outcome>, BackendError> {
        self.launch(call, plan).map_err(|source| BackendError::Failed { backend: "sim", source })
    }

    fn launch(&self, call: &mut HostCall<'_>, plan: &Plan) -> Result<Option<Outcome>, Failure> {
        let program = plan.kernel().program()?;
        let Some(mut spec) = plan.launch(&program, call.problem()) else { return Ok(None) };
        if call.outputs().1.is_none() {
            without_lse(&mut spec);
        }
        let (module, provenance) = (program.module(), Some(program.provenance()));
        let launch = Launch { module, provenance, spec: &spec, buffers: buffers(call) };
        Ok(Some(launch.run(&self.options())?))
    }

    fn run(&self, call: &mut HostCall<'_>, plan: &Plan) -> Result<Option<Counters>, Failure> {
        let Some(outcome) = self.launch(call, plan)? else { return Ok(None) };
        let findings: Vec<String> = outcome.errors().take(FINDINGS).map(ToString::to_string).collect();
        if !findings.is_empty() {
            return Err(findings.join("; ").into());
        }
        write_back(call, &outcome);
        Ok(Some(outcome.counters))
    }
}

impl Backend for Simulator {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        self.count(call)?;
        Ok(Ran { kernel: self.plan(call.problem())?.kernel().name() })
    }
}

fn without_lse(spec: &mut LaunchSpec) {
    let wanted = spec.params.iter_mut().filter(|param| **param == Param::Buffer(slots::LSE));
    wanted.for_each(|param| *param = Param::U64(0));
}

fn buffers(call: &mut HostCall<'_>) -> Vec<Buffer> {
    let SideArrays { sinks, lengths } = SideArrays::of(call.problem());
    let [q, k, v] = call.inputs().map(|data| data.bytes().to_vec());
    let (mut out, lse) = call.outputs();
    let lse = lse.map(|lse| bytemuck::cast_slice(lse).to_vec());
    let [lengths_q, lengths_kv] = lengths.map_or([None, None], |arrays| arrays.map(Some));
    // What lies between the output's rows goes in as it is, so that writing there shows.
    let bound: [(Slot, Option<Vec<u8>>); 8] = [
        (slots::Q, Some(q)),
        (slots::K, Some(k)),
        (slots::V, Some(v)),
        (slots::OUT, Some(out.bytes_mut().to_vec())),
        (slots::LSE, lse),
        (slots::SINKS, sinks),
        (slots::LENGTHS_Q, lengths_q),
        (slots::LENGTHS_KV, lengths_kv),
    ];
    bound.into_iter().filter_map(|(slot, bytes)| Some(Buffer::input(slot, bytes?))).collect()
}

fn write_back(call: &mut HostCall<'_>, outcome: &Outcome) {
    let bytes = |slot| outcome.bytes(slot).unwrap_or_default();
    let (mut out, lse) = call.outputs();
    out.bytes_mut().copy_from_slice(bytes(slots::OUT));
    if let Some(lse) = lse {
        bytemuck::cast_slice_mut(lse).copy_from_slice(bytes(slots::LSE));
    }
}
