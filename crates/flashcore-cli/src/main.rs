//! The `flashcore` command: flags become one command, the command reports, its verdict becomes the exit code.
//!
//! Reading order: [`cli`] (what can be asked), [`commands`] (one file or folder per command), [`output`] (how answers
//! are shown), [`error`] (how failures end).
#![forbid(unsafe_code)]
// A program exports nothing: `pub` marks what a module offers to the others.
#![allow(unreachable_pub)]

mod backends;
mod cli;
mod commands;
mod error;
mod files;
mod flags;
mod interrupt;
mod lab_flags;
mod output;
mod progress;
mod values;

use std::process::ExitCode;

use clap::Parser;

use crate::{cli::Cli, output::Output};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.style);
    match cli.command.execute(&output) {
        Ok(verdict) => verdict.into(),
        Err(error) => output.failure(&error),
    }
}
