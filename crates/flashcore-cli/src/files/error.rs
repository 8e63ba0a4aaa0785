//! What can be wrong with a tensor file, and what to do about it.

use std::{io, path::PathBuf};

use flashcore_core::DType;

use super::ElementType;

/// A file that cannot be used; carries the path.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a regular file; pass a .npy or .safetensors file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Format {
        path: PathBuf,
        #[source]
        source: FormatError,
    },
    #[error("{} holds {got} but --dtype says {expected}; convert it, or omit --dtype", path.display())]
    DType { path: PathBuf, got: DType, expected: DType },
    #[error("{} exists already; name another file or pass --force to overwrite it", path.display())]
    Exists { path: PathBuf },
    #[error("cannot write {}: the folder {} does not exist; create it first", path.display(), folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("cannot write {}: {source}; choose a folder you may write to", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{flags} both name {}; give each its own file", path.display())]
    SameFile { flags: &'static str, path: PathBuf },
    #[error("{} is an input and would be overwritten; name another file", path.display())]
    ReplacesInput { path: PathBuf },
    #[error("{} has elements of numpy type `{descr}`, which kernels do not take; convert it to one of: {}", path.display(), ElementType::names())]
    Element { path: PathBuf, descr: String },
    #[error("{} cannot hold bf16, for which npy has no type; name a .safetensors file", path.display())]
    NoBf16 { path: PathBuf },
}

/// Bytes that are not a tensor file this program takes.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    #[error("it cannot be read: {0}; check its permissions")]
    Io(#[from] io::Error),
    #[error("not an npy file: it does not start with \\x93NUMPY; save it with numpy.save")]
    Magic,
    #[error("npy version {0}.{1} is not known; save it with numpy.save, which writes 1.0 to 3.0")]
    Version(u8, u8),
    #[error("the header claims {len} bytes, more than the {max} allowed; the file is damaged")]
    HeaderTooLong { len: u64, max: u64 },
    #[error("the file ends after {len} of at least {needed} bytes; it is cut short, write it again")]
    Truncated { len: u64, needed: u64 },
    #[error("the file has {len} bytes but its header describes {needed}; it is damaged, write it again")]
    Length { len: u64, needed: u64 },
    #[error("the header is not what numpy writes: {0}; save it again with numpy.save")]
    Header(#[source] serde_json::Error),
    #[error("the header is not valid safetensors: {0}; write it again with safetensors.save_file")]
    Metadata(#[from] serde_json::Error),
    #[error(
        "elements of type `{descr}` are not supported; convert to float16 or float32 (bf16: safetensors)"
    )]
    DType { descr: String },
    #[error(
        "big-endian elements (`{descr}`) are not supported; convert with x.astype(x.dtype.newbyteorder('<'))"
    )]
    BigEndian { descr: String },
    #[error(
        "2-byte elements without a type (`{descr}`): pass --dtype bf16 if they are bfloat16, or use safetensors"
    )]
    Void { descr: String },
    #[error("the array is in Fortran order; save numpy.ascontiguousarray(x) instead")]
    Fortran,
    #[error("{shape:?} has {} dimensions; give batch x heads x sequence x dim, or without batch", shape.len())]
    Rank { shape: Vec<usize> },
    #[error("shape {shape:?} holds more elements than can be addressed; the file is damaged")]
    Overflow { shape: Vec<usize> },
    #[error(
        "shape {shape:?} needs {needed} bytes of data but the file holds {have}; it is damaged, write it again"
    )]
    Size { shape: Vec<usize>, needed: u64, have: u64 },
    #[error("no tensor is called `{name}`; the file has {found}: add #NAME to the path to choose one")]
    NoTensor { name: String, found: String },
}
