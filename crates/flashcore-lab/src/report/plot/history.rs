//! How runs of the same problems came out over time: against each peer, and by themselves.

use super::{
    Cast,
    figure::Figure,
    frame::{Area, Axis, Panel, frame, rule},
    mark::{Point, Slot, curve},
    scale::Scale,
};
use crate::report::{
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

fn panel(series: &Series, title: &str, y: &Axis<'_>, x: &Scale, curves: &[(Slot, Vec<Point>)]) -> Panel {
    let read = |n: f64| series.runs().get(n as usize).map_or(String::new(), label);
    let across = Axis { scale: x, title: "commit", label: &read, space: 74.0 };
    let even = (y.scale.domain().0..=y.scale.domain().1).contains(&1.0) && y.title == "times as fast";
    let even = even.then(|| {
        let ((from, to), at) = (AREA.whole_width(), y.scale.at(1.0));
        rule("axis", [(from, at), (to, at)])
    });
    let lines = curves.iter().map(|(slot, points)| curve(*slot, points));
    let body = frame(AREA, title, &across, y).all(even).all(lines);
    let description = curves.iter().flat_map(|(_, points)| points).map(|p| format!("{}. ", p.note)).collect();
    Panel { title: title.to_owned(), description, height: AREA.height, body }
}

fn leads(series: &Series, cast: &Cast) -> Option<Panel> {
    let newest = series.newest();
    let runs = || series.runs().iter().enumerate();
    let of_peer =
        |peer: &String| -> Vec<_> { runs().filter_map(|(n, r)| Some((n, r.lead(peer)?.mean))).collect() };
    let values: Vec<_> = newest.peers.iter().map(|peer| (peer, of_peer(peer))).collect();
    let all = || values.iter().flat_map(|(_, means)| means).map(|(_, mean)| *mean);
    let (least, most) = (all().reduce(f64::min)?, all().reduce(f64::max)?);
    let y = Scale::around(least.min(1.0), most.max(1.0), AREA.up());
    let x = Scale::places(series.runs().len(), AREA.whole_width());
    let point = |peer: &str, (n, mean): &(usize, f64)| Point {
        at: (x.at(*n as f64), y.at(*mean)),
        spread: None,
        note: format!(
            "{}: {} as fast as {}",
            label(&series.runs()[*n]),
            wording::times(*mean),
            newest.title(peer)
        ),
    };
    let curves: Vec<_> = values
        .iter()
        .map(|(peer, means)| (cast.slot(newest, peer), means.iter().map(|m| point(peer, m)).collect()))
        .collect();
    let up = Axis { scale: &y, title: "times as fast", label: &wording::tick, space: 14.0 };
    Some(panel(series, "FlashCore against peers", &up, &x, &curves))
}

fn speed(series: &Series) -> Option<Panel> {
    let means: Vec<_> =
        series.runs().iter().enumerate().filter_map(|(n, run)| Some((n, series.mean_speed(run)?))).collect();
    let most = means.iter().map(|(_, mean)| *mean).reduce(f64::max)?;
    let (size, unit) = wording::unit(most, &SPEED);
    let y = Scale::from_zero(most / size, AREA.up());
    let x = Scale::places(series.runs().len(), AREA.whole_width());
    let point = |(n, mean): &(usize, f64)| Point {
        at: (x.at(*n as f64), y.at(*mean / size)),
        spread: None,
        note: format!("{}: {}", label(&series.runs()[*n]), wording::flops(*mean)),
    };
    let up = Axis { scale: &y, title: unit, label: &wording::tick, space: 14.0 };
    let curves = [(Slot::OURS, means.iter().map(point).collect())];
    Some(panel(series, "FlashCore's speed", &up, &x, &curves))
}
