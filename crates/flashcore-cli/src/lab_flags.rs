//! Flags that the lab's commands share: what is measured, and how.

use std::path::PathBuf;

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore::DType;
use flashcore_lab::{
    LabError,
    comparison::{self, Comparison},
    competitor::roster::Ours,
    judge::Care,
    memory,
    protocol::{Mode, Protocol},
    record::Record,
    sensors::Sensors,
    suites::Suite,
    task::{AttentionSpec, Task},
};
use flashcore_testkit::Kind;

use crate::{
    error::CliError,
    files::Place,
    flags::{AttentionFlags, BackendFlags, TensorFlags, kinds},
    interrupt,
    output::Output,
    progress::Progress,
};

/// What is measured: a suite or one problem.
#[derive(Args, Clone, Debug)]
pub struct TaskFlags {
    /// Suite of problems [default: one problem, given by --shape]
    #[arg(long, value_name = "NAME", value_parser = suites(), conflicts_with_all = TensorFlags::NAMES)]
    suite: Option<Suite>,
    /// Only problems (or comparisons) whose name contains all these words; repeat to add more
    #[arg(long, value_name = "WORDS", requires = "suite")]
    filter: Vec<String>,
    #[command(flatten)]
    tensors: TensorFlags,
    /// Element type: f16, bf16 or f32 [default: f16, or what the suite uses]
    #[arg(long, value_name = "TYPE", help_heading = "Random tensors")]
    dtype: Option<DType>,
    /// Kind of random data: normal, outliers, sharp, sink, mean or drift
    #[arg(long, value_name = "NAME", default_value = "normal", value_parser = kinds(), hide_possible_values = true,
          conflicts_with = "suite", help_heading = "Random tensors")]
    kind: Kind,
    /// Measure the gradients alone, from an output computed beforehand
    #[arg(long, conflicts_with = "suite", help_heading = "Attention options")]
    backward: bool,
    #[command(flatten)]
    attention: AttentionFlags,
}

impl TaskFlags {
    /// The problems, at least one.
    pub fn tasks(&self) -> Result<Vec<Task>, CliError> {
        let Some(suite) = self.suite else {
            let dtype = self.dtype.unwrap_or(DType::F16);
            let problem = self.attention.problem(dtype, self.tensors.dims())?;
            let task = Task::new(problem).map_err(LabError::from)?.of_kind(self.kind);
            let gradients = |spec: &mut AttentionSpec| spec.backward = self.backward;
            return Ok(vec![task.changed(gradients).map_err(LabError::from)?]);
        };
        suite_tasks(suite, self.suite_dtype(suite), &self.filter)
    }

    /// What is compared with what, where the suite is one of comparisons.
    pub fn comparisons(&self) -> Result<Vec<Comparison>, CliError> {
        let all = self.suite.map_or(Ok(Vec::new()), |suite| suite.comparisons(self.suite_dtype(suite)));
        let wanted = |one: &Comparison| passes(&self.filter, |part| one.is_named(part));
        Ok(all.map_err(LabError::from)?.into_iter().filter(wanted).collect())
    }

    fn suite_dtype(&self, suite: Suite) -> DType {
        self.dtype.unwrap_or(suite.dtype)
    }

    /// Whether it is that suite.
    pub fn is_of(&self, suite: Suite) -> bool {
        self.suite.is_some_and(|own| own.name == suite.name)
    }

    /// Whether it is a suite of comparisons.
    pub fn compares(&self) -> bool {
        self.suite.is_some_and(Suite::compares)
    }

    /// How the suite is measured where nothing else is asked for.
    pub fn protocol(&self, usual: Protocol) -> Protocol {
        self.suite.map_or(usual, |suite| suite.protocol(usual))
    }

    /// How much of each problem is judged.
    pub fn care(&self) -> Care {
        self.suite.map_or(Care::Usual, |suite| suite.care)
    }

    /// Whether GPU calls are so short that they must be replayed from a graph.
    pub fn replays(&self) -> bool {
        self.suite.is_some_and(|suite| suite.replays)
    }
}

/// The problems of a suite whose names, or whose comparisons' names, pass one of the filters; at least one.
pub fn suite_tasks(suite: Suite, dtype: DType, filters: &[String]) -> Result<Vec<Task>, CliError> {
    let (wanted, names): (Vec<Task>, Vec<String>) = if suite.compares() {
        let mut all = suite.comparisons(dtype).map_err(LabError::from)?;
        let mut names: Vec<_> = all.iter().map(|one| one.what.clone()).collect();
        names.dedup();
        all.retain(|one| passes(filters, |part| one.is_named(part)));
        (comparison::tasks(&all), names)
    } else {
        let mut all = suite.tasks(dtype).map_err(LabError::from)?;
        let names = all.iter().map(Task::to_string).collect();
        all.retain(|task| {
            // With what goes without saying in a name: `full`, `normal`.
            let mask = task.attention().map(|spec| spec.mask().to_string()).unwrap_or_default();
            let name = format!("{task} {mask} {}", task.spec().kind().name());
            passes(filters, |part| name.contains(part))
        });
        (all, names)
    };
    if wanted.is_empty() {
        Err(CliError::nothing_to_measure(&filters.join(" or "), &names))
    } else {
        Ok(wanted)
    }
}

