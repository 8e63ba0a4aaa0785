//! Tensors rounded to 8 bits on the GPU: prepared once, launched on device memory, or over host tensors that are copied
//! there and back.

use std::sync::Arc;

use flashcore_core::{Operand, QuantiseCall, QuantiseProblem, QuantisedMut, Ran};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, plan_quantise, quantise_values, slots::quantise as slots};

use super::{
    Cuda, Error, Operation, ReadyOf,
    ready::{Asked, FLOAT},
};

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

/// A tensor to be quantised, ready to launch.
pub type ReadyQuantise = ReadyOf<QuantiseProblem>;

impl Operation for QuantiseProblem {
    type Tensors<'a> = QuantiseTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyQuantise, tensors: &QuantiseTensors) -> Result<Self::Slots, Error> {
        let problem = ready.problem();
        let elements = problem.dims().count().is_some_and(|count| count > 0);
        let tensor = elements.then(|| ready.tensor_alignment());
        let factors = (problem.factors() > 0).then_some(FLOAT);
        let means = (problem.means() > 0).then_some(FLOAT);
        let lengths = problem.spec().used.map(|index| index.bytes().into());
        ready.bind([
            Asked::new(slots::X, Operand::X, tensors.x, tensor),
            Asked::new(slots::OUT, Operand::Out, tensors.out, tensor),
            Asked::new(slots::FACTORS, Operand::Factors, tensors.factors, factors),
            Asked::new(slots::MEANS, Operand::Means, tensors.means, means),
            Asked::new(slots::LENGTHS, Operand::LengthsQ, tensors.lengths, lengths),
        ])
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
        let plan = || plan_quantise(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.quantised, problem, alignment, plan)
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn quantise_host(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_quantise(call.problem())?, self.held());
        held.inputs([(slots::X, call.x().bytes())])?;
        held.inputs(quantise_values(call))?;
        let QuantisedMut { mut out, factors, means } = call.outputs();
        held.output(slots::OUT, out.bytes_mut())?;
        held.output(slots::FACTORS, bytemuck::cast_slice_mut(factors))?;
        if let Some(means) = means {
            held.output(slots::MEANS, bytemuck::cast_slice_mut(means))?;
        }
        let tensors = QuantiseTensors {
            x: held.at(slots::X),
            out: held.at(slots::OUT),
            factors: held.at(slots::FACTORS),
            means: held.at(slots::MEANS),
            lengths: held.at(slots::LENGTHS),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
