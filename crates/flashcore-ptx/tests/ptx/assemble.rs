//! Every row of the table, as instances in the lowest `.version` and for the oldest target it claims, goes through
//! NVIDIA's assembler, where one is found (`FLASHCORE_PTXAS`, or `ptxas` on the path).

use crate::sample::{self, Dice, Sampler};
use flashcore_ptx::{
    inst::Inst,
    module::{Module, Statement},
    table::{self, Needs, Row},
    target::Target,
    version::Version,
};
use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

fn ptxas() -> Option<PathBuf> {
    let named = std::env::var_os("FLASHCORE_PTXAS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    named.or_else(|| std::env::split_paths(&path).map(|dir| dir.join("ptxas")).find(|p| p.is_file()))
}

/// What the assembler has to say about `module`; nothing if it is content.
fn assemble(ptxas: &PathBuf, module: &Module) -> Option<String> {
    let mut child = Command::new(ptxas)
        .args(["--output-file", "/dev/null", "--gpu-name", &module.target.to_string(), "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(module.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(said)
}

/// Instances of all rows, gathered by what they need: one module for each target and version.
fn modules() -> Vec<Module> {
    let mut modules: Vec<Module> = Vec::new();
    for row in table::rows() {
        for seed in 0..16 {
            let needs = instance(&mut sample::module(Target::Sm75), row, seed).1;
            let version = needs.version.max(Version::of_target(needs.target));
            let place = modules.iter().position(|m| m.target == needs.target && m.version == version);
            let place = place.unwrap_or_else(|| {
                modules.push(Module { version, ..sample::module(needs.target) });
                modules.len() - 1
            });
            let inst = instance(&mut modules[place], row, seed).0;
            modules[place].kernels[0].body.push(Statement::Inst(inst));
        }
    }
    modules.iter_mut().for_each(|m| m.kernels[0].body.push(Statement::Label(sample::name("end"))));
    modules
}

fn instance(module: &mut Module, row: &'static Row, seed: u64) -> (Inst, Needs) {
    let inst = Sampler { kernel: &mut module.kernels[0], dice: Dice(seed) }.inst(row);
    let form = inst.form().unwrap_or_else(|error| panic!("{inst}: {error}"));
    (inst.clone(), form.needs(&inst))
}

#[test]
fn assembler_agrees_with_the_table() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas: nothing assembled") };
    let mut complaints = String::new();
    for module in modules() {
        assert_eq!(module.lowest_version(), module.version);
        if let Some(said) = assemble(&ptxas, &module).filter(|said| !is_too_new(said)) {
            complaints += &format!("{} {}:\n{}\n", module.target, module.version, with_lines(&said, &module));
        }
    }
    assert!(complaints.is_empty(), "{complaints}");
}

/// Whether the assembler is older than the language that a row needs.
fn is_too_new(said: &str) -> bool {
    said.contains("Unsupported .version")
}

/// What the assembler said, with the lines it speaks of.
fn with_lines(said: &str, module: &Module) -> String {
    let text = module.to_string();
    let quoted = |message: &str| {
        let line = message.split("line ").nth(1)?.split(';').next()?.parse::<usize>().ok()?;
        text.lines().nth(line - 1).map(str::trim)
    };
    said.lines().map(|message| format!("{message}  <- {}\n", quoted(message).unwrap_or(""))).collect()
}
