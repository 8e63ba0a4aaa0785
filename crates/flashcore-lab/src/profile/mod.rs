//! What limits a kernel: how many CTAs fit ([`occupancy`]), and Nsight Compute's counters if it is found.
//!
//! [`ncu`] runs a child process ([`target`]) under Nsight Compute; [`reading`] makes one screen of the counters.

pub mod ncu;
pub mod occupancy;
pub mod reading;

use std::rc::Rc;

use crate::{burst::Run, competitor::Competitor, error::LabError, task::Task, workload::Workload};

/// Launches of the profiled child: the first ones warm up, the last is looked at.
pub const LAUNCHES: usize = 3;

/// The child's side: launches the task's kernel [`LAUNCHES`] times.
pub fn target(competitor: &dyn Competitor, task: Task) -> Result<(), LabError> {
    let mut ready = competitor.prepare(&Rc::new(Workload::new(task, 0)?))?;
    let run = Run { samples: LAUNCHES, calls: 1, conditions: Default::default() };
    ready.time(&run).map(drop)
}
