//! What a report shows, as data: runs in figures, comparable runs, problems that form a curve.

use std::collections::{BTreeMap, BTreeSet};

use flashcore_core::Mask;
use serde::Serialize;

use super::{ReportError, words};
use crate::{
    bootstrap::Interval,
    competitor::{Place, roster::Ours},
    figures::Figures,
    record::Record,
    standing::Standing,
    suites::Suite,
    task::{AttentionSpec, ExpertSpec, Task, TaskSpec},
};

/// Most measurements that a page shows; no suite has a tenth of them.
const MOST_MEASUREMENTS: usize = 4000;
/// Letters of a competitor's name in plots and tables.
const LONGEST_NAME: usize = 24;
/// What stands for the fastest peer of each problem where there are several.
pub const BEST_PEER: &str = "best peer";
/// Lengths that make a curve.
const FEWEST: usize = 3;

/// A run: what was measured where, and what came out.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// The file's name without its ending.
    pub name: String,
    pub record: Record,
    pub on_gpu: bool,
    pub ours: Option<String>,
    pub peers: Vec<String>,
    pub problems: Vec<Problem>,
    /// All competitors against the best peer.
    pub standings: Vec<Standing>,
}

/// One problem and everybody's figures; ratios are to ours.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    pub task: Task,
    pub entries: Vec<Figures>,
}

/// Ours against one peer over all problems of a run.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Lead {
    pub peer: String,
    /// How many times as fast ours is: the geometric mean.
    pub mean: f64,
    /// On the problem where it is least so.
    pub least: f64,
    /// On the problem where it is most so.
    pub most: f64,
    pub problems: usize,
    /// Problems on which ours is faster: the whole interval lies above 1.
    pub faster: usize,
    /// Problems on which ours is slower: the whole interval lies below 1.
    pub slower: usize,
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
        let mut peers: Vec<String> = Vec::new();
        for measurement in &record.measurements {
            if !peers.contains(&measurement.competitor) {
                peers.push(measurement.competitor.clone());
            }
        }
        let at = peers.iter().position(|name| Ours::NAMES.contains(&name.as_str()));
        let ours = at.map(|at| peers.remove(at));
        let problems = problems(&record, ours.as_deref().unwrap_or_default());
        let standings = record.standings();
        let on_gpu = record.measurements.iter().any(|m| m.place == Place::Gpu.name());
        record.measurements = Vec::new();
        Ok(Self { name, record, on_gpu, ours, peers, problems, standings })
    }

    /// Ours first, then the others.
    pub fn competitors(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.ours.iter().chain(&self.peers).map(String::as_str)
    }

    /// Whether the competitor is ours.
    pub fn is_ours(&self, name: &str) -> bool {
        self.ours.as_deref() == Some(name)
    }

    /// What a competitor is called in plots and tables.
    pub fn title(&self, name: &str) -> String {
        let known = match name {
            name if self.is_ours(name) => "FlashCore",
            BEST_PEER => "the best peer",
            "torch-cudnn" => "cuDNN",
            "fa3" => "FlashAttention-3",
            "torch-flash" => "FlashAttention-2",
            "torch-efficient" => "memory-efficient",
            "torch-flex" => "FlexAttention",
            "fa3-deterministic" => "FA-3 deterministic",
            "flashinfer" => "FlashInfer",
            "torch-grouped" => "torch grouped_mm",
            "torch-math" => "unfused",
            "torch-cpu" => "PyTorch CPU",
            "torch-cpu-math" => "PyTorch CPU unfused",
            other => other,
        };
        words::short(known, LONGEST_NAME)
    }

    /// What computed.
    pub fn device(&self) -> &str {
        let machine = &self.record.machine;
        machine.gpu.as_ref().filter(|_| self.on_gpu).unwrap_or(&machine.cpu)
    }

    /// The architecture that our GPU kernels were built for, as their names tell.
    fn target(&self) -> Option<String> {
        let kernel = self.problems.iter().find_map(|p| p.entry(self.ours.as_deref()?)?.kernel.as_deref())?;
        let version = kernel.strip_prefix("fc_")?.split_once("_sm_")?.1.split('_').next()?;
        Some(format!("sm_{version}"))
    }

    /// What the run is about: suite, element types, architecture.
    pub fn subject(&self) -> String {
        let types: BTreeSet<_> = self.problems.iter().map(|p| p.task.spec().dtype()).collect();
        let types = types.into_iter().collect::<Vec<_>>().join(", ");
        let target = self.target().map_or(String::new(), |target| format!(", {target}"));
        format!("{}, {types}{target}", self.suite())
    }

    fn suite(&self) -> String {
        let Some(first) = self.problems.first() else { return "nothing".to_owned() };
        let tasks = |suite: &Suite| suite.tasks(first.task.dtype()).unwrap_or_default();
        let holds = |suite: &&Suite| {
            let tasks = tasks(suite);
            self.problems.iter().all(|p| tasks.contains(&p.task))
        };
        match Suite::ALL.iter().filter(holds).max_by_key(|s| tasks(s).len() == self.problems.len()) {
            Some(suite) if tasks(suite).len() == self.problems.len() => suite.name.to_owned(),
            Some(suite) => format!("part of {}", suite.name),
            None => words::count(self.problems.len(), "problem"),
        }
    }

    /// Ours against each peer that can be compared; where there are several, against the best of them last.
    pub fn leads(&self) -> Vec<Lead> {
        let mut leads: Vec<_> = self.peers.iter().filter_map(|peer| self.lead(peer)).collect();
        leads.extend((leads.len() > 1).then(|| self.lead(BEST_PEER)).flatten());
        leads
    }

    /// Ours against a peer; `None` where nothing can be compared.
    pub fn lead(&self, peer: &str) -> Option<Lead> {
        let leads: Vec<_> = self.problems.iter().filter_map(|problem| problem.lead(peer)).collect();
        let points = || leads.iter().map(|lead| lead.point);
        Some(Lead {
            peer: peer.to_owned(),
            mean: geometric_mean(points())?,
            least: points().reduce(f64::min)?,
            most: points().reduce(f64::max)?,
            problems: leads.len(),
            faster: leads.iter().filter(|lead| lead.low > 1.0).count(),
            slower: leads.iter().filter(|lead| lead.high < 1.0).count(),
        })
    }

    /// Our operations per second on the same task as `problem`.
    fn our_speed(&self, problem: &Problem) -> Option<f64> {
        let same = self.problems.iter().find(|p| p.task == problem.task)?;
        Some(same.speed(self.ours.as_deref()?)?.point)
    }
}

