//! The `flashcore` program; all of it is in the library.
#![forbid(unsafe_code)]

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let program = env::current_exe().map(Into::into);
    flashcore_cli::run(env::args_os(), program.into_iter().collect()).into()
}
