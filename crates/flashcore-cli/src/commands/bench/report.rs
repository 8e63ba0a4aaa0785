//! The answer of `bench`: a short table per task, or per kind of comparison.

use std::path::Path;

use flashcore_lab::{
    bootstrap::Interval,
    ceiling::Ceiling,
    comparison::Compared,
    figures::{Figures, Speed},
    latency::time,
    machine::Machine,
    protocol::Protocol,
    record::Record,
};
use serde::Serialize;

use super::compared;
use crate::output::{Page, Report, Text, Tone};

/// Everything `bench` tells; raw times are in the result file.
#[derive(Serialize, Debug)]
pub struct BenchReport<'a> {
    complete: bool,
    created: &'a str,
    machine: &'a Machine,
    protocol: &'a Protocol,
    ceilings: &'a [Ceiling],
    results: Vec<Figures>,
    comparisons: &'a [Compared],
    warnings: &'a [String],
    out: Option<String>,
}

impl<'a> BenchReport<'a> {
    /// What a record comes to, and what was compared in it.
    pub fn new(record: &'a Record, comparisons: &'a [Compared], out: Option<&Path>) -> Self {
        Self {
            complete: record.complete,
            created: &record.created,
            machine: &record.machine,
            protocol: &record.protocol,
            ceilings: &record.ceilings,
            results: record.figures(None),
            comparisons,
            warnings: &record.warnings,
            out: out.map(|path| path.display().to_string()),
        }
    }

    fn way(&self) -> String {
        let p = self.protocol;
        let cold = if p.cold { "cold" } else { "warm" };
        let replay = if p.replay { ", GPU calls replayed" } else { "" };
        format!("{}, {} s x {}, caches {cold}{replay}, seed {}", p.mode.name(), p.seconds, p.rounds, p.seed)
    }

    fn facts(&self) -> Vec<(&'static str, Text)> {
        let device = self.machine.gpu.as_ref().unwrap_or(&self.machine.cpu);
        let mut facts = vec![("machine", device.as_str().into()), ("measured", self.way().into())];
        facts.extend(self.machine.peers.as_ref().map(|peers| ("peers", peers.as_str().into())));
        facts.extend(self.ceilings.iter().map(|c| ("roofline", roofline(c).into())));
        facts
    }

    fn ending(&self) -> Vec<(&'static str, Text)> {
        let mut facts: Vec<(&str, Text)> =
            self.warnings.iter().map(|warning| ("warning", Text::new(warning, Tone::Bad))).collect();
        facts.extend(compared::summary(self.comparisons));
        if !self.complete {
            facts.push(("result", Text::new("STOPPED; not everything was measured", Tone::Bad)));
        }
        facts.extend(self.out.as_ref().map(|path| ("wrote", path.as_str().into())));
        facts
    }
}

fn roofline(ceiling: &Ceiling) -> String {
    let Ceiling { place, dtype, copy, matrix, how } = ceiling;
    format!("{place} {dtype}: {:.2} TFLOP/s ({how}), {:.0} GB/s copied", matrix / 1e12, copy / 1e9)
}

impl Report for BenchReport<'_> {
    fn page(&self) -> Page {
        let page = Page::default().facts(self.facts());
        let page = if self.comparisons.is_empty() {
            self.results.chunk_by(|a, b| a.task == b.task).fold(page, task)
        } else {
            let page = compared::tables(page, self.comparisons);
            let named = self.results.iter().filter_map(|r| Some(format!("{}: {}", r.task, exclusion(r)?)));
            named.map(bad).fold(page, Page::line)
        };
        let ending = self.ending();
        if ending.is_empty() { page } else { page.facts(ending) }
    }
}

fn task(page: Page, rows: &[Figures]) -> Page {
    let mut page = page.line(rows[0].task.as_str());
    if rows.iter().any(|row| row.speed.is_some()) {
        page = page.table(std::iter::once(heading()).chain(rows.iter().filter_map(row)));
    }
    rows.iter().filter_map(exclusion).map(bad).fold(page, Page::line)
}

fn heading() -> Vec<Text> {
    let words = ["", "p50", "p90", "95 %", "TFLOP/s", "GB/s", "roof", "ratio"];
    words.map(|word| Text::new(word, Tone::Faint)).to_vec()
}

fn row(figures: &Figures) -> Option<Vec<Text>> {
    let speed = figures.speed.as_ref()?;
    Some(vec![
        figures.arm.as_str().into(),
        time(speed.p50_us).into(),
        time(speed.p90_us).into(),
        spread(speed).into(),
        figure(speed.tflops).into(),
        figure(speed.gbps).into(),
        speed.roofline_percent.map_or(String::new(), |percent| format!("{percent:.0} %")).into(),
        ratio(speed.ratio.as_ref()),
    ])
}

/// Why a competitor has no row.
fn exclusion(figures: &Figures) -> Option<String> {
    Some(format!("{} was not timed: {}", figures.arm, figures.excluded.as_ref()?))
}

fn bad(words: String) -> Text {
    Text::new(words, Tone::Bad)
}

/// Half the width of the interval of the median.
fn spread(speed: &Speed) -> String {
    format!("±{:.1} %", 50.0 * (speed.high_us - speed.low_us) / speed.p50_us)
}

/// Three digits that mean something.
fn figure(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    }
}

fn ratio(ratio: Option<&Interval>) -> Text {
    ratio.map_or("1".into(), |ratio| {
        let tone = if ratio.high < 1.0 { Tone::Good } else { Tone::Plain };
        Text::new(format!("{:.3}", ratio.point), tone)
    })
}
