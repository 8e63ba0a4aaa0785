//! Two compilers, ptxas and the driver: which one is used, what is cached from which.

use super::{Fake, functions::JIT_IMAGE};
use crate::{
    cache::{Cache, CacheOptions},
    compile::{Compiler, Route},
    toolchain::ToolPath,
};
use flashcore_ptx::target::Target;
use std::{path::Path, process::Command};

/// A ptxas that works while there is a file `works` beside it.
fn ptxas(folder: &Path) -> ToolPath {
    let text = r#"[ -e "${0%/*}/works" ] || { echo out of order >&2; exit 1; }; cat >/dev/null; printf '\177ELF by ptxas'"#;
    let path = folder.join("ptxas");
    // Written by another process: a file that this one has open, be it in a thread's fork, cannot be run.
    let write = "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"";
    assert!(Command::new("sh").args(["-c", write, "sh"]).arg(&path).arg(text).status().unwrap().success());
    ToolPath::at(&path).unwrap()
}

fn compiler(folder: &Path) -> Compiler {
    let cache = Cache::open(&folder.join("cache"), CacheOptions::default()).unwrap();
    Compiler::new(Some(cache), Some(ptxas(folder)))
}

fn repair(folder: &Path) {
    std::fs::write(folder.join("works"), "").unwrap();
}

#[test]
fn what_the_driver_made_is_not_taken_for_what_ptxas_makes() {
    let (fake, folder) = (Fake::new(), tempfile::tempdir().unwrap());
    let compiler = compiler(folder.path());
    let compile = || compiler.compile("kernel", Target::Sm90a, fake.device).unwrap();
    let first = compile();
    assert_eq!((first.route(), first.bytes()), (Route::Jit, JIT_IMAGE));
    assert!(first.notes().iter().any(|note| note.contains("out of order")), "{:?}", first.notes());
    let second = compile();
    assert_eq!((second.route(), second.bytes()), (Route::Cache, JIT_IMAGE));
    repair(folder.path());
    assert_eq!(compile().route(), Route::Ptxas);
}

#[test]
fn what_the_driver_does_not_load_it_compiles_itself() {
    const NO_BINARY_FOR_GPU: u32 = 209;
    let (fake, folder) = (Fake::new(), tempfile::tempdir().unwrap());
    let compiler = compiler(folder.path());
    repair(folder.path());
    let load = |compiler: &Compiler| compiler.load("kernel", Target::Sm90a, fake.device);
    assert_eq!(load(&compiler).unwrap().1.route(), Route::Ptxas);
    fake.fail("cuModuleLoadData", NO_BINARY_FOR_GPU);
    let (_, cubin) = load(&compiler).unwrap();
    assert_eq!((cubin.route(), cubin.bytes()), (Route::Jit, JIT_IMAGE));
    assert!(cubin.notes().iter().any(|note| note.contains("rejected the output")), "{:?}", cubin.notes());
    fake.fail("cuModuleLoadData", NO_BINARY_FOR_GPU);
    let error = load(&Compiler { ptxas: None, ..compiler }).unwrap_err().to_string();
    assert!(error.contains("209") || error.contains("NO_BINARY"), "{error}");
}
