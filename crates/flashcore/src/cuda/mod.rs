//! Attention on NVIDIA GPUs: plan → program → machine code → launch.
//!
//! [`Cuda`] is a [`Backend`](flashcore_core::Backend) for host tensors, used by [`crate::attention`]. Programs that
//! hold device memory of their own use [`Cuda::prepare`] once per problem and [`Ready::launch`] for every call: no
//! allocation, no synchronisation, on the caller's stream.
//!
//! ```no_run
//! use flashcore::cuda::{Cuda, DeviceTensors};
//! # fn run(problem: &flashcore::Problem, q: u64, k: u64, v: u64, out: u64, stream: *mut std::ffi::c_void)
//! # -> Result<(), flashcore::cuda::Error> {
//! let cuda = Cuda::open(0)?;
//! let ready = cuda.prepare(problem)?;
//! println!("{}", ready.plan());
//! let tensors = DeviceTensors { q, k, v, out, ..DeviceTensors::default() };
//! // SAFETY: the addresses are those of live tensors with the problem's layouts, and the stream is alive.
//! unsafe { ready.launch_raw(&tensors, stream) }
//! # }
//! ```
#![allow(unsafe_code)] // Launching a kernel over raw device memory.

mod append;
mod backward;
mod forward;
mod grouped;
mod host;
mod kernels;
mod merge;
mod moe;
mod quantise;
mod ready;
mod recent;

use std::sync::{Arc, OnceLock};

use flashcore_core::BackendError;
use flashcore_cuda::{Compiler, Device, Stream};
use flashcore_kernels::{Gpu, Misfit, PlanError};

pub use append::{AppendTensors, ReadyAppend};
pub use backward::{BackwardTensors, ReadyBackward};
pub use flashcore_cuda as driver;
pub use flashcore_kernels::{
    Choice, Family, Form, NarrowForm, Tile, UnknownKernel,
    moe::{Cut as ExpertCut, product::Shape as ExpertTile, product_sm90::Shape as HopperExpertTile},
    tuned::Table,
};
pub use forward::{DeviceTensors, Ready};
pub use grouped::{GroupedTensors, ReadyGrouped};
use kernels::Kernels;
pub use merge::{MergeTensors, ReadyMerge};
pub use moe::{MoeTensors, ReadyMoe};
pub use quantise::{QuantiseTensors, ReadyQuantise};
pub use ready::{Operation, ReadyOf};
use recent::Recent;

/// GPUs that the process shares, each opened once and kept to its end: more than a machine has.
static SHARED: [OnceLock<Cuda>; 64] = [const { OnceLock::new() }; 64];

/// One GPU that computes attention.
#[derive(Debug)]
pub struct Cuda {
    device: Device,
    gpu: Gpu,
    choice: Choice,
    kernels: Kernels,
    /// For host tensors; device tensors bring their own stream.
    stream: Stream,
    ready: Recent<Ready>,
    merges: Recent<ReadyMerge>,
    appends: Recent<ReadyAppend>,
    gradients: Recent<ReadyBackward>,
    experts: Recent<ReadyMoe>,
    grouped: Recent<ReadyGrouped>,
    quantised: Recent<ReadyQuantise>,
}

/// Why a GPU computed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No kernel supports the problem.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A requested tile cannot be used.
    #[error(transparent)]
    Tile(#[from] Misfit),
    /// The kernel could not be built: a bug of FlashCore.
    #[error(transparent)]
    Build(#[from] flashcore_tile::BuildError),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// An address that the problem needs and the caller did not bind.
    #[error("the problem reads {operand} but its address is 0; bind it")]
    Missing {
        /// What is missing.
        operand: flashcore_core::Operand,
    },
    /// The wrong number of addresses.
    #[error("{given} addresses for {operand} but the problem expects {expected}; give each part its own")]
    Addresses {
        /// What they are of.
        operand: flashcore_core::Operand,
        /// How many were given.
        given: usize,
        /// How many are needed.
        expected: usize,
    },
    /// An address that the prepared launch cannot take.
    #[error(
        "the address {address:#x} of {operand} must be a multiple of {alignment}; use `prepare_aligned` for it"
    )]
    Alignment {
        /// The tensor.
        operand: flashcore_core::Operand,
        /// Its address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
}

impl Error {
    /// What a GPU that cannot be opened means for a backend: it is not there, so that another may do its work. Only a
    /// tool that the user named wrongly is a failure, which another backend would hide.
    pub fn on_opening(self) -> BackendError {
        match self {
            Self::Driver(driver::Error::BadTool { .. }) => {
                BackendError::Failed { backend: "cuda", source: Box::new(self) }
            }
            other => BackendError::Unavailable { backend: "cuda", reason: other.to_string() },
        }
    }
}

impl Cuda {
    /// Opens GPU number `index`.
    pub fn open(index: u32) -> Result<Self, Error> {
        let device = Device::new(index)?;
        let props = device.props();
        let gpu = Gpu { capability: props.capability, sms: props.sms, shared_bytes: props.shared_optin };
        Ok(Self {
            device,
            gpu,
            choice: Choice::Rules,
            kernels: Kernels::new(device, Compiler::from_env()?),
            stream: Stream::new(device)?,
            ready: Recent::default(),
            merges: Recent::default(),
            appends: Recent::default(),
            gradients: Recent::default(),
            experts: Recent::default(),
            grouped: Recent::default(),
            quantised: Recent::default(),
        })
    }

    /// The process-wide GPU number `index`: all callers share its kernels and prepared problems.
    pub fn shared(index: u32) -> Result<&'static Self, Error> {
        let slot = SHARED.get(index as usize);
        if let Some(cuda) = slot.and_then(OnceLock::get) {
            return Ok(cuda);
        }
        // Two threads that come here at once may both open it; one stays.
        let cuda = Self::open(index)?;
        match slot {
            Some(slot) => Ok(slot.get_or_init(|| cuda)),
            None => Ok(Box::leak(Box::new(cuda))),
        }
    }

    /// Plans as if for another GPU, whose kernels this one must be able to run: for tests and comparisons.
    #[must_use]
    pub fn planning_for(mut self, gpu: Gpu) -> Self {
        self.gpu = gpu;
        self
    }

    /// Uses the general kernel even where a specialised one would be chosen: for comparisons.
    #[must_use]
    pub fn with_general_kernels(self) -> Self {
        self.choosing(Choice::Kernel(Family::Sm80))
    }

    /// Consults this table of measured tiles before the rules.
    #[must_use]
    pub fn with_table(self, table: impl Into<Arc<Table>>) -> Self {
        self.choosing(Choice::Table(table.into()))
    }

    /// Chooses kernels by this: a kernel by its name, as in `Choice::Kernel("forward_sm80".parse()?)`, or a table.
    #[must_use]
    pub fn choosing(mut self, choice: Choice) -> Self {
        self.choice = choice;
        self
    }

    /// What plans know of the GPU.
    pub fn gpu(&self) -> Gpu {
        self.gpu
    }

    /// A stream of its own, on which host tensors are computed.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The GPU.
    pub fn device(&self) -> Device {
        self.device
    }
}
