//! Machine code as text, for people: through nvdisasm if found.

use crate::{
    compile::Cubin,
    error::Error,
    toolchain::{Input, ToolPath},
};
use std::{
    ffi::OsString,
    fs::File,
    io::{Seek, Write},
    path::Path,
};

/// The SASS of a module. nvdisasm reads no pipe, so the image passes through a nameless file in `scratch`.
pub fn disassemble(nvdisasm: &ToolPath, cubin: &Cubin, scratch: &Path) -> Result<String, Error> {
    let failed = |reason: String| Error::ToolFailed { path: nvdisasm.path().to_owned(), reason };
    let file = nameless(scratch, cubin.bytes()).map_err(|error| failed(error.to_string()))?;
    let arguments = ["--print-code", "/dev/stdin"].map(OsString::from);
    let output = nvdisasm.run(&arguments, Input::File(file))?;
    if !output.success {
        return Err(failed(output.log));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A file that is removed as soon as it is open: nobody else can reach it.
fn nameless(folder: &Path, bytes: &[u8]) -> std::io::Result<File> {
    let path = folder.join(format!(".flashcore-{}-{:p}", std::process::id(), bytes));
    let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}
