//! The hard gate: right first, then fast enough, with an honest account of noise.
//!
//! | demand | passes if |
//! | --- | --- |
//! | [`Demand::Superior`] | the whole interval of our time over the peer's lies at or below the bound |
//! | [`Demand::NotInferior`] | some of the interval of our time over the baseline's lies at or below 1 + margin |
//!
//! So noise never passes a claim of superiority, and noise alone never fails a comparison with a baseline. The command
//! line turns [`Ruling`] (0 and 1) and errors (2) into exit codes.

use serde::Serialize;

use crate::{
    bootstrap::{self, Interval},
    contest::Contest,
    error::LabError,
    machine::Machine,
    protocol::Protocol,
    record::{Measurement, Record},
    task::Task,
};

/// Independent figures below which an interval would be a guess.
const LEAST_UNITS: usize = 8;

/// What is demanded of our time over another.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// At most this multiple, beyond doubt.
    Superior(f64),
    /// Not more than this share above, beyond doubt.
    NotInferior(f64),
}

impl Demand {
    /// The ratio that decides.
    pub fn bound(self) -> f64 {
        match self {
            Self::Superior(most) => most,
            Self::NotInferior(margin) => 1.0 + margin,
        }
    }

    /// Whether a ratio meets the demand.
    pub fn is_met(self, ratio: &Interval) -> bool {
        match self {
            Self::Superior(_) => ratio.high <= self.bound(),
            Self::NotInferior(_) => ratio.low <= self.bound(),
        }
    }
}

/// What was decided about one task.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Ruling {
    pub task: String,
    pub against: String,
    /// What was demanded; nothing was timed where missing.
    pub demand: Option<Demand>,
    pub ratio: Option<Interval>,
    /// Why it fails; missing when it passes.
    pub reason: Option<String>,
}

impl Ruling {
    /// Whether the task passes.
    pub const fn pass(&self) -> bool {
        self.reason.is_none()
    }

    fn timed(task: &Task, against: &str, demand: Demand, ratio: Interval) -> Self {
        let met = demand.is_met(&ratio);
        let reason = (!met).then(|| {
            let (low, high, bound) = (ratio.low, ratio.high, demand.bound());
            format!("{low:.3} to {high:.3} times the time of {against}, {bound:.3} is required")
        });
        let (task, against) = (task.to_string(), against.to_owned());
        Self { task, against, demand: Some(demand), ratio: Some(ratio), reason }
    }
}

/// Whether ours is right, looking at everybody's result before anything is timed.
///
/// A peer that is wrong where ours is right is no peer: nothing can be concluded. If ours and all peers are wrong, it
/// is the oracle that cannot be trusted.
pub fn correctness(task: &Task, ours: &str, contest: &Contest) -> Result<Option<Ruling>, LabError> {
    let findings: Vec<_> = contest.findings().filter_map(|(competitor, f)| Some((competitor, f?))).collect();
    let wrong = |name: &str| {
        findings.iter().find(|(competitor, _)| *competitor == name).and_then(|(_, f)| f.wrong.clone())
    };
    let peers = || findings.iter().filter(|(competitor, _)| *competitor != ours);
    let broken = peers().find_map(|(competitor, f)| Some((*competitor, f.wrong.clone()?)));
    let all_broken = peers().count() > 0 && peers().all(|(_, f)| !f.pass());
    match (wrong(ours), broken) {
        (Some(reason), _) if !all_broken => {
            let reason = Some(format!("wrong, so not timed: {reason}"));
            let (task, against) = (task.to_string(), "f64".to_owned());
            Ok(Some(Ruling { task, against, demand: None, ratio: None, reason }))
        }
        (_, Some((competitor, reason))) => {
            Err(LabError::Oracle { competitor: competitor.to_owned(), task: task.to_string(), reason })
        }
        _ => Ok(None),
    }
}

/// Compares two competitors of one run.
pub fn against_peer(
    task: &Task,
    measured: &[Measurement],
    protocol: &Protocol,
    [ours, peer]: [&str; 2],
    demand: Demand,
) -> Result<Ruling, LabError> {
    let units = |competitor: &str| {
        let measurement = measured.iter().find(|m| m.competitor == competitor);
        let refused = measurement.and_then(|m| m.refused.clone());
        let units = measurement.map(|m| m.units(protocol)).filter(|units| !units.is_empty());
        units.ok_or_else(|| LabError::Unavailable {
            competitor: competitor.to_owned(),
            reason: refused.unwrap_or_else(|| format!("it was not timed on {task}")),
        })
    };
    Ok(Ruling::timed(task, peer, demand, ratio(task, &units(ours)?, &units(peer)?)?))
}

/// Compares one competitor with what it was in a baseline.
pub fn against_baseline(
    task: &Task,
    ours: &Measurement,
    protocol: &Protocol,
    baseline: &Record,
    demand: Demand,
) -> Result<Ruling, LabError> {
    let missing = || LabError::Baseline(format!("it has no time of {} on {task}", ours.competitor));
    let then = baseline.find(task.spec(), &ours.competitor).ok_or_else(missing)?;
    let (now, then) = (ours.units(protocol), then.units(&baseline.protocol));
    Ok(Ruling::timed(task, "the baseline", demand, ratio(task, &now, &then)?))
}

fn ratio(task: &Task, ours: &[f64], theirs: &[f64]) -> Result<Interval, LabError> {
    let least = ours.len().min(theirs.len());
    let enough = bootstrap::ratio(ours, theirs).filter(|_| least >= LEAST_UNITS);
    enough.ok_or_else(|| LabError::TooFew { task: task.to_string(), got: least, needed: LEAST_UNITS })
}

/// Refuses a baseline of another machine or made in another way.
pub fn check_baseline(baseline: &Record, now: &Record) -> Result<(), LabError> {
    let (then, here) = (&baseline.machine, &now.machine);
    let processor = |machine: &Machine| format!("{}, {} threads", machine.cpu, machine.cores);
    let gpu = |machine: &Machine| machine.gpu.clone().unwrap_or_else(|| "none".to_owned());
    let way = |record: &Record| format!("cold {}, replay {}", record.protocol.cold, record.protocol.replay);
    let facts = [
        ("the GPU", gpu(then), gpu(here)),
        ("the processor", processor(then), processor(here)),
        ("the way of measuring", way(baseline), way(now)),
    ];
    let Some((what, then, here)) = facts.into_iter().find(|(_, then, here)| then != here) else {
        return Ok(());
    };
    let words = format!("{what} was `{then}` then and is `{here}` now; measure a new baseline");
    Err(LabError::Baseline(words))
}
