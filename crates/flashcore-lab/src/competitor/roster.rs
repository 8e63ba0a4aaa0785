//! Which competitors run on this machine: ours, the naive one, and PyTorch's if there is a Python with it.
//!
//! The command line asks for competitors by name; missing ones are reported once and skipped.

use std::{cell::OnceCell, path::Path, rc::Rc, sync::Arc};

use flashcore::cuda::Cuda;
use flashcore_core::{Backend, DType, Mask};
use flashcore_cpu::Cpu;
use flashcore_testkit::NaiveBackend;

use super::{
    Competitor, Place,
    cuda::{self, CudaCompetitor},
    fa3,
    host::HostCompetitor,
    torch::Torch,
};
use crate::{
    burst::{Burst, Conditions},
    ceiling::Ceiling,
    error::LabError,
    protocol::{Mode, Protocol, STEADY},
    stats::median,
    task::Task,
    workload::Workload,
};

/// The competitor that is in the program.
pub(super) const NAIVE: &str = "naive";

/// Which of our backends competes.
#[derive(Clone)]
pub enum Ours {
    Cpu(Cpu),
    Cuda(Arc<Cuda>),
}

impl Ours {
    /// What our competitors are called in results.
    pub const NAMES: [&'static str; 2] = [cuda::NAME, "cpu"];

    /// Where it computes.
    pub const fn place(&self) -> Place {
        match self {
            Self::Cpu(_) => Place::Cpu,
            Self::Cuda(_) => Place::Gpu,
        }
    }

    /// It as a backend for host tensors.
    pub fn backend(&self) -> Arc<dyn Backend> {
        match self {
            Self::Cpu(cpu) => Arc::new(cpu.clone()),
            Self::Cuda(cuda) => cuda.clone(),
        }
    }

    /// It as a competitor.
    pub fn competitor(&self) -> Box<dyn Competitor> {
        match self {
            Self::Cpu(cpu) => Box::new(HostCompetitor::new(Arc::new(cpu.clone()))),
            Self::Cuda(cuda) => Box::new(CudaCompetitor::new(cuda.clone())),
        }
    }
}

/// Everybody who can compete.
pub struct Roster {
    ours: Ours,
    threads: Option<usize>,
    /// Started when one of its competitors is first requested.
    torch: OnceCell<Result<Rc<Torch>, LabError>>,
}

impl Roster {
    /// Ours, and whoever else is asked for; PyTorch's CPU competitors use `threads` threads.
    pub const fn open(ours: Ours, threads: Option<usize>) -> Self {
        Self { ours, threads, torch: OnceCell::new() }
    }

    /// Adds FlashAttention-3, whose library lies in `folder`, or says why it cannot compete.
    pub fn add_fa3(&self, folder: &Path) -> Result<(), LabError> {
        let unavailable = |reason: String| LabError::Unavailable { competitor: fa3::NAME.to_owned(), reason };
        if self.ours.place() != Place::Gpu {
            return Err(unavailable("it runs on a GPU, but ours on the CPU".to_owned()));
        }
        let library = fa3::Library::find(folder)?;
        self.torch().map_err(|error| unavailable(error.to_string()))?.load_fa3(&library)
    }

    fn torch(&self) -> Result<&Rc<Torch>, &LabError> {
        self.torch.get_or_init(|| Torch::start(self.threads)).as_ref()
    }

    /// Our competitor.
    pub fn ours(&self) -> Box<dyn Competitor> {
        self.ours.competitor()
    }

    /// What the peers run on.
    pub fn describe_peers(&self) -> Option<String> {
        self.torch.get()?.as_ref().ok().map(|torch| torch.describe())
    }

    /// Why there are fewer peers than there could be.
    pub fn note(&self) -> Option<String> {
        let error = self.torch.get()?.as_ref().err()?;
        Some(format!("no PyTorch to compare with: {error}"))
    }

    /// Every peer that computes such tasks where ours does, best known first.
    pub fn peers(&self, task: &Task) -> Vec<Box<dyn Competitor>> {
        let mut peers = self.all_peers();
        peers.retain(|one| one.takes(task));
        peers
    }

