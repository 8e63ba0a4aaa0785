//! `flashcore bench`: how fast, against whom, and how far from what the device can do.
//!
//! Every competitor gets the same inputs and is judged before it is timed. The result file is rewritten after every
//! task, so that stopping at any moment leaves a valid one.

mod compared;
mod report;

use clap::Args;
use flashcore_lab::{
    LabError,
    arm::{
        Arm, Place,
        roster::{Ours, Roster},
    },
    comparison::{Compared, Comparison},
    contest::Contest,
    memory,
    protocol::{Mode, Protocol, STEADY},
    record::Record,
    sensors::Sensors,
    task::Task,
};

use self::report::BenchReport;
use crate::{
    error::{CliError, Verdict},
    flags::BackendFlags,
    interrupt,
    lab_flags::{TaskFlags, TimingFlags},
    output::Output,
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore bench
  flashcore bench --suite forward --out bench/runs/forward.json
  flashcore bench --suite small --peers torch-cudnn,torch-flash,torch-efficient,torch-math
  flashcore bench --shape 1x32x4096x128 --causal --dtype bf16 --mode interleaved
  flashcore bench --suite options --out bench/runs/options.json
  flashcore bench --suite sweep --filter 1x32xSx64
  FLASHCORE_PYTHON=~/torch/bin/python flashcore bench --backend cpu --peers all

Times are medians; the first competitor is the one that others are compared with. The suites `options`
and `sweep` compare problems of ours with each other and say which ratios are larger than wanted.
A result file that exists is kept unless --force is given.
Exit codes: 0 measured, 1 ours is wrong somewhere, 2 could not measure.";

/// The usual way of measuring.
const USUAL: Protocol = Protocol { warm_up: STEADY, ..Protocol::new(Mode::Sustained, 0.6) };

/// Measure speed against peers on the same inputs
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    /// Whom to compare with: names, `all` or `none` [default: the ones to beat]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "How to run")]
    peers: Option<Vec<String>>,
    /// Do not measure what the device can do at best
    #[arg(long, help_heading = "How to measure")]
    no_roofline: bool,
    #[command(flatten)]
    timing: TimingFlags,
}

/// Measures and reports.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    flags.timing.check_out()?;
    let tasks = flags.task.tasks()?;
    tasks.iter().try_for_each(|task| memory::check(3 * task.bytes() as u64))?;
    let ours = flags.backend.ours()?;
    let roster = Roster::open(ours.clone(), flags.backend.threads());
    let comparisons = flags.task.comparisons()?;
    let arms = flags.line_ups(&roster, &ours, &tasks, &comparisons)?;
    let protocol = flags.timing.protocol(flags.task.protocol(USUAL), flags.task.replays());
    let mut record = Record::new(protocol, roster.describe_peers());
    record.warnings.extend(roster.note());
    // Ours beside ours says nothing about the device.
    if !flags.no_roofline && !flags.task.compares() {
        record.ceilings = ceilings(&roster, &tasks)?;
    }
    flags.measure(&tasks, &arms, &mut record, output)?;
    let ours = roster.ours();
    let compared: Vec<Compared> = comparisons.iter().map(|one| one.read(&record, ours.name())).collect();
    let wrong = record
        .measurements
        .iter()
        .any(|m| m.arm == ours.name() && m.finding.as_ref().is_some_and(|f| !f.pass()));
    output.show(&BenchReport::new(&record, &compared, flags.timing.out.as_deref()))?;
    Ok(if record.complete { Verdict::from_bool(!wrong) } else { Verdict::Stopped })
}

impl Flags {
    /// The competitors of each task: a suite of comparisons needs peers only where one is compared with.
    fn line_ups(
        &self,
        roster: &Roster,
        ours: &Ours,
        tasks: &[Task],
        comparisons: &[Comparison],
    ) -> Result<Vec<Vec<Box<dyn Arm>>>, CliError> {
        let needed = |task: &Task| {
            let names = comparisons.iter().filter(|one| one.task == *task).filter_map(Comparison::peer);
            names.filter_map(|name| roster.peer(name).ok()).collect()
        };
        let peers = |task| match self.peers.as_deref() {
            Some(names) => named_peers(roster, names),
            None if self.task.compares() => Ok(needed(task)),
            None => Ok(usual_peers(roster, ours)),
        };
        tasks.iter().map(|task| Ok(line_up(roster, peers(task)?))).collect()
    }

    fn measure(
        &self,
        tasks: &[Task],
        arms: &[Vec<Box<dyn Arm>>],
        record: &mut Record,
        output: &Output,
    ) -> Result<(), CliError> {
        let mut progress = Progress::stoppable(tasks.len(), output);
        let sensors = Sensors::start();
        let protocol = record.protocol;
        for (task, arms) in tasks.iter().zip(arms) {
            let contest = match Contest::prepare(task, arms, protocol.seed, self.task.care(), &mut progress) {
                Err(LabError::Stopped) => break,
                contest => contest?,
            };
            record.measurements.extend(contest.run(&protocol, &sensors, &mut progress)?);
            self.save(record)?;
            progress.step();
            if interrupt::stopped() {
                break;
            }
        }
        record.complete = !interrupt::stopped();
        let doubts = record.doubts();
        record.warnings.extend(doubts);
        self.save(record)
    }

    fn save(&self, record: &Record) -> Result<(), CliError> {
        let saved = self.timing.out.as_deref().map(|path| record.save(path));
        Ok(saved.transpose().map(drop).map_err(LabError::from)?)
    }
}

/// The competitors: the first peer, which others are compared with and which comes again at the end, then ours.
fn line_up(roster: &Roster, mut peers: Vec<Box<dyn Arm>>) -> Vec<Box<dyn Arm>> {
    peers.insert(peers.len().min(1), roster.ours());
    peers
}

fn named_peers(roster: &Roster, names: &[String]) -> Result<Vec<Box<dyn Arm>>, CliError> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match names[..] {
        ["none"] => Ok(Vec::new()),
        ["all"] => Ok(roster.peers()),
        _ => names.iter().map(|name| Ok(roster.peer(name)?)).collect(),
    }
}

/// On a GPU the two to beat; on the CPU the best that is there.
fn usual_peers(roster: &Roster, ours: &Ours) -> Vec<Box<dyn Arm>> {
    let mut peers = roster.peers();
    peers.truncate(if ours.place() == Place::Gpu { 2 } else { 1 });
    peers
}

fn ceilings(roster: &Roster, tasks: &[Task]) -> Result<Vec<flashcore_lab::ceiling::Ceiling>, CliError> {
    let mut dtypes: Vec<_> = tasks.iter().map(|task| task.problem().dtype()).collect();
    dtypes.dedup();
    dtypes.into_iter().map(|dtype| Ok(roster.ceiling(dtype)?)).collect()
}
