//! Is a backend right? Stage by stage, so that the first failure names the cause.
//!
//! build → launch → sanity → correctness → determinism → isolation: `build` is asked of the backend here, the rest is
//! the testkit's suite. Cases come in groups ([`plan`]); each group runs in a child process ([`child`]) under a
//! watchdog ([`watch`]), so that a hang or a poisoned GPU context is one red row and not the end.

pub mod child;
pub mod plan;
pub mod watch;

use serde::{Deserialize, Serialize};

/// What is to be checked, as the parent tells its child.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// The backend's name.
    pub backend: String,
    /// The group's name.
    pub group: String,
    /// Which cases, how often.
    pub scope: Scope,
    /// Checks at the front of the group that are already done.
    pub skip: usize,
}

/// Which cases, how often.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    /// Only checks whose name contains this.
    pub filter: Option<String>,
    /// Seeds of the inputs: 1 and up to this.
    pub seeds: u64,
    /// Runs that must give the same bits.
    pub runs: usize,
    /// How many of the cases.
    pub extent: Extent,
}

/// How many of the cases are taken; what that means is a matter of the backend.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub enum Extent {
    /// What takes long is left out.
    Quick,
    /// What a person waits for.
    #[default]
    Usual,
    /// All, however long it takes.
    All,
}

/// How a check ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// All stages passed.
    Passed,
    /// The backend does not take the case.
    Skipped,
    /// A stage failed.
    Failed,
}

/// What was found in one check.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// The case, its element type and its seed.
    pub check: String,
    /// How it ended.
    pub ending: Ending,
    /// The stage that failed.
    pub stage: Option<String>,
    /// What was found, or why it was skipped.
    pub reason: Option<String>,
    /// The kernel that ran.
    pub kernel: Option<String>,
    /// Largest error, where the error rule was asked.
    pub max_error: Option<f64>,
    /// What it may be.
    pub tolerance: Option<f64>,
}

impl Report {
    /// A check that ended without the testkit's report.
    pub fn ended(check: String, ending: Ending, stage: Option<&str>, reason: String) -> Self {
        let stage = stage.map(str::to_owned);
        Self { check, ending, stage, reason: Some(reason), kernel: None, max_error: None, tolerance: None }
    }
}

/// One line from a child.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// The group has this many checks.
    Total(usize),
    /// A check begins: its place in the group and its name.
    Begin(usize, String),
    /// The check that began has ended.
    End(Report),
    /// The backend cannot be used here.
    Unavailable(String),
}
