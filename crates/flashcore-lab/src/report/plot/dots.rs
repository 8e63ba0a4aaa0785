//! Problems that are on no curve: a row each, with everybody's mark on one logarithmic axis.

use super::{
    Cast,
    figure::Figure,
    frame::{Area, Panel, WIDTH, rule, text},
    mark::{Point, dots},
    scale::Scale,
    sweep::Quantity,
};
use crate::report::{
    markup::Element,
    run::{Problem, Run},
    wording,
};

/// Height of a row: its name, and the marks below it.
const ROW: f64 = 32.0;
/// Above the first row.
const HEAD: f64 = 26.0;
/// Below the last row.
const FOOT: f64 = 22.0;
/// Rows of a panel.
const ROWS: usize = 16;

/// The figure, or `None` where nothing was timed.
pub fn figure(run: &Run, problems: &[&Problem], cast: &Cast) -> Option<Figure> {
    let panels: Vec<_> = problems
        .chunks(ROWS)
        .flat_map(|rows| [Quantity::Time, Quantity::Speed].map(|quantity| panel(quantity, run, rows, cast)))
        .flatten()
        .collect();
    (!panels.is_empty()).then(|| Figure {
        name: "problems",
        title: "Problem by problem".to_owned(),
        caption:
            "Batch x heads x sequence x dim. Medians on logarithmic axes; bars are 95 % intervals where they \
                  are wider than a mark."
                .to_owned(),
        legend: cast.legend(run),
        panels,
        columns: 2,
    })
}

fn panel(quantity: Quantity, run: &Run, problems: &[&Problem], cast: &Cast) -> Option<Panel> {
    let area = Area { height: HEAD + ROW * problems.len() as f64 + FOOT };
    let values = problems.iter().flat_map(|p| run.arms().filter_map(|arm| quantity.of(p, arm)));
    let scale = Scale::logarithmic(values.flat_map(|v| [v.low, v.point, v.high]), (8.0, WIDTH - 16.0))?;
    let (title, better) = match quantity {
        Quantity::Time => ("Time per call", "lower is better"),
        Quantity::Speed => ("FLOP/s", "higher is better"),
    };
    let mut body = Element::new("g")
        .with(text("ink name", "start", (8.0, 15.0), title))
        .with(text("soft", "end", (WIDTH - 14.0, 15.0), better))
        .all(grid(quantity, &scale, area))
        .all(problems.iter().enumerate().map(|(n, p)| label(n, p)));
    for arm in run.arms().collect::<Vec<_>>().into_iter().rev() {
        let point = |(n, problem): (usize, &&Problem)| {
            let (value, y) = (quantity.of(problem, arm)?, height_of(n));
            Some(Point {
                at: (scale.at(value.point), y),
                spread: Some([value.low, value.high].map(|end| (scale.at(end), y))),
                note: quantity.note(&run.title(arm), &problem.task.to_string(), &value),
            })
        };
        let points: Vec<_> = problems.iter().enumerate().filter_map(point).collect();
        body = body.with(dots(cast.slot(run, arm), &points));
    }
    let description = problems.iter().map(|problem| describe(quantity, run, problem)).collect();
    Some(Panel { title: title.to_owned(), description, height: area.height, body })
}

/// Where the marks of a row lie.
fn height_of(row: usize) -> f64 {
    HEAD + ROW * row as f64 + 22.0
}

fn grid(quantity: Quantity, scale: &Scale, area: Area) -> Vec<Element> {
    let bottom = area.height - FOOT;
    let lines =
        scale.ticks.iter().map(|&tick| rule("grid", [(scale.at(tick), HEAD), (scale.at(tick), bottom)]));
    let read = |tick: f64| match quantity {
        Quantity::Time => wording::tick_seconds(tick),
        Quantity::Speed => {
            let (size, unit) = wording::unit(tick, &wording::SPEED);
            format!("{} {}", wording::tick(tick / size), &unit[..1])
        }
    };
    let labels = scale.labelled(56.0).into_iter().map(|tick| {
        let anchor = match scale.at(tick) {
            x if x < 24.0 => "start",
            x if x > WIDTH - 32.0 => "end",
            _ => "middle",
        };
        text("soft", anchor, (scale.at(tick), bottom + 15.0), &read(tick))
    });
    lines.chain(labels).collect()
}

fn label(row: usize, problem: &Problem) -> Element {
    let y = height_of(row);
    let track = rule("axis", [(8.0, y), (WIDTH - 16.0, y)]);
    Element::new("g").with(track).with(text("ink clear", "start", (8.0, y - 8.0), &problem.task.to_string()))
}

fn describe(quantity: Quantity, run: &Run, problem: &Problem) -> String {
    let values = run.arms().filter_map(|arm| Some((arm, quantity.of(problem, arm)?.point)));
    let words: Vec<_> =
        values.map(|(arm, value)| format!("{} {}", run.title(arm), quantity.words(value))).collect();
    format!("{}: {}. ", problem.task, words.join(", "))
}