fn problems(record: &Record, ours: &str) -> Vec<Problem> {
    let mut problems: Vec<Problem> = Vec::new();
    for (measurement, figures) in record.measurements.iter().zip(record.figures(Some(ours))) {
        match problems.iter_mut().find(|p| *p.task.spec() == measurement.task) {
            Some(problem) => problem.entries.push(figures),
            None => problems.extend(
                Task::parse(measurement.task.clone()).map(|task| Problem { task, entries: vec![figures] }),
            ),
        }
    }
    problems
}

impl Problem {
    /// The figures of a competitor.
    pub fn entry(&self, name: &str) -> Option<&Figures> {
        self.entries.iter().find(|entry| entry.competitor == name)
    }

    /// The time of a competitor, in seconds.
    pub fn time(&self, name: &str) -> Option<Interval> {
        let speed = self.entry(name)?.speed.as_ref()?;
        let [low, point, high] = [speed.low_us, speed.p50_us, speed.high_us].map(|us| us / 1e6);
        Some(Interval { low, point, high })
    }

    /// Operations per second of a competitor, where that is a figure.
    pub fn speed(&self, name: &str) -> Option<Interval> {
        let (time, flops) = (self.time(name)?, self.task.flops());
        let speed = Interval { low: flops / time.high, point: flops / time.point, high: flops / time.low };
        (flops > 0.0 && speed.high.is_finite()).then_some(speed)
    }

    /// How many times as fast as `peer`, or as the fastest for [`BEST_PEER`], ours is.
    pub fn lead(&self, peer: &str) -> Option<Interval> {
        let ratio = |entry: &Figures| entry.speed.as_ref()?.ratio;
        if peer != BEST_PEER {
            return ratio(self.entry(peer)?);
        }
        self.entries.iter().filter_map(ratio).min_by(|a, b| a.point.total_cmp(&b.point))
    }

