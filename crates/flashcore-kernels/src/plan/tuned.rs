//! Tables of measured tiles: which tile computes exactly one problem on exactly one kind of GPU.
//!
//! `flashcore tune` writes tables; a plan uses one only if the caller named it, and the rules otherwise. A table is
//! untrusted data: its size is limited, unknown fields are refused, and a tile becomes a kernel only through the gate
//! that every tile passes (`fit`). If a row's tile does not pass, the rules choose.

use std::{collections::BTreeMap, fs::File, io::Read, path::Path};

use flashcore_core::{Problem, Sequences};
use serde::{Deserialize, Serialize};

use super::{Gpu, Plan, Tile, plan_tile};
use crate::untrusted::check_text;

/// What tables are called inside, with the version of their format.
const FORMAT: &str = "flashcore-table-3";
/// Largest table that is read.
const MOST_BYTES: u64 = 1 << 20;
/// Longest key and longest evidence.
const LONGEST_TEXT: usize = 400;
/// Characters of a faulty row's key that its error shows.
const SHOWN: usize = 80;

/// Measured tiles by [`key`].
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Table {
    format: String,
    rows: BTreeMap<String, Row>,
}

/// The tile of one problem.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// How to split the work.
    pub tile: Tile,
    /// What was measured, where and when, in words.
    pub evidence: String,
}

/// Why a table is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The operating system refused.
    #[error("cannot read it: {0}")]
    Io(#[from] std::io::Error),
    /// Too large.
    #[error("larger than {} KiB, the limit for a table", MOST_BYTES >> 10)]
    Size,
    /// Not the expected JSON.
    #[error("damaged or not a table ({0})")]
    Json(#[from] serde_json::Error),
    /// Another kind of file, or another version.
    #[error("not a table in the format {FORMAT:?}; make one with `flashcore tune`")]
    Format,
    /// A row that cannot be.
    #[error("the row {key:?}: {what}")]
    Row {
        /// How its key begins.
        key: String,
        /// What is wrong.
        what: String,
    },
}

/// What a row is for: the GPU and everything about the problem that may change which tile is fastest. `None` for
/// problems that no table serves: those with lengths of their own, those with dropout, and those whose bits must not depend
/// on the batch.
pub fn key(problem: &Problem, gpu: &Gpu) -> Option<String> {
    let plain = problem.sequences_kind() == Sequences::Uniform && problem.dropout().is_none();
    if problem.batch_invariant() || !plain {
        return None;
    }
    let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(|layout| layout.dims().array());
    let [batch, heads, seq, dim] = q;
    let ((major, minor), sms) = (gpu.capability, gpu.sms);
    let softcap = if problem.softcap().is_some() { ", softcap" } else { "" };
    let sinks = if problem.sinks().is_some() { ", sinks" } else { "" };
    Some(format!(
        "sm_{major}{minor} with {sms} SMs: {batch}x{heads}x{seq}x{dim} over {}x{}x{}, {}, {}{softcap}{sinks}",
        k[1],
        k[2],
        v[3],
        problem.dtype(),
        problem.mask(),
    ))
}

impl Default for Table {
    fn default() -> Self {
        Self { format: FORMAT.to_owned(), rows: BTreeMap::new() }
    }
}

impl Table {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, TableError> {
        let mut bytes = Vec::new();
        File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
        Self::parse(&bytes)
    }

    /// Reads the contents of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        if bytes.len() as u64 > MOST_BYTES {
            return Err(TableError::Size);
        }
        let table: Self = serde_json::from_slice(bytes)?;
        if table.format != FORMAT {
            return Err(TableError::Format);
        }
        table.rows.iter().try_for_each(|(key, row)| row.check(key))?;
        Ok(table)
    }

    /// The file's contents.
    pub fn to_json(&self) -> Result<String, TableError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The rows by key.
    pub const fn rows(&self) -> &BTreeMap<String, Row> {
        &self.rows
    }

    /// Adds a row; one with the same key gives way.
    pub fn insert(&mut self, key: String, row: Row) -> Result<(), TableError> {
        row.check(&key)?;
        self.rows.insert(key, row);
        Ok(())
    }

    /// The plan of the problem's row, if there is one whose tile fits.
    pub(super) fn plan(&self, problem: &Problem, gpu: &Gpu, alignment: u64) -> Option<Plan> {
        let row = self.rows.get(&key(problem, gpu)?)?;
        let plan = plan_tile(problem, gpu, alignment, row.tile).ok()?;
        plan.check_build(problem).ok()?;
        let why = "measured to be faster than the rules' choice";
        Some(Plan { why, row: Some(format!("a row of the table: {}", row.evidence)), ..plan })
    }
}

impl Row {
    fn check(&self, key: &str) -> Result<(), TableError> {
        let checked = [key, &self.evidence].iter().try_for_each(|text| check_text(text, LONGEST_TEXT));
        let checked = checked.and_then(|()| self.tile.check().map_err(|misfit| misfit.to_string()));
        checked.map_err(|what| TableError::Row { key: key.chars().take(SHOWN).collect(), what })
    }
}
