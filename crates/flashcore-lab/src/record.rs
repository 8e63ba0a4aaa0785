//! Results as a file: every raw time, with where and how it was measured. `docs/lab.md` documents the format.
//!
//! A file is never trusted: its size is checked before it is read, its version before its contents, and every number and
//! text before anything is computed from it. Files are replaced atomically ([`save`]), so a run that is stopped at any
//! moment leaves a valid one.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use flashcore_kernels::untrusted::{self, Head};
use serde::{Deserialize, Serialize};

use crate::{
    ceiling::Ceiling,
    competitor::Place,
    judge::Finding,
    machine::{self, Machine},
    protocol::Protocol,
    save,
    sensors::Noise,
    stats::Summary,
    task::{Task, TaskSpec},
};

/// What the files are called inside.
pub const SCHEMA: &str = "flashcore-bench";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Largest file that is read.
const MOST_BYTES: u64 = 64 << 20;
/// Longest text in a file.
const LONGEST_TEXT: usize = 2000;
/// Longest time that is taken for one, in seconds.
const LONGEST_TIME: f64 = 1e5;

/// A set of measurements.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Always [`VERSION`].
    pub version: u32,
    pub complete: bool,
    pub created: String,
    pub flashcore: String,
    pub commit: Option<String>,
    pub machine: Machine,
    pub protocol: Protocol,
    pub ceilings: Vec<Ceiling>,
    pub measurements: Vec<Measurement>,
    pub warnings: Vec<String>,
}

/// One competitor on one task.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    pub task: TaskSpec,
    #[serde(rename = "arm")]
    pub competitor: String,
    /// Where it computes: `cpu` or `gpu`.
    pub place: String,
    pub kernel: Option<String>,
    pub finding: Option<Finding>,
    pub refused: Option<String>,
    /// Its turns, in order of time.
    pub stretches: Vec<Stretch>,
}

/// One turn of a competitor.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Stretch {
    /// Seconds per call of each sample.
    pub seconds: Vec<f64>,
    pub calls: u32,
    /// Whether it is the extra turn at the end, which does not count towards the figures.
    pub again: bool,
    #[serde(rename = "weather")]
    pub noise: Option<Noise>,
}

impl Measurement {
    /// Of a competitor that has not computed yet.
    pub fn new(task: &Task, competitor: &str, place: Place) -> Self {
        let (task, competitor, place) = (task.spec().clone(), competitor.to_owned(), place.name().to_owned());
        Self { task, competitor, place, kernel: None, finding: None, refused: None, stretches: Vec::new() }
    }

    /// The turns that count.
    fn turns(&self) -> Vec<&[f64]> {
        self.stretches.iter().filter(|s| !s.again).map(|s| &s.seconds[..]).collect()
    }

    /// Nearly independent figures for confidence intervals.
    pub fn units(&self, protocol: &Protocol) -> Vec<f64> {
        protocol.units(self.turns().into_iter())
    }

    /// The times in few numbers; `None` where nothing was timed.
    pub fn summary(&self, protocol: &Protocol) -> Option<Summary> {
        let kept: Vec<f64> = self.turns().into_iter().flat_map(|turn| protocol.kept(turn)).copied().collect();
        Summary::of(&kept, &self.units(protocol))
    }
}

impl Record {
    /// An empty record of this machine, begun now.
    pub fn new(protocol: Protocol, peers: Option<String>) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            complete: false,
            created: machine::now(),
            flashcore: env!("CARGO_PKG_VERSION").to_owned(),
            commit: machine::commit(),
            machine: Machine::this(peers),
            protocol,
            ceilings: Vec::new(),
            measurements: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// The measurement of `competitor` on `task`.
    pub fn find(&self, task: &TaskSpec, competitor: &str) -> Option<&Measurement> {
        self.measurements.iter().find(|m| m.task == *task && m.competitor == competitor)
    }

    /// The ceiling that applies to a measurement.
    pub fn ceiling(&self, measurement: &Measurement) -> Option<&Ceiling> {
        let fits = |c: &&Ceiling| c.place == measurement.place && c.dtype == measurement.task.dtype();
        self.ceilings.iter().find(fits)
    }

