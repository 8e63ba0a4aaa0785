//! The `flashcore` command: flags become one command, the command reports, its verdict becomes the exit code.
//!
//! A library, so that the program and Python's script of the same name share it. Reading order: [`cli`] (what can be
//! asked), [`commands`] (one file or folder per command), [`output`] (how answers are shown), [`error`] (how failures
//! end).
#![forbid(unsafe_code)]
// Only `run` and `simulate` are exported: elsewhere `pub` marks what a module offers to the others.
#![allow(unreachable_pub)]

mod cli;
mod commands;
mod error;
mod files;
mod flags;
mod gpu_flags;
mod interrupt;
mod lab_flags;
mod output;
mod program;
mod progress;
mod simulation;
mod table_flags;
mod values;

use std::ffi::OsString;

use clap::Parser;

use crate::{cli::Cli, output::Output};

/// Runs launches that `request`, a JSON object, describes on the contents of its arrays, as long as `going` says so, which
/// is asked several times a second; returns what came of them as JSON, and the arrays. The message of an error says what
/// to do. This is `flashcore.sim` in Python.
pub fn simulate(
    request: &str,
    arrays: Vec<Vec<u8>>,
    going: &(dyn Fn() -> bool + Sync),
) -> Result<(String, Vec<Vec<u8>>), String> {
    commands::sim::service::simulate(request, arrays, going).map_err(|error| error.to_string())
}

/// The kernels of a PTX text with their parameters, as JSON.
pub fn kernels(ptx: &str) -> Result<String, String> {
    commands::sim::service::kernels(ptx).map_err(|error| error.to_string())
}

/// Runs the command that `args` ask for, the program's name first; returns its exit code.
///
/// `program` starts the same command again with other arguments: its path, and what comes before them.
pub fn run(args: impl IntoIterator<Item = OsString>, program: Vec<OsString>) -> u8 {
    program::set(program);
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody is there to hear that nobody is there.
            let _ = error.print();
            return error.exit_code() as u8;
        }
    };
    let output = Output::new(cli.style);
    match cli.command.execute(&output) {
        Ok(verdict) => verdict.code(),
        Err(error) => output.failure(&error),
    }
}
