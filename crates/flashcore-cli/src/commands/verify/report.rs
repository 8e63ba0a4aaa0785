//! The answer of `verify`: a row per group, and every failure in full.

use std::time::Duration;

use flashcore::BackendError;
use flashcore_lab::verify::{Ending, Report as CheckReport};
use serde::Serialize;

use crate::{
    error::{CliError, Verdict},
    output::{Page, Report, Text, Tone},
};

/// Failures that a page shows in full.
const SHOWN: usize = 10;

/// Letters of a reason that a page shows.
const REASON: usize = 160;

/// Everything `verify` tells.
#[derive(Serialize, Debug)]
pub struct VerifyReport {
    pass: bool,
    stopped: bool,
    seconds: f64,
    backends: Vec<BackendReport>,
}

/// One backend.
#[derive(Serialize, Debug)]
pub struct BackendReport {
    backend: &'static str,
    pub unavailable: Option<String>,
    pub groups: Vec<GroupReport>,
}

/// One group of checks.
#[derive(Serialize, Debug)]
pub struct GroupReport {
    group: String,
    passed: usize,
    skipped: usize,
    failed: usize,
    seconds: f64,
    /// The largest share of its tolerance that an error reached.
    worst: Option<f64>,
    failures: Vec<CheckReport>,
}

impl VerifyReport {
    /// Puts together what was found.
    pub fn new(backends: Vec<BackendReport>, time: Duration, stopped: bool) -> Self {
        let failed = |b: &BackendReport| b.groups.iter().any(|group| group.failed > 0);
        let pass = !stopped && backends.iter().any(|b| b.passed() > 0) && !backends.iter().any(failed);
        Self { pass, stopped, seconds: time.as_secs_f64(), backends }
    }

    /// Passed, failed, or nothing could be checked.
    pub fn verdict(&self) -> Result<Verdict, CliError> {
        let failed = self.backends.iter().flat_map(|b| &b.groups).any(|group| group.failed > 0);
        let checked = self.backends.iter().any(|b| b.passed() > 0);
        let missing = self.backends.iter().find_map(|b| Some((b.backend, b.unavailable.clone()?)));
        match (failed, checked, missing) {
            (true, ..) => Ok(Verdict::Fail),
            _ if self.stopped => Ok(Verdict::Stopped),
            (_, false, Some((backend, reason))) => Err(BackendError::Unavailable { backend, reason }.into()),
            _ => Ok(Verdict::Pass),
        }
    }
}

impl BackendReport {
    /// A backend of which nothing is known yet.
    pub const fn new(backend: &'static str) -> Self {
        Self { backend, unavailable: None, groups: Vec::new() }
    }

    fn passed(&self) -> usize {
        self.groups.iter().map(|group| group.passed).sum()
    }
}

impl GroupReport {
    /// Counts what was found.
    pub fn new(group: String, reports: Vec<CheckReport>, time: Duration) -> Self {
        let count = |ending| reports.iter().filter(|report| report.ending == ending).count();
        let share = |report: &CheckReport| Some(report.max_error? / report.tolerance.filter(|t| *t > 0.0)?);
        Self {
            group,
            passed: count(Ending::Passed),
            skipped: count(Ending::Skipped),
            failed: count(Ending::Failed),
            seconds: time.as_secs_f64(),
            worst: reports.iter().filter_map(share).reduce(f64::max),
            failures: reports.into_iter().filter(|report| report.ending == Ending::Failed).collect(),
        }
    }

    fn row(&self, backend: &str) -> Vec<Text> {
        let tone = if self.failed > 0 { Tone::Bad } else { Tone::Plain };
        let worst = self.worst.map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
        vec![
            backend.into(),
            Text::new(self.group.as_str(), tone),
            self.passed.to_string().into(),
            self.skipped.to_string().into(),
            Text::new(self.failed.to_string(), tone),
            worst.into(),
            format!("{:.1} s", self.seconds).into(),
        ]
    }
}

impl Report for VerifyReport {
    fn page(&self) -> Page {
        let heading = ["backend", "group", "passed", "skipped", "failed", "of tolerance", "time"];
        let heading = heading.map(|word| Text::new(word, Tone::Faint)).to_vec();
        let rows = self.backends.iter().flat_map(|b| b.groups.iter().map(|group| group.row(b.backend)));
        let mut page = Page::default();
        if self.backends.iter().any(|b| !b.groups.is_empty()) {
            page = page.table(std::iter::once(heading).chain(rows));
        }
        for backend in &self.backends {
            if let Some(reason) = &backend.unavailable {
                page = page.line(Text::new(format!("{}: not here: {reason}", backend.backend), Tone::Faint));
            }
        }
        let failures: Vec<_> =
            self.backends.iter().flat_map(|b| b.groups.iter().flat_map(|group| &group.failures)).collect();
        if !failures.is_empty() {
            page = page.table(failures.iter().take(SHOWN).map(|failure| failure_row(failure)));
        }
        page.facts([("result", self.result(failures.len()))])
    }
}

impl VerifyReport {
    fn result(&self, failures: usize) -> Text {
        let time = format!("in {:.1} s", self.seconds);
        match (failures, self.pass) {
            (0, true) => Text::new(format!("PASS {time}"), Tone::Good),
            (0, false) if self.stopped => Text::new(format!("STOPPED {time}, no failure so far"), Tone::Bad),
            (0, false) => Text::new("nothing was checked", Tone::Bad),
            (n, _) => Text::new(format!("FAIL: {n} failed {time}; --json lists all"), Tone::Bad),
        }
    }
}

/// The beginning of what may be pages; `--json` has it all.
fn shortened(reason: &str) -> String {
    let line = reason.lines().next().unwrap_or_default();
    let whole = line.chars().count() <= REASON && !reason.contains('\n');
    if whole { line.to_owned() } else { line.chars().take(REASON).chain(" …".chars()).collect() }
}

fn failure_row(failure: &CheckReport) -> Vec<Text> {
    let stage = failure.stage.clone().unwrap_or_default();
    let reason = shortened(failure.reason.as_deref().unwrap_or_default());
    vec![Text::new(stage, Tone::Bad), failure.check.as_str().into(), reason.into()]
}
