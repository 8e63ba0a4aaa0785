//! One record as a report sees it: problems, and how everybody did on each. Raw times are summed up here and dropped.

use std::collections::BTreeSet;

use flashcore_core::DType;
use rayon::prelude::*;

use super::{ReportError, wording};
use crate::{
    arm::{Place, roster::Ours},
    bootstrap::{self, Interval},
    record::{Measurement, Record},
    referee::Finding,
    suites::Suite,
    task::{Task, TaskSpec},
};

/// Most measurements that a page shows; no suite has a tenth of them.
const MOST_MEASUREMENTS: usize = 4000;

/// Letters of a competitor's name in plots and tables.
const LONGEST_NAME: usize = 24;

/// A run: what was measured where, and what came out.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// The file's name without its ending.
    pub name: String,
    /// Where, when and how it was measured; its raw times are gone.
    pub record: Record,
    /// Whether a GPU computed.
    pub on_gpu: bool,
    /// Our competitor's name.
    pub ours: Option<String>,
    /// The others, in order of appearance.
    pub peers: Vec<String>,
    /// What was computed.
    pub problems: Vec<Problem>,
}

/// One problem and everybody's figures.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    /// The problem.
    pub task: Task,
    /// Everybody who was asked.
    pub entries: Vec<Entry>,
}

/// One competitor on one problem.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    /// The competitor.
    pub arm: String,
    /// The kernel that ran.
    pub kernel: Option<String>,
    /// Its error.
    pub finding: Option<Finding>,
    /// Why it was not timed.
    pub excluded: Option<String>,
    /// Its time per call in seconds: the median, and where that lies.
    pub time: Option<Interval>,
    /// How much of the device's best it reached.
    pub roofline: Option<f64>,
    /// How many times as fast ours is.
    pub lead: Option<Interval>,
}

/// What a lead says, noise accounted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// Ours is faster: the whole interval says so.
    Faster,
    /// The interval holds 1.
    Level,
    /// Ours is slower: a miss.
    Slower,
}

impl Standing {
    /// What an interval of the lead comes to.
    pub fn of(lead: &Interval) -> Self {
        match lead {
            lead if lead.low > 1.0 => Self::Faster,
            lead if lead.high < 1.0 => Self::Slower,
            _ => Self::Level,
        }
    }
}

impl Run {
    /// Sums a record up; `name` says where it came from.
    pub fn new(name: String, mut record: Record) -> Result<Self, ReportError> {
        let count = record.measurements.len();
        if count == 0 {
            return Err(ReportError::Empty { name });
        }
        if count > MOST_MEASUREMENTS {
            return Err(ReportError::TooMuch { name, count, most: MOST_MEASUREMENTS });
        }
        let mut peers = distinct(record.measurements.iter().map(|m| &m.arm));
        let at = peers.iter().position(|arm| Ours::NAMES.contains(&arm.as_str()));
        let ours = at.map(|at| peers.remove(at).clone());
        let peers = peers.into_iter().cloned().collect();
        let problems = problems(&record, ours.as_deref());
        let on_gpu = record.measurements.iter().any(|m| m.place == Place::Gpu.name());
        record.measurements = Vec::new();
        Ok(Self { name, record, on_gpu, ours, peers, problems })
    }

    /// Ours first, then the others.
    pub fn arms(&self) -> impl Iterator<Item = &str> {
        self.ours.iter().chain(&self.peers).map(String::as_str)
    }

    /// Whether the competitor is ours.
    pub fn is_ours(&self, arm: &str) -> bool {
        self.ours.as_deref() == Some(arm)
    }

    /// What a competitor is called in plots and tables.
    pub fn title(&self, arm: &str) -> String {
        if self.is_ours(arm) { "FlashCore".to_owned() } else { peer_title(arm) }
    }

    /// What computed.
    pub fn device(&self) -> &str {
        let machine = &self.record.machine;
        machine.gpu.as_ref().filter(|_| self.on_gpu).unwrap_or(&machine.cpu)
    }

    /// Element types, as in `bf16` or `f16, f32`.
    pub fn dtypes(&self) -> String {
        let types: BTreeSet<_> = self.problems.iter().map(|p| p.task.spec().dtype.as_str()).collect();
        types.into_iter().collect::<Vec<_>>().join(", ")
    }

    /// The architecture that our GPU kernels were built for, as their names tell.
    pub fn target(&self) -> Option<String> {
        let kernel = self.problems.iter().find_map(|p| p.entry(self.ours.as_deref()?)?.kernel.as_deref())?;
        let version = kernel.strip_prefix("fc_")?.split_once("_sm_")?.1.split('_').next()?;
        Some(format!("sm_{version}"))
    }

