//! Tells the program which compiler built it; `repro` puts that into its manifest.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let run = Command::new(rustc).arg("--version").output();
    let text = run.ok().and_then(|run| String::from_utf8(run.stdout).ok()).unwrap_or_default();
    let version = text.lines().next().unwrap_or("rustc of unknown version");
    println!("cargo::rustc-env=FLASHCORE_RUSTC={version}");
}
