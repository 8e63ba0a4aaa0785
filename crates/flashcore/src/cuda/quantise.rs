//! Tensors rounded to 8 bits on the GPU: prepared once, launched on device memory, or over host tensors that are copied
//! there and back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{Operand, QuantiseCall, QuantiseProblem, QuantisedMut, Ran};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all};
use flashcore_kernels::{
    ALLOCATED_ALIGNMENT, Plan, plan_quantise, quantise_values, slots::quantise as slots,
};

use super::{Cuda, Error, ready::MOST_ASKED};

/// Addresses in device memory that the launches bind; lengths are read when the kernels run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuantiseTensors {
    /// The numbers, in the problem's layout.
    pub x: u64,
    /// The 8-bit floats.
    pub out: u64,
    /// f32 factors, as many as the problem has.
    pub factors: u64,
    /// f32 means, where the problem subtracts them.
    pub means: u64,
    /// Rows that batch entries use, in the problem's index type, where it has them.
    pub lengths: u64,
}

/// A tensor to be quantised, ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyQuantise {
    problem: QuantiseProblem,
    alignment: u64,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl ReadyQuantise {
    /// The problem it computes.
    pub const fn problem(&self) -> &QuantiseProblem {
        &self.problem
    }

    /// Which kernels, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches on a stream (`CUstream`, `cudaStream_t`; null is the legacy one); returns as soon as the launches are
    /// queued. Nothing is allocated, read back or waited for.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launches are
    /// done (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or
    /// touch the outputs meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &QuantiseTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &QuantiseTensors) -> Result<[u64; slots::COUNT], Error> {
        let (spec, float) = (self.problem.spec(), size_of::<f32>() as u64);
        let elements = self.problem.dims().count().is_some_and(|count| count > 0);
        let tensor = elements.then(|| self.alignment.min(MOST_ASKED));
        let factors = (self.problem.factors() > 0).then_some(float);
        let means = (self.problem.means() > 0).then_some(float);
        let operands = [
            (slots::X, Operand::X, tensors.x, tensor),
            (slots::OUT, Operand::Out, tensors.out, tensor),
            (slots::FACTORS, Operand::Factors, tensors.factors, factors),
            (slots::MEANS, Operand::Means, tensors.means, means),
            (slots::LENGTHS, Operand::LengthsQ, tensors.lengths, spec.used.map(|index| index.bytes().into())),
        ];
        let mut addresses = [0; slots::COUNT];
        for (slot, operand, address, wanted) in operands {
            let Some(alignment) = wanted else { continue };
            if address == 0 && !self.launches.is_empty() {
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
    /// Makes a tensor ready to be quantised: builds or finds the kernels and lays out the arguments. Later calls with an
    /// equal problem return the same.
    pub fn prepare_quantise(&self, problem: &QuantiseProblem) -> Result<Arc<ReadyQuantise>, Error> {
        self.prepare_quantise_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_quantise`](Self::prepare_quantise), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_quantise_aligned(
        &self,
        problem: &QuantiseProblem,
        alignment: u64,
    ) -> Result<Arc<ReadyQuantise>, Error> {
        self.quantised.find_or(
            |ready: &ReadyQuantise| ready.alignment == alignment && ready.problem == *problem,
            || {
                let plan = plan_quantise(problem, &self.gpu, alignment)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyQuantise { problem: problem.clone(), alignment, plan, launches })
            },
        )
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn quantise_host(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_quantise(call.problem())?;
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&self.stream, bytes);
        let x = upload(call.x().bytes())?;
        let lengths = quantise_values(call).into_iter().map(|(_, bytes)| upload(&bytes));
        let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
        let QuantisedMut { mut out, factors, means } = call.outputs();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = upload(out.bytes_mut())?;
        let device_factors = upload(bytemuck::cast_slice(factors))?;
        let device_means = means.as_ref().map(|means| upload(bytemuck::cast_slice(means))).transpose()?;
        let tensors = QuantiseTensors {
            x: x.address(),
            out: device_out.address(),
            factors: device_factors.address(),
            means: device_means.as_ref().map_or(0, DeviceBuffer::address),
            lengths: lengths.first().map_or(0, DeviceBuffer::address),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copies below have waited.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        device_out.copy_to_host(&self.stream, 0, out.bytes_mut())?;
        device_factors.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(factors))?;
        if let (Some(means), Some(from)) = (means, device_means) {
            from.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(means))?;
        }
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}