    /// Writes the file in one step: readers see the old one or the new one, whole.
    pub fn save(&self, path: &Path) -> Result<(), RecordError> {
        let failed = |source| RecordError::Io { action: "write", path: path.to_owned(), source };
        let text = serde_json::to_vec(self).map_err(|e| failed(e.into()))?;
        save::replace(path, &[&text, b"\n"]).map_err(failed)
    }

    /// Reads a file, or says what is wrong with it.
    pub fn load(path: &Path) -> Result<Self, RecordError> {
        let bytes = read(path)?;
        Self::parse(&bytes).map_err(|fault| RecordError::Content { path: path.to_owned(), fault })
    }

    /// Reads the contents of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        if bytes.len() as u64 > MOST_BYTES {
            return Err(Fault::Size);
        }
        let head: Head = serde_json::from_slice(bytes)?;
        if head.schema != SCHEMA {
            return Err(Fault::Schema);
        }
        if head.version != VERSION {
            return Err(Fault::Version { got: head.version });
        }
        let record: Self = serde_json::from_slice(bytes)?;
        record.check()?;
        Ok(record)
    }

    pub(crate) fn check(&self) -> Result<(), Fault> {
        let machine = &self.machine;
        let texts = [Some(&self.created), Some(&self.flashcore), Some(&machine.system), Some(&machine.cpu)];
        let optional =
            [self.commit.as_ref(), machine.gpu.as_ref(), machine.driver.as_ref(), machine.peers.as_ref()];
        let ceilings = self.ceilings.iter().flat_map(|c| [&c.place, &c.dtype, &c.how]);
        let texts = texts.into_iter().chain(optional).flatten().chain(&self.warnings).chain(ceilings);
        texts.map(String::as_str).try_for_each(check_text)?;
        let rates = self.ceilings.iter().flat_map(|c| [c.copy, c.matrix]);
        check_numbers(rates, f64::MAX, "a rate")?;
        check_numbers([self.protocol.seconds], LONGEST_TIME, "the length of a turn")?;
        self.measurements.iter().try_for_each(Measurement::check)
    }
}

impl Measurement {
    fn check(&self) -> Result<(), Fault> {
        Task::parse(self.task.clone()).map_err(|e| Fault::Value { what: e.to_string() })?;
        let wrong = self.finding.as_ref().and_then(|finding| finding.wrong.as_ref());
        let texts =
            [Some(&self.competitor), Some(&self.place), self.kernel.as_ref(), self.refused.as_ref(), wrong];
        texts.into_iter().flatten().map(String::as_str).try_for_each(check_text)?;
        let times = self.stretches.iter().flat_map(|stretch| stretch.seconds.iter().copied());
        check_numbers(times, LONGEST_TIME, "a time")
    }
}

/// The bytes of a file; beyond the largest that is taken, only so many that [`Record::parse`] refuses them.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, RecordError> {
    let failed = |source| RecordError::Io { action: "read", path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn check_text(text: &str) -> Result<(), Fault> {
    untrusted::check_text(text, LONGEST_TEXT).map_err(|what| Fault::Value { what })
}

fn check_numbers(numbers: impl IntoIterator<Item = f64>, most: f64, what: &str) -> Result<(), Fault> {
    match numbers.into_iter().find(|x| !(*x > 0.0 && *x <= most)) {
        Some(number) => Err(Fault::Value { what: format!("{what} is {number}") }),
        None => Ok(()),
    }
}

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}: {fault}", path.display())]
    Content {
        path: PathBuf,
        #[source]
        fault: Fault,
    },
}

/// What is wrong with the contents of a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("larger than {} MiB, the limit for a result", MOST_BYTES >> 20)]
    Size,
    #[error("not a result of `flashcore bench`")]
    Schema,
    #[error(
        "version {got} of the format; this program reads version {VERSION}: measure again or use a matching one"
    )]
    Version { got: u32 },
    #[error("damaged or not a result file ({0})")]
    Json(#[from] serde_json::Error),
    #[error("damaged: {what}")]
    Value { what: String },
}
