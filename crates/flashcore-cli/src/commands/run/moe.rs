//! `flashcore run moe`: a mixture of experts over made tensors, checked against f64 and timed.
//!
//! The path: [`Flags`] → a task of the lab with its tensors → backend or simulator → the lab's judge → an answer.

use std::{rc::Rc, sync::Arc};

use clap::Args;
use flashcore::{Backend, BackendError, DType};
use flashcore_lab::{
    LabError,
    judge::{Finding, Judge},
    latency::{self, time},
    memory,
    simulator::Simulator,
    stats::nearest_rank,
    task::{ExpertSpec, Task, TaskSpec},
    workload::{Outputs, Turn, Workload},
};
use serde_json::json;

use super::{HOSTILE_RUNS, QUANTILES};
use crate::{
    error::{CliError, Verdict},
    flags::{BackendFlags, first_to_take},
    gpu_flags::GpuFlags,
    output::{Output, Page, Text, bad, good},
    simulation,
};

/// Compute a mixture of experts (SwiGLU, random experts for each token), check it and time it
#[derive(Args, Clone, Debug)]
pub struct Flags {
    /// Number of tokens
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: usize,
    /// Hidden size: features of a token
    #[arg(long, value_name = "N", default_value_t = 256)]
    hidden: usize,
    /// Intermediate size: features between the two products
    #[arg(long, value_name = "N", default_value_t = 128)]
    intermediate: usize,
    /// Number of experts
    #[arg(long, value_name = "N", default_value_t = 8)]
    experts: usize,
    /// Experts per token
    #[arg(long, value_name = "N", default_value_t = 2)]
    top_k: usize,
    /// Element type: f16, bf16 or f32
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: DType,
    /// Seed of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    backend: BackendFlags,
    #[command(flatten)]
    gpu: GpuFlags,
    /// Timed runs after the first [default: about a second's worth]; with sim, runs under a hostile schedule [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
}

/// Runs a layer and says how right and how fast it was.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let task = flags.task()?;
    // Tensors, and as much again for those who copy them.
    memory::check(flags.bytes().saturating_mul(2))?;
    let workload = Rc::new(Workload::new(task, flags.seed)?);
    let done = match flags.backend.simulated()? {
        true => flags.simulate(&workload)?,
        false if flags.gpu.is_named() => return Err(CliError::Gpu),
        false => flags.run(&workload, &flags.backend.candidates()?)?,
    };
    output.answer(&done.json(), || done.page())?;
    Ok(Verdict::from_bool(done.finding.pass()))
}

impl Flags {
    fn task(&self) -> Result<Task, CliError> {
        let Self { tokens, hidden, intermediate, experts, top_k, .. } = *self;
        let dtype = self.dtype.name().to_owned();
        let spec = ExpertSpec { dtype, tokens, hidden, intermediate, experts, top_k };
        Ok(Task::parse(TaskSpec::Experts(spec)).map_err(LabError::from)?)
    }

    /// Bytes of all tensors.
    fn bytes(&self) -> u64 {
        let product = |factors: &[usize]| factors.iter().fold(1u64, |all, &n| all.saturating_mul(n as u64));
        let weights = product(&[3, self.experts, self.hidden, self.intermediate]);
        weights
            .saturating_add(product(&[2, self.tokens, self.hidden]))
            .saturating_mul(self.dtype.bytes() as u64)
    }

    fn run(&self, workload: &Rc<Workload>, candidates: &[Arc<dyn Backend>]) -> Result<Done, CliError> {
        let mut outputs = workload.outputs()?;
        let mut once = |backend: &dyn Backend, turn| computed(workload, backend, &mut outputs, turn);
        let (backend, kernel) = first_to_take(candidates, |backend| once(backend, Turn::Timed(0)))?;
        let mut calls = 0..;
        let mut next = || once(backend, Turn::Timed(calls.next().unwrap_or(0))).map(drop);
        let latency = latency::measure(self.iters.map(|n| n as usize), &mut next)?;
        let finding = self.judged(workload, backend, 2)?;
        Ok(Done { task: workload.task().clone(), backend: backend.name(), kernel, finding, latency })
    }

