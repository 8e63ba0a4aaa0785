//! Where candidates are built, checked and measured: on a GPU by time, or in the simulator by instructions.
//!
//! [`super::search`] drives a [`Runner`]; its tests drive it with one that only pretends.

use std::{collections::HashMap, error::Error, rc::Rc, sync::Arc};

use flashcore::cuda::Cuda;
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Gpu, Tile, plan_tile};
use rayon::prelude::*;

use crate::{
    burst::{Burst, Conditions},
    competitor::cuda::CudaReady,
    error::LabError,
    judge::Judge,
    simulator::{Simulator, judge},
    stats::blocks,
    task::{Task, TaskError},
    workload::Workload,
};

/// Figures that a measurement is condensed to.
const FIGURES: usize = 8;
/// Operations below which a GPU call takes no longer than its launch, so that calls are replayed from a graph.
const LAUNCH_BOUND: f64 = 2e10;

/// What candidates are for, and what their costs mean.
#[derive(Clone, PartialEq, Debug)]
pub struct Setting {
    /// The GPU that kernels are for.
    pub gpu: Gpu,
    /// What measures, in words.
    pub device: String,
    /// What costs are counted in.
    pub unit: &'static str,
    /// The tile that the plan chooses.
    pub planned: Tile,
}

/// Runs candidates for one problem.
pub trait Runner {
    /// What they are for.
    fn setting(&self) -> &Setting;

    /// Builds candidates, many at a time; each with the reason why it is out, if so.
    fn build(&mut self, tiles: &[Tile]) -> Vec<Result<(), String>>;

    /// Computes twice and compares with f64; what is wrong with the result, if anything.
    fn check(&mut self, tile: &Tile) -> Result<Option<String>, LabError>;

    /// Nearly independent costs of calls that last so many seconds together.
    fn cost(&mut self, tile: &Tile, seconds: f64) -> Result<Vec<f64>, LabError>;

    /// How busy the busiest unit of the GPU is, from 0 to 1, where that can be counted.
    fn busy(&mut self, _tile: &Tile) -> Option<f64> {
        None
    }
}

/// Asks Nsight Compute how busy the busiest unit is.
pub type Counter = fn(&Task, &Tile) -> Option<f64>;

/// A GPU.
pub struct OnGpu {
    setting: Setting,
    cuda: Arc<Cuda>,
    workload: Rc<Workload>,
    judge: Judge,
    counter: Option<Counter>,
    /// Data on the GPU, with the kernel of the tile that was last looked at.
    ready: CudaReady,
}

impl OnGpu {
    /// Brings the data of `task` to the GPU.
    pub fn new(cuda: Arc<Cuda>, task: &Task, seed: u64, counter: Option<Counter>) -> Result<Self, LabError> {
        let workload = Rc::new(Workload::new(task.clone(), seed)?);
        let ready = CudaReady::planned(&cuda, &workload)?;
        let device = cuda.device().props().name.clone();
        let not_forward = || TaskError::NotForward { task: task.to_string() };
        let planned = ready.tile().ok_or_else(not_forward)?;
        let setting = Setting { gpu: cuda.gpu(), device, unit: "us", planned };
        let judge = Judge::new(&workload)?;
        Ok(Self { setting, cuda, workload, judge, counter, ready })
    }

    fn switch(&mut self, tile: &Tile) -> Result<(), LabError> {
        if self.ready.tile() == Some(*tile) { Ok(()) } else { self.ready.switch(&self.cuda, tile) }
    }
}

