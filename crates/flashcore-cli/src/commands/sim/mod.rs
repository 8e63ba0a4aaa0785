//! `flashcore sim`: runs a kernel of any PTX file on the CPU, with every check on.
//!
//! The path: [`Flags`] → [`Bound`] (arrays read, outputs checked) → `flashcore_sim` → files and the answer. A
//! [`script`] has several launches on the same arrays.

mod argument;
mod bound;
mod compare;
mod explain;
mod map;
mod request;
mod script;
pub mod service;
mod stats;

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::{Args, builder::PossibleValuesParser, builder::TypedValueParser};
use flashcore_ptx::{
    ident::{BadIdent, Ident},
    launch::LaunchSpec,
    parse::{ParseError, Parsed, parse_lenient},
    verify::{Group, Rule, grouped, grouped_messages, verify},
};
use flashcore_sim::{CheckSet, Outcome, Schedule, SimError};
use serde_json::json;

use self::{
    argument::Argument,
    bound::{Bound, Written},
    compare::{Comparison, Tolerance},
    request::{Ran, run_all},
};
use crate::{
    error::{CliError, Verdict},
    output::{Output, Page, Text, bad},
    simulation,
    values::Triple,
};

const EXAMPLES: &str = "\
Examples:
  flashcore sim scale.ptx --entry scale --grid 8 --block 128 --arg in:x.npy --arg out:y.npy:f32:1024 --arg u32:1024
  flashcore sim scale.ptx --grid 8 --block 128 --arg inout:x.npy --arg u32:1024 --schedule random --seed 7
  flashcore sim gemm.ptx --entry gemm --grid 4,4 --block 128 --smem 65536 --check race,bounds --json
  flashcore sim tma.ptx --grid 4 --block 128 --arg 'tensormap:in:x.npy;box=64,8;swizzle=128' --arg out:y.npy:f16:64x8
  flashcore sim scale.ptx --grid 8 --block 128 --arg inout:x.npy --arg u32:1024 --compare x.npy=want.npy --rtol 1e-3
  flashcore sim --script operation.json --stats
  flashcore sim --explain SharedRace

Arguments are in the order of the kernel's parameters; u64:0 is a null pointer. A struct by value is
struct:u32:7|in:x.npy|f32:0.5, its members in order, laid out as in C; bytes:… passes raw bytes. A
tensor map takes dims, strides and element from its array unless ;dims=, ;strides= or ;element=
override them. An out: array starts filled with NaN. For several launches on the same arrays write
a script (see docs/simulator.md). Files are not written if a finding ended the launch.
Exit codes: 0 clean, 1 findings, 2 could not run.";

/// Run a PTX kernel on the CPU and check it for races, bad accesses, misused barriers and uninitialised values
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// PTX file
    #[arg(required_unless_present_any = ["script", "explain"])]
    file: Option<PathBuf>,
    /// Kernel to run [default: the only one]
    #[arg(long, value_name = "NAME")]
    entry: Option<String>,
    /// Grid size in CTAs
    #[arg(long, value_name = "X[,Y,Z]", required_unless_present_any = ["script", "explain"])]
    grid: Option<Triple>,
    /// Threads per CTA [default: the kernel's .reqntid]
    #[arg(long, value_name = "X[,Y,Z]")]
    block: Option<Triple>,
    /// CTAs per cluster [default: the kernel's .reqnctapercluster, or 1]
    #[arg(long, value_name = "X[,Y,Z]")]
    cluster: Option<Triple>,
    /// Dynamic shared memory per CTA
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    smem: u32,
    /// Kernel argument: u32:7 (or s32, u64, s64, f32, f64), bytes:00ff, in:a.npy, inout:b.npy (overwritten),
    /// out:c.npy:f32:1024, tensormap:in:a.npy;box=64,8, struct:u32:7|in:a.npy
    #[arg(long = "arg", value_name = "KIND:VALUE")]
    args: Vec<Argument>,
    /// Warp schedule, with asynchronous operations as hostile as the ISA allows; `apart` also keeps diverged lanes
    /// apart [default: in turn, not hostile]
    #[arg(long, value_name = "NAME", value_parser = schedules())]
    schedule: Option<Schedule>,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// What to check: all, none, or some of bounds,init,race,proxy,inflight,barrier
    #[arg(long, value_name = "LIST", default_value = "all", value_parser = checks)]
    check: CheckSet,
    /// Maximum number of warp instructions of a launch
    #[arg(long, value_name = "N", default_value_t = request::MAX_STEPS)]
    max_steps: u64,
    /// Overwrite existing output files
    #[arg(long)]
    force: bool,
    /// Compare a result file with one of expected values
    #[arg(long, value_name = "OUT=WANT", value_parser = pair)]
    compare: Vec<(PathBuf, PathBuf)>,
    /// Relative tolerance of --compare
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    rtol: f64,
    /// Absolute tolerance of --compare
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    atol: f64,
    /// Print the speed of the simulation
    #[arg(long)]
    stats: bool,
    /// Run the launches listed in a JSON file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "grid", "block", "args", "compare"])]
    script: Option<PathBuf>,
    /// Explain a kind of finding, or `all` of them
    #[arg(long, value_name = "KIND", conflicts_with_all = ["file", "grid", "script"])]
    explain: Option<String>,
}

