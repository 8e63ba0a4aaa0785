//! Classes of problems that a row of a table is for: exact in kind, a range in size.
//!
//! Sizes are counted in powers of two, the usual sizes in the middle, so that no class is about one shape alone.

use flashcore_core::{DType, Problem, Sequences};
use serde::{Deserialize, Serialize};

use super::{Gpu, tuned::check_text};

/// Rows of the tiles that a problem's size is counted in, whatever the kernel.
const TILE_ROWS: usize = 64;
/// Largest size; far beyond what kernels take.
const MOST: u64 = 1 << 40;

/// Sizes from the first to the second, both included.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Span(u64, u64);

impl Span {
    /// From `least` to `most`.
    pub const fn new(least: u64, most: u64) -> Self {
        Self(least, most)
    }

    /// All sizes whose logarithm to the base two is nearest to the same whole number as that of `size`.
    pub fn around(size: u64) -> Self {
        let middle = (size.max(1) as f64).log2().round();
        let edge = |by: f64| (middle + by).exp2().ceil() as u64;
        Self(edge(-0.5), edge(0.5) - 1)
    }

    /// The smallest size.
    pub const fn least(self) -> u64 {
        self.0
    }

    /// The largest size.
    pub const fn most(self) -> u64 {
        self.1
    }

    /// Whether it holds `size`.
    pub const fn holds(self, size: u64) -> bool {
        self.0 <= size && size <= self.1
    }

    fn check(self) -> Result<(), String> {
        let Self(least, most) = self;
        if 1 <= least && least <= most && most <= MOST {
            return Ok(());
        }
        Err(format!("sizes from {least} to {most} are none"))
    }
}

/// Problems of one kind and about one size on one device.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// `sm_90` and the like, or the instructions of a CPU.
    pub device: String,
    /// Multiprocessors of the GPU, or threads on the CPU.
    pub units: u32,
    /// Element type.
    pub dtype: String,
    /// Features of queries and keys.
    pub dim_qk: u32,
    /// Features of values.
    pub dim_v: u32,
    /// Whether keys far before a query are hidden.
    pub left: bool,
    /// Whether keys far behind a query are hidden.
    pub right: bool,
    /// Whether scores are limited.
    pub softcap: bool,
    /// Queries of a sequence.
    pub queries: Span,
    /// Keys that a query sees at most.
    pub keys: Span,
    /// Tiles of 64 rows in all heads and batch entries.
    pub tiles: Span,
}

/// A problem on a device, as classes see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Subject<'a> {
    device: &'a str,
    units: u32,
    dtype: DType,
    dims: [u32; 2],
    sides: [bool; 2],
    softcap: bool,
    queries: u64,
    keys: u64,
    tiles: u64,
}

impl<'a> Subject<'a> {
    /// `None` for problems that no row is for: those whose bits must not depend on the batch, and those whose options
    /// were never measured (lengths of their own, sinks).
    pub fn new(device: &'a str, units: u32, problem: &Problem) -> Option<Self> {
        let plain = problem.sequences_kind() == Sequences::Uniform && problem.sinks().is_none();
        if problem.batch_invariant() || !plain {
            return None;
        }
        let mask = problem.mask();
        let seen = match (mask.left(), mask.right()) {
            (Some(left), Some(right)) => u64::from(left) + u64::from(right) + 1,
            _ => u64::MAX,
        };
        let planes = (problem.batch() * problem.heads_q()) as u64;
        Some(Self {
            device,
            units,
            dtype: problem.dtype(),
            dims: [problem.dim_qk() as u32, problem.dim_v() as u32],
            sides: [mask.left().is_some(), mask.right().is_some()],
            softcap: problem.softcap().is_some(),
            queries: problem.seq_q() as u64,
            keys: seen.min(problem.seq_kv() as u64),
            tiles: planes.saturating_mul(problem.seq_q().div_ceil(TILE_ROWS) as u64),
        })
    }

    /// The class of problems of about its size.
    pub fn class(&self) -> Class {
        self.class_by(Span::around)
    }

    /// The class of problems of exactly its size.
    pub fn exactly(&self) -> Class {
        self.class_by(|size| Span(size, size))
    }

    fn class_by(&self, span: fn(u64) -> Span) -> Class {
        let [left, right] = self.sides;
        Class {
            device: self.device.to_owned(),
            units: self.units,
            dtype: self.dtype.name().to_owned(),
            dim_qk: self.dims[0],
            dim_v: self.dims[1],
            left,
            right,
            softcap: self.softcap,
            queries: span(self.queries),
            keys: span(self.keys),
            tiles: span(self.tiles),
        }
    }
}

impl Class {
    /// Whether a problem on a device is one of these.
    pub fn holds(&self, subject: &Subject<'_>) -> bool {
        let kind = self.device == subject.device
            && self.units == subject.units
            && self.dtype == subject.dtype.name()
            && [self.dim_qk, self.dim_v] == subject.dims
            && [self.left, self.right] == subject.sides
            && self.softcap == subject.softcap;
        kind && self.queries.holds(subject.queries)
            && self.keys.holds(subject.keys)
            && self.tiles.holds(subject.tiles)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        check_text(&self.device)?;
        self.dtype.parse::<DType>().map_err(|e| e.to_string())?;
        [self.queries, self.keys, self.tiles].into_iter().try_for_each(Span::check)?;
        let dims = [self.dim_qk, self.dim_v];
        if dims.iter().all(|dim| (1..=65_536).contains(dim)) && self.units > 0 {
            return Ok(());
        }
        Err(format!("head dims {dims:?} on {} units are none", self.units))
    }
}

impl Gpu {
    /// The name that classes have for it.
    pub fn device(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}")
    }
}
