//! How runs of the same problems came out over time: against each peer, and by themselves.

use super::{
    Cast,
    figure::Figure,
    frame::{Area, Axis, Panel, frame, rule},
    mark::{Point, Slot, curve},
    scale::Scale,
};
use crate::report::{
    markup::Element,
    run::Run,
    series::Series,
    wording::{self, SPEED},
};

const AREA: Area = Area::USUAL;

/// The figure, or `None` where there is only one run.
pub fn figure(series: &Series, cast: &Cast) -> Option<Figure> {
    let several = series.runs().len() > 1;
    let panels: Vec<_> = [leads(series, cast), speed(series)].into_iter().flatten().collect();
    (several && !panels.is_empty()).then(|| Figure {
        name: "history",
        title: "History".to_owned(),
        caption: "Geometric means over all problems of a run, oldest run first.".to_owned(),
        legend: cast.legend(series.newest()),
        columns: panels.len(),
        panels,
    })
}

/// What stands below a run: its commit, or month, day and time where none was recorded.
fn label(run: &Run) -> String {
    let time = || run.record.created.replace('T', " ").chars().skip(5).take(11).collect();
    run.record.commit.as_ref().map_or_else(time, |id| id.chars().take(7).collect())
}

/// One line of a panel: runs by their place in the series, each with its value and what that says.
struct Line {
    slot: Slot,
    values: Vec<(usize, f64, String)>,
}

impl Line {
    fn new(
        series: &Series,
        slot: Slot,
        of: impl Fn(&Run) -> Option<f64>,
        note: impl Fn(f64) -> String,
    ) -> Self {
        let value = |(n, run): (usize, &Run)| {
            let value = of(run)?;
            Some((n, value, format!("{}: {}", label(run), note(value))))
        };
        Self { slot, values: series.runs().iter().enumerate().filter_map(value).collect() }
    }
}

/// The least and the greatest value of some lines.
fn ends(lines: &[Line]) -> Option<(f64, f64)> {
    let all = || lines.iter().flat_map(|line| &line.values).map(|value| value.1);
    Some((all().reduce(f64::min)?, all().reduce(f64::max)?))
}

fn leads(series: &Series, cast: &Cast) -> Option<Panel> {
    let newest = series.newest();
    let line = |peer: &String| {
        let note = |mean| format!("{} as fast as {}", wording::times(mean), newest.title(peer));
        Line::new(series, cast.slot(newest, peer), |run| Some(run.lead(peer)?.mean), note)
    };
    let lines: Vec<_> = newest.peers.iter().map(line).collect();
    let (least, most) = ends(&lines)?;
    let y = Scale::around(least.min(1.0), most.max(1.0), AREA.up());
    let up = Axis { scale: &y, title: "times as fast", label: &wording::tick, space: 14.0 };
    let (from, to) = AREA.whole_width();
    let even = rule("axis", [(from, y.at(1.0)), (to, y.at(1.0))]);
    Some(panel(series, "FlashCore against peers", &up, &lines, Some(even)))
}

fn speed(series: &Series) -> Option<Panel> {
    let line = |size: f64| {
        let of = |run: &Run| Some(series.mean_speed(run)? / size);
        Line::new(series, Slot::OURS, of, |mean| wording::flops(mean * size))
    };
    let (_, most) = ends(&[line(1.0)])?;
    let (size, unit) = wording::unit(most, &SPEED);
    let y = Scale::from_zero(most / size, AREA.up());
    let up = Axis { scale: &y, title: unit, label: &wording::tick, space: 14.0 };
    Some(panel(series, "FlashCore's speed", &up, &[line(size)], None))
}

/// Draws the lines over `back`.
fn panel(series: &Series, title: &str, y: &Axis<'_>, lines: &[Line], back: Option<Element>) -> Panel {
    let x = Scale::places(series.runs().len(), AREA.whole_width());
    let read = |n: f64| series.runs().get(n as usize).map_or(String::new(), label);
    let across = Axis { scale: &x, title: "commit", label: &read, space: 74.0 };
    let point = |(n, value, note): &(usize, f64, String)| Point {
        at: (x.at(*n as f64), y.scale.at(*value)),
        spread: None,
        note: note.clone(),
    };
    let curves = lines.iter().map(|line| {
        let points: Vec<_> = line.values.iter().map(point).collect();
        curve(line.slot, &points)
    });
    let notes = lines.iter().flat_map(|line| &line.values).map(|(.., note)| format!("{note}. "));
    Panel {
        title: title.to_owned(),
        description: notes.collect(),
        height: AREA.height,
        body: frame(AREA, title, &across, y).all(back).all(curves),
    }
}
