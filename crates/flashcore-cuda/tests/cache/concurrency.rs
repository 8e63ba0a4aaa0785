//! Many processes and threads on one cache at once.

use crate::{Scene, compile, compiler, options};
use flashcore_cuda::{
    Route,
    cache::{Cache, CacheOptions},
};
use std::{
    path::Path,
    process::{Command, Stdio},
};

const KERNELS: [&str; 4] = ["one", "two", "three", "four"];

/// Compiles each kernel over and over while others write, evict and clear; `compile` insists on the right bytes.
fn hammer(root: &Path, seed: usize) {
    // Room for about two entries: every store evicts what somebody else is reading.
    let cache = Cache::open(&root.join("cache"), CacheOptions { max_bytes: 500, ..options() }).unwrap();
    let compiler = compiler(&root.join("ptxas"), cache);
    for round in 0..25 {
        compile(&compiler, KERNELS[(round * 7 + seed) % KERNELS.len()]);
        if round % 10 == seed {
            compiler.cache.as_ref().unwrap().clear().unwrap();
        }
    }
}

#[test]
fn processes_writing_at_once_never_see_half_an_entry() {
    const CHILD: &str = "FLASHCORE_TEST_HAMMER";
    if let Some(root) = std::env::var_os(CHILD) {
        let seed = std::process::id() as usize;
        return hammer(Path::new(&root), seed % 10);
    }
    let scene = Scene::new();
    let this_test =
        ["concurrency::processes_writing_at_once_never_see_half_an_entry", "--exact", "--nocapture"];
    let start = |_| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(this_test)
            .env(CHILD, scene.root.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..4).map(start).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let left = scene.cache(options()).verify().unwrap();
    assert!(left.iter().all(|(_, damage)| damage.is_none()), "{left:?}");
}

#[test]
fn threads_share_a_compiler() {
    let scene = Scene::new();
    let compiler = scene.compiler();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let compiler = &compiler;
            scope.spawn(move || {
                (0..8).for_each(|round| drop(compile(compiler, KERNELS[(round + thread) % 4])))
            });
        }
    });
    assert_eq!(KERNELS.map(|ptx| compile(&compiler, ptx).route()), [Route::Cache; 4]);
}