fn pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let parts = text.split_once('=').filter(|(result, want)| !result.is_empty() && !want.is_empty());
    let (result, want) =
        parts.ok_or("give a result file and one of expected values, as in y.npy=want.npy")?;
    Ok((result.into(), want.into()))
}

fn schedules() -> impl TypedValueParser<Value = Schedule> {
    PossibleValuesParser::new(Schedule::ALL.map(Schedule::name))
        .map(|name| Schedule::parse(&name).unwrap_or_default())
}

fn checks(text: &str) -> Result<CheckSet, String> {
    CheckSet::parse(text).map_err(|word| {
        format!("`{word}` is not a check; use bounds, init, race, proxy, inflight or barrier")
    })
}

/// Why a file could not be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimFailure {
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a PTX file: it is not text", path.display())]
    NotText { path: PathBuf },
    #[error("{} cannot be run:{}", path.display(), listed(errors))]
    Parse { path: PathBuf, errors: Vec<Group> },
    #[error("the file has {}; name one with --entry, or in a script with \"entry\"", kernels(found))]
    Entry { found: Vec<String> },
    #[error(
        "kernel `{kernel}` has no .reqntid; give its threads per CTA with --block, or in a script with \"block\""
    )]
    Block { kernel: String },
    #[error("{0}")]
    Script(String),
    #[error("--compare names {}, which no argument writes; name the file of an out: or inout: argument", path.display())]
    NoResult { path: PathBuf },
    #[error("`{name}` is not a kind of finding; the kinds are {all}")]
    Kind { name: String, all: String },
    #[error("{0}; rename the kernel, which the simulator cannot call by this name")]
    Name(#[from] BadIdent),
    #[error("{} is written by two arguments; give each its own file", path.display())]
    SameFile { path: PathBuf },
    #[error("{given} arrays were given; a launch takes at most {most}")]
    TooMany { given: usize, most: usize },
    #[error(transparent)]
    Sim(#[from] SimError),
}

impl SimFailure {
    /// The same, with the argument that it is about, counted from 0.
    fn of_argument(self, at: usize) -> Self {
        match self {
            Self::Script(text) => Self::Script(format!("argument {at}: {text}")),
            other => other,
        }
    }
}

fn listed(errors: &[Group]) -> String {
    const SHOWN: usize = 8;
    let shown: String = errors.iter().take(SHOWN).map(|error| format!("\n  {error}")).collect();
    let more = errors.len().saturating_sub(SHOWN);
    if more > 0 { format!("{shown}\n  and {more} more") } else { shown }
}

fn kernels(found: &[String]) -> String {
    if found.is_empty() { "no kernel".to_owned() } else { format!("the kernels {}", found.join(", ")) }
}

/// Runs what was asked for and tells what came of it.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    match (&flags.explain, &flags.script, &flags.file) {
        (Some(kind), ..) => explain::execute(kind, output),
        (_, Some(script), _) => script::execute(script, flags, output),
        (.., Some(file)) => launch(flags, file, output),
        // clap asks for one of the three.
        (None, None, None) => Ok(Verdict::Pass),
    }
}

fn launch(flags: &Flags, file: &Path, output: &Output) -> Result<Verdict, CliError> {
    let parsed = parse(file)?;
    let kernel = request::kernel(&parsed, flags.entry.as_deref())?;
    let bound = Bound::new(&flags.args, flags.force)?;
    let spec = LaunchSpec {
        entry: Ident::new(kernel.name.as_str()).map_err(SimFailure::from)?,
        grid: flags.grid.map_or([1; 3], |grid| grid.0),
        block: request::block(kernel, flags.block.map(|block| block.0))?,
        cluster: request::cluster(kernel, flags.cluster.map(|cluster| cluster.0)),
        shared_bytes: flags.smem,
        dependent: false,
        params: bound.params.clone(),
        workspace: Vec::new(),
    };
    let options = request::options(flags.schedule, flags.seed, flags.check, flags.max_steps);
    let ran = run_all(&parsed, vec![spec], bound.buffers(), &options, &|| true)?;
    let Some(ran) = ran.into_iter().next() else { return Ok(Verdict::Pass) };
    let overwritten = bound.overwritten(&ran.outcome);
    let results = bound.collect(&ran.outcome);
    if !ran.outcome.halted {
        results.iter().try_for_each(Written::save)?;
    }
    let comparisons = compared(flags, &results, &ran.outcome)?;
    let good =
        ran.outcome.is_clean() && overwritten.is_empty() && comparisons.iter().all(Comparison::is_good);
    let told =
        Told { file: file.display().to_string(), ran, results, overwritten, comparisons, stats: flags.stats };
    told.show(output)?;
    Ok(Verdict::from_bool(good))
}

