//! The answer of `repro`, with or without `--check`.

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
    pass: bool,
    bundle: String,
    steps: Vec<Step>,
    #[serde(flatten)]
    told: Told,
}

/// What was packed, or found.
#[derive(Serialize, Debug)]
#[serde(untagged)]
pub enum Told {
    Packed { manifest: Manifest },
    Compared(Comparison),
}

impl ReproReport {
    /// What came of these steps.
    pub fn new(pass: bool, bundle: &Path, steps: Vec<Step>, told: Told) -> Self {
        Self { pass, bundle: bundle.display().to_string(), steps, told }
    }
}

impl Told {
    fn facts(&self) -> Vec<(&str, Text)> {
        match self {
            Self::Packed { manifest } => manifest
                .environment
                .iter()
                .map(|(name, text)| (name.as_str(), text.as_str().into()))
                .collect(),
            Self::Compared(Comparison { differences, remarks, kernels, groups, rulings }) => {
                let same = [
                    ("kernels", format!("{kernels} with the same PTX").into()),
                    ("checks", format!("{groups} groups with the same verdict").into()),
                    ("times", format!("{} compared", rulings.len()).into()),
                ];
                let remarks = remarks.iter().take(SHOWN).map(|text| ("note", Text::new(text, Tone::Faint)));
                let differences = differences.iter().take(SHOWN);
                let differences = differences.map(|text| ("differs", Text::new(text, Tone::Bad)));
                same.into_iter().chain(remarks).chain(differences).collect()
            }
        }
    }
}

impl Report for ReproReport {
    fn page(&self) -> Page {
        let word = |good| if good { Text::new("PASS", Tone::Good) } else { Text::new("FAIL", Tone::Bad) };
        let seconds = |step: &Step| format!("{:.1} s", step.seconds).into();
        let steps =
            self.steps.iter().map(|step| vec![step.name.into(), word(step.exit_code == 0), seconds(step)]);
        let ending = [("bundle", self.bundle.as_str().into()), ("result", word(self.pass))];
        let facts = self.told.facts().into_iter().chain(ending);
        let facts = facts.map(|(name, text)| vec![Text::new(name, Tone::Faint), text]);
        Page::default().table(steps).table(facts)
    }
}
