//! Writing a result: checked before computing, complete or not there at all, never over an existing file unasked.

use std::{
    io,
    path::{Path, PathBuf},
};

use flashcore_core::{DType, Data};
use flashcore_lab::save;

use super::{FileError, Format, TensorPath, npy, safetensors};

/// An output file that can be written, as far as can be told beforehand.
#[derive(Clone, Debug)]
pub struct Target {
    place: Place,
    format: Format,
    tensor: String,
    dtype: DType,
}

impl Target {
    /// Checks that elements of `dtype` can be written to `name`; `usual` is the tensor's name where the path has none.
    pub fn check(name: &TensorPath, usual: &str, dtype: DType, force: bool) -> Result<Self, FileError> {
        let tensor = name.tensor.clone().unwrap_or_else(|| usual.to_owned());
        let place = Place { path: name.path.clone(), force };
        let target = Self { place, format: name.format, tensor, dtype };
        if target.header(&[]).is_none() {
            return Err(FileError::NoBf16 { path: target.place.path });
        }
        target.place.check()?;
        Ok(target)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// Writes the array beside its place and then moves it there in one step.
    pub fn save(&self, shape: &[usize], data: Data<'_>) -> Result<(), FileError> {
        let header = self.header(shape).ok_or(FileError::NoBf16 { path: self.place.path.clone() })?;
        self.place.write(&header, data.bytes())
    }

    fn header(&self, shape: &[usize]) -> Option<Vec<u8>> {
        match self.format {
            Format::Npy => npy::header(self.dtype, shape),
            Format::Safetensors => safetensors::header(&self.tensor, self.dtype, shape),
        }
    }
}

/// Where a file will stand, whatever it holds.
#[derive(Clone, Debug)]
pub struct Place {
    path: PathBuf,
    /// Whether it may replace a file.
    force: bool,
}

impl Place {
    /// A place that can be written to, as far as can be told beforehand.
    pub fn checked(path: &Path, force: bool) -> Result<Self, FileError> {
        let place = Self { path: path.to_owned(), force };
        place.check()?;
        Ok(place)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self) -> Result<(), FileError> {
        if !self.force && self.path.symlink_metadata().is_ok() {
            return Err(FileError::Exists { path: self.path.clone() });
        }
        if self.path.is_dir() {
            return Err(self.failed(io::ErrorKind::IsADirectory.into()));
        }
        let folder = save::folder(&self.path);
        if !folder.exists() {
            return Err(FileError::NoFolder { path: self.path.clone(), folder: folder.to_owned() });
        }
        save::temporary(&self.path).map(drop).map_err(|error| self.failed(error))
    }

    /// Writes the file in one step.
    pub fn write(&self, header: &[u8], elements: &[u8]) -> Result<(), FileError> {
        let write = if self.force { save::replace } else { save::create };
        write(&self.path, &[header, elements]).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => FileError::Exists { path: self.path.clone() },
            _ => self.failed(error),
        })
    }

    fn failed(&self, source: io::Error) -> FileError {
        FileError::Write { path: self.path.clone(), source }
    }
}
