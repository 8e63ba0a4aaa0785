//! `flashcore doctor`: what this machine offers, and what to do about what is missing.
//!
//! Each line is a [`Finding`] made by one of the [`PROBES`]; a new subject is one more probe in that list.

mod gpu;
mod machine;

use clap::Args;
use serde::Serialize;

use crate::{
    error::{CliError, Verdict},
    output::{Output, Page, Report, Text, Tone},
};

/// Show what was found on this machine and what to do about what is missing
#[derive(Args, Debug)]
pub struct Flags {}

type Probe = fn() -> Vec<Finding>;

/// What is looked at, in the order shown.
const PROBES: [Probe; 2] = [machine::look, gpu::look];

/// Looks at everything; passes if at least one backend can run.
pub fn execute(_flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let report = Findings { findings: PROBES.iter().flat_map(|probe| probe()).collect() };
    output.show(&report)?;
    Ok(Verdict::from_bool(report.findings.iter().all(|f| f.state != State::Broken)))
}

/// How a finding bears on what the user can do.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Good,
    /// Works, but something could be better.
    Limited,
    /// Attention cannot run.
    Broken,
}

/// One thing that was looked at.
#[derive(Serialize, Debug)]
struct Finding {
    subject: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn good(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, state: State::Good, found: found.into(), advice: None }
    }

    fn limited(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, state: State::Limited, found: found.into(), advice: Some(advice.into()) }
    }

    fn row(&self) -> Vec<Text> {
        let mark = match self.state {
            State::Good => Text::new("ok", Tone::Good),
            State::Limited => Text::new("--", Tone::Faint),
            State::Broken => Text::new("!!", Tone::Bad),
        };
        let advice = self.advice.as_ref().map(|advice| format!(" -> {advice}")).unwrap_or_default();
        vec![mark, self.subject.into(), format!("{}{advice}", self.found).into()]
    }
}

#[derive(Serialize, Debug)]
struct Findings {
    findings: Vec<Finding>,
}

impl Report for Findings {
    fn page(&self) -> Page {
        Page::default().table(self.findings.iter().map(Finding::row))
    }
}
