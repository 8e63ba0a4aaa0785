//! Comparisons inside one run: the time of one of our tasks relative to another of ours, or to a peer.
//!
//! [`crate::suites`] says what is compared and what is expected of it; `bench` prints the results of a [`Record`].

use serde::Serialize;

use crate::{
    bootstrap::{self, Interval},
    record::Record,
    task::Task,
};

/// A task that is to take hardly longer than something else.
#[derive(Clone, PartialEq, Debug)]
pub struct Comparison {
    /// What is compared, in words; comparisons of the same kind share a table.
    pub what: String,
    pub task: Task,
    /// The task that its time is compared with.
    pub other: Task,
    /// Whose time of the other task; ours where missing.
    pub peer: Option<&'static str>,
    /// Work of the task over the work of the other: times are compared for the same work.
    pub work: f64,
    /// Upper bound on the ratio.
    pub wanted: f64,
}

/// What a comparison came to.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Compared {
    pub what: String,
    pub task: String,
    pub against: String,
    pub work: f64,
    /// Median time of the task in microseconds, where it was timed.
    pub p50_us: Option<f64>,
    pub against_p50_us: Option<f64>,
    pub ratio: Option<Interval>,
    pub wanted: f64,
}

impl Compared {
    /// Whether the ratio meets the bound; `None` if a side is missing.
    pub fn met(&self) -> Option<bool> {
        self.ratio.map(|ratio| ratio.point <= self.wanted)
    }
}

impl Comparison {
    /// `task` against `other`, which does the same work.
    pub fn of_ours(what: impl Into<String>, task: Task, other: Task, wanted: f64) -> Self {
        Self { what: what.into(), task, other, peer: None, work: 1.0, wanted }
    }

    /// Whether its name, or that of its task, contains `part`.
    pub fn is_named(&self, part: &str) -> bool {
        self.what.contains(part) || self.task.to_string().contains(part)
    }

    /// What a record says about it, if ours is called `ours` there.
    pub fn read(&self, record: &Record, ours: &str) -> Compared {
        let times = |task: &Task, competitor: &str| {
            record.find(task.spec(), competitor).map(|m| m.units(&record.protocol))
        };
        let (mine, theirs) = (times(&self.task, ours), times(&self.other, self.peer.unwrap_or(ours)));
        let micro = |units: &Option<Vec<f64>>| Some(bootstrap::median(units.as_deref()?)?.point * 1e6);
        let ratio = mine.as_deref().zip(theirs.as_deref()).and_then(|(a, b)| bootstrap::ratio(a, b));
        Compared {
            what: self.what.clone(),
            task: self.task.to_string(),
            against: self.peer.map_or_else(|| self.other.to_string(), str::to_owned),
            work: self.work,
            p50_us: micro(&mine),
            against_p50_us: micro(&theirs),
            ratio: ratio.map(|ratio| self.per_work(ratio)),
            wanted: self.wanted,
        }
    }

    fn per_work(&self, Interval { low, point, high }: Interval) -> Interval {
        Interval { low: low / self.work, point: point / self.work, high: high / self.work }
    }
}

/// Every task that comparisons need, once; what is compared stands side by side, so that it is measured so.
pub fn tasks(comparisons: &[Comparison]) -> Vec<Task> {
    let mut tasks: Vec<Task> = Vec::new();
    for needed in comparisons.iter().flat_map(|one| [&one.other, &one.task]) {
        if !tasks.contains(needed) {
            tasks.push(needed.clone());
        }
    }
    tasks
}
