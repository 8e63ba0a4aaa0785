//! Which instructions the kernels may use: detected once, or forced by tests.

use std::fmt;

/// A set of vector instructions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SimdLevel {
    /// Whatever the compiler makes of plain Rust.
    Portable,
}

impl SimdLevel {
    /// Every level, slowest first.
    pub const ALL: [Self; 1] = [Self::Portable];

    /// The fastest level this machine has.
    pub fn detect() -> Self {
        Self::Portable
    }

    /// Whether this machine has the instructions.
    pub fn is_available(self) -> bool {
        true
    }

    /// The name used in kernel names and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
