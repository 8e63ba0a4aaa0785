//! How many threads are known to agree: on a value, or on executing this code.

use std::fmt;

/// A set of threads that agree, smallest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Scope {
    /// Each thread for itself.
    Lane,
    /// The 32 threads of a warp.
    Warp,
    /// The 128 threads of a warpgroup.
    Warpgroup,
    /// All threads of a CTA.
    Cta,
    /// All threads of the launch.
    Grid,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lane => "lane",
            Self::Warp => "warp",
            Self::Warpgroup => "warpgroup",
            Self::Cta => "CTA",
            Self::Grid => "grid",
        })
    }
}

/// A scope as a type, for conditions that [`Builder::if_uniform`](crate::Builder::if_uniform) may branch on.
pub trait UniformScope {
    /// The scope as a value.
    const SCOPE: Scope;
}

/// The threads of a warp, as a type.
#[derive(Clone, Copy, Debug)]
pub struct Warp;

/// The threads of a warpgroup, as a type.
#[derive(Clone, Copy, Debug)]
pub struct Warpgroup;

/// The threads of a CTA, as a type.
#[derive(Clone, Copy, Debug)]
pub struct Cta;

impl UniformScope for Warp {
    const SCOPE: Scope = Scope::Warp;
}

impl UniformScope for Warpgroup {
    const SCOPE: Scope = Scope::Warpgroup;
}

impl UniformScope for Cta {
    const SCOPE: Scope = Scope::Cta;
}
