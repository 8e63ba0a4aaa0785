//! `flashcore tune`: searches for the fastest tile of each problem and keeps it in a table.
//!
//! Everything tried is a line of a log, so that a search that was ended at any moment goes on where it was. With
//! `--counters` this program is started again under Nsight Compute (see [`super::profile`]).

use std::{path::PathBuf, time::Duration};

use clap::{Args, builder::PossibleValuesParser};
use flashcore_lab::{
    LabError,
    competitor::roster::Ours,
    machine::Machine,
    memory, signature,
    simulator::Simulator,
    task::Task,
    tune::{
        TuneError, check_table, extend_table,
        log::Log,
        runner::{Counter, OnGpu, Runner, Simulated},
        search::{Search, Settings, Tuned},
    },
};

use serde_json::json;

use super::profile;
use crate::{
    error::{CliError, Verdict},
    flags::BackendFlags,
    gpu_flags::GpuFlags,
    interrupt,
    lab_flags::{TaskFlags, seconds},
    output::{Output, Page, Text, bad, faint, good},
    progress::Progress,
};

const EXAMPLES: &str = "\
Examples:
  flashcore tune --shape 4x16x4096x128 --dtype bf16 --causal
  flashcore tune --suite small --budget 20 --out small.json
  flashcore tune --backend sim --shape 1x1x128x64 --candidates 20
  flashcore bench --shape 4x16x4096x128 --dtype bf16 --causal --table tuned.json

Candidates are checked against f64 before they are timed. The rules' own choice is one of them; a
candidate gets a row only if it is significantly faster. If interrupted, run the same command again
to resume.
Exit codes: 0 searched, 2 could not search or was stopped.";

/// Problems whose candidates take the simulator longer are for a real GPU.
const LONGEST: Duration = Duration::from_secs(60);

/// Search for the fastest tile of a GPU kernel and keep it in a table
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    #[command(flatten)]
    gpu: GpuFlags,
    #[command(flatten)]
    search: SearchFlags,
    /// Table to add rows to; rows for other problems are kept. FILE.log logs every candidate
    #[arg(long, value_name = "FILE", default_value = "tuned.json", help_heading = "What to keep")]
    out: PathBuf,
    /// Ignore the log and measure everything again
    #[arg(long, help_heading = "What to keep")]
    fresh: bool,
}

/// How to search.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How to search")]
pub struct SearchFlags {
    /// evolve: mutate and cross the best; exhaustive: try every candidate, those closest to the rules' choice first
    #[arg(long, value_name = "NAME", default_value = "evolve", value_parser = PossibleValuesParser::new(["evolve", "exhaustive"]))]
    strategy: String,
    /// Seconds of timing per candidate
    #[arg(long, value_name = "S", default_value = "0.02", value_parser = seconds)]
    seconds: f64,
    /// Seconds per problem after which no further candidates are built
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    budget: u32,
    /// Maximum number of candidates per problem
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    candidates: u32,
    /// Seed of the inputs and of the search
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Break ties between candidates by Nsight Compute's counters; takes seconds per candidate
    #[arg(long)]
    counters: bool,
}

/// Searches for every problem asked for.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let tasks = flags.task.tasks()?;
    tasks.iter().try_for_each(|task| memory::check(3 * task.bytes() as u64))?;
    if let Some(task) = tasks.iter().find(|task| task.flops() == 0.0) {
        return Err(LabError::from(TuneError::Nothing(task.to_string())).into());
    }
    check_table(&flags.out)?;
    let mut progress = Progress::stoppable(tasks.len(), output);
    let mut results = Vec::new();
    for task in &tasks {
        let mut runner = flags.runner(task)?;
        match flags.tune(task, &mut *runner, &mut progress) {
            Err(LabError::Stopped) => break,
            tuned => results.push(tuned?),
        }
        progress.step();
    }
    drop(progress);
    let stopped = interrupt::stopped();
    flags.show(stopped, &results, output)?;
    Ok(if stopped { Verdict::Stopped } else { Verdict::Pass })
}

