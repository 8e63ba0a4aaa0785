//! The answer of `tune`: a row per problem, and what to do with the table.

use std::path::Path;

use flashcore_lab::tune::search::Tuned;
use serde::Serialize;

use crate::output::{Page, Report, Text, Tone};

/// Everything `tune` tells.
#[derive(Serialize, Debug)]
pub struct TuneReport {
    stopped: bool,
    table: String,
    log: String,
    results: Vec<Tuned>,
}

impl TuneReport {
    /// What was found, and where it was kept.
    pub fn new(table: &Path, log: &Path, stopped: bool, results: Vec<Tuned>) -> Self {
        let [table, log] = [table, log].map(|path| path.display().to_string());
        Self { stopped, table, log, results }
    }
}

impl Report for TuneReport {
    fn page(&self) -> Page {
        let words = ["problem", "rules", "best", "in", "ratio, 95 %", "measured", "rejected"];
        let heading = words.map(|word| Text::new(word, Tone::Faint)).to_vec();
        let rows = std::iter::once(heading).chain(self.results.iter().map(row));
        let added = self.results.iter().filter(|result| result.row.is_some()).count();
        let mut facts: Vec<(_, Text)> =
            self.results.iter().map(|result| ("best", result.best.kernel.as_str().into())).collect();
        if self.results.iter().any(|result| !result.complete) {
            facts.push(("note", Text::new("ended before all candidates were tried", Tone::Faint)));
        }
        facts.push(("table", format!("{}: {added} rows from this search", self.table).into()));
        facts.push(("log", self.log.as_str().into()));
        if self.stopped {
            facts.push(("result", Text::new("STOPPED; the same command goes on from here", Tone::Bad)));
        }
        Page::default().table(rows).facts(facts)
    }
}

fn row(result: &Tuned) -> Vec<Text> {
    let ratio = match result.ratio {
        Some(ratio) => Text::new(format!("{:.3}-{:.3}", ratio.low, ratio.high), Tone::Good),
        None => "the rules' own".into(),
    };
    let cost = |cost: f64| format!("{cost:.1}").into();
    vec![
        result.task.as_str().into(),
        cost(result.rules.cost),
        cost(result.best.cost),
        result.unit.into(),
        ratio,
        result.measured.to_string().into(),
        result.rejected.to_string().into(),
    ]
}
