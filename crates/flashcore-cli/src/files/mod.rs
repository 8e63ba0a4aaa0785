//! Tensor files: npy and safetensors, read into a [`Buffer`] and written without ever losing an existing file.
//!
//! `run` opens all its inputs first ([`ArrayFile::open`] reads headers only), so that a problem is checked before its
//! data is read. A file is never trusted: headers are bounded, and every size is compared with the file's length.

mod any;
mod error;
mod npy;
mod safetensors;
mod save;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    str::FromStr,
};

use flashcore_core::{DType, Dims};
use flashcore_lab::buffer::Buffer;

pub use self::{
    any::{AnyArray, ElementType},
    error::{FileError, FormatError},
    save::{Place, Target},
};
use crate::error::CliError;

/// A file format, told by its extension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Npy,
    Safetensors,
}

/// The name of a tensor file: `x.npy`, `x.safetensors` or `x.safetensors#tensor`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPath {
    path: PathBuf,
    format: Format,
    tensor: Option<String>,
}

impl TensorPath {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl FromStr for TensorPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, tensor) = match text.rsplit_once('#') {
            Some((path, tensor)) if path.ends_with(".safetensors") => (path, Some(tensor.to_owned())),
            _ => (text, None),
        };
        let format = match Path::new(path).extension().and_then(|e| e.to_str()) {
            Some("npy") => Format::Npy,
            Some("safetensors") => Format::Safetensors,
            _ => return Err("unknown file format; name a .npy or .safetensors file".to_owned()),
        };
        Ok(Self { path: path.into(), format, tensor })
    }
}

/// Where an array lies in its file.
///
/// **Invariant:** the file holds exactly `shape` elements of `dtype` from `start` on; made only by [`Header::new`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    dtype: DType,
    shape: Vec<usize>,
    start: u64,
    len: usize,
}

impl Header {
    /// An array in bytes `start..end` of its file.
    fn new(dtype: DType, shape: Vec<usize>, start: u64, end: u64) -> Result<Self, FormatError> {
        let len = count(&shape, dtype.bytes(), end.saturating_sub(start))?;
        Ok(Self { dtype, shape, start, len })
    }
}

/// Elements of `shape`, if they are `have` bytes.
fn count(shape: &[usize], element: usize, have: u64) -> Result<usize, FormatError> {
    let product = |size: usize| shape.iter().try_fold(size, |n, &extent| n.checked_mul(extent));
    // An extent of 0 makes the product 0, but the others must still be addressable.
    let nonzero = shape.iter().try_fold(element, |n, &extent| n.checked_mul(extent.max(1)));
    let (Some(len), Some(needed), Some(_)) = (product(1), product(element), nonzero) else {
        return Err(FormatError::Overflow { shape: shape.to_vec() });
    };
    if needed as u64 != have {
        return Err(FormatError::Size { shape: shape.to_vec(), needed: needed as u64, have });
    }
    Ok(len)
}

/// An input file whose header was read and found right.
#[derive(Debug)]
pub struct ArrayFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl ArrayFile {
    /// Opens a file and checks its header; `usual` is the tensor to take where the path names none.
    pub fn open(name: &TensorPath, usual: &str, dtype: Option<DType>) -> Result<Self, FileError> {
        let path = name.path.clone();
        let (mut file, len) = open_file(&path)?;
        let wanted = Wanted { tensor: name.tensor.as_deref(), usual, dtype };
        match read_header(&mut file, name.format, len, wanted) {
            Ok(header) => Ok(Self { path, file, header }),
            Err(source) => Err(FileError::Format { path, source }),
        }
    }

    /// The element type.
    pub const fn dtype(&self) -> DType {
        self.header.dtype
    }

    /// Number of dimensions in the file.
    pub fn rank(&self) -> usize {
        self.header.shape.len()
    }

    /// The extents; three of them are heads × sequence × dim.
    pub fn dims(&self) -> Result<Dims, FileError> {
        match self.header.shape[..] {
            [batch, heads, seq, dim] => Ok(Dims::new(batch, heads, seq, dim)),
            [heads, seq, dim] => Ok(Dims::new(1, heads, seq, dim)),
            _ => {
                let source = FormatError::Rank { shape: self.header.shape.clone() };
                Err(FileError::Format { path: self.path.clone(), source })
            }
        }
    }

    /// Reads the elements.
    pub fn read(&mut self) -> Result<Buffer, CliError> {
        let mut elements = Buffer::zeros(self.header.dtype, self.header.len)?;
        let filled = self.file.seek(SeekFrom::Start(self.header.start));
        let filled = filled.and_then(|_| self.file.read_exact(elements.data_mut().bytes_mut()));
        filled.map_err(|source| FileError::Read { path: self.path.clone(), source })?;
        Ok(elements)
    }
}

/// Opens a regular file and tells its length.
fn open_file(path: &Path) -> Result<(File, u64), FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    // Before opening: that would wait for the other end of a pipe.
    let metadata = path.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile { path: path.to_owned() });
    }
    Ok((File::open(path).map_err(failed)?, metadata.len()))
}

/// What to look for in a file.
#[derive(Clone, Copy, Debug)]
struct Wanted<'a> {
    /// The tensor the user named.
    tensor: Option<&'a str>,
    /// The tensor to take where none was named.
    usual: &'a str,
    /// The element type the user named.
    dtype: Option<DType>,
}

fn read_header(
    file: &mut impl Read,
    format: Format,
    file_len: u64,
    wanted: Wanted<'_>,
) -> Result<Header, FormatError> {
    match format {
        Format::Npy => npy::read_header(file, file_len, wanted.dtype),
        Format::Safetensors => safetensors::read_header(file, file_len, wanted.tensor, wanted.usual),
    }
}

/// The next `len` bytes, or fewer where the file ends before.
fn read_up_to(file: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}
