//! `flashcore gate`: pass or fail for CI; right first, then fast enough, with noise accounted for.
//!
//! The result file is rewritten after every task, so that stopping at any moment leaves a valid one.

use std::path::PathBuf;

use clap::Args;
use flashcore_lab::{
    LabError,
    competitor::{
        Competitor,
        roster::{Roster, usual_gate_protocol},
    },
    contest::Contest,
    gate::{self, Demand, Ruling},
    judge::Care,
    protocol::Protocol,
    record::{Measurement, Record},
    save,
    sensors::Sensors,
    task::Task,
};
use serde_json::json;

use crate::{
    error::{CliError, Verdict},
    files::FileError,
    flags::BackendFlags,
    interrupt,
    lab_flags::{TaskFlags, TimingFlags},
    output::{Output, Page, Text, bad, faint, good},
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore gate --suite cpu --max-ratio 0.95
  flashcore gate --suite forward --peer torch-cudnn --max-ratio 0.95 --json
  flashcore gate --suite cpu --baseline main.json --margin 0.025

A baseline is the result file of `bench --out` or `gate --out` on the same machine.
An existing result file is kept unless --force is given.
FlashCore and two peers are checked against f64 first; whichever is wrong is not timed.
--max-ratio passes only if the whole 95 % interval of our time over the peer's is at or below X;
--baseline fails only if the whole 95 % interval is above 1 + margin.
Exit codes: 0 pass, 1 fail, 2 could not measure or was stopped, so there is no verdict.";

/// Pass or fail, for CI: is it correct, and fast enough?
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    #[command(flatten)]
    demands: DemandFlags,
    /// The fast peer to compare with [default: the strongest one here]
    #[arg(long, value_name = "NAME", help_heading = "How to run")]
    peer: Option<String>,
    #[command(flatten)]
    timing: TimingFlags,
}

/// What is demanded; at least one of them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Requirements")]
#[group(required = true, multiple = true)]
pub struct DemandFlags {
    /// Require our time to be at most this multiple of the peer's, with 95 % confidence
    #[arg(long, value_name = "X", value_parser = positive)]
    max_ratio: Option<f64>,
    /// Require our time to be no worse than in this result file
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Tolerated slowdown against the baseline
    #[arg(long, value_name = "X", default_value_t = 0.025, value_parser = positive, requires = "baseline")]
    margin: f64,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("give a positive number, as in 0.95".to_owned()),
    }
}

/// Measures and decides.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let (tasks, ours) = flags.timing.begin(&flags.task, &flags.backend)?;
    if let (Some(path), Some(out)) = (&flags.demands.baseline, &flags.timing.out)
        && save::same(path, out)
    {
        return Err(FileError::ReplacesInput { path: path.clone() }.into());
    }
    let baseline = flags.demands.baseline.as_deref().map(Record::load);
    let baseline = baseline.transpose().map_err(LabError::from)?;
    let protocol = flags.timing.protocol(usual_gate_protocol(ours.place()), flags.task.replays());
    let roster = Roster::open(ours, flags.backend.threads());
    let competitors = line_up(&roster, &tasks[0], flags.peer.as_deref())?;
    let mut record = Record::new(protocol, roster.describe_peers());
    record.warnings.extend(roster.note());
    if let Some(baseline) = &baseline {
        gate::check_baseline(baseline, &record)?;
    }
    let (gate, mut rulings) = (Gate { competitors, baseline, demands: flags.demands }, Vec::new());
    flags.timing.measure(&tasks, &mut record, output, |task, record, sensors, progress| {
        rulings.extend(gate.rule(task, record, sensors, progress)?);
        Ok(())
    })?;
    let pass = record.complete && rulings.iter().all(Ruling::pass);
    gate.show(pass, &record, &rulings, output)?;
    Ok(if record.complete { Verdict::from_bool(pass) } else { Verdict::Stopped })
}

/// Ours, the fast peer, and the plain one; those of one task of a suite are those of all.
fn line_up(roster: &Roster, task: &Task, peer: Option<&str>) -> Result<Vec<Box<dyn Competitor>>, CliError> {
    let mut competitors = roster.fast_and_plain(task);
    if let Some(name) = peer {
        competitors.retain(|competitor| competitor.name() != name);
        let plain = competitors.pop();
        competitors = std::iter::once(roster.peer(name)?).chain(plain).collect();
    }
    competitors.insert(0, roster.ours());
    Ok(competitors)
}

