//! The cache attacked: whatever happens to entries or folder, the kernel that comes out is the right one.
//!
//! A script stands in for ptxas: its "machine code" is the PTX behind an ELF magic, so a wrong kernel shows at once.
#![cfg(unix)]

mod concurrency;
mod entries;
mod folders;
mod limits;

use flashcore_cuda::{
    Arch, Compiler, Cubin, Route,
    cache::{Cache, CacheOptions},
    toolchain::{Search, Tool},
};
use flashcore_ptx::target::Target;
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A folder for one test, with a ptxas and a place for the cache in it.
struct Scene {
    root: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { root: tempfile::tempdir().unwrap() };
        let script =
            "#!/bin/sh\ncase \"$*\" in *--version*) echo V1.2.3;; *) printf '\\177ELF'; cat;; esac\n";
        write_script(&scene.ptxas(), script);
        scene
    }

    fn ptxas(&self) -> PathBuf {
        self.root.path().join("ptxas")
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("cache")
    }

    fn cache(&self, options: CacheOptions) -> Cache {
        Cache::open(&self.folder(), options).unwrap()
    }

    /// A compiler with a cache in the scene's folder.
    fn compiler(&self) -> Compiler {
        compiler(&self.ptxas(), self.cache(options()))
    }

    /// The one entry of the cache.
    fn entry(&self) -> PathBuf {
        let entries = self.cache(options()).list().unwrap();
        assert_eq!(entries.len(), 1);
        self.folder().join(entries[0].key.to_string())
    }
}

/// Written by another process: a file that this one has open for writing, be it in a thread's fork, cannot be run.
fn write_script(path: &Path, text: &str) {
    let write = "printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
    assert!(Command::new("sh").args(["-c", write, "sh", text]).arg(path).status().unwrap().success());
}

fn options() -> CacheOptions {
    CacheOptions { max_bytes: 1 << 20, ..CacheOptions::default() }
}

fn compiler(ptxas: &Path, cache: Cache) -> Compiler {
    let search = Search { explicit: Some(ptxas.into()), ..Search::default() };
    Compiler::new(Some(cache), search.find(Tool::Ptxas).unwrap())
}

/// Compiles `ptx` and insists on the right kernel.
#[track_caller]
fn compile(compiler: &Compiler, ptx: &str) -> Cubin {
    let cubin = compiler.compile_offline(ptx, Arch::from(Target::Sm90a)).unwrap();
    assert_eq!(cubin.bytes(), [b"\x7fELF", ptx.as_bytes()].concat(), "the wrong kernel");
    assert_eq!(cubin.report().compiler, "ptxas 1.2.3");
    cubin
}

/// Fills a cache, lets `attack` loose on folder and entry, and checks that the next call notices and heals it.
#[track_caller]
fn survives(attack: impl FnOnce(&Path, &Path)) {
    let scene = Scene::new();
    let compiler = scene.compiler();
    assert_eq!(compile(&compiler, "kernel").route(), Route::Ptxas);
    assert_eq!(compile(&compiler, "kernel").route(), Route::Cache);
    attack(&scene.folder(), &scene.entry());
    let attacked = scene.cache(options()).verify().unwrap();
    assert!(attacked.iter().all(|(_, damage)| damage.is_some()), "verify sees it: {attacked:?}");
    let next = compile(&compiler, "kernel");
    assert_eq!(
        (next.route(), next.notes().len()),
        (Route::Ptxas, 1),
        "a miss with a note: {:?}",
        next.notes()
    );
    let healed = compile(&compiler, "kernel");
    assert_eq!((healed.route(), healed.notes().len()), (Route::Cache, 0), "{:?}", healed.notes());
}
