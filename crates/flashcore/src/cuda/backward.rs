//! Gradients on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and back.

use std::sync::Arc;

use flashcore_core::{BackwardCall, BackwardProblem, Layout, Operand, Ran, RowSums, RowTerms};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, host_values, slots::backward as slots};

use super::{
    Cuda, Error, Operation, ReadyOf,
    forward::values,
    ready::{Asked, FLOAT},
};

/// Addresses in device memory that a launch of gradients binds. The kernels read what lies there when they run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BackwardTensors {
    /// Queries, in the problem's layout, like the other tensors.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// The result of forward; 0 where row sums are given.
    pub out: u64,
    /// Its f32 log-sum-exp, dense batch × heads × sequence.
    pub lse: u64,
    /// The gradient of the result.
    pub d_out: u64,
    /// f32 sums of each row of the result times its gradient, dense, where the problem says that they are given.
    pub row_sums: u64,
    /// The gradient of the queries.
    pub dq: u64,
    /// The gradient of the keys.
    pub dk: u64,
    /// The gradient of the values.
    pub dv: u64,
    /// Used queries of each batch entry, or offsets of packed sequences, as for forward; 0 where the problem has none. Rows
    /// that belong to no sequence have gradients of 0.
    pub lengths_q: u64,
    /// The same of keys and values.
    pub lengths_kv: u64,
    /// One sink per query head in the problem's type for them; 0 where it has none.
    pub sinks: u64,
    /// What was added to scores, as the problem's bias says; 0 where it has none.
    pub bias: u64,
    /// The u64 that forward had; 0 where the problem has no dropout.
    pub seed: u64,
    /// Their f32 gradients; 0 where nobody wants them.
    pub d_sinks: u64,
}

/// Gradients ready to launch.
pub type ReadyBackward = ReadyOf<BackwardProblem>;

impl Operation for BackwardProblem {
    type Tensors<'a> = BackwardTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyBackward, tensors: &BackwardTensors) -> Result<Self::Slots, Error> {
        let (problem, forward) = (ready.problem(), ready.problem().forward());
        let tensor = |slot, operand, address, layout: &Layout| {
            Asked::new(slot, operand, address, ready.tensor_alignment()).nullable(layout.span() == 0)
        };
        let of_rows =
            |slot, operand, address| Asked::new(slot, operand, address, FLOAT).nullable(forward.rows() == 0);
        let terms = match problem.row_sums() {
            RowSums::Computed => tensor(slots::OUT, Operand::Out, tensors.out, forward.out()),
            RowSums::Given => of_rows(slots::ROW_SUMS, Operand::RowSums, tensors.row_sums),
        };
        let asked = [
            tensor(slots::Q, Operand::Q, tensors.q, forward.q()),
            tensor(slots::K, Operand::K, tensors.k, forward.k()),
            tensor(slots::V, Operand::V, tensors.v, forward.v()),
            tensor(slots::D_OUT, Operand::DOut, tensors.d_out, problem.d_out()),
            tensor(slots::DQ, Operand::DQ, tensors.dq, problem.dq()),
            tensor(slots::DK, Operand::DK, tensors.dk, problem.dk()),
            tensor(slots::DV, Operand::DV, tensors.dv, problem.dv()),
            of_rows(slots::LSE, Operand::Lse, tensors.lse),
            terms,
            Asked::new(slots::D_SINKS, Operand::Sinks, tensors.d_sinks, 1).nullable(true),
        ];
        let addresses = [tensors.lengths_q, tensors.lengths_kv, tensors.sinks, tensors.bias, tensors.seed];
        let values = values(forward, addresses).map(|asked| asked.nullable(forward.sequences() == 0));
        ready.bind(asked.into_iter().chain(values))
    }
}

impl Cuda {
    /// Makes gradients ready to launch: builds or finds their kernels and lays out the arguments. Later calls with an
    /// equal problem return the same.
    pub fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<ReadyBackward>, Error> {
        self.prepare_backward_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_backward`](Self::prepare_backward), for tensors whose addresses are multiples of `alignment` bytes
    /// only.
    pub fn prepare_backward_aligned(
        &self,
        problem: &BackwardProblem,
        alignment: u64,
    ) -> Result<Arc<ReadyBackward>, Error> {
        let plan = || self.choice.plan_backward(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.gradients, problem, alignment, plan)
    }

    /// Gradients of host tensors, copied to the GPU and back.
    pub(super) fn backward_host(&self, call: &mut BackwardCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_backward(call.problem())?, self.held());
        let inputs = call.inputs();
        let [q, k, v] = inputs.qkv.map(|data| data.bytes());
        let terms = match inputs.terms {
            RowTerms::Out(out) => (slots::OUT, out.bytes()),
            RowTerms::Sums(sums) => (slots::ROW_SUMS, bytemuck::cast_slice(sums)),
        };
        held.inputs([(slots::Q, q), (slots::K, k), (slots::V, v), terms])?;
        held.inputs([(slots::D_OUT, inputs.d_out.bytes()), (slots::LSE, bytemuck::cast_slice(inputs.lse))])?;
        held.inputs(host_values(call.instance()))?;
        let mut gradients = call.gradients();
        for (slot, data) in [slots::DQ, slots::DK, slots::DV].into_iter().zip(&mut gradients.qkv) {
            held.output(slot, data.bytes_mut())?;
        }
        if let Some(sinks) = gradients.sinks {
            held.output(slots::D_SINKS, bytemuck::cast_slice_mut(sinks))?;
        }
        let tensors = BackwardTensors {
            q: held.at(slots::Q),
            k: held.at(slots::K),
            v: held.at(slots::V),
            out: held.at(slots::OUT),
            lse: held.at(slots::LSE),
            d_out: held.at(slots::D_OUT),
            row_sums: held.at(slots::ROW_SUMS),
            dq: held.at(slots::DQ),
            dk: held.at(slots::DK),
            dv: held.at(slots::DV),
            lengths_q: held.at(slots::LENGTHS_Q),
            lengths_kv: held.at(slots::LENGTHS_KV),
            sinks: held.at(slots::SINKS),
            bias: held.at(slots::BIAS),
            seed: held.at(slots::SEED),
            d_sinks: held.at(slots::D_SINKS),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
