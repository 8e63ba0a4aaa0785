//! Where candidates are built, judged and timed: on the CPU or on a GPU, over one problem and its data.
//!
//! [`super::search`] drives a [`Stand`]; tests drive the search with stands that only pretend.

use std::{
    cell::OnceCell,
    collections::{
        HashMap,
        hash_map::Entry::{Occupied, Vacant},
    },
    rc::Rc,
    sync::Arc,
};

use flashcore::cuda::Cuda;
use flashcore_core::Problem;
use flashcore_cpu::{Cpu, Tiles};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, CpuTile, Tile, plan_tile, tuned::Subject};
use rayon::prelude::*;

use super::table::kernel_name;
use crate::{
    arm::{Arm, Ready, cuda::CudaReady, host::HostArm, roster::Ours},
    burst::{Burst, Conditions},
    error::LabError,
    referee::{Finding, Referee},
    stats::blocks,
    task::Task,
    workload::Workload,
};

/// Times that a turn is condensed to.
const TIMES: usize = 8;
/// Operations below which a GPU call takes no longer than its launch, so that calls are replayed from a graph.
const LAUNCH_BOUND: f64 = 2e10;

/// Asks Nsight Compute how busy the busiest unit is, from 0 to 1.
pub type Counter<'a> = &'a dyn Fn(&Task, &Tile) -> Option<f64>;

/// Where candidates for one problem are tried.
pub trait Stand {
    /// What the plan chooses.
    fn plan(&self) -> Result<Tile, LabError>;

    /// Why a tile cannot be a candidate, as far as that is known without building it.
    fn refusal(&self, tile: &Tile) -> Option<String>;

    /// Builds candidates, many at a time; for each, why it is none.
    fn build(&mut self, tiles: &[Tile]) -> Vec<Option<String>>;

    /// Whether a candidate's result is right.
    fn judge(&mut self, tile: &Tile) -> Result<Finding, LabError>;

    /// Nearly independent times of calls that last so many seconds together.
    fn time(&mut self, tile: &Tile, seconds: f64) -> Result<Vec<f64>, LabError>;

    /// How busy the busiest unit is, from 0 to 1, where that can be counted.
    fn busy(&mut self, _tile: &Tile) -> Option<f64> {
        None
    }

    /// The same for a problem of another size.
    fn other(&self, task: &Task) -> Result<Box<dyn Stand + '_>, LabError>;

    /// The problem on its device, as classes of tables see it.
    fn subject(&self) -> Option<Subject<'_>>;

    /// The kernel's name.
    fn kernel(&self, tile: &Tile) -> String;
}

/// The stand for what computes here.
pub fn stand<'a>(
    ours: &'a Ours,
    task: &Task,
    seed: u64,
    counter: Option<Counter<'a>>,
) -> Result<Box<dyn Stand + 'a>, LabError> {
    let workload = Rc::new(Workload::new(task.clone(), seed)?);
    Ok(match ours {
        Ours::Cpu(cpu) => Box::new(CpuStand::new(cpu.plain(), workload, seed)),
        Ours::Cuda(cuda) => Box::new(CudaStand::new(cuda, workload, seed, counter)?),
    })
}

/// What computes here, as classes of tables and journals call it: a name, and how many units.
pub fn device(ours: &Ours) -> (String, u32) {
    match ours {
        Ours::Cpu(cpu) => {
            let cpu = cpu.plain();
            (cpu.simd().name().to_owned(), cpu.install(rayon::current_num_threads) as u32)
        }
        Ours::Cuda(cuda) => (cuda.gpu().device(), cuda.gpu().sms),
    }
}

struct CpuStand<'a> {
    cpu: &'a Cpu,
    workload: Rc<Workload>,
    referee: OnceCell<Referee>,
    seed: u64,
    ready: HashMap<Tile, Box<dyn Ready>>,
    /// The kernel's name without its tile, once it ran.
    name: OnceCell<String>,
    level: &'static str,
    threads: u32,
}

impl<'a> CpuStand<'a> {
    fn new(cpu: &'a Cpu, workload: Rc<Workload>, seed: u64) -> Self {
        let threads = cpu.install(rayon::current_num_threads) as u32;
        let (referee, ready, name) = (OnceCell::new(), HashMap::new(), OnceCell::new());
        Self { cpu, workload, referee, seed, ready, name, level: cpu.simd().name(), threads }
    }

    /// What the backend itself says that it runs; no tile changes it.
    fn name(&self) -> &str {
        self.name.get_or_init(|| {
            let ready = HostArm::new(Arc::new(self.cpu.clone())).prepare(&self.workload);
            ready.map_or_else(|error| error.to_string(), |ready| ready.kernel().to_owned())
        })
    }
}

/// A candidate on the CPU, prepared once.
fn prepared<'r>(
    ready: &'r mut HashMap<Tile, Box<dyn Ready>>,
    (cpu, workload): (&Cpu, &Rc<Workload>),
    tile: &Tile,
) -> Result<&'r mut Box<dyn Ready>, LabError> {
    Ok(match ready.entry(*tile) {
        Occupied(entry) => entry.into_mut(),
        Vacant(entry) => {
            let cpu = cpu.clone().with_tiles(tiles_of(tile).unwrap_or_default());
            entry.insert(HostArm::new(Arc::new(cpu)).prepare(workload)?)
        }
    })
}

/// The CPU backend's form of a tile; `None` for sizes it does not have, and for tiles of GPUs.
pub fn tiles_of(tile: &Tile) -> Option<Tiles> {
    let Tile::Cpu(CpuTile { keys, chunk }) = tile else { return None };
    Tiles::new(*keys as usize, *chunk as usize)
}

