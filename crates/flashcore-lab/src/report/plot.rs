//! One plot: two axes with ticks at round numbers, and marks that lines join or not, written as SVG.
//!
//! Every plot has the width of a phone, so that text keeps its size there. A [`Figure`] is some plots with a legend: part
//! of a page, or a standalone picture that includes its colours for light and dark.

use std::f64::consts::TAU;

use super::{
    STYLE,
    words::{escaped, short, tick},
};

const WIDTH: f64 = 328.0;
const HEIGHT: f64 = 232.0;
const RIGHT: f64 = WIDTH - 14.0;
const TOP: f64 = 34.0;
/// Room below the plot for ticks and the axis' title.
const BELOW: f64 = 38.0;
/// Between the outermost points and the frame.
const INSET: f64 = 12.0;
/// Height of a named row: its name, and the marks below it.
const ROW: f64 = 32.0;
/// Between the plots of a picture, and around them.
const GAP: f64 = 20.0;
/// Width of a letter, and of one of a picture's title; rather too wide than too narrow.
const LETTER: f64 = 6.8;
const BOLD_LETTER: f64 = 10.2;
/// Longest word of a picture.
const LONGEST_WORD: usize = 26;
/// Colours and shapes besides ours.
const PEERS: usize = 6;
/// What axes reach: far beyond any measurement, far from where powers of ten end.
const REACH: std::ops::RangeInclusive<f64> = 1e-99..=1e99;

/// An axis: which values lie where, and how its ticks read.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Axis {
    title: String,
    pub(super) domain: (f64, f64),
    logarithmic: bool,
    ticks: Vec<(f64, String)>,
    rows: bool,
}

impl Axis {
    /// From a round number not above `least` to one not below `most`; ticks read in units of `size`.
    pub(super) fn linear(title: impl Into<String>, least: f64, most: f64, size: f64) -> Self {
        let (least, most) = (least / size, most / size);
        let span = Some((most - least) / 4.5).filter(|span| REACH.contains(span)).unwrap_or(0.2);
        let step = round(above(span));
        let (first, last) = ((least / step).floor(), (most / step).ceil());
        let count = (last - first).clamp(1.0, 9.0) as usize;
        let tick = |n: usize| (first + n as f64) * step;
        let ticks: Vec<_> = (0..=count).map(|n| (tick(n) * size, self::tick(tick(n)))).collect();
        Self { domain: (ticks[0].0, ticks[count].0), ticks, ..Self::empty(title) }
    }

    /// A logarithmic axis between round numbers around `values`; `None` where no value is positive.
    pub(super) fn logarithmic(title: impl Into<String>, values: &[f64], size: f64) -> Option<Self> {
        let (least, most) = ends(values.iter().map(|value| value / size))?;
        let (first, last) = (below(least), above(most));
        let first = first.min(last - 1);
        let shown = |n: &i32| last - first < 8 || n % 3 == 0;
        let tick = |n: i32| (round(n) * size, self::tick(round(n)));
        let ticks = (first..=last).filter(shown).map(tick).collect();
        let domain = (round(first) * size, round(last) * size);
        Some(Self { domain, logarithmic: true, ticks, ..Self::empty(title) })
    }

    /// A logarithmic axis with these ticks, in order, and nothing beyond them.
    pub(super) fn at(title: &str, ticks: Vec<(f64, String)>) -> Self {
        let domain = (ticks[0].0, ticks[ticks.len() - 1].0);
        Self { domain, logarithmic: true, ticks, ..Self::empty(title) }
    }

    /// One tick for each name, in the middle of its share.
    pub(super) fn names(title: &str, names: impl Iterator<Item = String>) -> Self {
        let ticks: Vec<_> = names.enumerate().map(|(n, name)| (n as f64, name)).collect();
        Self { domain: (-0.5, ticks.len() as f64 - 0.5), ticks, ..Self::empty(title) }
    }

    /// A row for each name, with its marks below the name.
    pub(super) fn rows(names: impl Iterator<Item = String>) -> Self {
        let axis = Self::names("", names);
        let (first, last) = axis.domain;
        Self { domain: (first - 0.2, last - 0.2), rows: true, ..axis }
    }

