//! Two bundles held against each other: the same kernels, the same verdicts, times that are not worse beyond doubt.
//!
//! Another machine is said plainly and is no failure: times are not compared then, and backends that one of the two
//! does not have are left out.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    Fault,
    bundle::{BENCH, Bundle, Facts, VERIFY},
};
use crate::{
    error::LabError,
    gate::{self, Demand, Ruling},
    record::Record,
    task::Task,
};

/// What was found.
#[derive(Clone, PartialEq, Serialize, Debug, Default)]
pub struct Comparison {
    /// What is not as it was, and should be.
    pub differences: Vec<String>,
    /// What is not as it was, and need not be.
    pub remarks: Vec<String>,
    /// Kernels whose PTX is the same.
    pub kernels: usize,
    /// Groups of checks whose verdict is the same.
    pub groups: usize,
    /// Times that were compared.
    pub rulings: Vec<Ruling>,
}

impl Comparison {
    /// Whether it is the same.
    pub const fn pass(&self) -> bool {
        self.differences.is_empty()
    }

    /// Whether it is the same but for being slower.
    pub fn is_slower(&self) -> bool {
        let slower = self.rulings.iter().filter(|ruling| !ruling.pass()).count();
        slower > 0 && slower == self.differences.len()
    }
}

/// What `verify --json` says, as far as it is compared.
#[derive(Deserialize)]
struct Verified {
    backends: Vec<Backend>,
}

#[derive(Deserialize)]
struct Backend {
    backend: String,
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    group: String,
    passed: usize,
    failed: usize,
}

/// Verdicts of `verify` by backend and group.
fn verdicts(bundle: &Bundle) -> Result<Facts, Fault> {
    let bytes = bundle.files.get(VERIFY).ok_or(Fault::File(VERIFY))?;
    let verified: Verified = serde_json::from_slice(bytes).map_err(|e| Fault::content(VERIFY, e))?;
    let groups = verified.backends.iter().flat_map(|b| b.groups.iter().map(move |g| (&b.backend, g)));
    let verdict = |g: &Group| format!("{} passed and {} failed", g.passed, g.failed);
    Ok(groups.map(|(backend, g)| (format!("{backend}/{}", g.group), verdict(g))).collect())
}

fn record(bundle: &Bundle) -> Result<Record, Fault> {
    let bytes = bundle.files.get(BENCH).ok_or(Fault::File(BENCH))?;
    Record::parse(bytes).map_err(|e| Fault::content(BENCH, e))
}

/// What is not the same in both, by name and in words.
fn changes(then: &Facts, now: &Facts) -> BTreeMap<String, String> {
    let names: BTreeSet<_> = then.keys().chain(now.keys()).collect();
    let text = |facts: &Facts, name| facts.get(name).map_or("missing", String::as_str).to_owned();
    let changed = names.into_iter().filter(|name| then.get(*name) != now.get(*name));
    changed
        .map(|name| (name.clone(), format!("{name} was {} and is {}", text(then, name), text(now, name))))
        .collect()
}

/// Holds `now` against `then`; our times may be worse by `margin`.
pub fn compare(then: &Bundle, now: &Bundle, margin: f64) -> Result<Comparison, Fault> {
    let mut found = Comparison::default();
    let kernels = changes(&then.manifest.kernels, &now.manifest.kernels);
    found.kernels = now.manifest.kernels.keys().filter(|name| !kernels.contains_key(*name)).count();
    found.differences.extend(kernels.into_values().map(|text| format!("the PTX of {text}")));
    let environment = changes(&then.manifest.environment, &now.manifest.environment);
    found.remarks.extend(environment.into_values());
    found.verdicts(&verdicts(then)?, &verdicts(now)?);
    found.times(&record(then)?, &record(now)?, margin);
    Ok(found)
}

impl Comparison {
    fn verdicts(&mut self, then: &Facts, now: &Facts) {
        let backend = |name: &str| name.split('/').next().unwrap_or_default().to_owned();
        let has = |facts: &Facts, name: &str| facts.keys().any(|other| backend(other) == backend(name));
        let changes = changes(then, now);
        self.groups = now.keys().filter(|name| !changes.contains_key(*name)).count();
        for (name, text) in changes {
            let on_both = has(then, &name) && has(now, &name);
            if on_both { &mut self.differences } else { &mut self.remarks }.push(text);
        }
    }

    fn times(&mut self, then: &Record, now: &Record, margin: f64) {
        if let Err(reason) = gate::check_baseline(then, now) {
            return self.remarks.push(format!("times are not compared: {reason}"));
        }
        for ours in now.measurements.iter().filter(|m| !m.stretches.is_empty()) {
            let Ok(task) = Task::parse(ours.task.clone()) else { continue };
            match gate::against_baseline(&task, ours, &now.protocol, then, Demand::NotInferior(margin)) {
                Ok(ruling) => {
                    let slower = ruling.reason.as_ref().map(|reason| format!("{}: {reason}", ruling.task));
                    self.differences.extend(slower);
                    self.rulings.push(ruling);
                }
                Err(LabError::TooFew { .. }) => {
                    self.remarks.push(format!("too few times of {task} to compare"))
                }
                Err(error) => self.differences.push(error.to_string()),
            }
        }
    }
}