    fn simulate(&self, workload: &Rc<Workload>) -> Result<Done, CliError> {
        let simulator = Simulator::new(self.gpu.choose().gpu).choosing(self.backend.choice()?);
        let kernel = computed(workload, &simulator, &mut workload.outputs()?, Turn::Judged)?;
        let runs = self.iters.map_or(HOSTILE_RUNS, |n| n as usize);
        let finding = self.judged(workload, &simulator, runs)?;
        Ok(Done { task: workload.task().clone(), backend: "sim", kernel, finding, latency: Vec::new() })
    }

    /// Judges one run, and whether the others give the same bits.
    fn judged(
        &self,
        workload: &Rc<Workload>,
        backend: &dyn Backend,
        runs: usize,
    ) -> Result<Finding, CliError> {
        let mut first = workload.outputs()?;
        computed(workload, backend, &mut first, Turn::Judged)?;
        let mut finding = Judge::new(workload)?.compare(&first);
        for _ in 1..runs {
            let mut again = workload.outputs()?;
            computed(workload, backend, &mut again, Turn::Judged)?;
            if finding.pass() && again.tensors[0].data().bytes() != first.tensors[0].data().bytes() {
                finding.wrong = Some("two runs on the same input gave different bits".to_owned());
            }
        }
        Ok(finding)
    }
}

/// The name of the kernel that computed.
fn computed(
    workload: &Workload,
    backend: &dyn Backend,
    outputs: &mut Outputs,
    turn: Turn,
) -> Result<String, BackendError> {
    match workload.compute(backend, None, outputs, turn) {
        Ok(ran) => Ok(ran.kernel),
        Err(LabError::Backend(error)) => Err(error),
        Err(other) => Err(BackendError::Failed { backend: "lab", source: Box::new(other) }),
    }
}

/// A run that has come to its end.
struct Done {
    task: Task,
    backend: &'static str,
    kernel: String,
    finding: Finding,
    /// Microseconds of each run in ascending order; none of the simulator.
    latency: Vec<f64>,
}

impl Done {
    /// 10⁹ operations and bytes per second at the median time.
    fn rates(&self) -> Option<[f64; 2]> {
        let p50 =
            Some(&self.latency).filter(|times| !times.is_empty()).map(|times| nearest_rank(times, 0.5))?;
        Some([self.task.flops(), self.task.bytes()].map(|amount| amount / p50.max(1e-3) / 1e3))
    }

    fn json(&self) -> serde_json::Value {
        let Finding { max_error, relative_rms, tolerance, rows, wrong } = &self.finding;
        let answer = json!({
            "operation": "moe", "task": self.task.spec(), "backend": self.backend, "kernel": self.kernel,
            "max_error": max_error, "tolerance": tolerance, "relative_rms": relative_rms, "checked_tokens": rows,
            "pass": self.finding.pass(), "reason": wrong,
        });
        let Some([gflops, gbps]) = self.rates() else { return answer };
        let [p50, p90, min, max] = QUANTILES.map(|quantile| nearest_rank(&self.latency, quantile));
        let samples = self.latency.len();
        let latency = json!({ "p50": p50, "p90": p90, "min": min, "max": max, "samples": samples });
        simulation::merged(answer, json!({ "latency_us": latency, "gflops": gflops, "gbps": gbps }))
    }

    fn page(&self) -> Page {
        let Finding { max_error, tolerance, rows, wrong, .. } = &self.finding;
        let result = wrong.as_ref().map_or_else(|| good("PASS"), |reason| bad(format!("FAIL: {reason}")));
        let mut facts = vec![
            ("problem", Text::from(self.task.to_string())),
            ("backend", format!("{}, kernel {}", self.backend, self.kernel).into()),
            ("max error", format!("{max_error:.2e}, tolerance {tolerance:.2e}").into()),
            ("compared", format!("{rows} tokens (evenly spaced) against f64").into()),
        ];
        if let Some([gflops, gbps]) = self.rates() {
            let [p50, p90, min, max] = QUANTILES.map(|quantile| time(nearest_rank(&self.latency, quantile)));
            let runs = self.latency.len();
            let latency = format!("p50 {p50}, p90 {p90}, min {min}, max {max} ({runs} runs)");
            facts.push(("latency", latency.into()));
            facts.push(("speed", format!("{gflops:.1} GFLOP/s, {gbps:.1} GB/s of touched weights").into()));
        }
        facts.push(("result", result));
        Page::default().facts(facts)
    }
}
