//! Merges on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and back.

use std::sync::Arc;

use flashcore_core::{MergeCall, MergeProblem, Operand, Ran};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, plan_merge, slots::merge as slots};

use super::{
    Cuda, Error, Operation, ReadyOf,
    ready::{Asked, FLOAT},
};

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

/// A merge ready to launch.
pub type ReadyMerge = ReadyOf<MergeProblem>;

impl Operation for MergeProblem {
    type Tensors<'a> = MergeTensors<'a>;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyMerge, tensors: &MergeTensors<'_>) -> Result<Self::Slots, Error> {
        let expected = ready.problem().parts().tensors();
        for (operand, given) in [(Operand::Part, tensors.parts.len()), (Operand::PartLse, tensors.lses.len())]
        {
            if given != expected {
                return Err(Error::Addresses { operand, given, expected });
            }
        }
        let alignment = ready.tensor_alignment();
        let outputs = [
            Asked::new(slots::OUT, Operand::Out, tensors.out, alignment),
            Asked::new(slots::LSE, Operand::Lse, tensors.lse, 1).nullable(true),
        ];
        let parts = (0..).zip(tensors.parts.iter().zip(tensors.lses)).flat_map(|(n, (&part, &lse))| {
            [
                Asked::new(slots::part(n), Operand::Part, part, alignment),
                Asked::new(slots::part_lse(n), Operand::PartLse, lse, FLOAT),
            ]
        });
        ready.bind(outputs.into_iter().chain(parts))
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
        let plan = || plan_merge(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.merges, problem, alignment, plan)
    }

    /// Host parts, copied to the GPU and back.
    pub(super) fn merge_host(&self, call: &mut MergeCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_merge(call.problem())?, self.held());
        held.inputs((0..).zip(call.parts()).map(|(n, part)| (slots::part(n), part.bytes())))?;
        held.inputs((0..).zip(call.lses()).map(|(n, lse)| (slots::part_lse(n), bytemuck::cast_slice(lse))))?;
        let parts = call.parts().len() as u8;
        let (mut out, lse) = call.outputs();
        held.output(slots::OUT, out.bytes_mut())?;
        if let Some(lse) = lse {
            held.output(slots::LSE, bytemuck::cast_slice_mut(lse))?;
        }
        let tensors = MergeTensors {
            parts: &(0..parts).map(|n| held.at(slots::part(n))).collect::<Vec<_>>(),
            lses: &(0..parts).map(|n| held.at(slots::part_lse(n))).collect::<Vec<_>>(),
            out: held.at(slots::OUT),
            lse: held.at(slots::LSE),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
