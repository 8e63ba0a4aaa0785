//! The answers of `repro` and of `repro --check`.

use std::path::Path;

use flashcore_lab::repro::{bundle::Manifest, compare::Comparison};
use serde::Serialize;

use super::steps::Step;
use crate::output::{Page, Report, Text, Tone};

/// Differences and remarks that a page shows.
const SHOWN: usize = 20;

/// Everything `repro` tells.
#[derive(Serialize, Debug)]
pub struct ReproReport {
    pub pass: bool,
    bundle: String,
    steps: Vec<Step>,
    manifest: Manifest,
}

/// Everything `repro --check` tells.
#[derive(Serialize, Debug)]
pub struct CheckReport {
    pub pass: bool,
    bundle: String,
    steps: Vec<Step>,
    #[serde(flatten)]
    comparison: Comparison,
}

impl ReproReport {
    /// What was packed; it passes if every step did.
    pub fn new(bundle: &Path, manifest: Manifest, steps: Vec<Step>) -> Self {
        let pass = steps.iter().all(|step| step.exit_code == 0);
        Self { pass, bundle: bundle.display().to_string(), steps, manifest }
    }
}

impl CheckReport {
    /// What was found.
    pub fn new(bundle: &Path, comparison: Comparison, steps: Vec<Step>) -> Self {
        Self { pass: comparison.pass(), bundle: bundle.display().to_string(), steps, comparison }
    }
}

/// The steps, what else there is to tell, and the verdict.
fn page<'a>(pass: bool, steps: &[Step], facts: impl Iterator<Item = (&'a str, Text)>) -> Page {
    let word = |good| if good { Text::new("PASS", Tone::Good) } else { Text::new("FAIL", Tone::Bad) };
    let name = |name: &str| Text::new(name, Tone::Faint);
    let seconds = |step: &Step| format!("{:.1} s", step.seconds).into();
    let steps = steps.iter().map(|step| vec![step.name.into(), word(step.exit_code == 0), seconds(step)]);
    let facts = facts.chain([("result", word(pass))]);
    Page::default().table(steps).table(facts.map(|(what, text)| vec![name(what), text]))
}

impl Report for ReproReport {
    fn page(&self) -> Page {
        let environment = self.manifest.environment.iter();
        let facts = environment.map(|(name, text)| (name.as_str(), text.as_str().into()));
        page(self.pass, &self.steps, facts.chain([("bundle", self.bundle.as_str().into())]))
    }
}

impl Report for CheckReport {
    fn page(&self) -> Page {
        let Comparison { differences, remarks, kernels, groups, rulings } = &self.comparison;
        let counts = [
            ("bundle", self.bundle.as_str().into()),
            ("kernels", format!("{kernels} with the same PTX").into()),
            ("checks", format!("{groups} groups with the same verdict").into()),
            ("times", format!("{} compared", rulings.len()).into()),
        ];
        let remarks = remarks.iter().take(SHOWN).map(|text| ("note", Text::new(text, Tone::Faint)));
        let differences = differences.iter().take(SHOWN).map(|text| ("differs", Text::new(text, Tone::Bad)));
        page(self.pass, &self.steps, counts.into_iter().chain(remarks).chain(differences))
    }
}
