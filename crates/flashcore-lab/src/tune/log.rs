//! What was tried, one JSON line each: a search stopped at any moment resumes where it was.
//!
//! Every line names its search, so that one file serves many problems and machines; lines of other searches, and
//! unreadable lines, are skipped. A torn last line is removed.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use flashcore_kernels::Tile;
use serde::{Deserialize, Serialize};

use super::TuneError;
use crate::error::LabError;

/// How every line begins.
const HEAD: &[u8] = br#"{"tune":1,"#;
/// Largest log that is read.
const MOST_BYTES: u64 = 64 << 20;
/// How often a candidate may run for the first time: one that hangs or kills the process is left out after that.
const MOST_STARTS: usize = 2;

/// What became of a candidate.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// It runs for the first time: the process may not survive that.
    Started,
    /// Why it is out: it cannot be built, spills, or is wrong.
    Rejected(String),
    /// It is right: its cost, and that of the rules' choice at the same time.
    Measured {
        cost: f64,
        /// The cost of the rules' choice.
        rules: f64,
        /// How busy the busiest unit of the GPU was, from 0 to 1, where that was counted.
        busy: Option<f64>,
    },
}

#[derive(Serialize, Deserialize)]
struct Line {
    tune: u32,
    search: String,
    tile: Tile,
    outcome: Outcome,
}

/// A log that is being written.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    search: String,
    outcomes: HashMap<Tile, Vec<Outcome>>,
}

impl Log {
    /// Opens the log at `path`, or begins one; with `fresh` what it knows about this search is passed over.
    pub fn open(path: &Path, search: String, fresh: bool) -> Result<Self, LabError> {
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let mut file = opened.map_err(LabError::io("open", path))?;
        let mut bytes = Vec::new();
        (&mut file).take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(LabError::io("read", path))?;
        let head = bytes.len().min(HEAD.len());
        if bytes[..head] != HEAD[..head] || bytes.len() as u64 > MOST_BYTES {
            return Err(TuneError::Log(path.to_owned()).into());
        }
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(LabError::io("write", path))?;
        let mut outcomes: HashMap<_, Vec<_>> = HashMap::new();
        let lines = bytes[..whole].split(|byte| *byte == b'\n').filter(|_| !fresh);
        let lines = lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok());
        for line in lines.filter(|line| line.search == search && line.outcome.is_possible()) {
            outcomes.entry(line.tile).or_default().push(line.outcome);
        }
        Ok(Self { path: path.to_owned(), file, search, outcomes })
    }

    /// How many candidates it knows about.
    pub fn known(&self) -> usize {
        self.outcomes.len()
    }

    /// What became of a candidate, if that is known.
    pub fn outcome(&self, tile: &Tile) -> Option<Outcome> {
        let outcomes = self.outcomes.get(tile)?;
        let last = outcomes.iter().rfind(|outcome| **outcome != Outcome::Started).cloned();
        let deadly = || Outcome::Rejected(format!("it ended the search {MOST_STARTS} times"));
        last.or_else(|| (outcomes.len() >= MOST_STARTS).then(deadly))
    }

    /// Adds a line; it is on disk when this returns.
    pub fn add(&mut self, tile: Tile, outcome: Outcome) -> Result<(), LabError> {
        let line = Line { tune: 1, search: self.search.clone(), tile, outcome };
        let written = serde_json::to_string(&line).map_err(Into::into).and_then(|text| {
            self.file.write_all((text + "\n").as_bytes())?;
            self.file.sync_data()
        });
        written.map_err(LabError::io("write", &self.path))?;
        self.outcomes.entry(tile).or_default().push(line.outcome);
        Ok(())
    }
}

impl Outcome {
    fn is_possible(&self) -> bool {
        !matches!(self, Self::Measured { cost, rules, .. } if *cost <= 0.0 || *rules <= 0.0)
    }
}
