//! How to start this command again: `verify` and `profile` run parts of themselves in processes of their own.

use std::{ffi::OsString, io, process::Command, sync::OnceLock};

use flashcore_lab::LabError;

static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Tells, once, how the command was started: a path, and arguments before all others.
pub fn set(program: Vec<OsString>) {
    PROGRAM.get_or_init(|| program);
}

/// This command again, with arguments still to be added.
pub fn again() -> Result<Command, LabError> {
    let (path, before) = PROGRAM.get().and_then(|words| words.split_first()).ok_or_else(unknown)?;
    let mut command = Command::new(path);
    command.args(before);
    Ok(command)
}

fn unknown() -> LabError {
    LabError::io("find", "this program")(io::ErrorKind::NotFound.into())
}
