//! Competitors: everything that can compute a task and be timed doing so, ours and others' alike.
//!
//! [`Competitor`] is a contestant; [`Competitor::prepare`] gives a [`Ready`] that holds one task. [`crate::burst`] times it,
//! [`crate::judge`] judges it. [`host`] makes a competitor of any [`Backend`](flashcore_core::Backend), [`torch`] of what
//! PyTorch offers and of [`fa3`]'s operator.

pub mod cuda;
pub mod fa3;
pub mod host;
pub mod roster;
pub mod torch;

use std::rc::Rc;

use crate::{
    burst::Run,
    error::LabError,
    task::Task,
    workload::{Outputs, Workload},
};

/// Where a competitor computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    Cpu,
    Gpu,
}

impl Place {
    /// The name used in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }
}

/// A competitor.
pub trait Competitor {
    /// The name used on the command line and in results.
    fn name(&self) -> &str;

    /// Where it computes.
    fn place(&self) -> Place;

    /// Whether tasks of this kind are for it: others it would refuse.
    fn takes(&self, _: &Task) -> bool {
        true
    }

    /// Prepares a task: plans, compiles, copies the inputs to where they are needed.
    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError>;
}

/// A competitor with a prepared task.
pub trait Ready {
    /// The kernel that runs.
    fn kernel(&self) -> &str;

    /// Computes once into fresh, poisoned outputs.
    fn compute(&mut self) -> Result<Outputs, LabError>;

    /// Seconds per call of each sample.
    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError>;
}