    /// The number of keys or tokens, which the problems of a curve differ in.
    pub fn length(&self) -> usize {
        match self.task.spec() {
            TaskSpec::Attention(spec) => spec.k[2],
            TaskSpec::Experts(spec) => spec.tokens,
        }
    }

    /// What that number is called, and its letter.
    pub fn axis(&self) -> [&'static str; 2] {
        if self.task.attention().is_some() { ["sequence length", "S"] } else { ["tokens", "T"] }
    }

    /// Features of a head, or extents of a layer: what sets problems apart before everything else.
    pub fn features(&self) -> String {
        match self.task.spec() {
            TaskSpec::Attention(AttentionSpec { q: [.., dim], dim_v, .. }) if dim_v != dim => {
                format!("D = {dim} and {dim_v}")
            }
            TaskSpec::Attention(AttentionSpec { q: [.., dim], .. }) => format!("D = {dim}"),
            TaskSpec::Experts(ExpertSpec { hidden, intermediate, experts, top_k, .. }) => {
                format!("{hidden}/{intermediate}, {top_k} of {experts} experts")
            }
        }
    }
}

/// Runs of the same problems on the same device, measured the same way; oldest first, at least one.
pub type Series = Vec<Run>;

/// Sorts runs into series, in order of their first appearance.
pub fn series(runs: Vec<Run>) -> Vec<Series> {
    let kind = |run: &Run| {
        let tasks: BTreeSet<_> = run.problems.iter().map(|p| p.task.to_string()).collect();
        let p = run.record.protocol;
        (run.device().to_owned(), (p.mode, p.cold, p.replay), run.target(), tasks)
    };
    let mut sorted: Vec<(_, Series)> = Vec::new();
    for run in runs {
        let kind = kind(&run);
        match sorted.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, series)) => series.push(run),
            None => sorted.push((kind, vec![run])),
        }
    }
    let in_time = |mut series: Series| {
        series.sort_by(|a, b| (&a.record.created, &a.name).cmp(&(&b.record.created, &b.name)));
        series
    };
    sorted.into_iter().map(|(_, series)| in_time(series)).collect()
}

/// The geometric mean of our operations per second in a run, over problems that every run of the series timed.
pub fn mean_speed(series: &[Run], run: &Run) -> Option<f64> {
    let same = |p: &&Problem| series.iter().all(|run| run.our_speed(p).is_some());
    geometric_mean(run.problems.iter().filter(same).filter_map(|p| run.our_speed(p)))
}

/// Our time over that of the run before: the geometric mean, the largest ratio, and on which problem that is.
pub fn change(before: &Run, now: &Run) -> Option<(f64, f64, String)> {
    let ratio = |p: &Problem| Some((before.our_speed(p)? / now.our_speed(p)?, p.task.to_string()));
    let ratios: Vec<_> = now.problems.iter().filter_map(ratio).collect();
    let (worst, problem) = ratios.iter().max_by(|a, b| a.0.total_cmp(&b.0))?.clone();
    Some((geometric_mean(ratios.iter().map(|ratio| ratio.0))?, worst, problem))
}

fn geometric_mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let logarithms: Vec<f64> = numbers.map(f64::ln).collect();
    (!logarithms.is_empty()).then(|| (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp())
}

/// Problems that differ in the sequence length alone, in its order.
#[derive(Debug)]
pub struct Curve<'r> {
    /// What the problems share, in words.
    pub title: String,
    /// The mask, which a row of plots shares.
    pub mask: String,
    pub problems: Vec<&'r Problem>,
}

impl Curve<'_> {
    /// Every length of some curves, in order.
    pub fn lengths(curves: &[Self]) -> Vec<usize> {
        let lengths: BTreeSet<_> =
            curves.iter().flat_map(|c| c.problems.iter().map(|p| p.length())).collect();
        lengths.into_iter().collect()
    }

    /// Its problem of that length.
    pub fn at(&self, length: usize) -> Option<&Problem> {
        self.problems.iter().find(|p| p.length() == length).copied()
    }
}

