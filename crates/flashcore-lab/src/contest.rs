//! One task, several competitors: all get the same inputs, are judged first, and are timed only if right.
//!
//! [`Contest::prepare`] judges, [`Contest::run`] times; `bench` and `gate` do both and differ in what they make of it.

use std::rc::Rc;

use crate::{
    competitor::{Competitor, Place, Ready, roster::Ours},
    error::LabError,
    judge::{Care, Finding, Judge},
    protocol::{Protocol, Turn},
    record::{Measurement, Stretch},
    sensors::Sensors,
    task::Task,
    workload::Workload,
};

/// Receives progress, and may stop the run.
pub trait Observer {
    /// Work on `what` for `task` begins.
    fn at(&mut self, task: &Task, what: &str);

    /// Whether the user has stopped it.
    fn stopped(&self) -> bool;
}

/// A task that competitors are ready for.
pub struct Contest {
    workload: Rc<Workload>,
    entries: Vec<Entry>,
}

/// One competitor.
struct Entry {
    ready: Option<Box<dyn Ready>>,
    measurement: Measurement,
    place: Place,
}

impl Contest {
    /// Gets everybody ready and judges what they compute; those that refuse the task or are wrong stay out.
    pub fn prepare(
        task: &Task,
        competitors: &[Box<dyn Competitor>],
        seed: u64,
        care: Care,
        observer: &mut dyn Observer,
    ) -> Result<Self, LabError> {
        let workload = Rc::new(Workload::new(task.clone(), seed)?);
        observer.at(task, "f64");
        let judge = Judge::with(&workload, care)?;
        let mut entries = Vec::new();
        for competitor in competitors {
            if observer.stopped() {
                return Err(LabError::Stopped);
            }
            observer.at(task, competitor.name());
            entries.push(Entry::prepare(&**competitor, &workload, &judge)?);
        }
        drop(judge);
        Ok(Self { workload, entries })
    }

    /// What was found about each competitor, in their order.
    pub fn findings(&self) -> impl Iterator<Item = (&str, Option<&Finding>)> {
        self.entries.iter().map(|e| (e.measurement.competitor.as_str(), e.measurement.finding.as_ref()))
    }

    /// Keeps only the competitors named.
    #[must_use]
    pub fn only(mut self, names: &[&str]) -> Self {
        self.entries.retain(|entry| names.contains(&entry.measurement.competitor.as_str()));
        self
    }

    /// Times all competitors that are right. A user who stops it gets the results so far.
    pub fn run(
        mut self,
        protocol: &Protocol,
        sensors: &Sensors,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Measurement>, LabError> {
        let fit: Vec<usize> = (0..self.entries.len()).filter(|&n| self.entries[n].is_fit()).collect();
        if let Some(&first) = fit.first() {
            self.warm_up(first, protocol, observer)?;
        }
        for Turn { competitor, again } in protocol.turns(fit.len()) {
            if observer.stopped() {
                break;
            }
            let entry = &mut self.entries[fit[competitor]];
            observer.at(self.workload.task(), &entry.measurement.competitor);
            entry.turn(protocol, sensors, again)?;
        }
        Ok(self.entries.into_iter().map(|entry| entry.measurement).collect())
    }

    /// Lets a competitor compute until the device is steady, where the protocol asks for that.
    fn warm_up(
        &mut self,
        entry: usize,
        protocol: &Protocol,
        observer: &mut dyn Observer,
    ) -> Result<(), LabError> {
        let Entry { ready: Some(ready), place, .. } = &mut self.entries[entry] else { return Ok(()) };
        let Some(burst) = protocol.warm_up(*place) else { return Ok(()) };
        observer.at(self.workload.task(), "warm-up");
        burst.run(&mut **ready).map(drop)
    }
}

impl Entry {
    fn prepare(
        competitor: &dyn Competitor,
        workload: &Rc<Workload>,
        judge: &Judge,
    ) -> Result<Self, LabError> {
        let mut measurement = Measurement::new(workload.task(), competitor.name(), competitor.place());
        let mut ready = match competitor.prepare(workload) {
            Ok(ready) => ready,
            Err(error) => return Self::out(measurement, competitor.place(), error),
        };
        measurement.kernel = Some(ready.kernel().to_owned());
        // Others may add in any order, and are right all the same; ours never does.
        match judge.judge(&mut *ready, is_ours(competitor.name())) {
            Ok(finding) => measurement.finding = Some(finding),
            Err(error) => return Self::out(measurement, competitor.place(), error),
        }
        Ok(Self { ready: Some(ready), measurement, place: competitor.place() })
    }

    /// One who does not compete: it refuses the task, or it is a peer that failed, which is no reason to end a run.
    fn out(mut measurement: Measurement, place: Place, error: LabError) -> Result<Self, LabError> {
        let peer_failed = matches!(&error, LabError::Failed { .. }) && !is_ours(&measurement.competitor);
        if !error.is_refusal() && !peer_failed {
            return Err(error);
        }
        measurement.refused = Some(error.to_string());
        Ok(Self { ready: None, measurement, place })
    }

    fn is_fit(&self) -> bool {
        self.ready.is_some() && self.measurement.finding.as_ref().is_some_and(Finding::pass)
    }

    fn turn(&mut self, protocol: &Protocol, sensors: &Sensors, again: bool) -> Result<(), LabError> {
        let Some(ready) = &mut self.ready else { return Ok(()) };
        let (samples, noise) = sensors.during(self.place, || protocol.burst().run(&mut **ready));
        let samples = match samples {
            Err(error @ LabError::Failed { .. }) if !is_ours(&self.measurement.competitor) => {
                self.measurement.refused = Some(error.to_string());
                self.ready = None;
                return Ok(());
            }
            samples => samples?,
        };
        self.measurement.stretches.push(Stretch {
            seconds: samples.seconds,
            calls: samples.calls,
            again,
            noise,
        });
        Ok(())
    }
}

fn is_ours(name: &str) -> bool {
    Ours::NAMES.contains(&name)
}
