//! `flashcore sim`: runs a kernel of any PTX file on the CPU, with every check on.
//!
//! The path: [`Flags`] → [`Bound`] (arrays read, outputs checked) → `flashcore_sim` → files and the answer.

mod argument;
mod bound;

use std::{io, path::PathBuf};

use clap::{Args, builder::PossibleValuesParser, builder::TypedValueParser};
use flashcore_ptx::{
    ident::{BadIdent, Ident},
    launch::LaunchSpec,
    parse::{ParseError, Parsed, parse_all},
    verify::{Group, Rule, grouped, grouped_messages, verify},
};
use flashcore_sim::{CheckSet, Launch, Options, Outcome, Schedule, SimError};
use serde_json::json;

use self::{
    argument::Argument,
    bound::{Bound, Written},
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

Arguments come in the order of the kernel's parameters; u64:0 is a null pointer. Kernels with tensor maps among them
are launched from Rust. An array that is only written starts as NaN.
Files are not written if a finding ended the launch. Exit codes: 0 clean, 1 findings, 2 could not run.";

/// Run a PTX kernel on the CPU and check it: races, bounds, barriers, uninitialised values
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// The PTX file
    file: PathBuf,
    /// The kernel [default: the only one]
    #[arg(long, value_name = "NAME")]
    entry: Option<String>,
    /// CTAs of the grid
    #[arg(long, value_name = "X[,Y,Z]")]
    grid: Triple,
    /// Threads of a CTA
    #[arg(long, value_name = "X[,Y,Z]")]
    block: Triple,
    /// CTAs of a cluster
    #[arg(long, value_name = "X[,Y,Z]", default_value = "1")]
    cluster: Triple,
    /// Dynamic shared memory of a CTA
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    smem: u32,
    /// An argument: u32:7 (or s32, u64, s64, f32, f64), in:a.npy, inout:b.npy (which is replaced), out:c.npy:f32:1024
    #[arg(long = "arg", value_name = "KIND:VALUE")]
    args: Vec<Argument>,
    /// Which warp runs next, with everything asynchronous as hostile as the ISA allows [default: in turn, tame]
    #[arg(long, value_name = "NAME", value_parser = schedules())]
    schedule: Option<Schedule>,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// What to check: all, none, or some of bounds,init,race,proxy,inflight,barrier
    #[arg(long, value_name = "LIST", default_value = "all", value_parser = checks)]
    check: CheckSet,
    /// Replace output files that exist
    #[arg(long)]
    force: bool,
}

fn schedules() -> impl TypedValueParser<Value = Schedule> {
    PossibleValuesParser::new(Schedule::ALL.map(Schedule::name))
        .map(|name| Schedule::parse(&name).unwrap_or_default())
}