    /// The suite that the problems are, or what they are instead.
    pub fn suite(&self) -> String {
        let whole = |suite: &Suite| self.share_of(*suite) == Some(true);
        let part = |suite: &Suite| self.share_of(*suite) == Some(false);
        match (Suite::ALL.iter().find(|s| whole(s)), Suite::ALL.iter().find(|s| part(s))) {
            (Some(suite), _) => suite.name().to_owned(),
            (_, Some(suite)) => format!("part of {}", suite.name()),
            _ => wording::count(self.problems.len(), "problem"),
        }
    }

    /// `None` if a problem is not of the suite, otherwise whether the suite is complete.
    fn share_of(&self, suite: Suite) -> Option<bool> {
        let dtype: DType = self.problems.first()?.task.problem().dtype();
        let tasks = suite.tasks(dtype).ok()?;
        self.problems.iter().all(|p| tasks.contains(&p.task)).then_some(self.problems.len() == tasks.len())
    }
}

fn problems(record: &Record, ours: Option<&str>) -> Vec<Problem> {
    let specs = distinct(record.measurements.iter().map(|m| &m.task));
    specs.into_par_iter().filter_map(|spec| problem(record, spec, ours)).collect()
}

/// Everything once, in order of appearance.
fn distinct<'a, T: PartialEq>(all: impl Iterator<Item = &'a T>) -> Vec<&'a T> {
    all.fold(Vec::new(), |mut known, one| {
        if !known.contains(&one) {
            known.push(one);
        }
        known
    })
}

fn problem(record: &Record, spec: &TaskSpec, ours: Option<&str>) -> Option<Problem> {
    let task = Task::parse(spec.clone()).ok()?;
    let units = ours.and_then(|ours| Some(record.find(spec, ours)?.units(&record.protocol)));
    let measured = record.measurements.iter().filter(|m| m.task == *spec);
    let entry = |m: &Measurement| {
        let peer = units.as_ref().filter(|_| ours != Some(m.arm.as_str()));
        let lead = peer.and_then(|units| bootstrap::ratio(&m.units(&record.protocol), units));
        entry(record, m, &task, lead)
    };
    let entries = measured.map(entry).collect();
    Some(Problem { entries, task })
}

fn entry(record: &Record, measurement: &Measurement, task: &Task, lead: Option<Interval>) -> Entry {
    let summary = measurement.summary(&record.protocol);
    let time = summary.map(|s| Interval { point: s.p50, ..s.interval });
    let least = record.ceiling(measurement).map(|ceiling| ceiling.least_seconds(task));
    let wrong = measurement.finding.as_ref().and_then(|finding| finding.wrong.clone());
    Entry {
        arm: measurement.arm.clone(),
        kernel: measurement.kernel.clone(),
        finding: measurement.finding.clone(),
        excluded: measurement.refused.clone().or(wrong),
        roofline: least.zip(time).map(|(least, time)| least / time.point).filter(|share| share.is_finite()),
        time,
        lead,
    }
}

impl Problem {
    /// The figures of a competitor.
    pub fn entry(&self, arm: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.arm == arm)
    }

    /// The time of a competitor.
    pub fn time(&self, arm: &str) -> Option<Interval> {
        self.entry(arm)?.time
    }

    /// Operations per second of a competitor, where that is a figure.
    pub fn speed(&self, arm: &str) -> Option<Interval> {
        let (time, flops) = (self.time(arm)?, self.task.flops());
        let speed = Interval { low: flops / time.high, point: flops / time.point, high: flops / time.low };
        (flops > 0.0 && speed.high.is_finite()).then_some(speed)
    }

    /// Operations per byte that must move.
    pub fn intensity(&self) -> Option<f64> {
        let intensity = self.task.flops() / self.task.bytes();
        (intensity > 0.0 && intensity.is_finite()).then_some(intensity)
    }

    /// How many times as fast as `peer` ours is.
    pub fn lead(&self, peer: &str) -> Option<Interval> {
        self.entry(peer)?.lead
    }
}

/// What a peer is called in plots and tables.
fn peer_title(arm: &str) -> String {
    let known = match arm {
        "torch-cudnn" => "cuDNN",
        "torch-flash" => "FlashAttention-2",
        "torch-efficient" => "memory-efficient",
        "torch-flex" => "FlexAttention",
        "torch-math" => "unfused",
        "torch-cpu" => "PyTorch CPU",
        "torch-cpu-math" => "PyTorch CPU unfused",
        other => other,
    };
    wording::short(known, LONGEST_NAME)
}