impl Flags {
    /// What candidates for a problem run on.
    fn runner(&self, task: &Task) -> Result<Box<dyn Runner>, CliError> {
        let SearchFlags { seed, counters, .. } = self.search;
        if self.backend.simulated()? {
            let estimate = Simulator::estimate(task.forward().map_err(LabError::from)?);
            return match estimate > LONGEST {
                true => Err(CliError::TooLong { estimate, most: LONGEST }),
                false => Ok(Box::new(Simulated::new(self.gpu.choose().gpu, task, seed)?)),
            };
        }
        if self.gpu.is_named() {
            return Err(CliError::Gpu);
        }
        match self.backend.ours()? {
            Ours::Cuda(cuda) => {
                let counter = counters.then_some(profile::busy as Counter);
                Ok(Box::new(OnGpu::new(cuda, task, seed, counter)?))
            }
            Ours::Cpu(_) => Err(LabError::from(TuneError::NoGpu).into()),
        }
    }

    fn log_path(&self) -> PathBuf {
        format!("{}.log", self.out.display()).into()
    }

    fn tune(&self, task: &Task, runner: &mut dyn Runner, progress: &mut Progress) -> Result<Tuned, LabError> {
        // Whatever measurements depend on: another program, machine, problem or seed is another search.
        let (program, machine, setting) = (signature::program(), Machine::this(None), runner.setting());
        let SearchFlags { seed, seconds, .. } = self.search;
        let facts = format!("{program:?} {machine:?} {setting:?} {:?} {seed} {seconds}", task.spec());
        let name = signature::hash(facts.as_bytes())[..16].to_owned();
        let mut log = Log::open(&self.log_path(), name, self.fresh)?;
        let tuned = Search::new(task, runner, &mut log, progress, self.search.settings()).run()?;
        if let Some((key, row)) = tuned.row.clone() {
            extend_table(&self.out, key, row)?;
        }
        Ok(tuned)
    }

    /// Shows a row per problem, and where everything was kept.
    fn show(&self, stopped: bool, results: &[Tuned], output: &Output) -> Result<(), CliError> {
        let [table, log] = [&self.out, &self.log_path()].map(|path| path.display().to_string());
        let json = json!({ "stopped": stopped, "table": table, "log": log, "results": results });
        output.answer(&json, || {
            let heading = ["problem", "rules", "best", "in", "ratio, 95 %", "measured", "rejected"];
            let added = results.iter().filter(|result| result.row.is_some()).count();
            let best = results.iter().map(|result| ("best", Text::from(&result.best.kernel)));
            let early = results.iter().any(|result| !result.complete);
            let early = early.then(|| ("note", faint("ended before all candidates were tried")));
            let kept = [("table", kept(&table, added, self.out.exists()).into()), ("log", log.into())];
            let ending = stopped.then(|| ("result", bad("STOPPED; run the same command to resume")));
            let facts = best.chain(early).chain(kept).chain(ending);
            Page::default().headed(&heading, results.iter().map(row)).facts(facts)
        })
    }
}

/// What became of the table; a search that finds nothing better leaves it alone, or does not make one.
fn kept(table: &str, added: usize, exists: bool) -> String {
    match (added, exists) {
        (0, false) => "no table written: nothing better was found".to_owned(),
        (0, true) => format!("{table}: unchanged, nothing better was found"),
        (1, _) => format!("{table}: 1 row from this search"),
        (_, _) => format!("{table}: {added} rows from this search"),
    }
}

fn row(result: &Tuned) -> Vec<Text> {
    let ratio = match result.ratio {
        Some(ratio) => good(format!("{:.3}-{:.3}", ratio.low, ratio.high)),
        None => "the rules' own".into(),
    };
    let [rules, best] = [&result.rules, &result.best].map(|one| format!("{:.1}", one.cost).into());
    let counts = [result.measured, result.rejected].map(|count| count.to_string().into());
    let head = [result.task.as_str().into(), rules, best, result.unit.into(), ratio];
    head.into_iter().chain(counts).collect()
}

impl SearchFlags {
    fn settings(&self) -> Settings {
        Settings {
            exhaustive: self.strategy == "exhaustive",
            seed: self.seed,
            seconds: self.seconds,
            budget: Duration::from_secs(self.budget.into()),
            candidates: self.candidates as usize,
        }
    }
}
