//! HTML and SVG as a tree that escapes whatever it is given: text from a file can never become markup.
//!
//! [`super::plot`] and [`super::page`] build these trees. Style sheets are the only text that is not escaped, and they
//! are part of the program.

use std::fmt::{self, Display};

/// Elements that never have children. Shapes are among them: inside `svg`, HTML too takes `<path/>` as closed.
const VOID: [&str; 6] = ["meta", "col", "path", "line", "rect", "circle"];

/// An element with its attributes and children.
#[derive(Clone, PartialEq, Debug)]
pub struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    children: Vec<Node>,
}

/// What an element may hold.
#[derive(Clone, PartialEq, Debug)]
pub enum Node {
    /// Another element.
    Element(Element),
    /// Text from anywhere.
    Text(String),
    /// A style sheet of the program.
    Style(&'static str),
}

impl Element {
    /// An empty element.
    pub const fn new(name: &'static str) -> Self {
        Self { name, attributes: Vec::new(), children: Vec::new() }
    }

    /// With an attribute.
    pub fn attr(mut self, name: &'static str, value: impl Display) -> Self {
        self.attributes.push((name, value.to_string()));
        self
    }

    /// With attributes that are coordinates.
    pub fn at<const N: usize>(self, places: [(&'static str, f64); N]) -> Self {
        places.into_iter().fold(self, |element, (name, place)| element.attr(name, Coordinate(place)))
    }

    /// With classes, if any.
    pub fn class(self, names: impl Display) -> Self {
        let names = names.to_string();
        if names.is_empty() { self } else { self.attr("class", names) }
    }

    /// With one more child.
    pub fn with(mut self, child: impl Into<Node>) -> Self {
        self.children.push(child.into());
        self
    }

    /// With more children.
    pub fn all<N: Into<Node>>(mut self, children: impl IntoIterator<Item = N>) -> Self {
        self.children.extend(children.into_iter().map(Into::into));
        self
    }
}

impl From<Element> for Node {
    fn from(element: Element) -> Self {
        Self::Element(element)
    }
}

impl From<String> for Node {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Node {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{}", self.name)?;
        for (name, value) in &self.attributes {
            write!(f, " {name}=\"{}\"", Escaped(value))?;
        }
        if VOID.contains(&self.name) {
            return f.write_str("/>");
        }
        f.write_str(">")?;
        self.children.iter().try_for_each(|child| child.fmt(f))?;
        write!(f, "</{}>", self.name)
    }
}

impl Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Element(element) => element.fmt(f),
            Self::Text(text) => Escaped(text).fmt(f),
            Self::Style(sheet) => write!(f, "<style>{sheet}</style>"),
        }
    }
}

/// Text that is safe between tags and between quotes.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            letter if deceives(letter) => f.write_str("\u{fffd}"),
            letter => write!(f, "{letter}"),
        })
    }
}

/// Control characters, which XML forbids, and those that change the direction in which other text is read.
fn deceives(letter: char) -> bool {
    letter.is_control() || matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A coordinate to a tenth of a unit, which is finer than a screen shows.
struct Coordinate(f64);

impl Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = (self.0 * 10.0).round() / 10.0;
        // Adding zero turns a negative zero into a positive one.
        write!(f, "{}", tenths + 0.0)
    }
}

/// A line through points, as the value of a path's `d`.
pub fn path(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    for (x, y) in points {
        let step = if text.is_empty() { 'M' } else { 'L' };
        text.push_str(&format!("{step}{} {}", Coordinate(x), Coordinate(y)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(element: Element, text: &str) {
        assert_eq!(element.to_string(), text);
    }

    #[test]
    fn text_never_becomes_markup() {
        let hostile = "</p><script>alert('x')</script>&amp;\"\u{202e}\u{7}";
        let safe = "&lt;/p&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;amp;&quot;\u{fffd}\u{fffd}";
        check(Element::new("p").with(hostile), &format!("<p>{safe}</p>"));
        check(Element::new("p").attr("title", hostile), &format!("<p title=\"{safe}\"></p>"));
    }

    #[test]
    fn trees_are_written_out() {
        let tree = Element::new("g").class("a b").with(Element::new("path").attr("d", "M0 0")).with("x");
        check(tree, "<g class=\"a b\"><path d=\"M0 0\"/>x</g>");
        check(Element::new("td"), "<td></td>");
        check(Element::new("ul").all(["a", "b"]), "<ul>ab</ul>");
    }

    #[test]
    fn coordinates_are_short() {
        check(
            Element::new("rect").at([("x", -0.04), ("y", 1.25), ("rx", 3.0)]),
            "<rect x=\"0\" y=\"1.3\" rx=\"3\"/>",
        );
        assert_eq!(path([(0.0, 1.0), (2.55, 3.0)]), "M0 1L2.6 3");
    }
}
