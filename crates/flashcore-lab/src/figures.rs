//! The results of a record: a row per task and competitor, and what makes the figures doubtful.

use rayon::prelude::*;
use serde::Serialize;

use crate::{
    bootstrap::{self, Interval},
    record::{Measurement, Record, Stretch},
    stats::median,
    task::{Task, TaskSpec},
};

/// How much the first competitor may differ from itself before the figures are doubted.
const DRIFT: f64 = 0.02;
/// Most percent of the roof, beyond which either the roof or the figures are doubted.
const HIGHEST: f64 = 105.0;
/// How much a clock may move likewise.
const CLOCK_DRIFT: f64 = 0.03;

/// One competitor on one task, in figures.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Figures {
    pub task: String,
    #[serde(rename = "arm")]
    pub competitor: String,
    pub kernel: Option<String>,
    pub max_error: Option<f64>,
    pub relative_rms: Option<f64>,
    pub tolerance: Option<f64>,
    pub excluded: Option<String>,
    /// Speed, where it was timed.
    pub speed: Option<Speed>,
}

/// How fast.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Speed {
    /// Half of the samples took this long or less, in microseconds.
    pub p50_us: f64,
    pub p90_us: f64,
    pub min_us: f64,
    pub max_us: f64,
    /// The 95 % confidence interval of the median.
    pub low_us: f64,
    pub high_us: f64,
    pub samples: usize,
    /// 10^12 operations of visible matrix products per second.
    pub tflops: f64,
    /// 10^9 bytes of inputs and output per second.
    pub gbps: f64,
    /// Percent of what the device can do at best, as measured in the same run.
    pub roofline_percent: Option<f64>,
    pub ratio: Option<Interval>,
}

impl Record {
    /// A row per measurement, in order; ratios are to the competitor of that name, or to the first that was timed.
    pub fn figures(&self, against: Option<&str>) -> Vec<Figures> {
        self.measurements.par_iter().map(|measurement| self.row(measurement, against)).collect()
    }

    fn row(&self, measurement: &Measurement, against: Option<&str>) -> Figures {
        let finding = measurement.finding.as_ref();
        Figures {
            task: measurement.task.to_string(),
            competitor: measurement.competitor.clone(),
            kernel: measurement.kernel.clone(),
            max_error: finding.map(|f| f.max_error),
            relative_rms: finding.and_then(|f| f.relative_rms),
            tolerance: finding.map(|f| f.tolerance),
            excluded: measurement.refused.clone().or_else(|| finding.and_then(|f| f.wrong.clone())),
            speed: self.speed(measurement, against),
        }
    }

    fn speed(&self, measurement: &Measurement, against: Option<&str>) -> Option<Speed> {
        let summary = measurement.summary(&self.protocol)?;
        let task = Task::parse(measurement.task.clone()).ok()?;
        let least = self.ceiling(measurement).map(|ceiling| ceiling.least_seconds(&task));
        let micro = |seconds: f64| seconds * 1e6;
        Some(Speed {
            p50_us: micro(summary.p50),
            p90_us: micro(summary.p90),
            min_us: micro(summary.min),
            max_us: micro(summary.max),
            low_us: micro(summary.interval.low),
            high_us: micro(summary.interval.high),
            samples: summary.samples,
            tflops: task.flops() / summary.p50 / 1e12,
            gbps: task.bytes() / summary.p50 / 1e9,
            roofline_percent: least.map(|least| 100.0 * least / summary.p50),
            ratio: self.ratio(measurement, against),
        })
    }

    fn ratio(&self, measurement: &Measurement, against: Option<&str>) -> Option<Interval> {
        let named = |m: &Measurement| against.is_none_or(|name| m.competitor == name);
        let same = |m: &&Measurement| m.task == measurement.task && !m.stretches.is_empty() && named(m);
        let other =
            self.measurements.iter().find(same).filter(|other| other.competitor != measurement.competitor)?;
        bootstrap::ratio(&measurement.units(&self.protocol), &other.units(&self.protocol))
    }

    /// What makes figures doubtful: problems without any work, a first competitor that was not the same when it came
    /// again, more than the device can do.
    pub fn doubts(&self) -> Vec<String> {
        let mut tasks: Vec<_> =
            self.measurements.iter().filter(|m| !m.stretches.is_empty()).map(|m| &m.task).collect();
        tasks.dedup();
        let drifts = self.measurements.iter().flat_map(|measurement| self.drift(measurement));
        let figures = self.figures(None);
        let roofs = figures.iter().filter_map(beyond_roof);
        tasks.into_iter().filter_map(without_work).chain(drifts).chain(roofs).collect()
    }

    fn drift(&self, measurement: &Measurement) -> Vec<String> {
        let first = measurement.stretches.iter().find(|stretch| !stretch.again);
        let again = measurement.stretches.iter().find(|stretch| stretch.again);
        let (Some(first), Some(again)) = (first, again) else { return Vec::new() };
        let time = |stretch: &Stretch| Some(1e6 * median(self.protocol.kept(&stretch.seconds)));
        let clock = |stretch: &Stretch| stretch.noise.map(|noise| noise.clock_mean);
        let pairs = [
            (time(first), time(again), DRIFT, "took", "us"),
            (clock(first), clock(again), CLOCK_DRIFT, "ran at", "MHz"),
        ];
        let (competitor, task) = (&measurement.competitor, &measurement.task);
        let say = |(first, again, most, verb, unit): (Option<f64>, Option<f64>, f64, &str, &str)| {
            let (first, again) = (first?, again?);
            ((again / first - 1.0).abs() > most).then(|| {
                format!("{competitor} {verb} {first:.1} {unit} first and {again:.1} {unit} last on {task}: the machine drifts")
            })
        };
        pairs.into_iter().filter_map(say).collect()
    }
}

fn without_work(task: &TaskSpec) -> Option<String> {
    let empty = Task::parse(task.clone()).ok()?.flops() == 0.0;
    empty.then(|| format!("{task} has nothing to compute: times and ratios are those of calls alone"))
}

fn beyond_roof(figures: &Figures) -> Option<String> {
    let percent = figures.speed.as_ref()?.roofline_percent?;
    let Figures { competitor, task, .. } = figures;
    let why = "its tensors fit in a cache, or the roofline was measured while the machine was busy";
    (percent > HIGHEST).then(|| format!("{competitor} reaches {percent:.0} % of the roof on {task}: {why}"))
}
