//! The page: a summary of everything on top, then a section per series with its plots and tables.
//!
//! It is one file without scripts, and its content security policy forbids the browser to load anything.

mod section;
mod summary;
mod table;
mod tables;

use super::{
    Names, Report,
    markup::{Element, Node},
    plot::PALETTE,
    series::Series,
    wording,
};

const STYLE: &str = include_str!("style.css");
/// No network, no scripts; styles only from the page itself.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The whole page.
pub fn html(report: &Report) -> String {
    let mut names = Names::default();
    let named: Vec<(String, &Series)> =
        report.series.iter().map(|series| (names.unique(&series.newest().name), series)).collect();
    let sections = named.iter().map(|(id, series)| section::section(id, series, &report.figures(series)));
    let main = Element::new("main")
        .with(summary::summary(&named))
        .all(sections)
        .all(report.checks.as_ref().map(tables::checks));
    let body = Element::new("body").with(header(report)).with(main);
    let page = Element::new("html").attr("lang", "en").with(head()).with(body);
    format!("<!doctype html>\n{page}\n")
}

fn head() -> Element {
    let meta = |name, content| Element::new("meta").attr("name", name).attr("content", content);
    Element::new("head")
        .with(Element::new("meta").attr("charset", "utf-8"))
        .with(Element::new("meta").attr("http-equiv", "Content-Security-Policy").attr("content", POLICY))
        .with(meta("viewport", "width=device-width, initial-scale=1"))
        .with(meta("color-scheme", "light dark"))
        .with(Element::new("title").with("FlashCore: measured"))
        .with(Node::Style(PALETTE))
        .with(Node::Style(STYLE))
}

fn header(report: &Report) -> Element {
    let runs: Vec<_> = report.series.iter().flat_map(Series::runs).collect();
    let newest = runs.iter().map(|run| run.record.created.as_str()).max().unwrap_or_default();
    let mut devices: Vec<_> = runs.iter().map(|run| run.device().to_owned()).collect();
    devices.sort_unstable();
    devices.dedup();
    let count = wording::count(runs.len(), "run");
    let lede = format!("{count} on {}, the newest of {}.", wording::list(&devices), wording::date(newest));
    let title = Element::new("h1").with("FlashCore: measured");
    Element::new("header").with(title).with(Element::new("p").class("soft").with(lede))
}
