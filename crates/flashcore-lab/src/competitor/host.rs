//! A competitor that computes on host tensors, timed by the wall clock: the CPU backend, the naive one, or any other.

use std::{rc::Rc, sync::Arc, time::Instant};

use flashcore_core::Backend;

use super::{Competitor, Place, Ready, roster};
use crate::{
    burst::Run,
    error::LabError,
    task::{Operation, Task},
    workload::{Outputs, Turn, Workload},
};

/// Bytes that, once written, have pushed everything else out of a CPU's caches.
const EVICTING: usize = 128 << 20;
/// At most what one of their lines has: one byte written brings in all of them.
const LINE: usize = 64;

/// A backend as a competitor.
pub struct HostCompetitor {
    name: String,
    backend: Arc<dyn Backend>,
}

impl HostCompetitor {
    /// `backend` under its own name.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self { name: backend.name().to_owned(), backend }
    }
}

impl Competitor for HostCompetitor {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> Place {
        Place::Cpu
    }

    fn takes(&self, task: &Task) -> bool {
        self.name != roster::NAIVE || matches!(task.operation(), Operation::Forward(_))
    }

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        let (mut outputs, saved) = (workload.outputs()?, workload.saved(&*self.backend)?);
        let ran = workload.compute(&*self.backend, saved.as_ref(), &mut outputs, Turn::Timed(0))?;
        let (backend, workload) = (self.backend.clone(), workload.clone());
        let evictor = Vec::new();
        Ok(Box::new(HostReady { backend, workload, saved, outputs, kernel: ran.kernel, evictor }))
    }
}

struct HostReady {
    backend: Arc<dyn Backend>,
    workload: Rc<Workload>,
    /// What gradients need of forward.
    saved: Option<Outputs>,
    outputs: Outputs,
    kernel: String,
    evictor: Vec<u8>,
}

impl HostReady {
    fn sample(&mut self, calls: u32) -> Result<f64, LabError> {
        let start = Instant::now();
        for n in 0..calls as usize {
            let (saved, outputs) = (self.saved.as_ref(), &mut self.outputs);
            self.workload.compute(&*self.backend, saved, outputs, Turn::Timed(n))?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(calls))
    }

    fn empty_caches(&mut self) {
        self.evictor.resize(EVICTING, 0);
        self.evictor.iter_mut().step_by(LINE).for_each(|byte| *byte = byte.wrapping_add(1));
    }
}

impl Ready for HostReady {
    fn kernel(&self) -> &str {
        &self.kernel
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        let mut outputs = self.workload.outputs()?;
        self.workload.compute(&*self.backend, self.saved.as_ref(), &mut outputs, Turn::Judged)?;
        Ok(outputs)
    }

    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError> {
        let sample = |_| {
            if run.conditions.cold {
                self.empty_caches();
            }
            self.sample(run.calls)
        };
        (0..run.samples).map(sample).collect()
    }
}
