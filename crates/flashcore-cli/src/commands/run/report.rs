//! The answer of `run`: one JSON object, or two short tables.

use flashcore_core::Mask;
use flashcore_lab::latency::Latency;
use serde::Serialize;

use super::{
    check::Check,
    request::{Request, Source},
};
use crate::{
    output::{Page, Report, Text, Tone},
    simulation::Simulated,
};

/// What computed.
#[derive(Debug)]
pub struct Computed {
    pub backend: &'static str,
    pub kernel: String,
}

/// What computing took.
#[derive(Debug)]
pub enum Effort {
    /// On a clock.
    Timed(Latency),
    /// In the simulator, whose time means nothing: what the last run did; `None` where there is nothing to compute.
    Simulated { runs: usize, seconds: f64, last: Option<Simulated> },
}

/// The part of the answer about the simulator.
#[derive(Serialize, Debug)]
struct SimulationReport {
    /// Runs: one tame, the others under hostile schedules.
    runs: usize,
    seconds: f64,
    #[serde(flatten)]
    last: Option<Simulated>,
}

/// Everything `run` tells.
#[derive(Serialize, Debug)]
pub struct RunReport {
    backend: &'static str,
    kernel: String,
    /// Batch, heads, sequence, dim of the queries.
    shape: [usize; 4],
    kv_heads: usize,
    seq_kv: usize,
    dim_v: usize,
    dtype: &'static str,
    mask: String,
    scale: f32,
    softcap: Option<f32>,
    sinks: bool,
    seed: Option<u64>,
    max_error: f64,
    tolerance: f64,
    mean_error: f64,
    mean_tolerance: f64,
    lse_error: f64,
    rows: usize,
    checked_rows: usize,
    repeatable: bool,
    pass: bool,
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    simulation: Option<SimulationReport>,
    wrote: Vec<String>,
}

impl RunReport {
    /// Puts together what was asked, what ran and what was found.
    pub fn new(request: &Request, computed: Computed, check: &Check, effort: Effort) -> Self {
        let p = &request.problem;
        let v = &check.verdict;
        let wrote = if check.pass { request.outputs() } else { Vec::new() };
        let (latency_us, simulation) = match effort {
            Effort::Timed(latency) => (Some(latency), None),
            Effort::Simulated { runs, seconds, last } => {
                (None, Some(SimulationReport { runs, seconds, last }))
            }
        };
        let faulty = simulation.as_ref().and_then(SimulationReport::fault);
        Self {
            backend: computed.backend,
            kernel: computed.kernel,
            shape: p.q().dims().array(),
            kv_heads: p.heads_kv(),
            seq_kv: p.seq_kv(),
            dim_v: p.dim_v(),
            dtype: p.dtype().name(),
            mask: p.mask().to_string(),
            scale: p.scale(),
            softcap: p.softcap(),
            sinks: p.sinks().is_some(),
            seed: match request.source {
                Source::Seed(seed) => Some(seed),
                Source::Files(_) => None,
            },
            max_error: v.max_error,
            tolerance: v.tolerance,
            mean_error: v.mean_error,
            mean_tolerance: v.mean_tolerance,
            lse_error: v.lse_error,
            rows: p.rows(),
            checked_rows: check.checked_rows,
            repeatable: check.repeatable,
            pass: check.pass,
            reason: faulty.or_else(|| reason(check)),
            gflops: latency_us.as_ref().map(|latency| gflops(p.flops(), latency.p50)),
            latency_us,
            simulation,
            wrote: wrote.into_iter().map(|path| path.display().to_string()).collect(),
        }
    }

    fn problem(&self) -> String {
        let [batch, heads, seq, dim] = self.shape;
        let mut text = format!("{batch}x{heads}x{seq}x{dim} {}", self.dtype);
        let others =
            [(self.kv_heads, heads, "kv heads"), (self.seq_kv, seq, "keys"), (self.dim_v, dim, "value dim")];
        for (other, usual, name) in others {
            if other != usual {
                text += &format!(", {other} {name}");
            }
        }
        if self.mask != Mask::NONE.to_string() {
            text += &format!(", {}", self.mask);
        }
        text
    }

    fn rows_checked(&self) -> String {
        if self.checked_rows == self.rows {
            format!("all {} rows", self.rows)
        } else {
            format!("{} of {} rows (evenly spaced)", self.checked_rows, self.rows)
        }
    }

    fn result(&self) -> Text {
        match &self.reason {
            None if self.rows == 0 => Text::new("PASS: no rows, so that nothing was computed", Tone::Good),
            None => Text::new("PASS", Tone::Good),
            Some(reason) => Text::new(format!("FAIL: {reason}"), Tone::Bad),
        }
    }
}

impl SimulationReport {
    fn describe(&self) -> String {
        let hostile = self.runs.saturating_sub(1);
        format!("1 tame run, {hostile} under hostile schedules, {:.1} s", self.seconds)
    }

    fn fault(&self) -> Option<String> {
        let last = self.last.as_ref().filter(|last| !last.clean)?;
        let first = last.findings.iter().find(|found| found.is_error())?;
        Some(format!("the simulator found {first}"))
    }
}

fn reason(check: &Check) -> Option<String> {
    let unsteady = (!check.repeatable).then(|| "two runs on the same input gave different bits".to_owned());
    check.verdict.reason.as_ref().map(ToString::to_string).or(unsteady)
}

fn gflops(flops: f64, microseconds: f64) -> f64 {
    if microseconds > 0.0 { flops / microseconds / 1e3 } else { 0.0 }
}

impl Report for RunReport {
    fn page(&self) -> Page {
        let mut facts = vec![
            ("problem", Text::from(self.problem())),
            ("backend", format!("{}, kernel {}", self.backend, self.kernel).into()),
            ("max error", format!("{:.2e}, tolerance {:.2e}", self.max_error, self.tolerance).into()),
            ("compared", format!("{} with f64", self.rows_checked()).into()),
        ];
        facts.extend(self.latency_us.iter().map(|latency| ("latency", latency.to_string().into())));
        facts.extend(self.gflops.iter().map(|speed| ("speed", format!("{speed:.1} GFLOP/s").into())));
        facts.extend(self.simulation.iter().map(|part| ("simulated", part.describe().into())));
        facts.push(("result", self.result()));
        let mut page = Page::default().facts(facts);
        if let Some(last) = self.simulation.as_ref().and_then(|part| part.last.as_ref()) {
            page = last.add_to(page);
        }
        if self.wrote.is_empty() {
            page
        } else {
            page.facts(self.wrote.iter().map(|path| ("wrote", path.as_str())))
        }
    }
}