impl Stand for CpuStand<'_> {
    fn plan(&self) -> Result<Tile, LabError> {
        let tiles = self.cpu.tiles();
        Ok(Tile::Cpu(CpuTile { keys: tiles.keys() as u32, chunk: tiles.chunk() as u32 }))
    }

    fn refusal(&self, tile: &Tile) -> Option<String> {
        tiles_of(tile).is_none().then(|| "sizes that the CPU backend does not have".to_owned())
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Option<String>> {
        vec![None; tiles.len()]
    }

    fn judge(&mut self, tile: &Tile) -> Result<Finding, LabError> {
        let ready = prepared(&mut self.ready, (self.cpu, &self.workload), tile)?;
        self.referee.get_or_init(|| Referee::new(&self.workload)).judge(&mut **ready, true)
    }

    fn time(&mut self, tile: &Tile, seconds: f64) -> Result<Vec<f64>, LabError> {
        let ready = prepared(&mut self.ready, (self.cpu, &self.workload), tile)?;
        let samples = Burst { seconds, conditions: Conditions::default() }.run(&mut **ready)?;
        Ok(blocks(&samples.seconds, TIMES))
    }

    fn other(&self, task: &Task) -> Result<Box<dyn Stand + '_>, LabError> {
        let workload = Rc::new(Workload::new(task.clone(), self.seed)?);
        Ok(Box::new(CpuStand::new(self.cpu, workload, self.seed)))
    }

    fn subject(&self) -> Option<Subject<'_>> {
        Subject::new(self.level, self.threads, self.workload.task().problem())
    }

    fn kernel(&self, tile: &Tile) -> String {
        tiles_of(tile).map_or_else(|| "none".to_owned(), |tiles| kernel_name(self.name(), tiles))
    }
}

struct CudaStand<'a> {
    cuda: &'a Arc<Cuda>,
    workload: Rc<Workload>,
    referee: OnceCell<Referee>,
    seed: u64,
    counter: Option<Counter<'a>>,
    device: String,
    planned: Tile,
    /// Data on the GPU, with the kernel of the candidate that was last looked at.
    ready: CudaReady,
    at: Tile,
}

impl<'a> CudaStand<'a> {
    fn new(
        cuda: &'a Arc<Cuda>,
        workload: Rc<Workload>,
        seed: u64,
        counter: Option<Counter<'a>>,
    ) -> Result<Self, LabError> {
        let ready = CudaReady::planned(cuda, &workload)?;
        let (device, at, referee) = (cuda.gpu().device(), ready.tile(), OnceCell::new());
        Ok(Self { cuda, workload, referee, seed, counter, device, planned: at, ready, at })
    }

    fn switch(&mut self, tile: &Tile) -> Result<&mut CudaReady, LabError> {
        if self.at != *tile {
            self.ready.switch(self.cuda, tile)?;
            self.at = *tile;
        }
        Ok(&mut self.ready)
    }
}

/// Why a kernel is not a candidate: it cannot be built, or its registers do not suffice.
fn unbuildable(cuda: &Cuda, problem: &Problem, tile: &Tile) -> Option<String> {
    match cuda.prepare_tile(problem, *tile) {
        Err(error) => Some(error.to_string()),
        Ok(ready) => match ready.kernel().attributes().local {
            0 => None,
            local => Some(format!("it spills: {local} bytes of local memory")),
        },
    }
}

impl Stand for CudaStand<'_> {
    fn plan(&self) -> Result<Tile, LabError> {
        Ok(self.planned)
    }

    fn refusal(&self, tile: &Tile) -> Option<String> {
        let problem = self.workload.task().problem();
        let plan = plan_tile(problem, &self.cuda.gpu(), ALLOCATED_ALIGNMENT, *tile);
        let built = plan.and_then(|plan| plan.check_build(problem));
        built.err().map(|misfit| misfit.to_string())
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Option<String>> {
        let (cuda, problem, planned) = (self.cuda, self.workload.task().problem(), self.planned);
        // What the plan chooses is measured whatever its build says.
        let look = |tile: &Tile| unbuildable(cuda, problem, tile).filter(|_| *tile != planned);
        tiles.par_iter().map(look).collect()
    }

    fn judge(&mut self, tile: &Tile) -> Result<Finding, LabError> {
        self.switch(tile)?;
        self.referee.get_or_init(|| Referee::new(&self.workload)).judge(&mut self.ready, true)
    }

    fn time(&mut self, tile: &Tile, seconds: f64) -> Result<Vec<f64>, LabError> {
        let replay = self.workload.task().flops() < LAUNCH_BOUND;
        let conditions = Conditions { replay, ..Conditions::default() };
        let samples = Burst { seconds, conditions }.run(self.switch(tile)?)?;
        // The first half warms caches and clocks up.
        Ok(blocks(&samples.seconds[samples.seconds.len() / 2..], TIMES))
    }

    fn busy(&mut self, tile: &Tile) -> Option<f64> {
        self.counter.and_then(|count| count(self.workload.task(), tile))
    }

    fn other(&self, task: &Task) -> Result<Box<dyn Stand + '_>, LabError> {
        let workload = Rc::new(Workload::new(task.clone(), self.seed)?);
        Ok(Box::new(CudaStand::new(self.cuda, workload, self.seed, None)?))
    }

    fn subject(&self) -> Option<Subject<'_>> {
        Subject::new(&self.device, self.cuda.gpu().sms, self.workload.task().problem())
    }

    fn kernel(&self, tile: &Tile) -> String {
        let problem = self.workload.task().problem();
        let plan = plan_tile(problem, &self.cuda.gpu(), ALLOCATED_ALIGNMENT, *tile);
        plan.map_or_else(|misfit| misfit.to_string(), |plan| plan.kernel().name())
    }
}
