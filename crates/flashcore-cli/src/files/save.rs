//! Writing a result: checked before computing, complete or not there at all, never over an existing file unasked.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use flashcore_core::{DType, Data};
use tempfile::NamedTempFile;

use super::{FileError, Format, TensorPath, npy, safetensors};

/// An output file that can be written, as far as can be told beforehand.
#[derive(Clone, Debug)]
pub struct Target {
    path: PathBuf,
    format: Format,
    tensor: String,
    dtype: DType,
    force: bool,
}

impl Target {
    /// Checks that elements of `dtype` can be written to `name`; `usual` is the tensor's name where the path has none.
    pub fn check(name: &TensorPath, usual: &str, dtype: DType, force: bool) -> Result<Self, FileError> {
        let tensor = name.tensor.clone().unwrap_or_else(|| usual.to_owned());
        let target = Self { path: name.path.clone(), format: name.format, tensor, dtype, force };
        if target.header(&[]).is_none() {
            return Err(FileError::NoBf16 { path: target.path });
        }
        if !force && target.path.symlink_metadata().is_ok() {
            return Err(FileError::Exists { path: target.path });
        }
        if target.path.is_dir() {
            return Err(target.failed(io::ErrorKind::IsADirectory.into()));
        }
        target.temporary()?;
        Ok(target)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the array beside its place and then moves it there in one step.
    pub fn save(&self, shape: &[usize], data: Data<'_>) -> Result<(), FileError> {
        let header = self.header(shape).ok_or(FileError::NoBf16 { path: self.path.clone() })?;
        let mut file = self.temporary()?;
        let written = file.write_all(&header).and_then(|()| file.write_all(data.bytes()));
        written.and_then(|()| file.as_file().sync_all()).map_err(|error| self.failed(error))?;
        let moved = if self.force { file.persist(&self.path) } else { file.persist_noclobber(&self.path) };
        match moved {
            Ok(_) => Ok(()),
            Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(FileError::Exists { path: self.path.clone() })
            }
            Err(e) => Err(self.failed(e.error)),
        }
    }

    fn header(&self, shape: &[usize]) -> Option<Vec<u8>> {
        match self.format {
            Format::Npy => npy::header(self.dtype, shape),
            Format::Safetensors => safetensors::header(&self.tensor, self.dtype, shape),
        }
    }

    /// A file in the same folder that removes itself unless it is moved to its place.
    fn temporary(&self) -> Result<NamedTempFile, FileError> {
        let parent = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = parent.unwrap_or(Path::new("."));
        if !folder.exists() {
            return Err(FileError::NoFolder { path: self.path.clone(), folder: folder.to_owned() });
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".flashcore-");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        builder.tempfile_in(folder).map_err(|error| self.failed(error))
    }

    fn failed(&self, source: io::Error) -> FileError {
        FileError::Write { path: self.path.clone(), source }
    }
}