    fn empty(title: impl Into<String>) -> Self {
        let title = title.into();
        Self { title, domain: (0.0, 1.0), logarithmic: false, ticks: Vec::new(), rows: false }
    }

    /// How far along the axis a value lies; the nearest end for one beyond it.
    fn share(&self, value: f64) -> f64 {
        let (from, to) = self.domain;
        let share = match self.logarithmic {
            true => (value / from).ln() / (to / from).ln(),
            false => (value - from) / (to - from),
        };
        // An axis of a single value has its place in the middle.
        if share.is_nan() { 0.5 } else { share.clamp(0.0, 1.0) }
    }
}

/// The least and the greatest value that an axis reaches.
fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let reached: Vec<f64> = values.filter(|v| REACH.contains(v)).collect();
    Some((reached.iter().copied().reduce(f64::min)?, reached.into_iter().reduce(f64::max)?))
}

/// The `n`th of 1, 2, 5, 10, 20 and so on; 1 is number 0.
fn round(n: i32) -> f64 {
    [1.0, 2.0, 5.0][n.rem_euclid(3) as usize] * 10f64.powi(n.div_euclid(3))
}

/// Which round number is the greatest not above a positive value.
fn below(value: f64) -> i32 {
    let tens = 3 * value.log10().floor() as i32;
    (tens - 1..tens + 4).take_while(|&n| round(n) <= value * (1.0 + 1e-9)).last().unwrap_or(tens)
}

/// Which round number is the least not below a positive value.
fn above(value: f64) -> i32 {
    below(value * (1.0 - 1e-6)) + 1
}

/// A competitor's colour and shape; 0 is ours.
pub(super) type Slot = usize;

/// The colour and shape of the `n`th peer; beyond the sixth they repeat.
pub(super) const fn peer_slot(n: usize) -> Slot {
    1 + n % PEERS
}

/// A point, where its interval ends on either side, and what it says when asked.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Point {
    pub(super) at: (f64, f64),
    /// The same for the ends of its interval.
    pub(super) spread: Option<[(f64, f64); 2]>,
    pub(super) note: String,
}

/// Points that belong together.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Line {
    /// Whose; a line without marks where nobody's.
    pub(super) slot: Option<Slot>,
    pub(super) joined: bool,
    pub(super) points: Vec<Point>,
}

/// A plot.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) lines: Vec<Line>,
}

impl Plot {
    fn height(&self) -> f64 {
        if self.y.rows { TOP + ROW * self.y.ticks.len() as f64 + BELOW } else { HEIGHT }
    }

