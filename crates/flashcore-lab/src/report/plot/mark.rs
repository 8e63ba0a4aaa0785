//! What is drawn into a panel: one competitor's points with their intervals, joined by a line or not.
//!
//! Each competitor has a colour and a shape, so that none is told by its colour alone.

use std::f64::consts::TAU;

use crate::report::markup::{Element, path};

/// Colours and shapes besides ours.
const PEERS: usize = 6;

/// A competitor's colour and shape; 0 is ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(usize);

impl Slot {
    /// FlashCore's.
    pub const OURS: Self = Self(0);

    /// That of the `n`th peer; beyond the sixth they repeat.
    pub const fn peer(n: usize) -> Self {
        Self(1 + n % PEERS)
    }

    /// The class that has its colour.
    pub fn class(self) -> String {
        format!("s{}", self.0)
    }
}

/// A point, where its interval ends on either side, and what it says when asked.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// Where it is.
    pub at: (f64, f64),
    /// The ends of the interval.
    pub spread: Option<[(f64, f64); 2]>,
    /// What it says.
    pub note: String,
}

/// Points of one competitor, joined by a line.
pub fn curve(slot: Slot, points: &[Point]) -> Element {
    let line = Element::new("path").class("line").attr("d", path(points.iter().map(|p| p.at)));
    Element::new("g").class(slot.class()).with(line).all(points.iter().map(|point| mark(slot, point)))
}

/// Points of one competitor by themselves.
pub fn dots(slot: Slot, points: &[Point]) -> Element {
    Element::new("g").class(slot.class()).all(points.iter().map(|point| mark(slot, point)))
}

fn mark(slot: Slot, point: &Point) -> Element {
    let spread =
        point.spread.filter(shows).map(|ends| Element::new("path").class("spread").attr("d", path(ends)));
    let group = Element::new("g").with(Element::new("title").with(point.note.as_str()));
    group.all(spread).with(shape(slot, point.at))
}

/// Whether an interval would be seen beyond its mark.
fn shows([from, to]: &[(f64, f64); 2]) -> bool {
    ((from.0 - to.0).powi(2) + (from.1 - to.1).powi(2)).sqrt() > 4.0
}

/// The mark of a competitor.
pub fn shape(slot: Slot, (x, y): (f64, f64)) -> Element {
    let polygon = |corners: usize, radius: f64, turn: f64| {
        let corner = |n: usize| {
            let angle = TAU * (n as f64 / corners as f64 + turn);
            (x + radius * angle.sin(), y - radius * angle.cos())
        };
        Element::new("path").class("mark").attr("d", path((0..corners).map(corner)) + "Z")
    };
    match slot.0 {
        0 => Element::new("circle").class("mark").at([("cx", x), ("cy", y), ("r", 4.0)]),
        1 => polygon(4, 4.4, 0.125),
        2 => polygon(3, 4.6, 0.0),
        3 => polygon(4, 4.6, 0.0),
        4 => polygon(3, 4.6, 0.5),
        5 => polygon(6, 4.0, 0.0),
        _ => polygon(5, 4.4, 0.0),
    }
}
