//! What `flashcore verify --json` printed, read back: which groups of checks passed, and how close they came.
//!
//! Fields that a report does not show may be there or not.

use std::path::Path;

use serde::Deserialize;

use crate::record::{self, Fault, RecordError};

/// Most rows that a page shows.
const MOST_GROUPS: usize = 1000;

/// The answer of `verify`.
#[derive(Clone, PartialEq, Deserialize, Debug)]
pub struct Checks {
    /// The verdict.
    pub pass: bool,
    /// How long it took.
    pub seconds: f64,
    /// Every backend.
    pub backends: Vec<Backend>,
}

/// One backend.
#[derive(Clone, PartialEq, Deserialize, Debug)]
pub struct Backend {
    /// Its name.
    pub backend: String,
    /// Why it could not be used.
    pub unavailable: Option<String>,
    /// Its groups of checks.
    pub groups: Vec<Group>,
}

/// One group of checks.
#[derive(Clone, PartialEq, Deserialize, Debug)]
pub struct Group {
    /// Its name.
    pub group: String,
    /// Checks that passed.
    pub passed: usize,
    /// Checks that the backend does not take.
    pub skipped: usize,
    /// Checks that failed.
    pub failed: usize,
    /// The largest share of its tolerance that an error reached.
    pub worst: Option<f64>,
}

impl Checks {
    /// Reads a file, or says what is wrong with it.
    pub fn load(path: &Path) -> Result<Self, RecordError> {
        let bytes = record::read(path)?;
        Self::parse(&bytes).map_err(|fault| RecordError::Content { path: path.to_owned(), fault })
    }

    fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let checks: Self = serde_json::from_slice(bytes)?;
        if checks.backends.iter().map(|backend| backend.groups.len()).sum::<usize>() > MOST_GROUPS {
            return Err(Fault::Value { what: format!("more than {MOST_GROUPS} groups of checks") });
        }
        Ok(checks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_other_files_refused() {
        let good = r#"{"pass": true, "seconds": 2.5, "new": 1, "backends": [{"backend": "cpu", "unavailable": null,
            "groups": [{"group": "named", "passed": 3, "skipped": 0, "failed": 0, "worst": 0.5, "failures": []}]}]}"#;
        let checks = Checks::parse(good.as_bytes()).unwrap();
        assert_eq!((checks.pass, checks.backends[0].groups[0].worst), (true, Some(0.5)));
        for bad in ["", "{}", "[1]", &good.replace("3", "-3"), &good[..80]] {
            assert!(Checks::parse(bad.as_bytes()).unwrap_err().to_string().contains("damaged"), "{bad}");
        }
    }
}