    const fn left(&self) -> f64 {
        if self.y.rows { 8.0 } else { 46.0 }
    }

    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (bottom, left) = (self.height() - BELOW, self.left() + INSET);
        let up = if self.y.rows { 1.0 - self.y.share(y) } else { self.y.share(y) };
        (left + self.x.share(x) * (RIGHT - INSET - left), bottom - up * (bottom - TOP))
    }

    /// The same for those who cannot see it: the first and the last point of every line.
    fn description(&self) -> String {
        let ends = |line: &Line| {
            let note = |point: Option<&Point>| point.map_or(String::new(), |p| format!("{}. ", p.note));
            let last = line.points.last().filter(|_| line.points.len() > 1);
            note(line.points.first()) + &note(last)
        };
        self.lines.iter().map(ends).collect()
    }

    fn body(&self) -> String {
        let (left, bottom) = (self.left(), self.height() - BELOW);
        let mut body = text("ink name", "start", (left, 15.0), &self.title)
            + &text("soft", "end", (RIGHT, 15.0), &self.y.title)
            + &text("soft", "middle", ((left + RIGHT) / 2.0, self.height() - 4.0), &self.x.title)
            + &rule("axis", &[(left, bottom), (RIGHT, bottom)]);
        let class = if self.y.rows { "axis" } else { "grid" };
        for (value, _) in &self.y.ticks {
            let y = self.place((0.0, *value)).1;
            body += &rule(class, &[(left, y), (RIGHT, y)]);
        }
        for (value, _) in &self.x.ticks {
            let x = self.place((*value, 0.0)).0;
            let from = if self.y.rows { TOP } else { bottom };
            body += &rule(if self.y.rows { "grid" } else { "axis" }, &[(x, from), (x, bottom + 4.0)]);
        }
        body + &self.labels() + &self.lines.iter().map(|line| self.line(line)).collect::<String>()
    }

    /// Words at the ticks that have room for them.
    fn labels(&self) -> String {
        let mut labels = String::new();
        let bottom = self.height() - BELOW;
        let letters = self.x.ticks.iter().map(|(_, words)| words.chars().count()).max().unwrap_or(0);
        let room = (letters as f64 * LETTER + 4.0).max(26.0);
        for (x, words) in apart(&self.x, room, |value| self.place((value, 0.0)).0) {
            labels += &text("soft", "middle", (x, bottom + 16.0), words);
        }
        for (y, words) in apart(&self.y, 14.0, |value| self.place((0.0, value)).1) {
            labels += &match self.y.rows {
                true => text("ink clear", "start", (self.left(), y - 8.0), words),
                false => text("soft", "end", (self.left() - 6.0, y + 4.0), words),
            };
        }
        labels
    }

    fn line(&self, line: &Line) -> String {
        let points: Vec<_> = line.points.iter().map(|point| self.place(point.at)).collect();
        let Some(slot) = line.slot else {
            return format!("<path class=\"roof ink\" d=\"{}\"/>", path(&points));
        };
        let mut body = String::new();
        if line.joined {
            body += &format!("<path class=\"line\" d=\"{}\"/>", path(&points));
        }
        for (point, at) in line.points.iter().zip(points) {
            let ends = point.spread.map(|ends| ends.map(|end| self.place(end)));
            // Shown where it would be seen beyond its mark.
            let wide = |[a, b]: &[(f64, f64); 2]| (a.0 - b.0).abs() + (a.1 - b.1).abs() > 4.0;
            let spread =
                ends.filter(wide).map(|ends| format!("<path class=\"spread\" d=\"{}\"/>", path(&ends)));
            let (note, spread) = (escaped(&point.note), spread.unwrap_or_default());
            body += &format!("<g><title>{note}</title>{spread}{}</g>", mark(slot, at));
        }
        format!("<g class=\"s{slot}\">{body}</g>")
    }
}

/// Ticks of an axis that have at least this much room, with their places.
fn apart(axis: &Axis, room: f64, place: impl Fn(f64) -> f64) -> Vec<(f64, &str)> {
    let mut kept: Vec<(f64, &str)> = Vec::new();
    for (value, words) in &axis.ticks {
        let at = place(*value);
        if kept.last().is_none_or(|(last, _)| (at - last).abs() >= room) {
            kept.push((at, words));
        }
    }
    kept
}

/// A coordinate to a tenth of a unit, which is finer than a screen shows; never a negative zero.
fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0 + 0.0
}

fn path(points: &[(f64, f64)]) -> String {
    let step = |(n, (x, y)): (usize, &(f64, f64))| {
        format!("{}{} {}", if n == 0 { 'M' } else { 'L' }, tenths(*x), tenths(*y))
    };
    points.iter().enumerate().map(step).collect()
}

fn rule(class: &str, ends: &[(f64, f64)]) -> String {
    format!("<path class=\"rule {class}\" d=\"{}\"/>", path(ends))
}

fn text(class: &str, anchor: &str, (x, y): (f64, f64), words: &str) -> String {
    let (x, y, words) = (tenths(x), tenths(y), escaped(words));
    format!("<text class=\"{class}\" text-anchor=\"{anchor}\" x=\"{x}\" y=\"{y}\">{words}</text>")
}

