//! Grouped products on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and
//! back.

use std::sync::Arc;

use flashcore_core::{GroupedCall, GroupedProblem, Grouping, Operand, Ran};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, plan_grouped, slots::grouped as slots};

use super::{Cuda, Error, Operation, ReadyOf, ready::Asked};

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

/// Grouped products ready to launch. A captured graph is right for the offsets that it finds.
pub type ReadyGrouped = ReadyOf<GroupedProblem>;

impl Operation for GroupedProblem {
    type Tensors<'a> = GroupedTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyGrouped, tensors: &GroupedTensors) -> Result<Self::Slots, Error> {
        let (problem, alignment) = (ready.problem(), ready.tensor_alignment());
        let offsets = (problem.grouping() != Grouping::Batch).then_some(size_of::<i32>() as u64);
        let empty = problem.depth() == 0;
        ready.bind([
            Asked::new(slots::A, Operand::MatA, tensors.a, alignment).nullable(empty),
            Asked::new(slots::B, Operand::MatB, tensors.b, alignment).nullable(empty),
            Asked::new(slots::OUT, Operand::Out, tensors.out, alignment),
            Asked::new(slots::OFFSETS, Operand::Offsets, tensors.offsets, offsets),
        ])
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
        let plan = || plan_grouped(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.grouped, problem, alignment, plan)
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn grouped_host(&self, call: &mut GroupedCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_grouped(call.problem())?, self.held());
        let inputs = *call.inputs();
        held.inputs([(slots::A, inputs.a.bytes()), (slots::B, inputs.b.bytes())])?;
        held.inputs(inputs.offsets.map(|offsets| (slots::OFFSETS, bytemuck::cast_slice(offsets))))?;
        let mut out = call.out();
        held.output(slots::OUT, out.bytes_mut())?;
        let tensors = GroupedTensors {
            a: held.at(slots::A),
            b: held.at(slots::B),
            out: held.at(slots::OUT),
            offsets: held.at(slots::OFFSETS),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
