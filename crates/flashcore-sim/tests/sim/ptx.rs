//! The PTX tests of the repository in the simulator: `tests/ptx/*.ptx` must give their results under every
//! schedule, `tests/ptx/findings/*.ptx` must be judged as their comments say; `tests/ptx/nvcc` and
//! `tests/ptx/triton` do both with what other compilers made.

use flashcore_ptx::{op::Op, table};
use flashcore_sim::{Buffer, Launch, Options, Outcome, Schedule};
use flashcore_testkit::{
    fuzz,
    ptxtest::{Bound, Case, load, read},
};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The files of a folder under `tests/ptx`, in order.
fn files(folder: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ptx").join(folder);
    let entries = fs::read_dir(&root).expect("the tests are part of the repository");
    let mut files: Vec<_> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "ptx"));
    files.sort();
    files
}

fn run(case: &Case, options: &Options) -> Result<Outcome, String> {
    let buffer = |bound: &Bound| match &bound.input {
        Some(bytes) => Buffer::input(bound.slot, bytes.clone()),
        None => Buffer::output(bound.slot, bound.len()),
    };
    let launch = Launch {
        module: &case.parsed.module,
        provenance: Some(&case.parsed.provenance),
        spec: &case.spec,
        buffers: case.buffers.iter().map(buffer).collect(),
    };
    launch.run(options).map_err(|e| format!("{}: {e}", case.name))
}

/// What is wrong with a case under some options.
pub(crate) fn judge(case: &Case, options: &Options) -> Result<(), String> {
    let outcome = run(case, options)?;
    let mut kinds: BTreeSet<String> = outcome.findings.iter().map(|f| format!("{:?}", f.kind)).collect();
    if let Some(missing) = case.notes.iter().find(|note| !kinds.remove(*note)) {
        return Err(format!("{}: no note {missing}", case.name));
    }
    let expected = &case.findings;
    let first = *options == Options::new() && !case.apart;
    let found = expected.iter().take(if first { 1 } else { expected.len() }).any(|k| kinds.contains(k));
    let must = !expected.is_empty() && (!case.apart || options.schedule == Schedule::Apart);
    if (must && !found) || !kinds.iter().all(|k| expected.contains(k)) {
        let text: Vec<_> = outcome.findings.iter().map(ToString::to_string).collect();
        let how = (options.schedule, options.timing);
        return Err(format!("{} {how:?}: expected {expected:?}, found:\n{}", case.name, text.join("\n")));
    }
    if expected.is_empty() { case.check(|slot| outcome.bytes(slot)) } else { Ok(()) }
}

fn check(folder: &str) {
    let ways: Vec<_> = [Options::new()].into_iter().chain(Options::gauntlet(1)).collect();
    let mut failures = Vec::new();
    for file in files(folder) {
        let cases = load(&file).unwrap_or_else(|e| panic!("{e}"));
        assert!(!cases.is_empty(), "{} has no `// run:` line", file.display());
        let runs = cases.iter().flat_map(|case| ways.iter().map(move |options| judge(case, options)));
        failures.extend(runs.filter_map(Result::err));
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn instructions_give_the_documented_results() {
    check("");
}

/// Programs and answers are written by `gpu_fuzz`, an example of `flashcore`, on a machine with a GPU.
#[test]
fn random_programs_give_the_answers_of_a_gpu() {
    check("fuzz");
}

/// Begins the names of corpora whose answers the simulator does not share; `differs.rs` says why.
const DIFFERS: &str = "differs";

/// Every program of the compressed corpora under `tests/ptx/fuzz` that are of this kind, as text.
pub(crate) fn programs(wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ptx/fuzz");
    let mut paths: Vec<_> = fs::read_dir(root)
        .expect("the corpora are part of the repository")
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.ends_with(".gz") && wanted(n))
        })
        .collect();
    paths.sort();
    let read =
        |path: &PathBuf| fuzz::corpus::read(&fs::read(path).expect("a readable file")).expect("a corpus");
    paths.iter().flat_map(read).collect()
}

/// Each program under one way of running, all ways among all programs.
#[test]
fn corpora_of_random_programs_give_the_answers_of_a_gpu() {
    let programs = programs(|name| !name.starts_with(DIFFERS));
    assert!(programs.len() >= 2000, "{} programs", programs.len());
    let ways: Vec<_> = [Options::new()].into_iter().chain(Options::gauntlet(1)).collect();
    let one = |(at, (name, text)): (usize, &(String, String))| {
        let cases = read(name, text).map_err(|e| e.to_string())?;
        judge(&cases[0], &ways[at % ways.len()])
    };
    let failures: Vec<_> = programs.iter().enumerate().filter_map(|program| one(program).err()).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Programs for which no GPU was asked: clean, and the same bits under every schedule.
#[test]
fn random_programs_are_clean_under_every_schedule() {
    let failures: Vec<_> = (1000..1069).filter_map(|seed| unclean(&fuzz::Program::new(seed), seed)).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

fn unclean(program: &fuzz::Program, seed: u64) -> Option<String> {
    let text = program.with_answers("nobody", &vec![0; program.inputs.len()]);
    let name = &program.name;
    let cases = match read(name, &text) {
        Ok(cases) => cases,
        Err(error) => return Some(format!("{error} in\n{text}")),
    };
    let ways = [Options::new()].into_iter().chain(Options::gauntlet(seed));
    let outcomes: Result<Vec<_>, _> = ways.map(|way| run(&cases[0], &way)).collect();
    let outcomes = match outcomes {
        Ok(outcomes) => outcomes,
        Err(error) => return Some(error),
    };
    let finding = outcomes.iter().find_map(|outcome| outcome.findings.first());
    let differs = outcomes.iter().any(|outcome| outcome.buffers != outcomes[0].buffers);
    finding.map(|f| format!("{name}: {f}")).or(differs.then(|| format!("{name} depends on the schedule")))
}

/// Hints without a result of their own, and ends that no test can observe.
const UNTESTED: &[Op] = &[
    Op::Applypriority,
    Op::Prefetch,
    Op::CpAsyncBulkPrefetch,
    Op::CpAsyncBulkPrefetchTensor,
    Op::Nanosleep,
    Op::Griddepcontrol,
    Op::Brkpt,
];

#[test]
fn every_instruction_of_the_table_is_tested() {
    let modules =
        ["", "findings", "nvcc"].into_iter().flat_map(files).flat_map(|file| load(&file).expect("a test"));
    let tested: BTreeSet<Op> = modules
        .flat_map(|case| case.parsed.module.units().map(|(_, unit)| unit.clone()).collect::<Vec<_>>())
        .flat_map(|unit| unit.instructions().map(|(_, inst)| inst.op).collect::<Vec<_>>())
        .collect();
    let missing: Vec<_> = table::rows().map(|row| row.op).filter(|op| !tested.contains(op)).collect();
    let missing: BTreeSet<_> = missing.into_iter().filter(|op| !UNTESTED.contains(op)).collect();
    assert!(missing.is_empty(), "no test in tests/ptx executes {missing:?}");
}

/// What nvcc makes of CUDA: `make.py` beside the files says how.
#[test]
fn kernels_of_nvcc_are_run_and_judged() {
    check("nvcc");
}

/// What Triton makes of the kernels beside the files.
#[test]
fn kernels_of_triton_are_run_and_judged() {
    check("triton");
}

#[test]
fn checkers_report_each_fault_and_nothing_else() {
    check("findings");
}
