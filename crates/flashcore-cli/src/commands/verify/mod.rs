//! `flashcore verify`: every backend, every case, stage by stage, each group in a process of its own.
//!
//! The parent ([`execute`]) starts this program again with a hidden command ([`execute_group`]) for each group.

mod report;

use std::{
    io,
    process::Command,
    time::{Duration, Instant},
};

use clap::{Args, builder::PossibleValuesParser};
use flashcore_lab::verify::{
    Extent, Order, Scope, child,
    plan::{TARGETS, Target, groups},
    watch::Watch,
};

use self::report::{BackendReport, GroupReport, VerifyReport};
use crate::{
    error::{CliError, Verdict},
    interrupt,
    output::Output,
    program,
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore verify --quick
  flashcore verify --backend cuda --seeds 5 --runs 10
  flashcore verify --filter ragged/ --json
  flashcore verify --backend sim-general --all --seeds 1 --timeout 3600

Stages, in this order: build, launch, sanity, correctness, determinism, isolation.
A check that hangs or kills its process is one failure; the rest goes on.
Exit codes: 0 all passed, 1 something failed, 2 nothing could be checked.";

/// Check that backends are right: every case, law and random problem, stage by stage
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// What is checked: a backend, or all that this machine has
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
    /// Leave out what takes long
    #[arg(long)]
    quick: bool,
    /// Leave nothing out: the simulator takes hours for the largest cases
    #[arg(long, conflicts_with = "quick")]
    all: bool,
    /// Seconds after which a check is taken to hang
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u16).range(1..))]
    timeout: u16,
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

/// Verifies the backends asked for.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let begin = Instant::now();
    let scope = flags.scope();
    let reports =
        flags.targets().map(|target| flags.verify(target, &scope, output)).collect::<Result<Vec<_>, _>>()?;
    if reports.iter().all(|report| report.groups.is_empty() && report.unavailable.is_none()) {
        return Err(flags.nothing(scope));
    }
    let report = VerifyReport::new(reports, begin.elapsed(), interrupt::stopped());
    output.show(&report)?;
    report.verdict()
}

impl Flags {
    fn targets(&self) -> impl Iterator<Item = &'static Target> {
        TARGETS.iter().filter(|target| [target.name, "all"].contains(&self.backend.as_str()))
    }

    /// What to say where the filter leaves nothing.
    fn nothing(&self, scope: Scope) -> CliError {
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
        Scope { filter: self.filter.clone(), seeds, runs: self.runs.into(), extent }
    }

    fn verify(&self, target: &Target, scope: &Scope, output: &Output) -> Result<BackendReport, CliError> {
        let groups = groups(target, scope);
        let progress = Progress::stoppable(groups.iter().map(|group| group.checks.len()).sum(), output);
        let mut report = BackendReport::new(target.name);
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
                report.groups.push(GroupReport::new(group.name, outcome.reports, begin.elapsed()));
            }
        }
        Ok(report)
    }
}
