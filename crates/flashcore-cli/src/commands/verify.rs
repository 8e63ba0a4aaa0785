//! `flashcore verify`: every backend, every case, stage by stage, each group in a process of its own.
//!
//! The parent ([`execute`]) starts this program again with a hidden command ([`execute_group`]) for each group.

use std::{
    io,
    process::Command,
    time::{Duration, Instant},
};

use clap::{Args, builder::PossibleValuesParser};
use flashcore::BackendError;
use flashcore_kernels::Family;
use flashcore_lab::verify::{
    Ending, Extent, Order, Report, Scope, child,
    plan::{TARGETS, Target, groups},
    watch::Watch,
};
use serde::Serialize;
use serde_json::json;

use crate::{
    error::{CliError, Verdict},
    interrupt,
    output::{Output, Page, Text, bad, faint, good},
    program,
    progress::Progress,
    table_flags::families,
};

const EXAMPLES: &str = "\
Examples:
  flashcore verify --quick
  flashcore verify --backend cuda --seeds 5 --runs 10
  flashcore verify --filter ragged/ --json
  flashcore verify --backend sim-general --all --seeds 1 --timeout 3600

Stages, in this order: build, launch, sanity, correctness, determinism, isolation.
A check that hangs or crashes counts as one failure; the others still run.
Exit codes: 0 all passed, 1 something failed, 2 nothing could be checked.";

/// Check backends for correctness: every case, law and random problem, stage by stage
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Backend to check, or all that this machine has
    #[arg(long, value_name = "NAME", default_value = "all", value_parser = names())]
    backend: String,
    /// Only checks whose group and name contain this, as in `gqa/` or `f16`
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Seeds of the inputs [default: 3, or 1 if quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Runs of each check that must give the same bits
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=1000))]
    runs: u16,
    /// Skip slow checks
    #[arg(long)]
    quick: bool,
    /// Skip nothing; the simulator takes hours for the largest cases
    #[arg(long, conflicts_with = "quick")]
    all: bool,
    /// Seconds after which a check counts as hung
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u16).range(1..))]
    timeout: u16,
    /// Check only this GPU kernel; problems that it does not support are skipped
    #[arg(long, value_name = "NAME", value_parser = families())]
    kernel: Option<Family>,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(TARGETS.iter().map(|target| target.name).chain(["all"]))
}

/// What a child is told.
#[derive(Args, Clone, Debug)]
pub struct GroupFlags {
    /// The order, as JSON
    order: String,
}

/// Carries out one order; what happens goes to standard output line by line.
pub fn execute_group(flags: &GroupFlags) -> Result<Verdict, CliError> {
    let order: Order = serde_json::from_str(&flags.order)?;
    child::run(&order, &mut io::stdout().lock()).map_err(CliError::Print)?;
    Ok(Verdict::Pass)
}

/// Failures that a page shows in full.
const SHOWN: usize = 10;
/// Letters of a reason that a page shows.
const REASON: usize = 160;

/// What was found about a backend.
#[derive(Serialize, Debug)]
struct Backend {
    backend: &'static str,
    unavailable: Option<String>,
    groups: Vec<Group>,
}

/// What was found in a group of checks.
#[derive(Serialize, Debug)]
struct Group {
    group: String,
    passed: usize,
    skipped: usize,
    failed: usize,
    seconds: f64,
    /// The largest share of its tolerance that an error reached.
    worst: Option<f64>,
    failures: Vec<Report>,
}

impl Group {
    fn new(group: String, reports: Vec<Report>, time: Duration) -> Self {
        let count = |ending| reports.iter().filter(|report| report.ending == ending).count();
        let share = |report: &Report| Some(report.max_error? / report.tolerance.filter(|t| *t > 0.0)?);
        Self {
            group,
            passed: count(Ending::Passed),
            skipped: count(Ending::Skipped),
            failed: count(Ending::Failed),
            seconds: time.as_secs_f64(),
            worst: reports.iter().filter_map(share).reduce(f64::max),
            failures: reports.into_iter().filter(|report| report.ending == Ending::Failed).collect(),
        }
    }

    /// The group in one line, under [`heading`].
    fn line(&self, backend: &str) -> Text {
        let Self { group, passed, skipped, failed, seconds, worst, .. } = self;
        let worst = worst.map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
        let (passed, skipped, failures) = (passed.to_string(), skipped.to_string(), failed.to_string());
        let words = line([backend, group, &passed, &skipped, &failures, &worst], &format!("{seconds:.1} s"));
        if *failed > 0 { bad(words) } else { words.into() }
    }
}

/// What the columns of [`Group::line`] are.
fn heading() -> Text {
    faint(line(["backend", "group", "passed", "skipped", "failed", "of tolerance"], "time"))
}

/// Columns that line up although they are printed one at a time.
fn line([backend, group, passed, skipped, failed, worst]: [&str; 6], time: &str) -> String {
    format!(" {backend:<12} {group:<14} {passed:>7} {skipped:>8} {failed:>7} {worst:>13} {time:>10}")
}