/// The mark of a competitor: each has a shape too, so that none is told by its colour alone.
fn mark(slot: Slot, (x, y): (f64, f64)) -> String {
    // Corners, radius, and by which part of a full turn the first corner is off the top.
    let (corners, radius, turn) = match slot {
        0 => return format!("<circle class=\"mark\" cx=\"{}\" cy=\"{}\" r=\"4\"/>", tenths(x), tenths(y)),
        1 => (4, 4.4, 0.125),
        2 => (3, 4.6, 0.0),
        3 => (4, 4.6, 0.0),
        4 => (3, 4.6, 0.5),
        5 => (6, 4.0, 0.0),
        _ => (5, 4.4, 0.0),
    };
    let corner = |n: i32| {
        let angle = TAU * (f64::from(n) / f64::from(corners) + turn);
        (x + radius * angle.sin(), y - radius * angle.cos())
    };
    format!("<path class=\"mark\" d=\"{}Z\"/>", path(&(0..corners).map(corner).collect::<Vec<_>>()))
}

/// A short line with a competitor's mark.
fn sample(slot: Slot, (x, y): (f64, f64)) -> String {
    let ends = path(&[(x, y), (x + 18.0, y)]);
    format!("<g class=\"s{slot}\"><path class=\"line\" d=\"{ends}\"/>{}</g>", mark(slot, (x + 9.0, y)))
}

/// An SVG of this size; `more` are further attributes.
fn svg(width: f64, height: f64, more: &str, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" class=\"plot\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" {more}>{body}</svg>"
    )
}

/// An SVG with a name and a description that screen readers find; `id` tells it from all others.
fn described(size: (f64, f64), id: &str, title: &str, description: &str, body: &str) -> String {
    let (title, description) = (escaped(title), escaped(description));
    let more = format!("role=\"img\" aria-labelledby=\"{id}-t {id}-d\"");
    let head = format!("<title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{description}</desc>");
    svg(size.0, size.1, &more, &(head + body))
}

/// Plots with a legend.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) caption: String,
    pub(super) legend: Vec<(Slot, String)>,
    pub(super) plots: Vec<Plot>,
    pub(super) columns: usize,
}

impl Figure {
    /// As part of a page; `id` tells it from all others there.
    pub(super) fn html(&self, id: &str) -> String {
        let (title, caption) = (escaped(self.title), escaped(&self.caption));
        let legend = self.legend.iter().map(|(slot, name)| {
            let mark = svg(20.0, 12.0, "aria-hidden=\"true\"", &sample(*slot, (1.0, 6.0)));
            format!("<li>{mark}{}</li>", escaped(name))
        });
        let plots = self.plots.iter().enumerate().map(|(n, plot)| {
            let id = format!("{id}-{}-{n}", self.name);
            described((WIDTH, plot.height()), &id, &plot.title, &plot.description(), &plot.body())
        });
        format!(
            "<figure><figcaption><h3>{title}</h3><p>{caption}</p></figcaption><ul class=\"legend\">{}</ul>\
             <div class=\"panels of-{}\">{}</div></figure>",
            legend.collect::<String>(),
            self.columns,
            plots.collect::<String>()
        )
    }

    /// As a picture of its own; `origin` says where the figures come from.
    pub(super) fn picture(&self, heading: &str, origin: &str) -> String {
        let columns = self.columns.clamp(1, self.plots.len().max(1));
        let width = GAP + columns as f64 * (WIDTH + GAP);
        let (mut body, mut top) = self.head(width, heading, origin);
        for row in self.plots.chunks(columns) {
            for (n, plot) in row.iter().enumerate() {
                let left = GAP + n as f64 * (WIDTH + GAP);
                body += &format!("<g transform=\"translate({left} {top})\">{}</g>", plot.body());
            }
            top += row.iter().map(Plot::height).fold(0.0, f64::max) + GAP;
        }
        let style = format!("<style>{STYLE}</style>");
        let paper = format!("<rect class=\"mark paper\" width=\"{width}\" height=\"{top}\" rx=\"8\"/>");
        let description: String =
            self.plots.iter().map(|p| format!("{}: {}", p.title, p.description())).collect();
        described((width, top), "f", heading, &description, &(style + &paper + &body)) + "\n"
    }

