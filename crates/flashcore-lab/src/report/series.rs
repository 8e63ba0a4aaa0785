//! Runs of the same problems on the same device, in order of time: the newest is shown in full, all make the history.

use super::run::{Problem, Run, Standing};
use crate::protocol::Mode;

/// Runs that can be compared with each other, oldest first; at least one.
#[derive(Debug)]
pub struct Series {
    runs: Vec<Run>,
}

/// Ours against one peer over all problems of a run.
#[derive(Clone, PartialEq, serde::Serialize, Debug)]
pub struct Lead {
    /// The peer.
    pub peer: String,
    /// How many times as fast ours is: the geometric mean.
    pub mean: f64,
    /// On the problem where it is least so.
    pub least: f64,
    /// On the problem where it is most so.
    pub most: f64,
    /// Problems compared.
    pub problems: usize,
    /// Problems on which ours is faster beyond doubt.
    pub faster: usize,
    /// Problems on which it is slower beyond doubt.
    pub slower: usize,
}

/// What changed from one run to the next.
#[derive(Clone, PartialEq, Debug)]
pub struct Change {
    /// Our time over that of the run before: the geometric mean.
    pub mean: f64,
    /// On the problem where that is largest.
    pub worst: f64,
    /// That problem.
    pub problem: String,
}

/// What makes runs comparable.
#[derive(PartialEq, Eq)]
struct Kind {
    device: String,
    way: (Mode, bool, bool),
    target: Option<String>,
    tasks: Vec<String>,
}

impl Kind {
    fn of(run: &Run) -> Self {
        let mut tasks: Vec<_> = run.problems.iter().map(|p| p.task.to_string()).collect();
        tasks.sort_unstable();
        let p = run.record.protocol;
        Self { device: run.device().to_owned(), way: (p.mode, p.cold, p.replay), target: run.target(), tasks }
    }
}

/// Sorts runs into series, in order of their first appearance.
pub fn sort(runs: Vec<Run>) -> Vec<Series> {
    let mut sorted: Vec<(Kind, Series)> = Vec::new();
    for run in runs {
        let kind = Kind::of(&run);
        match sorted.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, series)) => series.runs.push(run),
            None => sorted.push((kind, Series { runs: vec![run] })),
        }
    }
    let in_time = |(_, mut series): (Kind, Series)| {
        series.runs.sort_by(|a, b| (&a.record.created, &a.name).cmp(&(&b.record.created, &b.name)));
        series
    };
    sorted.into_iter().map(in_time).collect()
}

impl Series {
    /// All runs, oldest first.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The newest run.
    pub fn newest(&self) -> &Run {
        &self.runs[self.runs.len() - 1]
    }

    /// What it is about, in few words.
    pub fn title(&self) -> String {
        let run = self.newest();
        let target = run.target().map_or(String::new(), |target| format!(", {target}"));
        format!("{}, {}{target}", run.suite(), run.dtypes())
    }

    /// The geometric mean of our operations per second over problems that every run timed.
    pub fn mean_speed(&self, run: &Run) -> Option<f64> {
        let timed = |run: &Run, problem: &Problem| ours(run, problem).is_some();
        let same = |problem: &&Problem| {
            self.runs.iter().all(|run| find(run, problem).is_some_and(|found| timed(run, found)))
        };
        geometric_mean(run.problems.iter().filter(same).filter_map(|p| ours(run, p)))
    }

    /// What changed from the run before to the `n`th.
    pub fn change(&self, n: usize) -> Option<Change> {
        let (before, now) = (self.runs.get(n.checked_sub(1)?)?, &self.runs[n]);
        let ratio = |p: &Problem| Some((ours(before, find(before, p)?)? / ours(now, p)?, p.task.to_string()));
        let ratios: Vec<_> = now.problems.iter().filter_map(ratio).collect();
        let (worst, problem) = ratios.iter().max_by(|a, b| a.0.total_cmp(&b.0))?.clone();
        Some(Change { mean: geometric_mean(ratios.iter().map(|ratio| ratio.0))?, worst, problem })
    }
}

fn find<'r>(run: &'r Run, problem: &Problem) -> Option<&'r Problem> {
    run.problems.iter().find(|p| p.task == problem.task)
}

fn ours(run: &Run, problem: &Problem) -> Option<f64> {
    Some(problem.speed(run.ours.as_deref()?)?.point)
}

impl Run {
    /// Ours against each peer.
    pub fn leads(&self) -> Vec<Lead> {
        self.peers.iter().filter_map(|peer| self.lead(peer)).collect()
    }

    /// Ours against a peer; `None` where nothing can be compared.
    pub fn lead(&self, peer: &str) -> Option<Lead> {
        let leads: Vec<_> = self.problems.iter().filter_map(|problem| problem.lead(peer)).collect();
        let count = |standing| leads.iter().filter(|lead| Standing::of(lead) == standing).count();
        let points = || leads.iter().map(|lead| lead.point);
        Some(Lead {
            peer: peer.to_owned(),
            mean: geometric_mean(points())?,
            least: points().reduce(f64::min)?,
            most: points().reduce(f64::max)?,
            problems: leads.len(),
            faster: count(Standing::Faster),
            slower: count(Standing::Slower),
        })
    }
}

fn geometric_mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for number in numbers {
        sum += number.ln();
        count += 1;
    }
    (count > 0).then(|| (sum / f64::from(count)).exp())
}
