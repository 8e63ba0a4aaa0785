//! Achieved speed against arithmetic intensity, under what the device can do at best as measured in the same run.

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

/// A little higher than other panels: it holds the points of a whole run.
const AREA: Area = Area { height: 280.0 };

/// The figure, or `None` where nothing was timed.
pub fn figure(run: &Run, cast: &Cast) -> Option<Figure> {
    let mut dtypes: Vec<&str> = run.problems.iter().map(|p| p.task.spec().dtype.as_str()).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    let panels: Vec<_> = dtypes.into_iter().filter_map(|dtype| panel(run, dtype, cast)).collect();
    let how: Vec<String> = run.record.ceilings.iter().map(source).collect();
    let roof = if how.is_empty() {
        "No ceilings: this run did not measure what the device can do at best.".to_owned()
    } else {
        format!("Ceilings measured in the same run: {}.", how.join("; "))
    };
    (!panels.is_empty()).then(|| Figure {
        name: "roofline",
        title: "Roofline".to_owned(),
        caption: format!("A mark per problem. {roof}"),
        legend: cast.legend(run),
        columns: panels.len().min(3),
        panels,
    })
}

fn source(ceiling: &Ceiling) -> String {
    let Ceiling { dtype, copy, matrix, how, .. } = ceiling;
    format!("{dtype} {} ({how}), {} copied", wording::flops(*matrix), wording::rate(*copy))
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
        let most = speeds.iter().copied().reduce(f64::max)?;
        let (size, unit) = wording::unit(most, &SPEED);
        let (across, up) = (AREA.whole_width(), AREA.up());
        // Room beyond the outermost points, and enough of the slope to be seen as one.
        let wide = points.iter().flat_map(|p| [p.0 * 0.8, p.0 * 1.25]).chain(ridge.map(|ridge| ridge / 2.0));
        let high = speeds.iter().flat_map(|speed| [speed * 0.8 / size, speed * 1.25 / size]);
        Some(Self { x: Scale::logarithmic(wide, across)?, y: Scale::logarithmic(high, up)?, size, unit })
    }

    fn at(&self, (intensity, speed): (f64, f64)) -> (f64, f64) {
        (self.x.at(intensity), self.y.at(speed / self.size))
    }

    /// The line that nothing can be above.
    fn roof(&self, ceiling: &Ceiling) -> Element {
        let (least, most) = self.x.domain();
        let start = least.max(self.y.domain().0 * self.size / ceiling.copy);
        let ridge = (ceiling.matrix / ceiling.copy).clamp(least, most);
        let height = |intensity: f64| (intensity * ceiling.copy).min(ceiling.matrix);
        let corners = [start.min(ridge), ridge, most].map(|x| self.at((x, height(x))));
        let line = Element::new("path").class("roof ink").attr("d", path(corners));
        let flat = (corners[2].0 - 4.0, corners[2].1 - 7.0);
        let group = Element::new("g").with(line);
        let group = group.with(text("ink", "end", flat, &wording::flops(ceiling.matrix)));
        let slope = (corners[0].0 + 8.0, corners[0].1 - 6.0);
        let room = corners[1].0 - corners[0].0 > 24.0;
        group.all(room.then(|| text("ink", "start", (slope.0 + 8.0, slope.1), &wording::rate(ceiling.copy))))
    }
}

fn panel(run: &Run, dtype: &str, cast: &Cast) -> Option<Panel> {
    let of_type = |p: &&Problem| p.task.spec().dtype == dtype;
    let problems: Vec<&Problem> = run.problems.iter().filter(of_type).collect();
    let place = |p: &Problem, arm: &str| Some((p.intensity()?, p.speed(arm)?.point));
    let all = problems.iter().flat_map(|p| run.arms().filter_map(|arm| place(p, arm)));
    let points: Vec<(f64, f64)> = all.collect();
    let ceiling = run.record.ceilings.iter().find(|c| c.dtype == dtype && (c.place == "gpu") == run.on_gpu);
    let plane = Plane::around(&points, ceiling)?;
    let across = Axis { scale: &plane.x, title: "operations per byte", label: &wording::tick, space: 34.0 };
    let up = Axis { scale: &plane.y, title: plane.unit, label: &wording::tick, space: 14.0 };
    let mut body = frame(AREA, dtype, &across, &up).all(ceiling.map(|ceiling| plane.roof(ceiling)));
    for arm in run.arms().collect::<Vec<_>>().into_iter().rev() {
        let point = |p: &&Problem| {
            let speed = wording::flops(p.speed(arm)?.point);
            let note = format!("{}, {}: {speed}", run.title(arm), p.task);
            Some(Point { at: plane.at(place(p, arm)?), spread: None, note })
        };
        let points: Vec<_> = problems.iter().filter_map(point).collect();
        body = body.with(dots(cast.slot(run, arm), &points));
    }
    let description = describe(run, &problems);
    Some(Panel { title: format!("Roofline, {dtype}"), description, height: AREA.height, body })
}

fn describe(run: &Run, problems: &[&Problem]) -> String {
    let best = |arm: &str| problems.iter().filter_map(|p| Some(p.speed(arm)?.point)).reduce(f64::max);
    let words =
        run.arms().filter_map(|arm| Some(format!("{} up to {}", run.title(arm), wording::flops(best(arm)?))));
    format!("Speed against operations per byte: {}.", words.collect::<Vec<_>>().join(", "))
}