fn checks(text: &str) -> Result<CheckSet, String> {
    CheckSet::parse(text).map_err(|word| {
        format!("`{word}` is not a check; there are bounds, init, race, proxy, inflight, barrier")
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
    #[error("{} is not PTX that can be run:{}", path.display(), listed(errors))]
    Parse { path: PathBuf, errors: Vec<Group> },
    #[error("{} has {}; name one with --entry", path.display(), kernels(found))]
    Entry { path: PathBuf, found: Vec<String> },
    #[error("{0}; the simulator takes kernels of plain names")]
    Name(#[from] BadIdent),
    #[error("{} is written by two arguments; give each its own file", path.display())]
    SameFile { path: PathBuf },
    #[error("{given} arrays were given; a launch takes at most {most}")]
    TooMany { given: usize, most: usize },
    #[error(transparent)]
    Sim(#[from] SimError),
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

/// Runs the kernel and tells what came of it.
pub fn execute(flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let parsed = parse(flags)?;
    let entry = entry(flags, &parsed)?;
    let bound = Bound::new(&flags.args, flags.force)?;
    let spec = LaunchSpec {
        entry: Ident::new(entry).map_err(SimFailure::from)?,
        grid: flags.grid.0,
        block: flags.block.0,
        cluster: flags.cluster.0,
        shared_bytes: flags.smem,
        dependent: false,
        params: bound.params.clone(),
        workspace: Vec::new(),
    };
    let (module, provenance) = (&parsed.module, Some(&parsed.provenance));
    let launch = Launch { module, provenance, spec: &spec, buffers: bound.buffers() };
    let outcome = launch.run(&options(flags)).map_err(SimFailure::from)?;
    let overwritten = bound.overwritten(&outcome);
    let results = bound.collect(&outcome);
    if !outcome.halted {
        results.iter().try_for_each(Written::save)?;
    }
    show(&flags.file.display().to_string(), &spec, &outcome, &results, &overwritten, output)?;
    Ok(Verdict::from_bool(outcome.is_clean() && overwritten.is_empty()))
}

/// Shows results, counts and findings.
fn show(
    file: &str,
    spec: &LaunchSpec,
    outcome: &Outcome,
    results: &[Written],
    overwritten: &[String],
    output: &Output,
) -> Result<(), CliError> {
    let LaunchSpec { entry, grid, block, .. } = spec;
    let kernel = entry.to_string();
    let array = |result: &Written| {
        json!({
            "file": result.path().display().to_string(),
            "dtype": result.content.element.name,
            "shape": result.content.shape,
            "first": result.first(),
            "written": !outcome.halted,
        })
    };
    let arrays: Vec<_> = results.iter().map(array).collect();
    let answer = json!({
        "file": file, "kernel": kernel, "grid": grid, "block": block, "results": arrays, "overwritten": overwritten,
    });
    output.answer(&simulation::merged(answer, simulation::json(outcome)), || {
        let text = |[x, y, z]: &[u32; 3]| format!("{x} x {y} x {z}");
        let lost = |file: &String| {
            let words =
                format!("FAIL: {file} was only to be read; to keep what is written, pass inout:{file}");
            ("input", bad(words))
        };
        let page = Page::default().facts::<Text>([
            ("kernel", format!("{kernel} of {file}").into()),
            ("launch", format!("grid {}, block {}", text(grid), text(block)).into()),
            ("result", simulation::verdict(outcome)),
        ]);
        let page =
            page.facts(overwritten.iter().map(lost)).table(results.iter().map(|r| r.row(outcome.halted)));
        simulation::add_to(page, outcome)
    })
}

fn options(flags: &Flags) -> Options {
    let hostile = |schedule| Options::gauntlet(flags.seed).into_iter().find(|o| o.schedule == schedule);
    let mut options = flags.schedule.and_then(hostile).unwrap_or_default();
    options.seed = flags.seed;
    options.with_checks(flags.check)
}

fn parse(flags: &Flags) -> Result<Parsed, SimFailure> {
    let path = flags.file.clone();
    match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(SimFailure::NotText { path }),
        Err(source) => Err(SimFailure::Read { path, source }),
        Ok(text) => {
            let parsed = parse_all(&path.display().to_string(), &text).map_err(|(first, more)| {
                let said =
                    |e: ParseError| (Some(format!("line {}:{}", e.line, e.column)), e.kind.to_string());
                let errors = grouped_messages(std::iter::once(first).chain(more).map(said));
                SimFailure::Parse { path: path.clone(), errors }
            })?;
            let errors = unknown_to_target(&parsed);
            if errors.is_empty() { Ok(parsed) } else { Err(SimFailure::Parse { path, errors }) }
        }
    }
}

/// Instructions that the file's own `.target` or `.version` lacks, which no assembler takes.
fn unknown_to_target(parsed: &Parsed) -> Vec<Group> {
    let mut found = verify(&parsed.module, &parsed.provenance);
    found.retain(|finding| matches!(finding.rule, Rule::Target | Rule::Version));
    grouped(&found)
}

fn entry(flags: &Flags, parsed: &Parsed) -> Result<String, SimFailure> {
    let found: Vec<_> = parsed.module.kernels.iter().map(|kernel| kernel.name.to_string()).collect();
    match (&flags.entry, found.as_slice()) {
        (Some(name), _) if found.contains(name) => Ok(name.clone()),
        (None, [only]) => Ok(only.clone()),
        _ => Err(SimFailure::Entry { path: flags.file.clone(), found }),
    }
}
