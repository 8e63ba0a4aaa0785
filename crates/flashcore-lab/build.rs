//! Tells the program which compiler built it, and from which commit; results and bundles name both.

use std::{path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = answer(&rustc, &["--version"]).unwrap_or_else(|| "rustc of unknown version".to_owned());
    println!("cargo::rustc-env=FLASHCORE_RUSTC={version}");
    if let Some(commit) = commit() {
        println!("cargo::rustc-env=FLASHCORE_BUILT_FROM={commit}");
    }
}

/// The commit of these files, where they are a repository's; built again when it changes.
fn commit() -> Option<String> {
    let git = |args: &[&str]| answer("git", args);
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for name in ["HEAD", "logs/HEAD", "packed-refs", &branch] {
        let path = git(&["rev-parse", "--git-path", name]);
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "HEAD"])
}

/// The first line of what a program answers, if it can be asked.
fn answer(program: &str, args: &[&str]) -> Option<String> {
    let run = Command::new(program).args(args).output().ok().filter(|run| run.status.success())?;
    String::from_utf8(run.stdout).ok()?.lines().next().map(str::to_owned)
}
