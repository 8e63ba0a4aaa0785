//! The figures of a series: speed and latency by length, problem by problem, the roofline, the history.

use std::collections::BTreeMap;

use super::{
    data::{Curve, Problem, Run, curves, mean_speed},
    plot::{Axis, Figure, Line, Plot, Point, Slot, peer_slot},
    words::{self, RATE, SPEED, TIME, Units},
};
use crate::{bootstrap::Interval, ceiling::Ceiling};

/// Rows of a plot of problems.
const ROWS: usize = 16;
const INTERVALS: &str = "Medians; bars are 95 % intervals where they are wider than a mark.";

/// Everybody who competes in a report, each with one colour and shape in all of its plots.
#[derive(Debug, Default)]
pub(super) struct Cast(pub(super) Vec<String>);

impl Cast {
    fn slot(&self, run: &Run, name: &str) -> Slot {
        let peer = || peer_slot(self.0.iter().position(|peer| peer == name).unwrap_or(0));
        if run.is_ours(name) { 0 } else { peer() }
    }

    fn legend(&self, run: &Run) -> Vec<(Slot, String)> {
        run.competitors().map(|name| (self.slot(run, name), run.title(name))).collect()
    }

    /// A line for each competitor, ours on top; `point` tells where a problem lies.
    fn lines<'p>(
        &self,
        run: &Run,
        problems: &[&'p Problem],
        joined: bool,
        point: impl Fn(usize, &'p Problem, &str) -> Option<Point>,
    ) -> Vec<Line> {
        let line = |name| Line {
            slot: Some(self.slot(run, name)),
            joined,
            points: problems.iter().enumerate().filter_map(|(n, p)| point(n, p, name)).collect(),
        };
        run.competitors().rev().map(line).filter(|line| !line.points.is_empty()).collect()
    }

    /// All figures of a series whose newest run is its last.
    pub(super) fn figures(&self, series: &[Run]) -> Vec<Figure> {
        let run = &series[series.len() - 1];
        let (curves, rest) = curves(&run.problems);
        let figures = [
            self.by_length(&SPEEDS, run, &curves),
            self.by_length(&TIMES, run, &curves),
            self.by_problem(run, &rest),
            self.roofline(run),
            self.history(series, run),
        ];
        figures.into_iter().flatten().filter(|figure| !figure.plots.is_empty()).collect()
    }

    fn by_length(&self, quantity: &Quantity, run: &Run, curves: &[Curve<'_>]) -> Option<Figure> {
        let all: Vec<_> = curves.iter().flat_map(|curve| curve.problems.iter().copied()).collect();
        let y = quantity.axis(run, &all)?;
        let plot = |curve: &Curve<'_>| {
            let length = |p: &&Problem| (p.length() as f64, words::extent(p.length()));
            let ticks = curve.problems.iter().map(length).collect();
            let lines = self.lines(run, &curve.problems, true, |_, p, name| {
                let (value, x) = ((quantity.of)(p, name)?, p.length() as f64);
                let spread = Some([(x, value.low), (x, value.high)]);
                let note = quantity.note(
                    run,
                    name,
                    &format!("{} = {}", p.axis()[1], words::extent(p.length())),
                    &value,
                );
                Some(Point { at: (x, value.point), spread, note })
            });
            Plot {
                title: curve.title.clone(),
                x: Axis::at(&curve.problems[0].axis().join(" "), ticks),
                y: y.clone(),
                lines,
            }
        };
        let first = curves.first()?.mask.as_str();
        Some(Figure {
            name: quantity.name,
            title: if curves[0].problems[0].task.attention().is_some() {
                quantity.title
            } else {
                quantity.by_tokens
            },
            caption: format!("{} {INTERVALS}", quantity.caption),
            legend: self.legend(run),
            plots: curves.iter().map(plot).filter(|plot| !plot.lines.is_empty()).collect(),
            columns: curves.iter().filter(|curve| curve.mask == first).count().clamp(1, 3),
        })
    }

    fn by_problem(&self, run: &Run, problems: &[&Problem]) -> Option<Figure> {
        let plot = |quantity: &Quantity, rows: &[&Problem]| {
            let lines = self.lines(run, rows, false, |n, p, name| {
                let (value, y) = ((quantity.of)(p, name)?, n as f64);
                let note = quantity.note(run, name, &p.task.to_string(), &value);
                Some(Point { at: (value.point, y), spread: Some([(value.low, y), (value.high, y)]), note })
            });
            let x = Quantity { logarithmic: true, ..*quantity }.axis(run, rows)?;
            let y = Axis::rows(rows.iter().map(|p| p.task.to_string()));
            Some(Plot { title: quantity.short.to_owned(), x, y, lines })
        };
        let pages = problems.chunks(ROWS);
        Some(Figure {
            name: "problems",
            title: "Problem by problem",
            caption: format!("Batch x heads x sequence x dim, on logarithmic axes. {INTERVALS}"),
            legend: self.legend(run),
            plots: pages.flat_map(|rows| [plot(&TIMES, rows), plot(&SPEEDS, rows)]).flatten().collect(),
            columns: 2,
        })
    }

    /// Achieved speed against operations per byte, under what the device can do at best as measured in the same run.
    fn roofline(&self, run: &Run) -> Option<Figure> {
        let mut groups: BTreeMap<(&str, usize, String), Vec<&Problem>> = BTreeMap::new();
        for problem in &run.problems {
            let dim = problem.task.attention().map_or(0, |spec| spec.q[3]);
            let key = (problem.task.spec().dtype(), dim, problem.features());
            groups.entry(key).or_default().push(problem);
        }
        let plots: Vec<_> = groups
            .iter()
            .filter_map(|((dtype, _, features), problems)| {
                let place = |c: &&Ceiling| c.dtype == *dtype && (c.place == "gpu") == run.on_gpu;
                let ceiling = run.record.ceilings.iter().find(place);
                self.under_roof(run, format!("{features}, {dtype}"), problems, ceiling)
            })
            .collect();
        let source = |Ceiling { dtype, copy, matrix, how, .. }: &Ceiling| {
            let (matrix, copy) = (words::scaled(*matrix, SPEED), words::scaled(*copy, RATE));
            format!("{dtype} {matrix} ({how}), {copy} copied")
        };
        let sources: Vec<String> = run.record.ceilings.iter().map(source).collect();
        let origin = match sources.is_empty() {
            true => "No ceilings: this run did not measure the roofline.".to_owned(),
            false => format!("Ceilings measured in the same run: {}.", sources.join("; ")),
        };
        Some(Figure {
            name: "roofline",
            title: "Roofline",
            caption: format!("One mark per problem; both axes are logarithmic. {origin}"),
            legend: self.legend(run),
            columns: plots.len().clamp(1, 3),
            plots,
        })
    }

    fn under_roof(
        &self,
        run: &Run,
        title: String,
        problems: &[&Problem],
        ceiling: Option<&Ceiling>,
    ) -> Option<Plot> {
        let mut lines = self.lines(run, problems, false, |_, p, name| {
            let (intensity, speed) = (p.task.flops() / p.task.bytes(), p.speed(name)?.point);
            let note = format!("{}, {}: {}", run.title(name), p.task, words::scaled(speed, SPEED));
            Some(Point { at: (intensity, speed), spread: None, note })
        });
        let points: Vec<_> = lines.iter().flat_map(|line| &line.points).map(|point| point.at).collect();
        let ridge = ceiling.map(|c| c.matrix / c.copy);
        // Room beyond the outermost points, and enough of the slope to be seen as one.
        let wide: Vec<f64> =
            points.iter().flat_map(|p| [p.0 * 0.9, p.0 * 1.1]).chain(ridge.map(|r| r / 4.0)).collect();
        let speeds = points.iter().map(|p| p.1).chain(ceiling.map(|c| c.matrix));
        let high: Vec<f64> = speeds.flat_map(|speed| [speed * 0.9, speed * 1.2]).collect();
        let (size, unit) = words::unit(high.iter().copied().reduce(f64::max)?, SPEED);
        let x = Axis::logarithmic("operations per byte", &wide, 1.0)?;
        let y = Axis::logarithmic(unit, &high, size)?;
        if let Some(Ceiling { copy, matrix, .. }) = ceiling {
            let (least, most) = x.domain;
            let ridge = (matrix / copy).clamp(least, most);
            // The slope begins where it enters the plot.
            let start = least.max(y.domain.0 / copy).min(ridge);
            let corner =
                |x: f64| Point { at: (x, (x * copy).min(*matrix)), spread: None, note: String::new() };
            let roof = Line { slot: None, joined: true, points: [start, ridge, most].map(corner).to_vec() };
            lines.insert(0, roof);
        }
        (!points.is_empty()).then_some(Plot { title, x, y, lines })
    }

    /// How runs of the same problems came out over time: against each peer, and by themselves.
    fn history(&self, series: &[Run], newest: &Run) -> Option<Figure> {
        // A run's commit, or month, day and time where none was recorded.
        let label = |run: &Run| -> String {
            let time = || run.record.created.replace('T', " ").chars().skip(5).take(11).collect();
            run.record.commit.as_ref().map_or_else(time, |id| id.chars().take(7).collect())
        };
        let x = Axis::names("commit", series.iter().map(label));
        let line = |slot: Slot, of: &dyn Fn(&Run) -> Option<f64>, note: &dyn Fn(f64) -> String| {
            let point = |(n, run): (usize, &Run)| {
                let value = of(run)?;
                let note = format!("{}: {}", label(run), note(value));
                Some(Point { at: (n as f64, value), spread: None, note })
            };
            let points = series.iter().enumerate().filter_map(point).collect();
            Line { slot: Some(slot), joined: true, points }
        };
        let lead = |peer: &String| {
            let note = |mean| format!("{} as fast as {}", words::times(mean), newest.title(peer));
            line(self.slot(newest, peer), &|run| Some(run.lead(peer)?.mean), &note)
        };
        let leads: Vec<Line> = newest.peers.iter().map(lead).filter(|line| !line.points.is_empty()).collect();
        let speed = line(0, &|run| mean_speed(series, run), &|mean| words::scaled(mean, SPEED));
        let values = |lines: &[Line]| -> Vec<f64> {
            lines.iter().flat_map(|line| &line.points).map(|point| point.at.1).collect()
        };
        let most = |values: &[f64]| values.iter().copied().reduce(f64::max);
        let against = most(&values(&leads)).map(|most| {
            let least = values(&leads).into_iter().fold(1.0, f64::min);
            let y = Axis::linear("times as fast", least, most.max(1.0), 1.0);
            Plot { title: "FlashCore against peers".to_owned(), x: x.clone(), y, lines: leads }
        });
        let alone = most(&values(std::slice::from_ref(&speed))).map(|most| {
            let (size, unit) = words::unit(most, SPEED);
            let y = Axis::linear(unit, 0.0, most, size);
            Plot { title: "FlashCore's speed".to_owned(), x: x.clone(), y, lines: vec![speed] }
        });
        let plots: Vec<_> = against.into_iter().chain(alone).collect();
        (series.len() > 1).then(|| Figure {
            name: "history",
            title: "History",
            caption: "Geometric means over all problems of a run, oldest run first.".to_owned(),
            legend: self.legend(newest),
            columns: plots.len().max(1),
            plots,
        })
    }
}

/// What plots show of each problem.
#[derive(Clone, Copy)]
struct Quantity {
    name: &'static str,
    title: &'static str,
    by_tokens: &'static str,
    short: &'static str,
    caption: &'static str,
    units: &'static Units,
    logarithmic: bool,
    of: fn(&Problem, &str) -> Option<Interval>,
}

const SPEEDS: Quantity = Quantity {
    name: "tflops",
    title: "Speed against sequence length",
    by_tokens: "Speed against tokens",
    short: "Speed (higher is better)",
    caption: "Higher is better.",
    units: SPEED,
    logarithmic: false,
    of: Problem::speed,
};

const TIMES: Quantity = Quantity {
    name: "latency",
    title: "Latency against sequence length",
    by_tokens: "Latency against tokens",
    short: "Time per call (lower is better)",
    caption: "Lower is better; both axes are logarithmic.",
    units: TIME,
    logarithmic: true,
    of: Problem::time,
};

impl Quantity {
    /// An axis for everybody's values on these problems; `None` where there are none.
    fn axis(&self, run: &Run, problems: &[&Problem]) -> Option<Axis> {
        let values = problems.iter().flat_map(|p| run.competitors().filter_map(|name| (self.of)(p, name)));
        let values: Vec<f64> = values.flat_map(|value| [value.low, value.point, value.high]).collect();
        let most = values.iter().copied().reduce(f64::max)?;
        let (size, unit) = words::unit(most, self.units);
        match self.logarithmic {
            true => Axis::logarithmic(unit, &values, size),
            false => Some(Axis::linear(unit, 0.0, most, size)),
        }
    }

    /// A value with its interval in words.
    fn note(&self, run: &Run, name: &str, place: &str, value: &Interval) -> String {
        let [point, low, high] = [value.point, value.low, value.high].map(|v| words::scaled(v, self.units));
        format!("{}, {place}: {point} (95 %: {low} to {high})", run.title(name))
    }
}