/// Whether something has every word of a filter in its name; without filters everything has.
fn passes(filters: &[String], has: impl Fn(&str) -> bool) -> bool {
    filters.is_empty() || filters.iter().any(|filter| filter.split_whitespace().all(&has))
}

fn suites() -> impl TypedValueParser<Value = Suite> {
    PossibleValuesParser::new(Suite::ALL.map(|suite| suite.name))
        .try_map(|name| Suite::named(&name).ok_or("no such suite"))
}

/// How it is measured.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How to measure")]
pub struct TimingFlags {
    /// sustained: each competitor alone, back to back; interleaved: in short turns
    #[arg(long, value_name = "MODE", value_parser = modes())]
    mode: Option<Mode>,
    /// Seconds of timing per competitor and round
    #[arg(long, value_name = "S", value_parser = seconds)]
    seconds: Option<f64>,
    /// Seconds of GPU load before the first sustained turn [default: 1.5]
    #[arg(long, value_name = "S", value_parser = load)]
    warm_up: Option<f64>,
    /// Number of rounds; every competitor has a turn in each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Flush caches before each call
    #[arg(long)]
    cold: bool,
    /// Replay GPU calls from a CUDA graph [default: in suites of short calls]
    #[arg(long)]
    graph: bool,
    /// Launch GPU calls one by one even in suites of short calls
    #[arg(long, conflicts_with = "graph")]
    eager: bool,
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write all raw timings to this file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Overwrite the file of --out if it exists
    #[arg(long, requires = "out")]
    force: bool,
}

impl TimingFlags {
    /// What is to be measured and by which backend of ours; asks before anything is measured whether there is memory for
    /// it and whether the file can be written.
    pub fn begin(&self, task: &TaskFlags, backend: &BackendFlags) -> Result<(Vec<Task>, Ours), CliError> {
        self.out.as_deref().map(|path| Place::checked(path, self.force)).transpose()?;
        let tasks = task.tasks()?;
        tasks.iter().try_for_each(|task| memory::check(3 * task.bytes() as u64))?;
        Ok((tasks, backend.ours()?))
    }

    /// Measures task by task until the user stops it; the file is rewritten after each, so that it is always valid.
    pub fn measure(
        &self,
        tasks: &[Task],
        record: &mut Record,
        output: &Output,
        mut one: impl FnMut(&Task, &mut Record, &Sensors, &mut Progress) -> Result<(), LabError>,
    ) -> Result<(), LabError> {
        let (sensors, mut progress) = (Sensors::start(), Progress::stoppable(tasks.len(), output));
        for task in tasks {
            match one(task, record, &sensors, &mut progress) {
                Err(LabError::Stopped) => break,
                done => done?,
            }
            self.save(record)?;
            progress.step();
            if interrupt::stopped() {
                break;
            }
        }
        record.complete = !interrupt::stopped();
        self.save(record)
    }

    /// Writes the result file, if one was asked for.
    pub fn save(&self, record: &Record) -> Result<(), LabError> {
        Ok(self.out.as_deref().map_or(Ok(()), |path| record.save(path))?)
    }

    /// The usual way of measuring with what was asked for changed.
    pub fn protocol(&self, usual: Protocol, replays: bool) -> Protocol {
        let mode = self.mode.unwrap_or(usual.mode);
        let usual_rounds = if mode == usual.mode { usual.rounds } else { mode.usual_rounds() };
        let rounds = self.rounds.unwrap_or(usual_rounds);
        // The same time in all, however it is cut into rounds.
        let seconds = usual.seconds * f64::from(usual.rounds) / f64::from(usual_rounds);
        Protocol {
            mode,
            seconds: self.seconds.unwrap_or(seconds),
            rounds,
            warm_up: self.warm_up.unwrap_or(usual.warm_up),
            cold: self.cold,
            replay: (replays || self.graph) && !self.eager,
            seed: self.seed,
        }
    }
}

fn modes() -> impl TypedValueParser<Value = Mode> {
    let known = |name: String| Mode::ALL.into_iter().find(|mode| mode.name() == name);
    PossibleValuesParser::new(Mode::ALL.map(Mode::name))
        .try_map(move |name| known(name).ok_or("no such mode"))
}

/// Seconds of load, perhaps none.
fn load(text: &str) -> Result<f64, String> {
    if text.parse() == Ok(0.0) { Ok(0.0) } else { seconds(text) }
}

/// Seconds of timing.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 600.0 => Ok(seconds),
        _ => Err("write seconds between 0 and 600, as in 0.5".to_owned()),
    }
}