    /// Title, origin and legend, and where the plots begin.
    fn head(&self, width: f64, heading: &str, origin: &str) -> (String, f64) {
        let (mut head, mut y) = (String::new(), 10.0);
        for line in lines(heading, (width - 2.0 * GAP) / BOLD_LETTER) {
            y += 22.0;
            head += &text("ink name head", "start", (GAP, y), &line);
        }
        for line in lines(origin, (width - 2.0 * GAP) / LETTER) {
            y += 18.0;
            head += &text("soft", "start", (GAP, y), &line);
        }
        let (mut x, mut y) = (GAP, y + 24.0);
        for (slot, name) in &self.legend {
            let needed = 42.0 + LETTER * 1.15 * name.chars().count() as f64;
            if x > GAP && x + needed > width - GAP {
                (x, y) = (GAP, y + 18.0);
            }
            head += &sample(*slot, (x, y - 4.0));
            head += &text("ink", "start", (x + 26.0, y), name);
            x += needed;
        }
        (head, y + GAP)
    }
}

/// Words in lines of so many letters; long words are shortened.
fn lines(words: &str, letters: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words.split_whitespace().map(|word| short(word, LONGEST_WORD)) {
        match lines.last_mut() {
            Some(line) if (line.chars().count() + word.chars().count()) as f64 + 1.0 <= letters => {
                *line += &format!(" {word}");
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn linear_axes_end_on_round_numbers() {
        for (ends, ticks) in [
            ((0.0, 700.0), &["0", "200", "400", "600", "800"][..]),
            ((0.0, 1.0), &["0", "0.5", "1"]),
            ((0.95, 1.3), &["0.9", "1", "1.1", "1.2", "1.3"]),
            ((1.0, 1.0), &["1", "1.2"]),
        ] {
            let axis = Axis::linear("", ends.0, ends.1, 1.0);
            assert_eq!(labels(&axis), ticks, "{ends:?}");
            assert_eq!((axis.share(axis.domain.0), axis.share(axis.domain.1)), (0.0, 1.0));
        }
        let tera = Axis::linear("", 0.0, 7e14, 1e12);
        assert_eq!((labels(&tera)[4], (tera.share(2e14) * 4.0).round()), ("800", 1.0));
        assert_eq!(Axis::linear("", 0.0, f64::NAN, 1.0).share(9.0), 1.0);
    }

    #[test]
    fn logarithmic_axes_hold_their_values() {
        for (values, ticks) in [
            (&[3.0, 40.0][..], &["2", "5", "10", "20", "50"][..]),
            (&[0.2, 0.0, -1.0, f64::INFINITY], &["0.1", "0.2"]),
            (&[1.0, 1e4], &["1", "10", "100", "1000", "10000"]),
        ] {
            let axis = Axis::logarithmic("", values, 1.0).unwrap();
            assert_eq!(labels(&axis), ticks, "{values:?}");
            assert!(values.iter().all(|v| (0.0..=1.0).contains(&axis.share(*v))));
        }
        assert_eq!(Axis::logarithmic("", &[0.0, -2.0, f64::NAN, 1e-310, 1e300], 1.0), None);
        let lengths = Axis::at("", [512.0, 1024.0, 2048.0, 4096.0].map(|s| (s, s.to_string())).to_vec());
        assert_eq!((lengths.share(1024.0) * 3.0).round(), 1.0);
        assert_eq!(Axis::at("", vec![(64.0, String::new())]).share(64.0), 0.5);
        assert_eq!(apart(&lengths, 40.0, |v| 90.0 * lengths.share(v)).len(), 2);
    }

    #[test]
    fn words_are_set_in_lines() {
        assert_eq!(lines("one two three", 8.0), ["one two", "three"]);
        assert_eq!(lines(&"w".repeat(99), 8.0)[0].chars().count(), LONGEST_WORD);
        assert_eq!(path(&[(0.0, 1.0), (2.55, -0.01)]), "M0 1L2.6 0");
    }
}