/// Results held against what `--compare` names; nothing where the launch ended early.
fn compared(flags: &Flags, results: &[Written], outcome: &Outcome) -> Result<Vec<Comparison>, CliError> {
    if outcome.halted {
        return Ok(Vec::new());
    }
    let tolerance = Tolerance { rtol: flags.rtol, atol: flags.atol };
    let one = |(path, want): &(PathBuf, PathBuf)| {
        let result = results.iter().find(|result| result.path() == path);
        let result = result.ok_or_else(|| SimFailure::NoResult { path: path.clone() })?;
        Comparison::new(&path.display().to_string(), &result.content, want, tolerance)
    };
    flags.compare.iter().map(one).collect()
}

/// What a launch has to tell.
struct Told {
    file: String,
    ran: Ran,
    results: Vec<Written>,
    overwritten: Vec<String>,
    comparisons: Vec<Comparison>,
    stats: bool,
}

impl Told {
    fn json(&self) -> serde_json::Value {
        let LaunchSpec { entry, grid, block, .. } = &self.ran.spec;
        let array = |result: &Written| {
            json!({
                "file": result.path().display().to_string(),
                "dtype": result.content.element.name,
                "shape": result.content.shape,
                "first": result.first(),
                "written": !self.ran.outcome.halted,
            })
        };
        let arrays: Vec<_> = self.results.iter().map(array).collect();
        let comparisons: Vec<_> = self.comparisons.iter().map(Comparison::json).collect();
        let answer = json!({
            "file": self.file, "kernel": entry.to_string(), "grid": grid, "block": block, "results": arrays,
            "overwritten": self.overwritten, "comparisons": comparisons,
        });
        let answer = simulation::merged(answer, simulation::json(&self.ran.outcome));
        if self.stats { simulation::merged(answer, stats::json(&self.ran)) } else { answer }
    }

    /// Shows results, counts and findings.
    fn show(&self, output: &Output) -> Result<(), CliError> {
        output.answer(&self.json(), || self.page())
    }

    fn page(&self) -> Page {
        let LaunchSpec { entry, grid, block, .. } = &self.ran.spec;
        let outcome = &self.ran.outcome;
        let text = |[x, y, z]: &[u32; 3]| format!("{x} x {y} x {z}");
        let lost = |file: &String| {
            let words =
                format!("FAIL: the kernel wrote to in:{file}; pass inout:{file} to keep what it writes");
            ("input", bad(words))
        };
        let mut page = Page::default().facts::<Text>([
            ("kernel", format!("{entry} of {}", self.file).into()),
            ("launch", format!("grid {}, block {}", text(grid), text(block)).into()),
            ("result", simulation::verdict(outcome)),
        ]);
        if self.stats {
            page = page.facts::<Text>([("speed", stats::line(&self.ran).into())]);
        }
        let page = page.facts(self.overwritten.iter().map(lost));
        let page = page.table(self.results.iter().map(|r| r.row(outcome.halted)));
        let page = page.table(self.comparisons.iter().map(Comparison::row));
        simulation::add_to(page, outcome)
    }
}

/// The text of a file.
fn read_text(path: &Path) -> Result<String, SimFailure> {
    let path = path.to_owned();
    std::fs::read_to_string(&path).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => SimFailure::NotText { path },
        _ => SimFailure::Read { path, source: error },
    })
}

fn parse(path: &Path) -> Result<Parsed, SimFailure> {
    parse_text(path, &read_text(path)?)
}

/// Reads PTX; `path` is how messages call it.
pub fn parse_text(path: &Path, text: &str) -> Result<Parsed, SimFailure> {
    let parsed = parse_lenient(&path.display().to_string(), text).map_err(|(first, more)| {
        let said = |e: ParseError| (Some(format!("line {}:{}", e.line, e.column)), e.kind.to_string());
        let errors = grouped_messages(std::iter::once(first).chain(more).map(said));
        SimFailure::Parse { path: path.to_owned(), errors }
    })?;
    let errors = unknown_to_target(&parsed);
    if errors.is_empty() { Ok(parsed) } else { Err(SimFailure::Parse { path: path.to_owned(), errors }) }
}

/// Instructions that the file's own `.target` or `.version` lacks, which no assembler takes.
fn unknown_to_target(parsed: &Parsed) -> Vec<Group> {
    let mut found = verify(&parsed.module, &parsed.provenance);
    found.retain(|finding| matches!(finding.rule, Rule::Target | Rule::Version));
    grouped(&found)
}
