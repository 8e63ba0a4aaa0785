//! Two bundles held against each other: the same kernels, the same verdicts, times that are not worse beyond doubt.
//!
//! Another machine is said plainly and is no failure: times are not compared then, and backends that one of the two
//! does not have are left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Fault,
    bundle::{BENCH, Parts, VERIFY},
    manifest::Manifest,
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
    pass: bool,
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

impl Verified {
    fn read(parts: &Parts) -> Result<Self, Fault> {
        let bytes = parts.get(VERIFY).ok_or(Fault::Missing(VERIFY))?;
        serde_json::from_slice(bytes).map_err(|e| Fault::Part { part: VERIFY, reason: e.to_string() })
    }

    /// Checks that passed and failed, by group.
    fn groups(&self) -> BTreeMap<String, (usize, usize)> {
        let groups = self.backends.iter().flat_map(|b| b.groups.iter().map(move |g| (&b.backend, g)));
        groups.map(|(backend, g)| (format!("{backend}/{}", g.group), (g.passed, g.failed))).collect()
    }

    fn has(&self, group: &str) -> bool {
        let backend = group.split('/').next().unwrap_or_default();
        self.backends.iter().any(|b| b.backend == backend && !b.groups.is_empty())
    }
}

/// The result file of a bundle.
pub fn record(parts: &Parts) -> Result<Record, Fault> {
    let bytes = parts.get(BENCH).ok_or(Fault::Missing(BENCH))?;
    Record::parse(bytes).map_err(|e| Fault::Part { part: BENCH, reason: e.to_string() })
}

/// Holds `now` against `then`; our times may be worse by `margin`.
pub fn compare(then: &Parts, now: &Parts, margin: f64) -> Result<Comparison, Fault> {
    let mut found = Comparison::default();
    let manifests = (Manifest::read(then)?, Manifest::read(now)?);
    found.kernels(&manifests.0, &manifests.1);
    found.machines(&manifests.0, &manifests.1);
    found.verdicts(&Verified::read(then)?, &Verified::read(now)?);
    found.times(&record(then)?, &record(now)?, margin);
    Ok(found)
}

impl Comparison {
    fn kernels(&mut self, then: &Manifest, now: &Manifest) {
        let names: std::collections::BTreeSet<_> = then.kernels.keys().chain(now.kernels.keys()).collect();
        for name in names {
            match (then.kernels.get(name), now.kernels.get(name)) {
                (Some(a), Some(b)) if a == b => self.kernels += 1,
                (Some(_), Some(_)) => self.differences.push(format!("the PTX of {name} is another")),
                (None, _) => self.differences.push(format!("{name} is a new kernel")),
                (_, None) => self.differences.push(format!("{name} is gone")),
            }
        }
    }

    fn machines(&mut self, then: &Manifest, now: &Manifest) {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
        let pairs = [
            ("version of FlashCore", then.flashcore.clone(), now.flashcore.clone()),
            ("commit", text(&then.commit), text(&now.commit)),
            ("compiler", then.rustc.clone(), now.rustc.clone()),
            ("program", text(&then.program), text(&now.program)),
            ("processor", then.machine.cpu.clone(), now.machine.cpu.clone()),
            ("GPU", text(&then.machine.gpu), text(&now.machine.gpu)),
            ("driver", text(&then.machine.driver), text(&now.machine.driver)),
        ];
        let other = pairs.into_iter().filter(|(_, then, now)| then != now);
        self.remarks.extend(other.map(|(what, then, now)| format!("the {what} was {then} and is {now}")));
    }

    fn verdicts(&mut self, then: &Verified, now: &Verified) {
        let (before, after) = (then.groups(), now.groups());
        let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        for name in names {
            match (before.get(name), after.get(name)) {
                (Some(a), Some(b)) if a == b => self.groups += 1,
                (Some(a), Some(b)) => self.differences.push(format!(
                    "{name}: {} checks passed and {} failed, now {} and {}",
                    a.0, a.1, b.0, b.1
                )),
                _ if then.has(name) && now.has(name) => {
                    self.differences.push(format!("{name} was checked only once"));
                }
                _ => self.remarks.push(format!("{name} can be checked on one of the machines only")),
            }
        }
        if then.pass != now.pass {
            let word = |pass: bool| if pass { "passed" } else { "failed" };
            let text = format!("verify {} then and {} now", word(then.pass), word(now.pass));
            self.differences.push(text);
        }
    }

    fn times(&mut self, then: &Record, now: &Record, margin: f64) {
        if let Err(reason) = gate::check_baseline(then, now) {
            return self.remarks.push(format!("times are not compared: {reason}"));
        }
        for ours in now.measurements.iter().filter(|m| !m.stretches.is_empty()) {
            let task = match Task::parse(ours.task.clone()) {
                Ok(task) => task,
                Err(_) => continue,
            };
            match gate::against_baseline(&task, ours, &now.protocol, then, Demand::NotInferior(margin)) {
                Ok(ruling) => self.rule(ruling),
                Err(LabError::TooFew { .. }) => {
                    self.remarks.push(format!("too few times of {task} to compare"))
                }
                Err(error) => self.differences.push(error.to_string()),
            }
        }
    }

    fn rule(&mut self, ruling: Ruling) {
        let slower = ruling.reason.as_ref().map(|reason| format!("{}: {reason}", ruling.task));
        self.differences.extend(slower);
        self.rulings.push(ruling);
    }
}
