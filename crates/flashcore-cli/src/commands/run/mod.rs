//! `flashcore run`: attention on made or given tensors, checked against f64 and timed.
//!
//! The path: [`Flags`] → [`Request`] (everything that can be wrong is found here) → [`Tensors`] → backend or simulator →
//! [`Check`] → [`Done::end`]. Results reach their files only after they passed. The simulator runs the kernel that a GPU
//! would run, first tamely and then under hostile schedules.

mod check;
mod flags;
mod gradients;
mod moe;
mod request;
#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use flashcore::{Backend, BackendError};
use flashcore_core::HostCall;
use flashcore_lab::{
    latency::{self, time},
    memory,
    simulator::Simulator,
    stats::nearest_rank,
};
use flashcore_sim::Outcome;
use serde_json::json;

pub use self::flags::Flags;
use self::{
    check::Check,
    flags::Other,
    request::{Request, Source, Tensors},
};
use crate::{
    error::{CliError, Verdict},
    flags::first_to_take,
    output::{Output, Page, Text, bad, good},
    progress::Progress,
    simulation,
    values::describe,
};

/// Median, nine in ten, fastest, slowest.
const QUANTILES: [f64; 4] = [0.5, 0.9, 0.0, 1.0];
/// Hostile runs of the simulator unless another number is asked for.
const HOSTILE_RUNS: usize = 1;
/// Problems that take the simulator longer are for a real GPU.
const LONGEST: Duration = Duration::from_secs(10 * 60);

/// Runs attention and says how right and how fast it was.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    if let Some(Other::Moe(flags)) = &flags.other {
        return moe::execute(flags, output);
    }
    let (backends, simulated) = (flags.backend.clone(), flags.simulated()?);
    let request = Request::parse(flags)?;
    // The tensors by themselves first: how much comparing takes is found by walking through all rows.
    memory::check(request.bytes())?;
    memory::check(request.bytes().saturating_add(Check::bytes(&request.problem)))?;
    match simulated {
        Some(gpu) if request.backward.is_some() => {
            gradients::simulate(request, &Simulator::new(gpu).choosing(backends.choice()?), output)
        }
        Some(gpu) => simulate(request, &Simulator::new(gpu).choosing(backends.choice()?), output),
        None => run(request, &backends.candidates()?, output),
    }
}

fn run(mut request: Request, candidates: &[Arc<dyn Backend>], output: &Output) -> Result<Verdict, CliError> {
    let mut tensors = Tensors::prepare(&mut request)?;
    let problem = request.problem.clone();
    let backward = request.backward.clone();
    let once = |backend: &dyn Backend, tensors: &mut Tensors| match &backward {
        None => tensors.call(&problem, |call| backend.forward(call)),
        Some(problem) => tensors.gradients(problem, |call| backend.backward(call)),
    };
    let mut whole = |backend: &dyn Backend| {
        let ran = tensors.call(&problem, |call| backend.forward(call))?;
        if backward.is_some() { once(backend, &mut tensors) } else { Ok(ran) }
    };
    let (backend, ran) = first_to_take(candidates, &mut whole)?;
    let first = tensors.digest();
    let latency = latency::measure(request.times, || once(backend, &mut tensors).map(drop))?;
    let repeatable = tensors.digest() == first;
    let check = match &request.backward {
        None => Check::of(&problem, &tensors, repeatable)?,
        Some(problem) => gradients::check(problem, &mut tensors, repeatable, &mut |tensors| {
            once(backend, tensors).map(drop)
        })?,
    };
    let (backend, latency) = (backend.name(), Some(latency));
    Done { request, tensors, backend, kernel: ran.kernel, check, latency, simulated: None }.end(output)
}

fn simulate(request: Request, simulator: &Simulator, output: &Output) -> Result<Verdict, CliError> {
    let runs = 1 + request.times.unwrap_or(HOSTILE_RUNS);
    let estimate =
        Simulator::estimate(&request.problem).saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX));
    if estimate > LONGEST {
        return Err(CliError::TooLong { estimate, most: LONGEST });
    }
    let plan = simulator.plan(&request.problem)?;
    let progress = Progress::new(runs, output);
    progress.say(format!("simulating: about {:.0} s", estimate.as_secs_f64().max(1.0)));
    let launch = |call: &mut HostCall<'_>| {
        let outcome = simulator.launch(call, &plan);
        progress.step();
        outcome
    };
    launches(request, runs, plan.kernel().name(), launch, output)
}

