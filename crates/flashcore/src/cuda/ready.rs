//! A problem that is ready to launch: plan, kernel, laid-out arguments, and the small arrays that kernels read.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{Operand, Problem};
use flashcore_cuda::{DeviceBuffer, Kernel, Prepared, Route, Stream};
use flashcore_kernels::{Plan, SideArrays, slots};

use super::{Error, kernels::Loaded};

/// Addresses of a problem's tensors in device memory, each with the problem's layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceTensors {
    /// Queries.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// The result.
    pub out: u64,
    /// f32 log-sum-exp, dense batch × heads × sequence; 0 where nobody wants it.
    pub lse: u64,
}

/// A problem ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct Ready {
    problem: Problem,
    alignment: u64,
    plan: Plan,
    kernel: Kernel,
    route: Route,
    /// `None` where there is nothing to compute.
    prepared: Option<Prepared>,
    sinks: Option<DeviceBuffer>,
    lengths: Option<[DeviceBuffer; 2]>,
}

impl Ready {
    pub(super) fn new(
        loaded: &Arc<Loaded>,
        plan: Plan,
        problem: &Problem,
        alignment: u64,
        stream: &Stream,
    ) -> Result<Self, Error> {
        let spec = plan.launch(&loaded.program, problem);
        let prepared = spec.map(|spec| Prepared::new(&loaded.kernel, &spec)).transpose()?;
        let arrays = SideArrays::of(problem);
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes);
        let lengths = arrays.lengths.as_ref().map(|[q, kv]| Ok::<_, Error>([upload(q)?, upload(kv)?]));
        Ok(Self {
            problem: problem.clone(),
            alignment,
            plan,
            kernel: loaded.kernel.clone(),
            route: loaded.route,
            prepared,
            sinks: arrays.sinks.as_deref().map(upload).transpose()?,
            lengths: lengths.transpose()?,
        })
    }

    pub(super) fn serves(&self, problem: &Problem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Which kernel, and why.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The loaded kernel: registers, spills, occupancy.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// How its machine code was obtained.
    pub fn route(&self) -> Route {
        self.route
    }

    /// Launches on `stream`; returns as soon as the launch is queued.
    ///
    /// # Safety
    /// The tensors must be live device memory of this GPU with the problem's layouts, until the launch is done (or,
    /// where the stream is being captured, until the last replay is done). Nobody else may write the inputs or touch
    /// the outputs meanwhile. Where the stream is being captured, `self` must live as long: the kernel reads its
    /// lengths and sinks.
    pub unsafe fn launch(&self, tensors: &DeviceTensors, stream: &Stream) -> Result<(), Error> {
        let Some(prepared) = &self.prepared else { return Ok(()) };
        // SAFETY: the caller's promise; freeing side arrays waits for launches, see `slots`.
        unsafe { prepared.launch(stream, &self.slots(tensors)?)? };
        Ok(())
    }

    /// As [`launch`](Self::launch) on another program's stream (`CUstream`, `cudaStream_t`; null is the legacy one).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &DeviceTensors, stream: *mut c_void) -> Result<(), Error> {
        let Some(prepared) = &self.prepared else { return Ok(()) };
        // SAFETY: the caller's promise; freeing side arrays waits for launches, see `slots`.
        unsafe { prepared.launch_raw(stream, &self.slots(tensors)?)? };
        Ok(())
    }

    /// The address of every slot. Side arrays are freed with `self`, and freeing waits for the device.
    fn slots(&self, tensors: &DeviceTensors) -> Result<[u64; slots::COUNT], Error> {
        let mut addresses = [0; slots::COUNT];
        let operands = [
            (slots::Q, Operand::Q, tensors.q),
            (slots::K, Operand::K, tensors.k),
            (slots::V, Operand::V, tensors.v),
            (slots::OUT, Operand::Out, tensors.out),
        ];
        let alignment = self.alignment.min(MOST_ASKED);
        for (slot, operand, address) in operands {
            if !address.is_multiple_of(alignment) {
                return Err(Error::Alignment { operand, address, alignment });
            }
            addresses[slot.0 as usize] = address;
        }
        addresses[slots::LSE.0 as usize] = tensors.lse;
        addresses[slots::SINKS.0 as usize] = self.sinks.as_ref().map_or(0, DeviceBuffer::address);
        if let Some([q, kv]) = &self.lengths {
            addresses[slots::LENGTHS_Q.0 as usize] = q.address();
            addresses[slots::LENGTHS_KV.0 as usize] = kv.address();
        }
        Ok(addresses)
    }
}

/// No kernel makes use of more than this.
const MOST_ASKED: u64 = 16;
