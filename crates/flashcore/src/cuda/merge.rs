//! Merges on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{MergeCall, MergeProblem, Operand, Ran};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Plan, plan_merge, slots::merge as slots};

use super::{Cuda, Error, ready::MOST_ASKED};

/// Addresses in device memory that the launch of a merge binds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MergeTensors<'a> {
    /// Each part, or the first of all where they are stacked.
    pub parts: &'a [u64],
    /// f32 log-sum-exp of each part, dense batch × heads × sequence; one address where they are stacked.
    pub lses: &'a [u64],
    /// The result.
    pub out: u64,
    /// f32 log-sum-exp of the result, dense; 0 where nobody wants it.
    pub lse: u64,
}

/// A merge ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyMerge {
    problem: MergeProblem,
    alignment: u64,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl ReadyMerge {
    pub(super) fn serves(&self, problem: &MergeProblem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub const fn problem(&self) -> &MergeProblem {
        &self.problem
    }

    /// Which kernel, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches on a stream (`CUstream`, `cudaStream_t`; null is the legacy one); returns as soon as the launch is
    /// queued. Nothing is allocated, read back or waited for.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launch is done
    /// (or, where the stream is being captured, until the last replay is done). Nobody else may write the parts or touch
    /// the outputs meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &MergeTensors<'_>, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &MergeTensors<'_>) -> Result<[u64; slots::COUNT], Error> {
        let mut addresses = [0; slots::COUNT];
        let expected = self.problem.parts().tensors();
        for (operand, given) in [(Operand::Part, tensors.parts.len()), (Operand::PartLse, tensors.lses.len())]
        {
            if given != expected {
                return Err(Error::Addresses { operand, given, expected });
            }
        }
        let tensor = self.alignment.min(MOST_ASKED);
        addresses[slots::OUT.0 as usize] = self.checked(Operand::Out, tensors.out, tensor)?;
        for (n, (&part, &lse)) in (0..).zip(tensors.parts.iter().zip(tensors.lses)) {
            addresses[slots::part(n).0 as usize] = self.checked(Operand::Part, part, tensor)?;
            let lse = self.checked(Operand::PartLse, lse, size_of::<f32>() as u64)?;
            addresses[slots::part_lse(n).0 as usize] = lse;
        }
        addresses[slots::LSE.0 as usize] = tensors.lse;
        Ok(addresses)
    }

    fn checked(&self, operand: Operand, address: u64, alignment: u64) -> Result<u64, Error> {
        if address == 0 && !self.launches.is_empty() {
            return Err(Error::Missing { operand });
        }
        if !address.is_multiple_of(alignment) {
            return Err(Error::Alignment { operand, address, alignment });
        }
        Ok(address)
    }
}

impl Cuda {
    /// Makes a merge ready to launch: builds or finds its kernel and lays out the arguments. Later calls with an equal
    /// problem return the same.
    pub fn prepare_merge(&self, problem: &MergeProblem) -> Result<Arc<ReadyMerge>, Error> {
        self.prepare_merge_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_merge`](Self::prepare_merge), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_merge_aligned(
        &self,
        problem: &MergeProblem,
        alignment: u64,
    ) -> Result<Arc<ReadyMerge>, Error> {
        self.merges.find_or(
            |ready| ready.serves(problem, alignment),
            || {
                let plan = plan_merge(problem, &self.gpu, alignment)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyMerge { problem: problem.clone(), alignment, plan, launches })
            },
        )
    }

    /// Host parts, copied to the GPU and back.
    pub(super) fn merge_host(&self, call: &mut MergeCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_merge(call.problem())?;
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&self.stream, bytes);
        let parts = call.parts().iter().map(|part| upload(part.bytes())).collect::<Result<Vec<_>, _>>()?;
        let lses = call.lses().iter().map(|lse| upload(bytemuck::cast_slice(lse)));
        let lses = lses.collect::<Result<Vec<_>, _>>()?;
        let (mut out, lse) = call.outputs();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = upload(out.bytes_mut())?;
        let device_lse =
            lse.as_ref().filter(|lse| !lse.is_empty()).map(|lse| upload(bytemuck::cast_slice(lse)));
        let device_lse = device_lse.transpose()?;
        let addresses =
            |buffers: &[DeviceBuffer]| buffers.iter().map(DeviceBuffer::address).collect::<Vec<_>>();
        let tensors = MergeTensors {
            parts: &addresses(&parts),
            lses: &addresses(&lses),
            out: device_out.address(),
            lse: device_lse.as_ref().map_or(0, DeviceBuffer::address),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copies below have waited.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        device_out.copy_to_host(&self.stream, 0, out.bytes_mut())?;
        if let (Some(lse), Some(from)) = (lse, device_lse) {
            from.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(lse))?;
        }
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}