/// Sorts problems into curves, and those that are on none, in their order.
pub fn curves(problems: &[Problem]) -> (Vec<Curve<'_>>, Vec<&Problem>) {
    let mut groups: BTreeMap<_, Vec<&Problem>> = BTreeMap::new();
    for problem in problems {
        groups.entry(shared(problem)).or_default().push(problem);
    }
    let mut curves = Vec::new();
    for ((_, _, mask, _, _, title), mut problems) in groups {
        problems.sort_by_key(|problem| problem.length());
        let rises = problems.windows(2).all(|pair| pair[0].length() < pair[1].length());
        if rises && problems.len() >= FEWEST && problems[0].length() > 0 {
            curves.push(Curve { title, mask, problems });
        }
    }
    let on_none = |p: &&Problem| !curves.iter().any(|c| c.problems.iter().any(|on| std::ptr::eq(*on, *p)));
    let rest = problems.iter().filter(on_none).collect();
    (curves, rest)
}

/// What the problems of a curve share, in the order of the plots: full before causal before windows.
fn shared(problem: &Problem) -> (String, u8, String, usize, usize, String) {
    let spec = problem.task.spec();
    let TaskSpec::Attention(task) = spec else {
        return (spec.dtype().to_owned(), 0, String::new(), 0, 0, problem.features());
    };
    let mask = task.mask();
    let rank = if mask == Mask::NONE { 0 } else { 1 + u8::from(mask != Mask::CAUSAL) };
    let (dim, heads, queries) = (task.q[3], task.q[1], task.q[2]);
    let parts = [
        Some(problem.features()),
        Some(mask.to_string()),
        (heads != task.k[1]).then(|| format!("{heads} heads on {}", task.k[1])),
        (queries != task.k[2]).then(|| words::count(queries, "row")),
        task.softcap.map(|cap| format!("cap {cap}")),
        task.sinks.then(|| "sinks".to_owned()),
        task.page.map(|rows| format!("pages of {rows}")),
        task.traffic.map(|traffic| format!("{} of {}", task.q[0], traffic.name())),
        task.invariant.then(|| "batch-invariant".to_owned()),
        task.backward.then(|| "backward".to_owned()),
        (!task.kind.is_normal()).then(|| task.kind.name().to_owned()),
    ];
    let title = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    (task.dtype.clone(), rank, mask.to_string(), dim, heads, title)
}

#[cfg(test)]
mod tests {
    use flashcore_core::DType;

    use super::*;

    fn problems(tasks: Vec<Task>) -> Vec<Problem> {
        tasks.into_iter().map(|task| Problem { task, entries: Vec::new() }).collect()
    }

    #[test]
    fn the_forward_suite_is_six_curves() {
        let problems = problems(Suite::FORWARD.tasks(DType::BF16).unwrap());
        let (curves, rest) = curves(&problems);
        let titles: Vec<_> = curves.iter().map(|curve| curve.title.as_str()).collect();
        let wanted = ["D = 64, full", "D = 128, full", "D = 256, full", "D = 64, causal", "D = 128, causal"];
        assert_eq!((&titles[..5], rest.len()), (&wanted[..], 0));
        let lengths: Vec<_> = curves[5].problems.iter().map(|p| p.length()).collect();
        assert_eq!(lengths, [512, 1024, 2048, 4096, 8192, 16_384]);
    }

    #[test]
    fn mixed_problems_are_rows_in_their_order() {
        for suite in [Suite::SMALL, Suite::CPU] {
            let problems = problems(suite.tasks(DType::F16).unwrap());
            let (curves, rest) = curves(&problems);
            assert!(curves.is_empty() && rest.iter().zip(&problems).all(|(row, p)| std::ptr::eq(*row, p)));
        }
        let task = |seq| Task::square(DType::F16, [1, 1, seq, 64], Mask::NONE).unwrap();
        assert_eq!(curves(&problems(vec![task(64); 4])).1.len(), 4, "one length is no curve");
        assert_eq!(curves(&problems([0, 1, 2].map(task).to_vec())).1.len(), 3, "0 has no place on the axis");
    }
}
