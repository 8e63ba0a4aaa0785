//! Achieved speed against arithmetic intensity, under what the device can do at best as measured in the same run.
//!
//! A panel per head dim; all panels of an element type share their axes.

use std::collections::BTreeMap;

use super::{
    Cast,
    figure::Figure,
    frame::{Area, Axis, Panel, frame, text},
    mark::{Point, dots},
    scale::Scale,
};
use crate::{
    ceiling::Ceiling,
    report::{
        markup::{Element, path},
        run::{Problem, Run},
        wording::{self, SPEED},
    },
};

const AREA: Area = Area::USUAL;
/// Length of the slope, in the units of a panel, that has room for its name.
const NAMED: f64 = 72.0;

/// The figure, or `None` where nothing was timed.
pub fn figure(run: &Run, cast: &Cast) -> Option<Figure> {
    let mut groups: BTreeMap<(&str, usize), Vec<&Problem>> = BTreeMap::new();
    for problem in &run.problems {
        let spec = problem.task.spec();
        groups.entry((&spec.dtype, spec.q[3])).or_default().push(problem);
    }
    let mut panels = Vec::new();
    for ((dtype, dim), problems) in &groups {
        let ceiling = ceiling(run, dtype);
        let of_type = run.problems.iter().filter(|p| p.task.spec().dtype == *dtype);
        let points: Vec<_> = of_type.flat_map(|p| run.arms().filter_map(|arm| place(p, arm))).collect();
        let plane = Plane::around(&points, ceiling);
        let title = format!("D = {dim}, {dtype}");
        panels.extend(plane.map(|plane| panel(run, &title, problems, &plane, ceiling, cast)));
    }
    (!panels.is_empty()).then(|| Figure {
        name: "roofline",
        title: "Roofline".to_owned(),
        caption: format!("A mark per problem; both axes are logarithmic. {}", origin(run)),
        legend: cast.legend(run),
        columns: panels.len().min(3),
        panels,
    })
}

fn ceiling<'r>(run: &'r Run, dtype: &str) -> Option<&'r Ceiling> {
    run.record.ceilings.iter().find(|c| c.dtype == dtype && (c.place == "gpu") == run.on_gpu)
}

/// Where the ceilings come from.
fn origin(run: &Run) -> String {
    let source = |Ceiling { dtype, copy, matrix, how, .. }: &Ceiling| {
        format!("{dtype} {} ({how}), {} copied", wording::flops(*matrix), wording::rate(*copy))
    };
    let sources: Vec<String> = run.record.ceilings.iter().map(source).collect();
    if sources.is_empty() {
        return "No ceilings: this run did not measure what the device can do at best.".to_owned();
    }
    format!("Ceilings measured in the same run: {}.", sources.join("; "))
}

/// Operations per byte, and operations per second.
fn place(problem: &Problem, arm: &str) -> Option<(f64, f64)> {
    Some((problem.intensity()?, problem.speed(arm)?.point))
}

/// Both axes, and the unit of the vertical one.
struct Plane {
    x: Scale,
    y: Scale,
    size: f64,
    unit: &'static str,
}

impl Plane {
    fn around(points: &[(f64, f64)], ceiling: Option<&Ceiling>) -> Option<Self> {
        let ridge = ceiling.map(|c| c.matrix / c.copy);
        let speeds: Vec<f64> = points.iter().map(|p| p.1).chain(ceiling.map(|c| c.matrix)).collect();
        let most = speeds.iter().copied().reduce(f64::max).filter(|_| !points.is_empty())?;
        let (size, unit) = wording::unit(most, &SPEED);
        // Room beyond the outermost points, and enough of the slope to be seen as one.
        let wide = points.iter().flat_map(|p| [p.0 * 0.9, p.0 * 1.1]).chain(ridge.map(|ridge| ridge / 4.0));
        let high = speeds.iter().flat_map(|speed| [speed * 0.9 / size, speed * 1.2 / size]);
        let x = Scale::logarithmic(wide, AREA.whole_width())?;
        Some(Self { x, y: Scale::logarithmic(high, AREA.up())?, size, unit })
    }

    fn at(&self, (intensity, speed): (f64, f64)) -> (f64, f64) {
        (self.x.at(intensity), self.y.at(speed / self.size))
    }

    /// The line that nothing can be above.
    fn roof(&self, ceiling: &Ceiling) -> Element {
        let (least, most) = self.x.domain();
        let ridge = (ceiling.matrix / ceiling.copy).clamp(least, most);
        // The slope begins where it enters the plot.
        let start = least.max(self.y.domain().0 * self.size / ceiling.copy).min(ridge);
        let height = |intensity: f64| (intensity * ceiling.copy).min(ceiling.matrix);
        let corners = [start, ridge, most].map(|x| self.at((x, height(x))));
        let line = Element::new("path").class("roof ink").attr("d", path(corners));
        let flat = (corners[2].0 - 2.0, corners[2].1 - 6.0);
        Element::new("g")
            .with(line)
            .with(text("ink clear", "end", flat, &wording::flops(ceiling.matrix)))
            .all(along(corners[0], corners[1], &wording::rate(ceiling.copy)))
    }
}

/// Words along a line, where it is long enough.
fn along(from: (f64, f64), to: (f64, f64), words: &str) -> Option<Element> {
    let (across, up) = (to.0 - from.0, to.1 - from.1);
    let angle = up.atan2(across).to_degrees();
    let middle = ((from.0 + to.0) / 2.0, (from.1 + to.1) / 2.0);
    let turn = format!("rotate({angle:.1} {:.1} {:.1})", middle.0, middle.1);
    let place = (middle.0, middle.1 - 6.0);
    ((across * across + up * up).sqrt() > NAMED)
        .then(|| text("ink clear", "middle", place, words).attr("transform", turn))
}

fn panel(
    run: &Run,
    title: &str,
    problems: &[&Problem],
    plane: &Plane,
    ceiling: Option<&Ceiling>,
    cast: &Cast,
) -> Panel {
    let label = &wording::tick_thousands;
    let across = Axis { scale: &plane.x, title: "operations per byte", label, space: 30.0 };
    let up = Axis { scale: &plane.y, title: plane.unit, label: &wording::tick, space: 14.0 };
    let mut body = frame(AREA, title, &across, &up).all(ceiling.map(|ceiling| plane.roof(ceiling)));
    for arm in run.arms().collect::<Vec<_>>().into_iter().rev() {
        let point = |p: &&Problem| {
            let (intensity, speed) = place(p, arm)?;
            let note = format!("{}, {}: {}", run.title(arm), p.task, wording::flops(speed));
            Some(Point { at: plane.at((intensity, speed)), spread: None, note })
        };
        let points: Vec<_> = problems.iter().filter_map(point).collect();
        body = body.with(dots(cast.slot(run, arm), &points));
    }
    Panel {
        title: format!("Roofline, {title}"),
        description: describe(run, problems),
        height: AREA.height,
        body,
    }
}

fn describe(run: &Run, problems: &[&Problem]) -> String {
    let best = |arm: &str| problems.iter().filter_map(|p| Some(p.speed(arm)?.point)).reduce(f64::max);
    let words = |arm| Some(format!("{} up to {}", run.title(arm), wording::flops(best(arm)?)));
    format!(
        "Speed against operations per byte: {}.",
        run.arms().filter_map(words).collect::<Vec<_>>().join(", ")
    )
}
