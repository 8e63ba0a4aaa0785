//! A table that scrolls by itself where it is wider than the page.

use crate::{
    bootstrap::Interval,
    report::{markup::Element, run::Standing, wording},
};

/// A table with a caption, a row of headings, and rows.
pub(super) fn table(
    caption: &str,
    headings: &[String],
    rows: impl IntoIterator<Item = Vec<Element>>,
) -> Element {
    let heading = |words: &String| Element::new("th").attr("scope", "col").with(words.as_str());
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

/// A figure, or nothing.
pub(super) fn some<T>(value: Option<T>, words: impl FnOnce(T) -> String) -> Element {
    cell(value.map_or_else(|| "–".to_owned(), words))
}

/// Text that may break lines.
pub(super) fn prose(words: impl Into<String>) -> Element {
    cell(words).class("prose")
}

/// How many times as fast, with a mark unless it is faster beyond doubt.
pub(super) fn lead(lead: Option<Interval>, interval: bool) -> Element {
    let Some(lead) = lead else { return cell("–") };
    let (class, mark) = match Standing::of(&lead) {
        Standing::Faster => ("", ""),
        Standing::Level => ("level", "≈ "),
        Standing::Slower => ("miss", "▼ "),
    };
    let range = format!("{} to {}", wording::times(lead.low), wording::times(lead.high));
    let words = format!("{mark}{}", wording::times(lead.point));
    let cell = Element::new("td").class(class).attr("title", format!("95 %: {range}")).with(words);
    if interval { cell.with(Element::new("small").with(format!(" {range}"))) } else { cell }
}
