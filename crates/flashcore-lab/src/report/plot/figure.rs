//! Panels that belong together, with their legend: as part of a page, or as a picture of its own.
//!
//! On a page each panel is an SVG of the width of a phone, so that a narrow screen shows them one below the other. A
//! picture is one SVG that brings its colours for light and dark along.

use super::{
    PALETTE,
    frame::{Panel, WIDTH, text},
    mark::{Slot, shape},
};
use crate::report::{
    markup::{Element, Node},
    wording,
};

/// Panels with a legend.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// The end of a picture's file name.
    pub name: &'static str,
    /// What it shows.
    pub title: String,
    /// How to read it.
    pub caption: String,
    /// Who is drawn how.
    pub legend: Vec<(Slot, String)>,
    /// The panels, row by row.
    pub panels: Vec<Panel>,
    /// Panels in a row of a picture.
    pub columns: usize,
}

/// Between panels of a picture.
const GAP: f64 = 20.0;
/// Around a picture.
const EDGE: f64 = 20.0;
/// Width of a usual letter.
const LETTER: f64 = 6.6;
/// Width of a usual letter of a picture's title.
const BOLD_LETTER: f64 = 10.2;
/// Width of the line with its mark before a name.
const SAMPLE: f64 = 26.0;

fn svg(width: f64, height: f64) -> Element {
    Element::new("svg")
        .attr("xmlns", "http://www.w3.org/2000/svg")
        .attr("viewBox", format!("0 0 {width} {height}"))
        .class("plot")
        .attr("font-family", "system-ui, sans-serif")
        .attr("font-size", 12)
        .attr("role", "img")
}

/// Gives a picture a name and a description that readers of the screen find.
fn described(element: Element, id: &str, title: &str, description: &str) -> Element {
    element
        .attr("aria-labelledby", format!("{id}-t {id}-d"))
        .with(Element::new("title").attr("id", format!("{id}-t")).with(title))
        .with(Element::new("desc").attr("id", format!("{id}-d")).with(description))
}

/// A short line with a competitor's mark.
fn sample(slot: Slot, (x, y): (f64, f64)) -> Element {
    let line = Element::new("path").class("line").attr("d", format!("M{x} {y}h{}", SAMPLE - 8.0));
    Element::new("g").class(slot.class()).with(line).with(shape(slot, (x + (SAMPLE - 8.0) / 2.0, y)))
}

impl Figure {
    /// As part of a page; `id` tells it from all others there.
    pub fn html(&self, id: &str) -> Element {
        let caption = Element::new("figcaption")
            .with(Element::new("h3").with(self.title.as_str()))
            .with(Element::new("p").with(self.caption.as_str()));
        let legend = self.legend.iter().map(|(slot, name)| {
            let mark = svg(SAMPLE - 6.0, 12.0).attr("aria-hidden", "true").with(sample(*slot, (1.0, 6.0)));
            Element::new("li").with(mark).with(name.as_str())
        });
        let panels = self.panels.iter().enumerate().map(|(n, panel)| {
            let picture = svg(WIDTH, panel.height);
            described(picture, &format!("{id}-{}-{n}", self.name), &panel.title, &panel.description)
                .with(panel.body.clone())
        });
        Element::new("figure")
            .with(caption)
            .with(Element::new("ul").class("legend").all(legend))
            .with(Element::new("div").class(format!("panels of-{}", self.columns)).all(panels))
    }

    /// As a picture of its own; `origin` says where the figures come from.
    pub fn picture(&self, heading: &str, origin: &str) -> Element {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let width = 2.0 * EDGE + columns as f64 * (WIDTH + GAP) - GAP;
        let (head, top) = self.head(width, heading, origin);
        let (panels, height) = self.laid_out(columns, top);
        let picture = svg(width, height).attr("width", width).attr("height", height);
        let paper =
            Element::new("rect").class("mark paper").at([("width", width), ("height", height), ("rx", 8.0)]);
        described(picture, "f", heading, &self.words())
            .with(Node::Style(PALETTE))
            .with(paper)
            .all(head)
            .all(panels)
    }

    /// Title, origin and legend, and where the panels begin.
    fn head(&self, width: f64, heading: &str, origin: &str) -> (Vec<Element>, f64) {
        let (mut head, mut y) = (Vec::new(), EDGE - 8.0);
        for line in lines(heading, (width - 2.0 * EDGE) / BOLD_LETTER) {
            y += 22.0;
            head.push(text("ink name", "start", (EDGE, y), &line).attr("font-size", 17));
        }
        for line in lines(origin, (width - 2.0 * EDGE) / LETTER) {
            y += 18.0;
            head.push(text("soft", "start", (EDGE, y), &line));
        }
        let (mut x, mut y) = (EDGE, y + 24.0);
        for (slot, name) in &self.legend {
            let needed = SAMPLE + LETTER * wording::width(name);
            if x > EDGE && x + needed > width - EDGE {
                (x, y) = (EDGE, y + 18.0);
            }
            head.push(sample(*slot, (x, y - 4.0)));
            head.push(text("ink", "start", (x + SAMPLE, y), name));
            x += needed + 16.0;
        }
        (head, y + GAP)
    }

    fn laid_out(&self, columns: usize, mut top: f64) -> (Vec<Element>, f64) {
        let mut laid = Vec::new();
        for row in self.panels.chunks(columns) {
            laid.extend(row.iter().enumerate().map(|(n, panel)| {
                let place = format!("translate({} {top})", EDGE + n as f64 * (WIDTH + GAP));
                Element::new("g").attr("transform", place).with(panel.body.clone())
            }));
            top += row.iter().map(|panel| panel.height).fold(0.0, f64::max) + GAP;
        }
        (laid, top - GAP + EDGE)
    }

    fn words(&self) -> String {
        let panels = self.panels.iter().map(|panel| format!("{}: {}", panel.title, panel.description));
        panels.collect::<Vec<_>>().join(" ")
    }
}

/// Words in lines of so many letters; a word that is longer than a line is shortened.
fn lines(words: &str, letters: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words.split_whitespace() {
        let word = fitting(word, letters);
        match lines.last_mut() {
            Some(line) if wording::width(line) + wording::width(&word) + 1.0 <= letters => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

fn fitting(word: &str, letters: f64) -> String {
    let count = word.chars().count();
    let share = letters / wording::width(word);
    if share >= 1.0 {
        word.to_owned()
    } else {
        wording::short(word, ((count as f64 * share) as usize).max(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_set_in_lines() {
        assert_eq!(lines("one two three", 8.0), ["one two", "three"]);
        assert_eq!(lines("  enormous  a", 4.0), ["en…", "a"]);
        assert_eq!(lines("", 3.0), [""; 0]);
    }
}
