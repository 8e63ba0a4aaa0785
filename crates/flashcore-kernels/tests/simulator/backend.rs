//! The simulator as a backend: the plan's program and launch, every check on, any finding an error.

use flashcore_core::{Backend, BackendError, Data, HostCall, Problem, Ran};
use flashcore_kernels::{Plan, SideArrays, slots};
use flashcore_ptx::launch::{LaunchSpec, Param};
use flashcore_sim::{Buffer, Launch, Options, Outcome};
use flashcore_tile::Program;

/// Runs whatever `plan` chooses, once under each of `options`; all runs must agree bit for bit.
pub(crate) struct Simulator<P> {
    pub(crate) plan: P,
    pub(crate) options: Vec<Options>,
}

impl<P: Fn(&Problem) -> Result<Plan, String> + Send + Sync> Backend for Simulator<P> {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let plan = (self.plan)(call.problem()).map_err(unsupported)?;
        let program = plan.kernel().program().map_err(failed)?;
        if let Some(spec) = plan.launch(&program, call.problem()) {
            self.run(call, &program, spec).map_err(failed)?;
        }
        Ok(Ran { kernel: plan.kernel().name() })
    }
}

impl<P> Simulator<P> {
    fn run(
        &self,
        call: &mut HostCall<'_>,
        program: &Program<Problem>,
        mut spec: LaunchSpec,
    ) -> Result<(), String> {
        if call.outputs().1.is_none() {
            spec.params
                .iter_mut()
                .filter(|p| **p == Param::Buffer(slots::LSE))
                .for_each(|p| *p = Param::U64(0));
        }
        let outcomes: Result<Vec<_>, _> =
            self.options.iter().map(|o| self.once(call, program, &spec, o)).collect();
        let outcomes = outcomes?;
        for other in &outcomes[1..] {
            if [slots::OUT, slots::LSE].into_iter().any(|slot| other.bytes(slot) != outcomes[0].bytes(slot)) {
                return Err("results depend on the schedule".into());
            }
        }
        let (mut out, lse) = call.outputs();
        out.bytes_mut().copy_from_slice(outcomes[0].bytes(slots::OUT).unwrap_or_default());
        if let Some(lse) = lse {
            let bytes = outcomes[0].bytes(slots::LSE).unwrap_or_default();
            lse.copy_from_slice(&bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
        }
        Ok(())
    }

    fn once(
        &self,
        call: &mut HostCall<'_>,
        program: &Program<Problem>,
        spec: &LaunchSpec,
        options: &Options,
    ) -> Result<Outcome, String> {
        let launch = Launch {
            module: program.module(),
            provenance: Some(program.provenance()),
            spec,
            buffers: buffers(call),
        };
        let outcome = launch.run(options).map_err(|e| e.to_string())?;
        let findings: Vec<_> = outcome.errors().map(ToString::to_string).collect();
        if findings.is_empty() { Ok(outcome) } else { Err(findings.join("\n")) }
    }
}

fn buffers(call: &mut HostCall<'_>) -> Vec<Buffer> {
    let problem = call.problem();
    let tensors = call.inputs().map(|data: Data<'_>| data.bytes().to_vec());
    let mut buffers: Vec<_> = [slots::Q, slots::K, slots::V]
        .into_iter()
        .zip(tensors)
        .map(|(slot, bytes)| Buffer::input(slot, bytes))
        .collect();
    let (mut out, lse) = call.outputs();
    // What lies between the output's rows is kept, so that writing there shows.
    buffers.push(Buffer::input(slots::OUT, out.bytes_mut().to_vec()));
    buffers.extend(lse.map(|lse| Buffer::input(slots::LSE, bytemuck::cast_slice(lse).to_vec())));
    let SideArrays { sinks, lengths } = SideArrays::of(problem);
    buffers.extend(sinks.map(|sinks| Buffer::input(slots::SINKS, sinks)));
    if let Some([q, kv]) = lengths {
        buffers.extend([Buffer::input(slots::LENGTHS_Q, q), Buffer::input(slots::LENGTHS_KV, kv)]);
    }
    buffers
}

fn unsupported(reason: String) -> BackendError {
    BackendError::Unsupported { backend: "sim", what: reason, instead: "use the CPU backend".into() }
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BackendError {
    BackendError::Failed { backend: "sim", source: source.into() }
}
