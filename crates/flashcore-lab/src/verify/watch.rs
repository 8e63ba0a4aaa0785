//! The parent's side: starts children, listens, and kills those that hang.

use std::{
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::RecvTimeoutError,
    thread,
    time::Duration,
};

use super::{Ending, Line, Order, Report};
use crate::{error::LabError, lines::Lines};

/// Children of a group that may end early before the rest of it is given up.
const MOST_DEATHS: usize = 5;

/// How often, and after which pause, it is asked whether a child that ended early was ended by the user.
const STOP_ATTEMPTS: usize = 20;
const STOP_PAUSE: Duration = Duration::from_millis(10);

/// What became of a group.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outcome {
    pub reports: Vec<Report>,
    pub unavailable: Option<String>,
}

/// How children are started and how long they may be silent.
pub struct Watch<'a> {
    pub command: &'a dyn Fn(&Order) -> Command,
    pub patience: Duration,
    pub stopped: &'a dyn Fn() -> bool,
}

impl Watch<'_> {
    /// Executes `order`, in as many children as it takes; `seen` gets every report.
    pub fn group(&self, mut order: Order, seen: &mut dyn FnMut(&Report)) -> Result<Outcome, LabError> {
        let mut outcome = Outcome::default();
        let mut deaths = 0;
        loop {
            let ran = self.child(&order, &mut |report| {
                seen(&report);
                outcome.reports.push(report);
            })?;
            outcome.unavailable = ran.unavailable;
            order.skip = ran.next;
            deaths += 1;
            let given_up = deaths >= MOST_DEATHS || !ran.progressed;
            if outcome.unavailable.is_some() || ran.next >= ran.total || (self.stopped)() {
                return Ok(outcome);
            }
            if given_up {
                let reason = format!("given up: {deaths} processes of this group ended early");
                let rest = format!("{} more checks", ran.total.saturating_sub(ran.next));
                let report = Report::ended(rest, Ending::Failed, Some("launch"), reason);
                seen(&report);
                outcome.reports.push(report);
                return Ok(outcome);
            }
        }
    }

    /// Starts one child and listens until it ends or hangs.
    fn child(&self, order: &Order, seen: &mut dyn FnMut(Report)) -> Result<Ran, LabError> {
        let mut command = (self.command)(order);
        let program = command.get_program().to_owned();
        let started = Lines::start(&mut command, Stdio::null(), |text| serde_json::from_str(text).ok());
        let mut child = started.map_err(LabError::io("start", program))?;
        let mut ran = Ran { next: order.skip, ..Ran::default() };
        let mut open: Option<(usize, String)> = None;
        let reason = loop {
            match child.lines.recv_timeout(self.patience) {
                Ok(Line::Total(total)) => ran.total = total,
                Ok(Line::Begin(index, name)) => open = Some((index, name)),
                Ok(Line::End(report)) => {
                    ran.end(&mut open, report, seen);
                    if (self.stopped)() {
                        return Ok(ran);
                    }
                }
                Ok(Line::Unavailable(reason)) => return Ok(Ran { unavailable: Some(reason), ..ran }),
                Err(RecvTimeoutError::Timeout) => {
                    child.end();
                    break format!("no progress for {} s: it hangs", self.patience.as_secs_f64());
                }
                Err(RecvTimeoutError::Disconnected) => break describe(child.child.wait().ok()),
            }
        };
        // A child that never said how much there is to do has not done it.
        ran.total = ran.total.max(ran.next + usize::from(ran.total == 0));
        if !(ran.next < ran.total && self.was_stopped())
            && let Some((_, name)) = &open
        {
            let report = Report::ended(name.clone(), Ending::Failed, Some("launch"), reason);
            ran.end(&mut open, report, seen);
        }
        Ok(ran)
    }

    /// Whether a child ended early because the user stopped everything, which says nothing about its check: Ctrl-C ends
    /// children too, and one may be gone before its parent has heard of it.
    fn was_stopped(&self) -> bool {
        (0..STOP_ATTEMPTS).any(|_| {
            let stopped = (self.stopped)();
            if !stopped {
                thread::sleep(STOP_PAUSE);
            }
            stopped
        })
    }
}

/// What one child did.
#[derive(Default)]
struct Ran {
    total: usize,
    /// The first check that is still to do.
    next: usize,
    progressed: bool,
    unavailable: Option<String>,
}

impl Ran {
    fn end(&mut self, open: &mut Option<(usize, String)>, report: Report, seen: &mut dyn FnMut(Report)) {
        if let Some((index, _)) = open.take() {
            self.next = index + 1;
            self.progressed = true;
        }
        seen(report);
    }
}

fn describe(status: Option<ExitStatus>) -> String {
    let status = status.map_or_else(|| "in an unknown way".to_owned(), |status| status.to_string());
    format!("the process died: {status}")
}
