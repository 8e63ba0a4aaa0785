//! Arguments with their arrays: read from files before the launch, written to files after it.

use std::path::{Path, PathBuf};

use flashcore_lab::{buffer::filled, memory};
use flashcore_ptx::launch::{Param, Slot};
use flashcore_sim::{Buffer, Outcome};

use super::{SimFailure, argument::Argument, map::MapSettings, request::Known};
use crate::{
    error::CliError,
    files::{AnyArray, FileError, Place},
    output::Text,
};

/// Elements of a result that are shown.
const SHOWN: usize = 8;
/// Arrays that one launch can bind.
pub const MOST: usize = 254;

/// What a launch is given.
#[derive(Debug)]
pub struct Bound {
    pub params: Vec<Param>,
    arrays: Vec<Array>,
}

#[derive(Debug)]
struct Array {
    /// What findings call it.
    name: String,
    content: AnyArray,
    initialised: bool,
    /// Where it goes, if the kernel may write it.
    place: Option<Place>,
    /// Where it came from, if it was there before.
    source: Option<PathBuf>,
}

/// An array that the kernel wrote.
#[derive(Debug)]
pub struct Written {
    pub content: AnyArray,
    place: Place,
}

impl Bound {
    /// Reads inputs and checks that outputs can be written.
    pub fn new(args: &[Argument], force: bool) -> Result<Self, CliError> {
        let mut bound = Self { params: Vec::new(), arrays: Vec::new() };
        for arg in args {
            bound.add(arg, force)?;
        }
        bound.check()?;
        Ok(bound)
    }

    fn add(&mut self, arg: &Argument, force: bool) -> Result<(), CliError> {
        let at = self.params.len();
        self.add_to(at, arg, force)
    }

    /// Adds an argument, or a member of one, to the parameters; findings call it argument `at`.
    fn add_to(&mut self, at: usize, arg: &Argument, force: bool) -> Result<(), CliError> {
        let name = format!("argument {at} ({arg})");
        let array = match arg {
            Argument::Number(param) => {
                self.params.push(param.clone());
                return Ok(());
            }
            Argument::Map { array, map } => {
                self.add_to(at, array, force)?;
                return self.describe_last(map);
            }
            Argument::Struct(members) => {
                let before = self.params.len();
                members.iter().try_for_each(|member| self.add_to(at, member, force))?;
                let members = self.params.split_off(before);
                self.params.push(Param::Struct(members));
                return Ok(());
            }
            Argument::In(path) => Array::read(name, path, None)?,
            Argument::InOut(path) => Array::read(name, path, Some(Place::checked(path, true)?))?,
            Argument::Out { path, element, shape } => {
                let place = Some(Place::checked(path, force)?);
                let len = shape.iter().try_fold(element.bytes, |n, &extent| n.checked_mul(extent));
                let len = len.unwrap_or(usize::MAX);
                memory::check(len as u64)?;
                // NaN in every format, so that what is never written shows.
                let bytes = filled(0xff, len)?;
                let content = AnyArray { element: *element, shape: shape.clone(), bytes };
                Array { name, content, initialised: false, place, source: None }
            }
        };
        self.params.push(Param::Buffer(slot(self.arrays.len())));
        self.arrays.push(array);
        Ok(())
    }

    /// Makes a tensor map of the argument added last.
    fn describe_last(&mut self, map: &MapSettings) -> Result<(), CliError> {
        if let (Some(Param::Buffer(slot)), Some(array)) = (self.params.pop(), self.arrays.last()) {
            let AnyArray { element, shape, .. } = &array.content;
            let known = Known { slot, element: element.name, shape };
            self.params.push(Param::TensorMap(map.spec(&known).map_err(SimFailure::Script)?));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), SimFailure> {
        if self.arrays.len() > MOST {
            return Err(SimFailure::TooMany { given: self.arrays.len(), most: MOST });
        }
        let written: Vec<&Path> = self.arrays.iter().filter_map(|a| Some(a.place.as_ref()?.path())).collect();
        let twice = written.iter().enumerate().find(|(at, path)| written[..*at].contains(path));
        twice.map_or(Ok(()), |(_, path)| Err(SimFailure::SameFile { path: path.to_path_buf() }))
    }

    /// The arrays as the simulator takes them.
    pub fn buffers(&self) -> Vec<Buffer> {
        let buffer = |(at, array): (usize, &Array)| Buffer {
            slot: slot(at),
            bytes: array.content.bytes.clone(),
            initialised: array.initialised,
            name: Some(array.name.clone()),
        };
        self.arrays.iter().enumerate().map(buffer).collect()
    }

    /// Files of arrays that the kernel was only to read, and that it has changed.
    pub fn overwritten(&self, outcome: &Outcome) -> Vec<String> {
        let changed = |(at, array): (usize, &Array)| {
            let source = array.source.clone().filter(|_| array.place.is_none())?;
            (outcome.bytes(slot(at)) != Some(&array.content.bytes)).then(|| source.display().to_string())
        };
        self.arrays.iter().enumerate().filter_map(changed).collect()
    }

    /// The arrays that the kernel could write, as it left them.
    pub fn collect(self, outcome: &Outcome) -> Vec<Written> {
        let result = |(at, array): (usize, Array)| {
            let bytes = outcome.bytes(slot(at)).unwrap_or_default().to_vec();
            Some(Written { content: AnyArray { bytes, ..array.content }, place: array.place? })
        };
        self.arrays.into_iter().enumerate().filter_map(result).collect()
    }
}

impl Array {
    fn read(name: String, path: &Path, place: Option<Place>) -> Result<Self, CliError> {
        let (content, source) = (AnyArray::read(path)?, Some(path.to_owned()));
        Ok(Self { name, content, initialised: true, place, source })
    }
}

/// At most [`MOST`] arrays are bound, so that every number fits.
fn slot(at: usize) -> Slot {
    Slot(at.min(MOST - 1) as u8)
}

impl Written {
    /// Writes the array to its file.
    pub fn save(&self) -> Result<(), FileError> {
        self.content.save(&self.place)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// The first few elements as text.
    pub fn first(&self) -> Vec<String> {
        let AnyArray { element, bytes, .. } = &self.content;
        bytes.chunks_exact(element.bytes).take(SHOWN).map(element.show).collect()
    }

    /// The array as a row of a table.
    pub fn row(&self, halted: bool) -> Vec<Text> {
        let shape = &self.content.shape;
        let extents: Vec<_> = shape.iter().map(usize::to_string).collect();
        let more = if shape.iter().product::<usize>() > SHOWN { " ..." } else { "" };
        let lost = if halted { " (not written: the launch ended early)" } else { "" };
        vec![
            self.path().display().to_string().into(),
            format!("{} {}", self.content.element.name, extents.join("x")).into(),
            format!("{}{more}{lost}", self.first().join(" ")).into(),
        ]
    }
}
