//! `flashcore tune`: searches for the fastest tile of each problem and keeps it in a table, with the evidence.
//!
//! Everything measured goes to a journal first, so that a search that was ended at any moment goes on where it was. With
//! `--counters` this program is started again under Nsight Compute (see [`super::profile`]).

mod report;

use std::{path::PathBuf, thread::available_parallelism, time::Duration};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore_kernels::Tile;
use flashcore_lab::{
    LabError,
    arm::{Place, roster::Ours},
    memory, save, signature,
    task::Task,
    tune::{
        TuneError, check_table, extend_table,
        journal::{Header, Journal},
        search::{Search, Settings, Tuned},
        stand::{device, stand},
        strategy::Strategy,
    },
};

use self::report::TuneReport;
use super::profile;
use crate::{
    error::{CliError, Verdict},
    files::FileError,
    flags::BackendFlags,
    interrupt,
    lab_flags::{TaskFlags, seconds},
    output::Output,
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore tune --shape 4x16x4096x128 --dtype bf16 --causal
  flashcore tune --suite small --budget 20 --out small.json
  flashcore tune --backend cpu --shape 1x8x1024x64 --dtype f32
  flashcore bench --shape 4x16x4096x128 --dtype bf16 --causal --table tuned.json

What cannot be built is refused, what is wrong is thrown out, what is behind is stopped early.
The plan's own choice is a candidate too: only what is faster than it beyond doubt gets a row.
Ended at any moment, the same command goes on where it was.
Exit codes: 0 searched, 2 could not search, or was stopped.";

/// Candidates that are built together, at most.
const WAVE: usize = 16;

/// Search for the fastest tiles of a kernel and keep them in a table
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    #[command(flatten)]
    search: SearchFlags,
    /// The table that gets the rows; those it has for other problems stay
    #[arg(long, value_name = "FILE", default_value = "tuned.json", help_heading = "What to keep")]
    out: PathBuf,
    /// Where everything measured is kept meanwhile [default: beside the table]
    #[arg(long, value_name = "FILE", help_heading = "What to keep")]
    journal: Option<PathBuf>,
    /// Throw away what an earlier search measured
    #[arg(long, help_heading = "What to keep")]
    fresh: bool,
}

/// How to search.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How to search")]
pub struct SearchFlags {
    /// exhaustive: every candidate, those like the plan's choice first; evolve: offspring of the best [default:
    /// exhaustive on the CPU, evolve on a GPU]
    #[arg(long, value_name = "NAME", value_parser = strategies())]
    strategy: Option<Strategy>,
    /// Seconds of timing in a candidate's first turn
    #[arg(long, value_name = "S", default_value = "0.02", value_parser = seconds)]
    seconds: f64,
    /// Seconds for each problem after which no further candidates are built
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    budget: u32,
    /// Most candidates for each problem
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    candidates: u32,
    /// Seed of the inputs and of the search
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Let counters of Nsight Compute break ties between candidates; takes seconds for each
    #[arg(long)]
    counters: bool,
}

fn strategies() -> impl TypedValueParser<Value = Strategy> {
    let known = |name: String| Strategy::ALL.into_iter().find(|strategy| strategy.name() == name);
    PossibleValuesParser::new(Strategy::ALL.map(Strategy::name))
        .try_map(move |name| known(name).ok_or("no such strategy"))
}

/// Searches for every problem asked for.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let tasks = flags.task.tasks()?;
    tasks.iter().try_for_each(|task| memory::check(3 * task.bytes() as u64))?;
    if let Some(task) = tasks.iter().find(|task| task.flops() == 0.0) {
        return Err(TuneError::Nothing { task: task.to_string() }.into());
    }
    let ours = flags.backend.ours()?;
    let (name, units) = device(&ours);
    let specs: Vec<_> = tasks.iter().map(|task| task.spec().clone()).collect();
    let path = flags.journal_path(&serde_json::to_string(&specs)?);
    check_table(&flags.out)?;
    if save::same(&path, &flags.out) {
        return Err(FileError::SameFile { flags: "--out and --journal", path }.into());
    }
    let header = Header::new(format!("{name} x {units}"), flags.search.seed, specs);
    let mut journal = Journal::open(&path, &header, flags.fresh)?;
    let mut report = TuneReport::new(&flags.out, &path, journal.found);
    let progress = Progress::stoppable(tasks.len(), output);
    let results = flags.tune_all(&tasks, &ours, &mut journal, progress);
    report.results = results?;
    report.stopped = interrupt::stopped();
    output.show(&report)?;
    Ok(if report.stopped { Verdict::Stopped } else { Verdict::Pass })
}

impl Flags {
    fn tune_all(
        &self,
        tasks: &[Task],
        ours: &Ours,
        journal: &mut Journal,
        mut progress: Progress,
    ) -> Result<Vec<Tuned>, CliError> {
        let settings = self.search.settings(ours.place());
        let count = |task: &Task, tile: &Tile| profile::busy(task, tile);
        let counter = self.search.counters.then_some(&count as _);
        let mut results = Vec::new();
        for (index, task) in tasks.iter().enumerate() {
            let mut stand = stand(ours, task, settings.seed, counter)?;
            let search = Search::new((index, task), &mut *stand, journal, &mut progress, settings);
            let tuned = match search.run() {
                Err(LabError::Stopped) => break,
                tuned => tuned?,
            };
            extend_table(&self.out, tuned.row.iter().cloned().collect())?;
            results.push(tuned);
            progress.step();
        }
        Ok(results)
    }

    /// One journal for each set of problems, beside the table.
    fn journal_path(&self, tasks: &str) -> PathBuf {
        let beside = || {
            let mut name = self.out.clone().into_os_string();
            name.push(format!(".{}.journal", &signature::hash(tasks.as_bytes())[..8]));
            name.into()
        };
        self.journal.clone().unwrap_or_else(beside)
    }
}

impl SearchFlags {
    fn settings(&self, place: Place) -> Settings {
        let usual = if place == Place::Gpu { Strategy::Evolve } else { Strategy::Exhaustive };
        Settings {
            strategy: self.strategy.unwrap_or(usual),
            seed: self.seed,
            seconds: self.seconds,
            budget: Duration::from_secs(self.budget.into()),
            candidates: self.candidates as usize,
            wave: available_parallelism().map_or(WAVE, usize::from).clamp(4, WAVE),
        }
    }
}

impl From<TuneError> for CliError {
    fn from(error: TuneError) -> Self {
        LabError::from(error).into()
    }
}
