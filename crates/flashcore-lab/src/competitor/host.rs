//! A competitor that computes on host tensors, timed by the wall clock: the CPU backend, the naive one, or any other.

use std::{rc::Rc, sync::Arc, time::Instant};

use flashcore_core::Backend;

use super::{Competitor, Place, Ready};
use crate::{
    burst::Run,
    error::LabError,
    workload::{Outputs, Workload},
};

/// Bytes that, once written, have pushed everything else out of a CPU's caches.
const EVICTING: usize = 128 << 20;

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

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        let mut outputs = workload.outputs()?;
        let kernel = self.backend.forward(&mut workload.call(&mut outputs, false)?)?.kernel;
        Ok(Box::new(HostReady {
            backend: self.backend.clone(),
            workload: workload.clone(),
            outputs,
            kernel,
            evictor: Vec::new(),
        }))
    }
}

struct HostReady {
    backend: Arc<dyn Backend>,
    workload: Rc<Workload>,
    outputs: Outputs,
    kernel: String,
    evictor: Vec<u8>,
}

impl HostReady {
    fn sample(&mut self, calls: u32) -> Result<f64, LabError> {
        let start = Instant::now();
        for _ in 0..calls {
            self.backend.forward(&mut self.workload.call(&mut self.outputs, false)?)?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(calls))
    }

    fn empty_caches(&mut self) {
        self.evictor.resize(EVICTING, 0);
        self.evictor.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    }
}

impl Ready for HostReady {
    fn kernel(&self) -> &str {
        &self.kernel
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        let mut outputs = self.workload.outputs()?;
        self.backend.forward(&mut self.workload.call(&mut outputs, true)?)?;
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