/// Launches up to the first run with a fault, judges, reports.
fn launches(
    mut request: Request,
    runs: usize,
    kernel: String,
    mut launch: impl FnMut(&mut HostCall<'_>) -> Result<Option<Outcome>, BackendError>,
    output: &Output,
) -> Result<Verdict, CliError> {
    let mut tensors = Tensors::prepare(&mut request)?;
    let begin = Instant::now();
    let (mut digests, mut last) = (Vec::new(), None);
    for _ in 0..runs {
        last = tensors.call(&request.problem, &mut launch)?;
        digests.push(tensors.digest());
        if last.as_ref().is_some_and(|outcome| !outcome.is_clean()) {
            break;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let repeatable = digests.windows(2).all(|pair| pair[0] == pair[1]);
    let mut check = Check::of(&request.problem, &tensors, repeatable)?;
    if let Some(fault) = last.as_ref().and_then(simulation::fault) {
        (check.pass, check.reason) = (false, Some(format!("the simulator found {fault}")));
    }
    let simulated = Some(Simulated { runs: digests.len(), seconds, last });
    Done { request, tensors, backend: "sim", kernel, check, latency: None, simulated }.end(output)
}

/// What the simulator did; `last` is missing where there is nothing to compute.
struct Simulated {
    runs: usize,
    seconds: f64,
    last: Option<Outcome>,
}

/// A run that has come to its end.
struct Done {
    request: Request,
    tensors: Tensors,
    backend: &'static str,
    kernel: String,
    check: Check,
    /// Microseconds of each run in ascending order.
    latency: Option<Vec<f64>>,
    simulated: Option<Simulated>,
}

impl Done {
    /// Keeps results that passed, and says what came of it.
    fn end(self, output: &Output) -> Result<Verdict, CliError> {
        if self.check.pass {
            self.request.save(&self.tensors)?;
        }
        output.answer(&self.json(), || self.page())?;
        Ok(Verdict::from_bool(self.check.pass))
    }

    fn wrote(&self) -> Vec<String> {
        let outputs = self.request.outputs().into_iter().filter(|_| self.check.pass);
        outputs.map(|path| path.display().to_string()).collect()
    }

    /// What is computed, where that does not go without saying.
    const fn what(&self) -> &'static str {
        if self.request.backward.is_some() { ", gradients" } else { "" }
    }

    /// 10⁹ operations per second at the median time.
    fn gflops(&self) -> Option<f64> {
        let p50 = nearest_rank(self.latency.as_ref()?, 0.5);
        Some(if p50 > 0.0 { self.request.flops() / p50 / 1e3 } else { 0.0 })
    }

    fn json(&self) -> serde_json::Value {
        let (p, v) = (&self.request.problem, &self.check.verdict);
        // As few digits as tell the number from others of its type.
        let decimal = |number: f32| number.to_string().parse::<f64>().unwrap_or(number.into());
        let (kind, seed) = match self.request.source {
            Source::Drawn { kind, seed } => (Some(kind.name()), Some(seed)),
            Source::Files(_) => (None, None),
        };
        let mut answer = json!({
            "backend": self.backend, "kernel": self.kernel, "backward": self.request.backward.is_some(), "shape": p.q().dims().array(),
            "kv_heads": p.heads_kv(), "seq_kv": p.seq_kv(), "dim_v": p.dim_v(), "page_size": p.page_size(), "dtype": p.dtype().name(),
            "mask": p.mask().to_string(), "scale": decimal(p.scale()), "softcap": p.softcap().map(decimal),
            "dropout": p.dropout().map(|dropout| decimal(dropout.probability())),
            "dropout_seed": self.request.values.seed,
            "sinks": p.sinks().is_some(), "kind": kind, "seed": seed, "max_error": v.max_error, "tolerance": v.tolerance,
            "mean_error": v.mean_error, "mean_tolerance": v.mean_tolerance, "relative_rms": v.relative_rms, "lse_error": v.lse_error,
            "rows": p.rows(), "checked_rows": self.check.checked_rows, "repeatable": self.check.repeatable,
            "pass": self.check.pass, "reason": self.check.reason, "wrote": self.wrote(),
        });
        if let Some(samples) = &self.latency {
            let [p50, p90, min, max] = QUANTILES.map(|quantile| nearest_rank(samples, quantile));
            let latency = json!({ "p50": p50, "p90": p90, "min": min, "max": max, "samples": samples.len() });
            answer = simulation::merged(answer, json!({ "latency_us": latency, "gflops": self.gflops() }));
        }
        if let Some(Simulated { runs, seconds, last }) = &self.simulated {
            let last = last.as_ref().map_or(json!({}), simulation::json);
            let part = simulation::merged(json!({ "runs": runs, "seconds": seconds }), last);
            answer = simulation::merged(answer, json!({ "simulation": part }));
        }
        answer
    }

    fn page(&self) -> Page {
        let (rows, check) = (self.request.problem.rows(), &self.check);
        let compared = match check.checked_rows == rows {
            true => format!("all {rows} rows against f64"),
            false => format!("{} of {rows} rows (evenly spaced) against f64", check.checked_rows),
        };
        let result = match &check.reason {
            None if rows == 0 => good("PASS: no rows, so nothing was computed"),
            None => good("PASS"),
            Some(reason) => bad(format!("FAIL: {reason}")),
        };
        let error = format!("{:.2e}, tolerance {:.2e}", check.verdict.max_error, check.verdict.tolerance);
        let mut facts = vec![
            ("problem", Text::from(format!("{}{}", describe(&self.request.problem), self.what()))),
            ("backend", format!("{}, kernel {}", self.backend, self.kernel).into()),
            ("max error", error.into()),
            ("compared", compared.into()),
        ];
        facts.extend(self.latency.iter().map(|samples| {
            let [p50, p90, min, max] = QUANTILES.map(|quantile| time(nearest_rank(samples, quantile)));
            let runs = if samples.len() == 1 { "run" } else { "runs" };
            (
                "latency",
                format!("p50 {p50}, p90 {p90}, min {min}, max {max} ({} {runs})", samples.len()).into(),
            )
        }));
        facts.extend(self.gflops().map(|speed| ("speed", format!("{speed:.1} GFLOP/s").into())));
        facts.extend(self.simulated.iter().map(|Simulated { runs, seconds, .. }| {
            let hostile = runs.saturating_sub(1);
            ("simulated", format!("1 plain run, {hostile} under hostile schedules, {seconds:.1} s").into())
        }));
        facts.push(("result", result));
        let page = Page::default().facts(facts);
        let last = self.simulated.as_ref().and_then(|part| part.last.as_ref());
        let page = last.into_iter().fold(page, simulation::add_to);
        page.facts(self.wrote().into_iter().map(|path| ("wrote", path)))
    }
}