    fn all_peers(&self) -> Vec<Box<dyn Competitor>> {
        let place = self.ours.place();
        let torch = self.torch().into_iter().flat_map(|torch| torch.competitors());
        let here = torch.filter(|one| one.place() == place);
        let mut peers: Vec<Box<dyn Competitor>> =
            here.map(|one| Box::new(one) as Box<dyn Competitor>).collect();
        peers.sort_by_key(|one| rank(one.name()));
        peers.extend((place == Place::Cpu).then(naive));
        peers
    }

    /// The peer of that name.
    pub fn peer(&self, name: &str) -> Result<Box<dyn Competitor>, LabError> {
        if name == NAIVE {
            return Ok(naive());
        }
        let peers = self.all_peers();
        let known: Vec<_> = peers.iter().map(|one| one.name().to_owned()).collect();
        let missing = || {
            let there = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let note = self.note().map_or(String::new(), |note| format!("; {note}"));
            let reason = format!("unknown peer; available: {there}{note}");
            LabError::Unavailable { competitor: name.to_owned(), reason }
        };
        peers.into_iter().find(|one| one.name() == name).ok_or_else(missing)
    }

    /// The two peers that a gate needs: a fast one, and a plain one that shows whether the oracle can be trusted.
    pub fn fast_and_plain(&self, task: &Task) -> Vec<Box<dyn Competitor>> {
        let mut peers = self.peers(task);
        let plain = peers.iter().position(|one| is_plain(one.name()));
        let plain = plain.map(|at| peers.remove(at));
        peers.truncate(1);
        peers.into_iter().chain(plain).collect()
    }

    /// What the device of ours can do at best with `dtype`.
    pub fn ceiling(&self, dtype: DType) -> Result<Ceiling, LabError> {
        match &self.ours {
            Ours::Cpu(cpu) => Ceiling::of_cpu(cpu, dtype),
            Ours::Cuda(gpu) => self.gpu_ceiling(gpu, dtype),
        }
    }

    fn gpu_ceiling(&self, gpu: &Arc<Cuda>, dtype: DType) -> Result<Ceiling, LabError> {
        let copy = cuda::copy_rate(gpu)?;
        let product = self.torch().ok().map(|torch| torch.ceiling(dtype.name())).transpose()?;
        let (copy, matrix, how) = match product {
            Some((their_copy, matrix)) => (copy.max(their_copy), matrix, "8192x8192 product by PyTorch"),
            None => (copy, own_rate(gpu, dtype)?, "our own kernel at 1x16x16384x128, without PyTorch"),
        };
        let (place, dtype) = (Place::Gpu.name().to_owned(), dtype.name().to_owned());
        Ok(Ceiling { place, dtype, copy, matrix, how: how.to_owned() })
    }
}

/// Operations per second of our own kernel on a long sequence: a lower bound of what matrix units do.
fn own_rate(gpu: &Arc<Cuda>, dtype: DType) -> Result<f64, LabError> {
    let task = Task::square(dtype, [1, 16, 16_384, 128], Mask::NONE)?;
    let flops = task.flops();
    let mut ready = CudaCompetitor::new(gpu.clone()).prepare(&Rc::new(Workload::new(task, 0)?))?;
    let samples = Burst { seconds: 0.3, conditions: Conditions::default() }.run(&mut *ready)?;
    Ok(flops / median(&samples.seconds))
}

fn naive() -> Box<dyn Competitor> {
    Box::new(HostCompetitor::new(Arc::new(NaiveBackend)))
}

/// Competitors are listed with the ones to beat first.
fn rank(name: &str) -> usize {
    let order = [
        "torch-cudnn",
        fa3::NAME,
        "fa3-deterministic",
        "flashinfer",
        "torch-grouped",
        "torch-flash",
        "torch-efficient",
        "torch-flex",
        "torch-cpu",
    ];
    order.iter().position(|known| *known == name).unwrap_or(order.len())
}

fn is_plain(name: &str) -> bool {
    name == NAIVE || name.ends_with("math")
}

/// How a gate measures on each device: sustained where power limits the clock, interleaved where other programs
/// disturb.
pub fn usual_gate_protocol(place: Place) -> Protocol {
    let (mode, seconds, rounds) = match place {
        Place::Gpu => (Mode::Sustained, 0.5, 3),
        Place::Cpu => (Mode::Interleaved, 0.03, Mode::Interleaved.usual_rounds()),
    };
    Protocol { rounds, warm_up: STEADY, ..Protocol::new(mode, seconds) }
}
