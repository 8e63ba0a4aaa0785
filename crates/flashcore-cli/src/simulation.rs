//! What the simulator counted and found, as commands show it; `sim`, `run --backend sim` and `inspect --simulate` use it.

use std::{collections::BTreeMap, fmt};

use flashcore_sim::{Counters, Finding, Outcome, Severity};
use serde::Serialize;

use crate::output::{Page, Text, Tone};

/// Counts and findings of one simulated launch.
#[derive(Serialize, Debug)]
pub struct Simulated {
    /// Whether nothing was wrong; notes do not count.
    pub clean: bool,
    /// Whether a finding ended the launch before its time.
    pub halted: bool,
    pub findings: Vec<Found>,
    pub counters: Counts,
}

/// One finding.
#[derive(Serialize, Debug)]
pub struct Found {
    severity: &'static str,
    kind: String,
    message: String,
    instruction: Option<String>,
    source: Option<String>,
    cta: [u32; 3],
    warp: u32,
    lane: u32,
    count: u64,
}

/// What a launch did, in numbers.
#[derive(Serialize, Debug)]
pub struct Counts {
    /// Warp instructions in all, and by kind of work.
    instructions: u64,
    by_class: BTreeMap<String, u64>,
    shared_wavefronts: u64,
    bank_conflicts: u64,
    global_sectors: u64,
    async_bytes: u64,
    tensor_macs: u64,
    divergent_branches: u64,
}

impl From<&Outcome> for Simulated {
    fn from(outcome: &Outcome) -> Self {
        Self {
            clean: outcome.is_clean(),
            halted: outcome.halted,
            findings: outcome.findings.iter().map(Found::from).collect(),
            counters: Counts::from(&outcome.counters),
        }
    }
}

impl From<&Finding> for Found {
    fn from(finding: &Finding) -> Self {
        let site = finding.site.as_ref();
        Self {
            severity: if finding.severity() == Severity::Error { "error" } else { "note" },
            kind: format!("{:?}", finding.kind),
            message: finding.message.clone(),
            instruction: site.map(|site| site.text.clone()),
            source: site.and_then(|site| site.source.clone()),
            cta: finding.cta,
            warp: finding.warp,
            lane: finding.lane,
            count: finding.count,
        }
    }
}

impl From<&Counters> for Counts {
    fn from(counters: &Counters) -> Self {
        let named = |(class, &count): (&_, &u64)| (format!("{class:?}").to_lowercase(), count);
        Self {
            instructions: counters.total_instructions(),
            by_class: counters.instructions.iter().map(named).collect(),
            shared_wavefronts: counters.shared_wavefronts,
            bank_conflicts: counters.bank_conflicts,
            global_sectors: counters.global_sectors,
            async_bytes: counters.async_bytes,
            tensor_macs: counters.tensor_macs,
            divergent_branches: counters.divergent_branches,
        }
    }
}

impl Simulated {
    /// Adds findings and counts to a page.
    pub fn add_to(&self, page: Page) -> Page {
        let counts = self.counters.rows();
        let page = page.table(counts.into_iter().map(|(name, n)| vec![faint(name), n.to_string().into()]));
        self.findings.iter().fold(page, |page, found| page.table(found.rows()))
    }

    /// How it went, in a few words.
    pub fn verdict(&self) -> Text {
        let errors = self.findings.iter().filter(|found| found.is_error()).count();
        match errors {
            0 => Text::new("clean", Tone::Good),
            1 => Text::new("1 kind of fault", Tone::Bad),
            n => Text::new(format!("{n} kinds of fault"), Tone::Bad),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl Found {
    /// Whether something is wrong; the others are notes.
    pub fn is_error(&self) -> bool {
        self.severity == "error"
    }

    fn rows(&self) -> Vec<Vec<Text>> {
        let [x, y, z] = self.cta;
        let tone = if self.is_error() { Tone::Bad } else { Tone::Plain };
        let place = format!("CTA ({x},{y},{z}) warp {} lane {}", self.warp, self.lane);
        let times = if self.count > 1 { format!(", {} times", self.count) } else { String::new() };
        let mut rows = vec![vec![Text::new(self.severity, tone), self.to_string().into()]];
        rows.extend(self.instruction.iter().map(|text| vec![faint("at"), text.as_str().into()]));
        rows.extend(self.source.iter().map(|text| vec![faint("from"), text.as_str().into()]));
        rows.push(vec![faint("in"), (place + &times).into()]);
        rows
    }
}

impl Counts {
    fn rows(&self) -> Vec<(String, u64)> {
        let classes = self.by_class.iter().map(|(class, &n)| (format!("  {class}"), n));
        let fixed = [
            ("shared wavefronts", self.shared_wavefronts),
            ("bank conflicts", self.bank_conflicts),
            ("global sectors", self.global_sectors),
            ("async bytes", self.async_bytes),
            ("tensor multiply-adds", self.tensor_macs),
            ("divergent branches", self.divergent_branches),
        ];
        let all = std::iter::once(("warp instructions".to_owned(), self.instructions)).chain(classes);
        all.chain(fixed.map(|(name, n)| (name.to_owned(), n))).collect()
    }
}

fn faint(words: impl Into<String>) -> Text {
    Text::new(words, Tone::Faint)
}
