//! The answer of `tune`: a row per problem, and what to do with the table.

use std::path::Path;

use flashcore_lab::{latency::time, tune::search::Tuned};
use serde::Serialize;

use crate::output::{Page, Report, Text, Tone};

/// Everything `tune` tells.
#[derive(Serialize, Debug)]
pub struct TuneReport {
    pub stopped: bool,
    table: String,
    journal: String,
    /// Measurements that an earlier run had made.
    found: usize,
    pub results: Vec<Tuned>,
}

impl TuneReport {
    /// An answer without results yet.
    pub fn new(table: &Path, journal: &Path, found: usize) -> Self {
        let [table, journal] = [table, journal].map(|path| path.display().to_string());
        Self { stopped: false, table, journal, found, results: Vec::new() }
    }

    fn ending(&self) -> Vec<(&'static str, Text)> {
        let rows = self.results.iter().filter(|result| result.row.is_some()).count();
        let mut facts = vec![("table", format!("{}: {rows} rows from this search", self.table).into())];
        let journal = format!("{}, {} measurements from before", self.journal, self.found);
        facts.push(("journal", journal.into()));
        if self.stopped {
            let text = "STOPPED; the same command goes on from here";
            facts.push(("result", Text::new(text, Tone::Bad)));
        }
        facts
    }
}

impl Report for TuneReport {
    fn page(&self) -> Page {
        if self.results.is_empty() {
            return Page::default().facts(self.ending());
        }
        let words = ["problem", "plan", "best", "ratio", "95 %", "tried", "out", "time"];
        let heading = words.map(|word| Text::new(word, Tone::Faint)).to_vec();
        let rows = std::iter::once(heading).chain(self.results.iter().map(row));
        let page = Page::default().table(rows);
        let page = page.facts(self.results.iter().flat_map(winner));
        page.facts(self.ending())
    }
}

fn row(result: &Tuned) -> Vec<Text> {
    let (ratio, interval) = match result.ratio {
        Some(ratio) => {
            let interval = format!("{:.3}-{:.3}", ratio.low, ratio.high);
            (Text::new(format!("{:.3}", ratio.point), Tone::Good), interval)
        }
        None => ("1".into(), "the plan's own".to_owned()),
    };
    vec![
        result.task.as_str().into(),
        time(result.plan.median_us).into(),
        time(result.best.median_us).into(),
        ratio,
        interval.into(),
        result.measured.to_string().into(),
        result.failed.len().to_string().into(),
        format!("{:.0} s", result.seconds).into(),
    ]
}

/// The kernel that won, and how far it reaches.
fn winner(result: &Tuned) -> Vec<(&'static str, Text)> {
    let mut facts = vec![("best", Text::from(result.best.kernel.as_str()))];
    if let Some(row) = &result.row {
        let (queries, keys) = (row.class.queries, row.class.keys);
        let reach = format!(
            "{} to {} queries, {} to {} keys",
            queries.least(),
            queries.most(),
            keys.least(),
            keys.most()
        );
        facts.push(("for", reach.into()));
    } else if result.ratio.is_some() {
        facts.push(("for", "this size alone, so the table gets no row".into()));
    }
    if !result.complete {
        facts.push(("note", Text::new("ended before all candidates were tried", Tone::Faint)));
    }
    facts
}
