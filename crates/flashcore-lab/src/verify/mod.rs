//! Is a backend right? Stage by stage, so that the first failure names the cause.
//!
//! build → launch → sanity → correctness → determinism → isolation: `build` is done by the backend here, the rest is
//! the testkit's suite. Cases come in groups ([`plan`]); each group runs in a child process ([`child`]) under a
//! watchdog ([`watch`]), so a hang or a poisoned GPU context fails only one row.

pub mod child;
pub mod plan;
pub mod watch;

use flashcore_kernels::Family;
use serde::{Deserialize, Serialize};

/// What is to be checked, as the parent tells its child.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Order {
    pub backend: String,
    pub group: String,
    pub scope: Scope,
    /// Checks at the front of the group that are already done.
    pub skip: usize,
}

/// Which cases, how often.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    pub filter: Option<String>,
    pub seeds: u64,
    /// Runs that must give the same bits.
    pub runs: usize,
    pub extent: Extent,
    /// The one kernel that is checked, where it was named.
    pub kernel: Option<Family>,
}

/// How many of the cases are taken; each backend has its own limits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub enum Extent {
    /// Slow checks are omitted.
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
    Passed,
    /// The backend does not take the case.
    Skipped,
    Failed,
}

/// What was found in one check.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Report {
    pub check: String,
    pub ending: Ending,
    pub stage: Option<String>,
    pub reason: Option<String>,
    pub kernel: Option<String>,
    /// Largest error, where the error rule was asked.
    pub max_error: Option<f64>,
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