impl Runner for OnGpu {
    fn setting(&self) -> &Setting {
        &self.setting
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Result<(), String>> {
        let (cuda, planned) = (&self.cuda, self.setting.planned);
        let problem = match self.workload.task().forward() {
            Ok(problem) => problem,
            Err(error) => return vec![Err(error.to_string()); tiles.len()],
        };
        let build = |tile: &Tile| {
            let ready = cuda.prepare_tile(problem, *tile).map_err(|error| error.to_string())?;
            match ready.kernel().attributes().local {
                // What the plan chooses is measured whatever its build says.
                bytes if bytes > 0 && *tile != planned => Err(format!("it spills {bytes} bytes")),
                _ => Ok(()),
            }
        };
        tiles.par_iter().map(build).collect()
    }

    fn check(&mut self, tile: &Tile) -> Result<Option<String>, LabError> {
        self.switch(tile)?;
        Ok(self.judge.judge(&mut self.ready, true)?.wrong)
    }

    fn cost(&mut self, tile: &Tile, seconds: f64) -> Result<Vec<f64>, LabError> {
        self.switch(tile)?;
        let replay = self.workload.task().flops() < LAUNCH_BOUND;
        let conditions = Conditions { replay, ..Conditions::default() };
        let times = Burst { seconds, conditions }.run(&mut self.ready)?.seconds;
        // The first half warms caches and clocks up.
        Ok(blocks(&times[times.len() / 2..], FIGURES).into_iter().map(|seconds| seconds * 1e6).collect())
    }

    fn busy(&mut self, tile: &Tile) -> Option<f64> {
        self.counter.and_then(|count| count(self.workload.task(), tile))
    }
}

/// The simulator: no time, but what a GPU would have to issue.
pub struct Simulated {
    setting: Setting,
    workload: Rc<Workload>,
    judge: Judge,
    /// Instructions of the candidates that were checked.
    instructions: HashMap<Tile, f64>,
}

impl Simulated {
    /// The kernels of `gpu`.
    pub fn new(gpu: Gpu, task: &Task, seed: u64) -> Result<Self, LabError> {
        let planned = Simulator::new(gpu).plan(task.forward()?)?.kernel().tile();
        let workload = Rc::new(Workload::new(task.clone(), seed)?);
        let setting = Setting { gpu, device: "the simulator".to_owned(), unit: "instructions", planned };
        Ok(Self { setting, judge: Judge::new(&workload)?, workload, instructions: HashMap::new() })
    }

    /// Launches a candidate twice, first tamely, then under a hostile schedule; why it is out, if so.
    fn launch(&mut self, tile: &Tile) -> Result<(), String> {
        fn text(error: impl Error) -> String {
            error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
        }
        let gpu = self.setting.gpu;
        let problem = self.workload.task().forward().map_err(text)?;
        let plan = plan_tile(problem, &gpu, ALLOCATED_ALIGNMENT, *tile).map_err(text)?;
        let simulator = Simulator::new(gpu);
        for _ in 0..2 {
            let mut outputs = self.workload.outputs().map_err(text)?;
            let mut call = self.workload.call(&mut outputs).map_err(text)?;
            let Some(ran) = simulator.launch(&mut call, &plan).map_err(text)? else { continue };
            judge(&ran).map_err(text)?;
            // Instructions of the tame run, and the passes that conflicts in shared memory add.
            let count = ran.counters.total_instructions() + ran.counters.bank_conflicts;
            self.instructions.entry(*tile).or_insert(count as f64);
            self.judge.compare(&outputs).wrong.map_or(Ok(()), Err)?;
        }
        Ok(())
    }
}

impl Runner for Simulated {
    fn setting(&self) -> &Setting {
        &self.setting
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Result<(), String>> {
        vec![Ok(()); tiles.len()]
    }

    fn check(&mut self, tile: &Tile) -> Result<Option<String>, LabError> {
        Ok(self.launch(tile).err())
    }

    fn cost(&mut self, tile: &Tile, _seconds: f64) -> Result<Vec<f64>, LabError> {
        if !self.instructions.contains_key(tile) {
            let failed = |reason| LabError::Failed { competitor: "the simulator".to_owned(), reason };
            self.launch(tile).map_err(failed)?;
        }
        Ok(vec![self.instructions[tile]])
    }
}
