//! Where each statement came from: a side table beside the text, so moving a source line changes no hash.
//!
//! Builders record the Rust line that made an instruction; the parser records `.loc`, or else the line of the PTX
//! text itself. The verifier and the simulator quote it in their findings.

use std::fmt;

/// Source lines of the statements of a module.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Provenance {
    files: Vec<String>,
    kernels: Lines,
    functions: Lines,
}

/// File and line of each statement of each body.
type Lines = Vec<Vec<Option<(u32, u32)>>>;

/// A body of a module, by its index among its kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Unit {
    /// A kernel.
    Kernel(usize),
    /// A function.
    Function(usize),
}

impl From<usize> for Unit {
    fn from(kernel: usize) -> Self {
        Self::Kernel(kernel)
    }
}

/// A line of a source file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Location<'a> {
    /// The file.
    pub file: &'a str,
    /// The line, from 1.
    pub line: u32,
}

impl fmt::Display for Location<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

impl Provenance {
    /// Says that statement `statement` of `unit` (a number means a kernel) came from `file`:`line`.
    pub fn record(&mut self, unit: impl Into<Unit>, statement: usize, file: &str, line: u32) {
        let file = self.file_number(file);
        let (table, index) = match unit.into() {
            Unit::Kernel(index) => (&mut self.kernels, index),
            Unit::Function(index) => (&mut self.functions, index),
        };
        if table.len() <= index {
            table.resize_with(index + 1, Vec::new);
        }
        let lines = &mut table[index];
        if lines.len() <= statement {
            lines.resize(statement + 1, None);
        }
        lines[statement] = Some((file, line));
    }

    /// Where a statement came from, if known.
    pub fn location(&self, unit: impl Into<Unit>, statement: usize) -> Option<Location<'_>> {
        let (table, index) = match unit.into() {
            Unit::Kernel(index) => (&self.kernels, index),
            Unit::Function(index) => (&self.functions, index),
        };
        let (file, line) = (*table.get(index)?.get(statement)?)?;
        Some(Location { file: self.files.get(file as usize)?, line })
    }

    fn file_number(&mut self, file: &str) -> u32 {
        let found = self.files.iter().rposition(|known| known == file);
        let number = found.unwrap_or_else(|| {
            self.files.push(file.into());
            self.files.len() - 1
        });
        number as u32
    }
}