/// Verifies the backends asked for.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let begin = Instant::now();
    let scope = flags.scope();
    if flags.targets().all(|target| groups(target, &scope).is_empty()) {
        return Err(flags.nothing(scope));
    }
    output.remark(&heading())?;
    let backends =
        flags.targets().map(|target| flags.verify(target, &scope, output)).collect::<Result<Vec<_>, _>>()?;
    let groups = || backends.iter().flat_map(|backend| &backend.groups);
    let (stopped, seconds) = (interrupt::stopped(), begin.elapsed().as_secs_f64());
    let failed = groups().any(|group| group.failed > 0);
    let checked = groups().any(|group| group.passed > 0);
    let pass = checked && !failed && !stopped;
    let json = json!({ "pass": pass, "stopped": stopped, "seconds": seconds, "backends": backends });
    output.answer(&json, || page(&backends, pass, stopped, seconds))?;
    let missing = backends.iter().find_map(|b| Some((b.backend, b.unavailable.clone()?)));
    match missing {
        _ if failed => Ok(Verdict::Fail),
        _ if stopped => Ok(Verdict::Stopped),
        Some((backend, reason)) if !checked => Err(BackendError::Unavailable { backend, reason }.into()),
        _ => Ok(Verdict::Pass),
    }
}

fn page(backends: &[Backend], pass: bool, stopped: bool, seconds: f64) -> Page {
    let missing = backends.iter().filter_map(|b| {
        Some(faint(format!("{}: not available here: {}", b.backend, b.unavailable.as_ref()?)))
    });
    let failures: Vec<&Report> =
        backends.iter().flat_map(|b| &b.groups).flat_map(|group| &group.failures).collect();
    let result = match (failures.len(), pass) {
        (0, true) => good(format!("PASS in {seconds:.1} s")),
        (0, false) if stopped => bad(format!("STOPPED in {seconds:.1} s, no failure so far")),
        (0, false) => bad("nothing was checked"),
        (n, _) => bad(format!("FAIL: {n} failed in {seconds:.1} s; --json lists all")),
    };
    let page = Page::default().lines(missing);
    page.table(failures.iter().take(SHOWN).map(|failure| failure_row(failure))).facts([("result", result)])
}

/// The beginning of what may be pages; `--json` has it all.
fn failure_row(failure: &Report) -> Vec<Text> {
    let reason = failure.reason.as_deref().unwrap_or_default();
    let line = reason.lines().next().unwrap_or_default();
    let whole = line.chars().count() <= REASON && !reason.contains('\n');
    let more = if whole { "" } else { " …" };
    let reason: String = line.chars().take(REASON).chain(more.chars()).collect();
    vec![bad(failure.stage.as_deref().unwrap_or_default()), failure.check.as_str().into(), reason.into()]
}

impl Flags {
    fn targets(&self) -> impl Iterator<Item = &'static Target> {
        let named = |target: &&Target| [target.name, "all"].contains(&self.backend.as_str());
        TARGETS.iter().filter(named).filter(|target| self.kernel.is_none() || target.has_kernels())
    }

    /// What to say where the flags leave nothing.
    fn nothing(&self, scope: Scope) -> CliError {
        if self.targets().next().is_none() {
            return CliError::KernelOnCpu { flag: "--kernel" };
        }
        let every = Scope { filter: None, ..scope.clone() };
        let mut names: Vec<String> = Vec::new();
        for group in self.targets().flat_map(|target| groups(target, &every)) {
            if !names.contains(&group.name) {
                names.push(group.name);
            }
        }
        CliError::NothingToCheck { filter: scope.filter.unwrap_or_default(), groups: names.join(", ") }
    }

    fn scope(&self) -> Scope {
        let seeds = self.seeds.unwrap_or(if self.quick { 1 } else { 3 });
        let extent = match (self.quick, self.all) {
            (true, _) => Extent::Quick,
            (_, true) => Extent::All,
            _ => Extent::Usual,
        };
        Scope { filter: self.filter.clone(), seeds, runs: self.runs.into(), extent, kernel: self.kernel }
    }

    fn verify(&self, target: &Target, scope: &Scope, output: &Output) -> Result<Backend, CliError> {
        let groups = groups(target, scope);
        let progress = Progress::stoppable(groups.iter().map(|group| group.checks.len()).sum(), output);
        let mut report = Backend { backend: target.name, unavailable: None, groups: Vec::new() };
        let again = program::again()?;
        let command = |order: &Order| {
            let mut command = Command::new(again.get_program());
            command.args(again.get_args());
            command.args(["verify-group", &serde_json::to_string(order).unwrap_or_default()]);
            command
        };
        let patience = Duration::from_secs(self.timeout.into());
        let watch = Watch { command: &command, patience, stopped: &interrupt::stopped };
        for group in groups {
            if report.unavailable.is_some() || interrupt::stopped() {
                break;
            }
            let begin = Instant::now();
            let (backend, name) = (target.name.to_owned(), group.name.clone());
            let order = Order { backend, group: name, scope: scope.clone(), skip: 0 };
            progress.say(format!("{}: {}", target.name, group.name));
            let outcome = watch.group(order, &mut |_| progress.step())?;
            report.unavailable = outcome.unavailable;
            if report.unavailable.is_none() {
                let group = Group::new(group.name, outcome.reports, begin.elapsed());
                progress.print(&group.line(target.name), output)?;
                report.groups.push(group);
            }
        }
        Ok(report)
    }
}
