//! Speed and latency against the sequence length: a panel per head dim and mask, a curve per competitor.

use super::{
    Cast,
    figure::Figure,
    frame::{Area, Axis, Panel, frame},
    mark::{Point, curve},
    scale::Scale,
};
use crate::{
    bootstrap::Interval,
    report::{
        run::{Problem, Run},
        sweep::{Sweep, length},
        wording::{self, SPEED},
    },
};

/// What the curves show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quantity {
    /// Operations per second.
    Speed,
    /// Time per call.
    Time,
}

impl Quantity {
    /// A competitor's value on a problem.
    pub fn of(self, problem: &Problem, arm: &str) -> Option<Interval> {
        match self {
            Self::Speed => problem.speed(arm),
            Self::Time => problem.time(arm),
        }
    }

    /// A value in words.
    pub fn words(self, value: f64) -> String {
        match self {
            Self::Speed => wording::flops(value),
            Self::Time => wording::seconds(value),
        }
    }

    /// A value with its interval in words.
    pub fn note(self, name: &str, place: &str, value: &Interval) -> String {
        let [point, low, high] = [value.point, value.low, value.high].map(|v| self.words(v));
        format!("{name}, {place}: {point} (95 %: {low} to {high})")
    }
}

/// The vertical axis that all panels of a figure share.
struct Shared {
    scale: Scale,
    title: &'static str,
    /// Size of the unit of the ticks.
    size: f64,
}

impl Shared {
    fn new(quantity: Quantity, values: &[f64]) -> Option<Self> {
        let up = Area::USUAL.up();
        let most = values.iter().copied().reduce(f64::max)?;
        match quantity {
            Quantity::Speed => {
                let (size, title) = wording::unit(most, &SPEED);
                Some(Self { scale: Scale::from_zero(most / size, up), title, size })
            }
            Quantity::Time => {
                let scale = Scale::logarithmic(values.iter().copied(), up)?;
                Some(Self { scale, title: "time per call", size: 1.0 })
            }
        }
    }

    fn at(&self, value: f64) -> f64 {
        self.scale.at(value / self.size)
    }
}

/// The figure, or `None` where nothing was timed.
pub fn figure(quantity: Quantity, run: &Run, sweeps: &[Sweep<'_>], cast: &Cast) -> Option<Figure> {
    let all = sweeps.iter().flat_map(|sweep| &sweep.problems);
    let values = all.flat_map(|problem| run.arms().filter_map(|arm| quantity.of(problem, arm)));
    let ends: Vec<f64> = values.flat_map(|value| [value.low, value.point, value.high]).collect();
    let shared = Shared::new(quantity, &ends)?;
    let panels = sweeps.iter().filter_map(|sweep| panel(quantity, run, sweep, &shared, cast)).collect();
    let first = sweeps.first().map_or("", |sweep| sweep.mask.as_str());
    let (name, title, caption) = match quantity {
        Quantity::Speed => ("tflops", "Speed against sequence length", "Higher is better."),
        Quantity::Time => {
            ("latency", "Latency against sequence length", "Lower is better; both axes are logarithmic.")
        }
    };
    Some(Figure {
        name,
        title: title.to_owned(),
        caption: format!("{caption} Medians; bars are 95 % intervals where they are wider than a mark."),
        legend: cast.legend(run),
        panels,
        columns: sweeps.iter().filter(|sweep| sweep.mask == first).count().clamp(1, 3),
    })
}

/// Room that a character of a label takes.
const CHARACTER: f64 = 6.5;
/// Room between labels, however short they are.
const LEAST_SPACE: f64 = 26.0;

fn panel(quantity: Quantity, run: &Run, sweep: &Sweep<'_>, shared: &Shared, cast: &Cast) -> Option<Panel> {
    let lengths: Vec<f64> = sweep.problems.iter().map(|problem| length(problem) as f64).collect();
    let x = Scale::at_values(&lengths, Area::USUAL.across())?;
    let label = |value: f64| wording::extent(value as usize);
    let widest = lengths.iter().map(|&length| label(length).chars().count()).max().unwrap_or(0);
    let space = (widest as f64).mul_add(CHARACTER, 4.0).max(LEAST_SPACE);
    let across = Axis { scale: &x, title: "sequence length S", label: &label, space };
    let read = |value| match quantity {
        Quantity::Speed => wording::tick(value),
        Quantity::Time => wording::tick_seconds(value),
    };
    let up = Axis { scale: &shared.scale, title: shared.title, label: &read, space: 14.0 };
    let mut body = frame(Area::USUAL, &sweep.title, &across, &up);
    let mut description = format!("{} by sequence length.", shared.title);
    // Ours last, on top of the others.
    for arm in run.arms().collect::<Vec<_>>().into_iter().rev() {
        let values: Vec<_> =
            sweep.problems.iter().filter_map(|p| Some((length(p), quantity.of(p, arm)?))).collect();
        let point = |(s, value): &(usize, Interval)| Point {
            at: (x.at(*s as f64), shared.at(value.point)),
            spread: Some([value.low, value.high].map(|end| (x.at(*s as f64), shared.at(end)))),
            note: quantity.note(&run.title(arm), &format!("S = {}", wording::extent(*s)), value),
        };
        let points: Vec<_> = values.iter().map(point).collect();
        if let (Some((_, first)), Some((_, last))) = (values.first(), values.last()) {
            let [first, last] = [first, last].map(|value| quantity.words(value.point));
            description += &format!(" {}: {first} to {last}.", run.title(arm));
            body = body.with(curve(cast.slot(run, arm), &points));
        }
    }
    Some(Panel { title: sweep.title.clone(), description, height: Area::USUAL.height, body })
}
