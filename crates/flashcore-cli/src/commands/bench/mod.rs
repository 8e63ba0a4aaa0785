//! `flashcore bench`: how fast, against whom, and how far from what the device can do.
//!
//! Every competitor gets the same inputs and is judged before it is timed. The result file is rewritten after every
//! task, so that stopping at any moment leaves a valid one.

mod kinds;
mod report;

use std::path::PathBuf;

use clap::Args;
use flashcore_lab::{
    comparison::{Compared, Comparison},
    competitor::{Competitor, Place, roster::Roster},
    contest::Contest,
    protocol::{Mode, Protocol, STEADY},
    record::{Measurement, Record},
    suites::Suite,
    task::Task,
};

use self::report::View;
use crate::{
    error::{CliError, Verdict},
    flags::BackendFlags,
    lab_flags::{TaskFlags, TimingFlags},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore bench
  flashcore bench --suite small --peers torch-cudnn,torch-flash,torch-efficient,torch-math
  flashcore bench --shape 1x32x4096x128 --causal --dtype bf16 --mode interleaved
  flashcore bench --suite forward --fa3 ~/fa3 --out bench/runs/forward.json
  flashcore bench --suite kinds --dtype f16 --filter 'x128 sharp' --filter 'x128 drift'
  flashcore bench --suite options --out bench/runs/options.json
  flashcore bench --suite sweep --filter 1x32xSx64
  flashcore bench --suite backward --fa3 ~/fa3 --peers torch-cudnn,torch-flash,fa3,fa3-deterministic
  flashcore bench --suite serving --fa3 ~/fa3 --filter random
  flashcore bench --suite moe-cpu --backend cpu
  FLASHCORE_PYTHON=~/torch/bin/python flashcore bench --backend cpu --peers all

Times are medians; ratios are to the first competitor. The suite `kinds` compares errors and times
with the best peer's on every kind of data. The suites `options` and `sweep` compare FlashCore with
itself, for example with and without sinks, and mark ratios above their target; `backward` and
`serving` do so beside peers. Suites whose name ends in `-cpu` are small versions for a CPU.
An existing result file is kept unless --force is given.
Exit codes: 0 measured, 1 FlashCore gave a wrong result, 2 could not measure.";

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
    /// Peers to compare with: names, `all` or `none` [default: the strongest ones here]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "How to run")]
    peers: Option<Vec<String>>,
    /// Add FlashAttention-3 as peer `fa3`: folder with its library and CUDA runtime
    #[arg(long, value_name = "FOLDER", help_heading = "How to run")]
    fa3: Option<PathBuf>,
    /// Do not measure the roofline
    #[arg(long, help_heading = "How to measure")]
    no_roofline: bool,
    #[command(flatten)]
    timing: TimingFlags,
}

/// Measures and reports.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let (tasks, ours) = flags.timing.begin(&flags.task, &flags.backend)?;
    let place = ours.place();
    let roster = Roster::open(ours, flags.backend.threads());
    flags.fa3.as_deref().map_or(Ok(()), |folder| roster.add_fa3(folder))?;
    let mut comparisons = flags.task.comparisons()?;
    comparisons.retain(|one| tasks.contains(&one.task) && tasks.contains(&one.other));
    let line_ups = tasks.iter().map(|task| flags.line_up(&roster, place, task, &comparisons));
    let line_ups = line_ups.collect::<Result<Vec<_>, _>>()?;
    let protocol = flags.timing.protocol(flags.task.protocol(USUAL), flags.task.replays());
    let mut record = Record::new(protocol, roster.describe_peers());
    record.warnings.extend(roster.note());
    // Ours beside ours says nothing about the device.
    if !flags.no_roofline && !flags.task.compares() {
        let mut dtypes: Vec<_> = tasks.iter().map(Task::dtype).collect();
        dtypes.dedup();
        record.ceilings = dtypes.into_iter().map(|dtype| roster.ceiling(dtype)).collect::<Result<_, _>>()?;
    }
    let mut line_ups = line_ups.iter();
    flags.timing.measure(&tasks, &mut record, output, |task, record, sensors, progress| {
        let (competitors, protocol) = (line_ups.next().map_or(&[][..], Vec::as_slice), record.protocol);
        let contest = Contest::prepare(task, competitors, protocol.seed, flags.task.care(), progress)?;
        record.measurements.extend(contest.run(&protocol, sensors, progress)?);
        Ok(())
    })?;
    let doubts = record.doubts();
    record.warnings.extend(doubts);
    flags.timing.save(&record)?;
    let ours = roster.ours();
    let compared: Vec<Compared> = comparisons.iter().map(|one| one.read(&record, ours.name())).collect();
    let view = match flags.task.compares() {
        true => View::Comparisons,
        false if flags.task.is_of(Suite::KINDS) => View::Kinds,
        false => View::Tasks,
    };
    let failed =
        |m: &Measurement| m.competitor == ours.name() && m.finding.as_ref().is_some_and(|f| !f.pass());
    let wrong = record.measurements.iter().any(failed);
    report::show(&record, view, &compared, flags.timing.out.as_deref(), output)?;
    Ok(if record.complete { Verdict::from_bool(!wrong) } else { Verdict::Stopped })
}

impl Flags {
    /// The competitors of a task: the first peer, which others are compared with and which comes again at the end, then
    /// ours. A suite of comparisons needs peers only where one is compared with.
    fn line_up(
        &self,
        roster: &Roster,
        place: Place,
        task: &Task,
        comparisons: &[Comparison],
    ) -> Result<Vec<Box<dyn Competitor>>, CliError> {
        let named = self.peers.as_ref().map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
        let mut peers = match named.as_deref() {
            Some(["none"]) => Vec::new(),
            Some(["all"]) => roster.peers(task),
            Some(names) => names.iter().map(|name| roster.peer(name)).collect::<Result<_, _>>()?,
            None if self.task.compares() => {
                let needed = comparisons.iter().filter(|one| one.task == *task).filter_map(|one| one.peer);
                needed.filter_map(|name| roster.peer(name).ok()).collect()
            }
            None => {
                // On a GPU the ones to beat; on the CPU the best that is there.
                let mut peers = roster.peers(task);
                let most = if task.forward().is_ok() { 2 } else { 3 };
                peers.truncate(if place == Place::Gpu { most } else { 1 });
                peers
            }
        };
        peers.insert(peers.len().min(1), roster.ours());
        Ok(peers)
    }
}
