//! Grouped products on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and
//! back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{GroupedCall, GroupedProblem, Grouping, Operand, Ran};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Plan, plan_grouped, slots::grouped as slots};

use super::{Cuda, Error, ready::MOST_ASKED};

/// Addresses in device memory that the launches of grouped products bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GroupedTensors {
    /// The left factor.
    pub a: u64,
    /// The right factor.
    pub b: u64,
    /// The result.
    pub out: u64,
    /// The i32 end of each group, any numbers; 0 where nothing is divided.
    pub offsets: u64,
}

/// Grouped products ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyGrouped {
    problem: GroupedProblem,
    alignment: u64,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl ReadyGrouped {
    fn serves(&self, problem: &GroupedProblem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub const fn problem(&self) -> &GroupedProblem {
        &self.problem
    }

    /// Which kernels, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches on a stream (`CUstream`, `cudaStream_t`; null is the legacy one); returns as soon as the launches are
    /// queued. Nothing is read back or waited for: a captured graph is right for the offsets that it finds.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launches are
    /// done (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or
    /// touch the output meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &GroupedTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &GroupedTensors) -> Result<[u64; slots::COUNT], Error> {
        let divides = self.problem.grouping() != Grouping::Batch;
        let tensor = self.alignment.min(MOST_ASKED);
        let factors = self.problem.depth() > 0;
        let bound = [
            (Operand::MatA, slots::A, tensors.a, factors, tensor),
            (Operand::MatB, slots::B, tensors.b, factors, tensor),
            (Operand::Out, slots::OUT, tensors.out, true, tensor),
            (Operand::Offsets, slots::OFFSETS, tensors.offsets, divides, size_of::<i32>() as u64),
        ];
        let mut addresses = [0; slots::COUNT];
        for (operand, slot, address, read, alignment) in bound {
            if read && address == 0 && !self.launches.is_empty() {
                return Err(Error::Missing { operand });
            }
            if !address.is_multiple_of(alignment) {
                return Err(Error::Alignment { operand, address, alignment });
            }
            addresses[slot.0 as usize] = address;
        }
        Ok(addresses)
    }
}

impl Cuda {
    /// Makes grouped products ready to launch: builds or finds their kernels and lays out the arguments. Later calls with
    /// an equal problem return the same.
    pub fn prepare_grouped(&self, problem: &GroupedProblem) -> Result<Arc<ReadyGrouped>, Error> {
        self.prepare_grouped_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_grouped`](Self::prepare_grouped), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_grouped_aligned(
        &self,
        problem: &GroupedProblem,
        alignment: u64,
    ) -> Result<Arc<ReadyGrouped>, Error> {
        self.grouped.find_or(
            |ready| ready.serves(problem, alignment),
            || {
                let plan = plan_grouped(problem, &self.gpu, alignment)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyGrouped { problem: *problem, alignment, plan, launches })
            },
        )
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn grouped_host(&self, call: &mut GroupedCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_grouped(call.problem())?;
        let (inputs, upload) = (*call.inputs(), |bytes: &[u8]| DeviceBuffer::from_host(&self.stream, bytes));
        let (a, b) = (upload(inputs.a.bytes())?, upload(inputs.b.bytes())?);
        let offsets = inputs.offsets.map(|offsets| upload(bytemuck::cast_slice(offsets))).transpose()?;
        let mut out = call.out();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = upload(out.bytes_mut())?;
        let tensors = GroupedTensors {
            a: a.address(),
            b: b.address(),
            out: device_out.address(),
            offsets: offsets.as_ref().map_or(0, DeviceBuffer::address),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copy below has waited.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        device_out.copy_to_host(&self.stream, 0, out.bytes_mut())?;
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}
