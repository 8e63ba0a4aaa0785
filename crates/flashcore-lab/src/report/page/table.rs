//! A table that scrolls by itself where it is wider than the page.

use crate::{
    bootstrap::Interval,
    report::{markup::Element, run::Standing, wording},
};

/// The heading of a column.
pub(super) struct Heading {
    words: String,
    /// Whether the column holds words and not figures.
    text: bool,
}

/// Headings of columns of words.
pub(super) fn texts<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Vec<Heading> {
    words.into_iter().map(|words| Heading { words: words.into(), text: true }).collect()
}

/// Headings of columns of figures.
pub(super) fn figures<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Vec<Heading> {
    words.into_iter().map(|words| Heading { words: words.into(), text: false }).collect()
}

/// A table with a caption, a row of headings, and rows.
pub(super) fn table(
    caption: &str,
    headings: &[Heading],
    rows: impl IntoIterator<Item = Vec<Element>>,
) -> Element {
    let heading = |heading: &Heading| {
        let class = if heading.text { "text" } else { "" };
        Element::new("th").attr("scope", "col").class(class).with(heading.words.as_str())
    };
    let head = Element::new("thead").with(Element::new("tr").all(headings.iter().map(heading)));
    let body = Element::new("tbody").all(rows.into_iter().map(|cells| Element::new("tr").all(cells)));
    let table = Element::new("table").with(Element::new("caption").with(caption)).with(head).with(body);
    // Focusable, so that the keyboard can scroll it.
    let region = Element::new("div").class("scroll").attr("tabindex", 0).attr("role", "region");
    region.attr("aria-label", caption).with(table)
}

/// The heading of a row.
pub(super) fn row_name(words: impl Into<String>) -> Element {
    Element::new("th").attr("scope", "row").with(words.into())
}

/// A figure.
pub(super) fn cell(words: impl Into<String>) -> Element {
    Element::new("td").with(words.into())
}

/// A word.
pub(super) fn word(words: impl Into<String>) -> Element {
    cell(words).class("text")
}

/// A figure, or nothing.
pub(super) fn some<T>(value: Option<T>, words: impl FnOnce(T) -> String) -> Element {
    cell(value.map_or_else(|| "–".to_owned(), words))
}

/// Text that may break lines.
pub(super) fn prose(words: impl Into<String>) -> Element {
    cell(words).class("prose")
}

/// How many times as fast, with a mark unless it is faster beyond doubt.
pub(super) fn lead(lead: Option<Interval>) -> Element {
    let Some(lead) = lead else { return cell("–") };
    let (class, mark) = match Standing::of(&lead) {
        Standing::Faster => ("", ""),
        Standing::Level => ("level", "≈ "),
        Standing::Slower => ("miss", "▼ "),
    };
    let point = wording::times(lead.point);
    let words = format!("{mark}{}", point.trim_end_matches('×'));
    Element::new("td").class(class).attr("title", lead_range(&lead)).with(words)
}

/// Where a lead lies.
pub(super) fn lead_range(lead: &Interval) -> String {
    format!("{} to {}", wording::times(lead.low), wording::times(lead.high))
}