/// Everything a decision needs.
struct Gate {
    /// Ours first, then the fast peer, then the plain one.
    competitors: Vec<Box<dyn Competitor>>,
    baseline: Option<Record>,
    demands: DemandFlags,
}

impl Gate {
    fn rule(
        &self,
        task: &Task,
        record: &mut Record,
        sensors: &Sensors,
        progress: &mut Progress,
    ) -> Result<Vec<Ruling>, LabError> {
        let protocol = record.protocol;
        let contest = Contest::prepare(task, &self.competitors, protocol.seed, Care::Usual, progress)?;
        let ours = self.competitors[0].name();
        if let Some(ruling) = gate::correctness(task, ours, &contest)? {
            return Ok(vec![ruling]);
        }
        // The plain peer was there to be right, not to be fast, unless it is the only one.
        let fast = self
            .competitors
            .get(1)
            .filter(|_| self.demands.max_ratio.is_some())
            .map(|competitor| competitor.name());
        let timed: Vec<&str> = std::iter::once(ours).chain(fast).collect();
        let measured = contest.only(&timed).run(&protocol, sensors, progress)?;
        // Who stops it gets the turns there were; nothing follows from them.
        let stopped = interrupt::stopped();
        let rulings = if stopped { Vec::new() } else { self.compare(task, &measured, &protocol, fast)? };
        record.measurements.extend(measured);
        Ok(rulings)
    }

    /// Holds our times, the first of those measured, against what is demanded.
    fn compare(
        &self,
        task: &Task,
        measured: &[Measurement],
        protocol: &Protocol,
        fast: Option<&str>,
    ) -> Result<Vec<Ruling>, LabError> {
        let mut rulings = Vec::new();
        if let Some(most) = self.demands.max_ratio {
            let pair = [self.competitors[0].name(), fast.unwrap_or("a peer")];
            rulings.push(gate::against_peer(task, measured, protocol, pair, Demand::Superior(most))?);
        }
        if let (Some(baseline), Some(now)) = (&self.baseline, measured.first()) {
            let demand = Demand::NotInferior(self.demands.margin);
            rulings.push(gate::against_baseline(task, now, protocol, baseline, demand)?);
        }
        Ok(rulings)
    }

    fn show(&self, pass: bool, record: &Record, rulings: &[Ruling], output: &Output) -> Result<(), CliError> {
        let Record { complete, machine, protocol, warnings, .. } = record;
        let competitors: Vec<&str> = self.competitors.iter().map(|competitor| competitor.name()).collect();
        let json = json!({
            "pass": pass, "stopped": !complete, "machine": machine, "protocol": protocol, "arms": competitors,
            "rulings": rulings, "warnings": warnings,
        });
        output.answer(&json, || {
            let reasons =
                rulings.iter().filter_map(|r| Some(bad(format!("{}: {}", r.task, r.reason.as_ref()?))));
            let result = match rulings.iter().filter(|ruling| !ruling.pass()).count() {
                _ if !complete => bad("STOPPED; not everything was measured"),
                0 => good("PASS"),
                n => bad(format!("FAIL: {n} of {} requirements not met", rulings.len())),
            };
            let judged = format!("{} against f64, before anything was timed", competitors.join(", "));
            let notes = warnings.iter().map(|warning| ("note", faint(warning)));
            let facts = [("judged", judged.into())].into_iter().chain(notes).chain([("result", result)]);
            let heading = ["problem", "against", "required", "ratio", "95 %", ""];
            Page::default().headed(&heading, rulings.iter().map(row)).lines(reasons).facts(facts)
        })
    }
}

fn row(ruling: &Ruling) -> Vec<Text> {
    let demand = ruling.demand.map_or("right".to_owned(), |demand| match demand {
        Demand::Superior(most) => format!("<= {most}"),
        Demand::NotInferior(_) => format!("not > {:.3}", demand.bound()),
    });
    let (point, interval) = ruling.ratio.map_or((String::new(), String::new()), |ratio| {
        (format!("{:.3}", ratio.point), format!("{:.3}-{:.3}", ratio.low, ratio.high))
    });
    let verdict = if ruling.pass() { good("pass") } else { bad("FAIL") };
    let words = [ruling.task.clone(), ruling.against.clone(), demand, point, interval];
    words.into_iter().map(Text::from).chain([verdict]).collect()
}
