//! The frame of a panel: title, grid, ticks and what the axes mean. Plots fill it with marks.

use super::scale::Scale;
use crate::report::markup::{Element, path};

/// Width of every panel: that of a phone, so that text keeps its size there.
pub const WIDTH: f64 = 328.0;
/// Height of most panels.
pub const HEIGHT: f64 = 232.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = WIDTH - 14.0;
const TOP: f64 = 34.0;
/// Room below the plot for ticks and the axis' title.
const BELOW: f64 = 38.0;
/// Between the outermost points and the frame.
const INSET: f64 = 12.0;

/// One plot of a figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Panel {
    /// What it shows.
    pub title: String,
    /// The same for those who cannot see it.
    pub description: String,
    /// Its height.
    pub height: f64,
    /// What is drawn.
    pub body: Element,
}

/// Where the plot lies within a panel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Area {
    /// Height of the panel.
    pub height: f64,
}

impl Area {
    /// That of most panels.
    pub const USUAL: Self = Self { height: HEIGHT };

    /// Where the horizontal axis ends, with room for marks at its ends.
    pub const fn across(self) -> (f64, f64) {
        (LEFT + INSET, RIGHT - INSET)
    }

    /// The same from edge to edge.
    pub const fn whole_width(self) -> (f64, f64) {
        (LEFT, RIGHT)
    }

    /// Where the vertical axis ends: at the bottom and at the top.
    pub const fn up(self) -> (f64, f64) {
        (self.height - BELOW, TOP)
    }
}

/// What an axis means and how its ticks read.
pub struct Axis<'a> {
    /// Where values lie.
    pub scale: &'a Scale,
    /// What the values are.
    pub title: &'a str,
    /// How a tick reads.
    pub label: &'a dyn Fn(f64) -> String,
    /// Room that a label needs.
    pub space: f64,
}

/// Draws the frame.
pub fn frame(area: Area, title: &str, x: &Axis<'_>, y: &Axis<'_>) -> Element {
    let (bottom, _) = area.up();
    let heading = text("ink name", "start", (LEFT, 15.0), title);
    let unit = text("soft", "end", (RIGHT, 15.0), y.title);
    let below = text("soft", "middle", ((LEFT + RIGHT) / 2.0, area.height - 4.0), x.title);
    let edge = rule("axis", [(LEFT, bottom), (RIGHT, bottom)]);
    Element::new("g").with(heading).with(unit).with(below).all(rows(y)).with(edge).all(columns(x, bottom))
}

fn rows(y: &Axis<'_>) -> Vec<Element> {
    let lines = y.scale.ticks.iter().map(|&tick| {
        let at = y.scale.at(tick);
        rule("grid", [(LEFT, at), (RIGHT, at)])
    });
    let labels = y.scale.labelled(y.space).into_iter().map(|tick| {
        let place = (LEFT - 6.0, y.scale.at(tick) + 4.0);
        text("soft", "end", place, &(y.label)(tick))
    });
    lines.chain(labels).collect()
}

fn columns(x: &Axis<'_>, bottom: f64) -> Vec<Element> {
    let ticks = x.scale.ticks.iter().map(|&tick| {
        let at = x.scale.at(tick);
        rule("axis", [(at, bottom), (at, bottom + 4.0)])
    });
    let labels = x
        .scale
        .labelled(x.space)
        .into_iter()
        .map(|tick| text("soft", "middle", (x.scale.at(tick), bottom + 16.0), &(x.label)(tick)));
    ticks.chain(labels).collect()
}

/// A thin line.
pub fn rule(class: &str, ends: [(f64, f64); 2]) -> Element {
    Element::new("path").class(format!("rule {class}")).attr("d", path(ends))
}

/// A line of text.
pub fn text(class: &str, anchor: &str, (x, y): (f64, f64), words: &str) -> Element {
    Element::new("text").class(class).attr("text-anchor", anchor).at([("x", x), ("y", y)]).with(words)
}
