//! The answers of `repro` and of `repro --check`.

use std::path::Path;

use flashcore_lab::repro::{compare::Comparison, manifest::Manifest};
use serde::Serialize;

use super::steps::{Step, Steps};
use crate::output::{Page, Report, Text, Tone};

/// Differences and remarks that a page shows.
const SHOWN: usize = 20;

/// Everything `repro` tells.
#[derive(Serialize, Debug)]
pub struct ReproReport {
    pass: bool,
    bundle: String,
    steps: Vec<Step>,
    manifest: Manifest,
}

/// Everything `repro --check` tells.
#[derive(Serialize, Debug)]
pub struct CheckReport {
    pass: bool,
    bundle: String,
    steps: Vec<Step>,
    #[serde(flatten)]
    comparison: Comparison,
}

impl ReproReport {
    /// What was packed.
    pub fn new(bundle: &Path, manifest: Manifest, steps: Steps) -> Self {
        let steps = steps.done;
        // A profile need not be possible.
        let pass = steps.iter().all(|step| step.exit_code == 0 || step.name == "profile");
        Self { pass, bundle: bundle.display().to_string(), steps, manifest }
    }

    /// Whether everything went well.
    pub const fn pass(&self) -> bool {
        self.pass
    }
}

impl CheckReport {
    /// What was found.
    pub fn new(bundle: &Path, comparison: Comparison, steps: Steps) -> Self {
        let pass = comparison.pass();
        Self { pass, bundle: bundle.display().to_string(), steps: steps.done, comparison }
    }

    /// Whether it came out the same.
    pub const fn pass(&self) -> bool {
        self.pass
    }
}

fn step_row(step: &Step) -> Vec<Text> {
    let state = match step.exit_code {
        0 => Text::new("ok", Tone::Good),
        1 => Text::new("failed", Tone::Bad),
        _ => Text::new("could not run", Tone::Faint),
    };
    vec![step.name.into(), state, format!("{:.1} s", step.seconds).into()]
}

impl Report for ReproReport {
    fn page(&self) -> Page {
        let Manifest { commit, rustc, machine, kernels, settings, .. } = &self.manifest;
        let result = if self.pass { Text::new("PASS", Tone::Good) } else { Text::new("FAIL", Tone::Bad) };
        let commit = commit.as_deref().unwrap_or("none");
        Page::default().table(self.steps.iter().map(step_row)).facts([
            ("commit", commit.into()),
            ("built by", rustc.as_str().into()),
            ("machine", machine.gpu.as_ref().unwrap_or(&machine.cpu).as_str().into()),
            ("kernels", format!("{} signed", kernels.len()).into()),
            ("measured", format!("suite {}, {} s each", settings.suite, settings.seconds).into()),
            ("bundle", self.bundle.as_str().into()),
            ("result", result),
        ])
    }
}

impl Report for CheckReport {
    fn page(&self) -> Page {
        let Comparison { differences, remarks, kernels, groups, rulings } = &self.comparison;
        let mut facts: Vec<(&str, Text)> = vec![
            ("bundle", self.bundle.as_str().into()),
            ("kernels", format!("{kernels} with the same PTX").into()),
            ("checks", format!("{groups} groups with the same verdict").into()),
            ("times", format!("{} compared", rulings.len()).into()),
        ];
        facts.extend(remarks.iter().take(SHOWN).map(|text| ("note", Text::new(text, Tone::Faint))));
        facts.extend(differences.iter().take(SHOWN).map(|text| ("differs", Text::new(text, Tone::Bad))));
        let same = Text::new("PASS: it comes out the same", Tone::Good);
        let result =
            if self.pass { same } else { Text::new("FAIL: it does not come out the same", Tone::Bad) };
        facts.push(("result", result));
        Page::default().table(self.steps.iter().map(step_row)).facts(facts)
    }
}
