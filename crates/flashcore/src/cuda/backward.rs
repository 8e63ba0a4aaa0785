//! Gradients on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{BackwardCall, BackwardProblem, Layout, Operand, Ran, RowSums, RowTerms, Sequences};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all, launch_all_with};
use flashcore_kernels::{
    ALLOCATED_ALIGNMENT, Plan, host_values,
    slots::{Slot, backward as slots},
};

use super::{Cuda, Error, ready::MOST_ASKED};

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
    /// Used queries of each batch entry, or offsets of packed sequences, as for forward; 0 where the problem has none.
    pub lengths_q: u64,
    /// The same of keys and values.
    pub lengths_kv: u64,
    /// One sink per query head in the problem's type for them; 0 where it has none.
    pub sinks: u64,
    /// What was added to scores, as the problem's bias says; 0 where it has none.
    pub bias: u64,
    /// Their f32 gradients; 0 where nobody wants them.
    pub d_sinks: u64,
}

/// Gradients ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyBackward {
    problem: BackwardProblem,
    alignment: u64,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

/// An address that the problem asks for.
struct Asked {
    slot: Slot,
    operand: Operand,
    address: u64,
    /// What it must be a multiple of.
    alignment: u64,
    /// Whether nothing lies there, so that it may be 0.
    empty: bool,
}

impl ReadyBackward {
    fn serves(&self, problem: &BackwardProblem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub const fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// Which kernels, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches on a stream (`CUstream`, `cudaStream_t`; null is the legacy one); returns as soon as the launches are
    /// queued. Nothing is read back or waited for, and nothing allocated but, at a stream's first call, the plan's
    /// workspace.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launch is done
    /// (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or touch
    /// the gradients meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &BackwardTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// As [`launch_raw`](Self::launch_raw) with scratch memory of the caller's: `allocate` is asked for so many bytes, and
    /// answers with an address that is a multiple of 256, or with none.
    ///
    /// # Safety
    /// As [`launch_raw`](Self::launch_raw); what `allocate` gave must stay until the launch is done.
    pub unsafe fn launch_with(
        &self,
        tensors: &BackwardTensors,
        stream: *mut c_void,
        allocate: &dyn Fn(u64) -> Option<u64>,
    ) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all_with(&self.launches, stream, &slots, allocate)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &BackwardTensors) -> Result<[u64; slots::COUNT], Error> {
        let mut addresses = [0; slots::COUNT];
        for asked in self.tensors(tensors).into_iter().chain(self.values(tensors)) {
            let Asked { slot, operand, address, alignment, empty } = asked;
            if address == 0 && !empty {
                return Err(Error::Missing { operand });
            }
            if !address.is_multiple_of(alignment) {
                return Err(Error::Alignment { operand, address, alignment });
            }
            addresses[slot.0 as usize] = address;
        }
        addresses[slots::D_SINKS.0 as usize] = tensors.d_sinks;
        Ok(addresses)
    }

    fn tensors(&self, tensors: &BackwardTensors) -> Vec<Asked> {
        let (problem, forward) = (&self.problem, self.problem.forward());
        let tensor = |slot, operand, address, layout: &Layout| {
            let (alignment, empty) = (self.alignment.min(MOST_ASKED), layout.span() == 0);
            Asked { slot, operand, address, alignment, empty }
        };
        let of_rows = |slot, operand, address| {
            let (alignment, empty) = (size_of::<f32>() as u64, forward.rows() == 0);
            Asked { slot, operand, address, alignment, empty }
        };
        let terms = match problem.row_sums() {
            RowSums::Computed => tensor(slots::OUT, Operand::Out, tensors.out, forward.out()),
            RowSums::Given => of_rows(slots::ROW_SUMS, Operand::RowSums, tensors.row_sums),
        };
        vec![
            tensor(slots::Q, Operand::Q, tensors.q, forward.q()),
            tensor(slots::K, Operand::K, tensors.k, forward.k()),
            tensor(slots::V, Operand::V, tensors.v, forward.v()),
            tensor(slots::D_OUT, Operand::DOut, tensors.d_out, problem.d_out()),
            tensor(slots::DQ, Operand::DQ, tensors.dq, problem.dq()),
            tensor(slots::DK, Operand::DK, tensors.dk, problem.dk()),
            tensor(slots::DV, Operand::DV, tensors.dv, problem.dv()),
            of_rows(slots::LSE, Operand::Lse, tensors.lse),
            terms,
        ]
    }

    /// Lengths and sinks, as far as the problem asks for them.
    fn values(&self, tensors: &BackwardTensors) -> Vec<Asked> {
        let forward = self.problem.forward();
        let (of_q, of_kv) = match forward.sequences_kind() {
            Sequences::Used { q, kv } => (q, kv),
            Sequences::Ragged { .. } => (true, true),
            _ => (false, false),
        };
        let (index, empty) = (u64::from(forward.index().bytes()), forward.sequences() == 0);
        let values = [
            (slots::LENGTHS_Q, Operand::LengthsQ, tensors.lengths_q, of_q.then_some(index)),
            (slots::LENGTHS_KV, Operand::LengthsKv, tensors.lengths_kv, of_kv.then_some(index)),
            (slots::SINKS, Operand::Sinks, tensors.sinks, forward.sinks().map(|sinks| sinks.bytes() as u64)),
            (slots::BIAS, Operand::Bias, tensors.bias, forward.bias().map(|bias| bias.bytes() as u64)),
        ];
        let asked = |(slot, operand, address, wanted): (_, _, _, Option<u64>)| {
            wanted.map(|alignment| Asked { slot, operand, address, alignment, empty })
        };
        values.into_iter().filter_map(asked).collect()
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
        self.gradients.find_or(
            |ready| ready.serves(problem, alignment),
            || {
                let plan = self.choice.plan_backward(problem, &self.gpu, alignment)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyBackward { problem: problem.clone(), alignment, plan, launches })
            },
        )
    }

    /// Gradients of host tensors, copied to the GPU and back.
    pub(super) fn backward_host(&self, call: &mut BackwardCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_backward(call.problem())?;
        let (inputs, values) = (call.inputs(), host_values(call.instance()));
        let mut held = Held { cuda: self, buffers: Vec::new() };
        for (slot, data) in [slots::Q, slots::K, slots::V].into_iter().zip(inputs.qkv) {
            held.upload(slot, data.bytes())?;
        }
        held.upload(slots::D_OUT, inputs.d_out.bytes())?;
        held.upload(slots::LSE, bytemuck::cast_slice(inputs.lse))?;
        match inputs.terms {
            RowTerms::Out(out) => held.upload(slots::OUT, out.bytes())?,
            RowTerms::Sums(sums) => held.upload(slots::ROW_SUMS, bytemuck::cast_slice(sums))?,
        }
        for (slot, bytes) in values {
            held.upload(slot, &bytes)?;
        }
        // What lies between the rows of a strided gradient comes back as it was.
        let mut gradients = call.gradients();
        for (slot, data) in GRADIENTS.into_iter().zip(&mut gradients.qkv) {
            held.upload(slot, data.bytes_mut())?;
        }
        if let Some(sinks) = &gradients.sinks {
            held.upload(slots::D_SINKS, bytemuck::cast_slice(sinks))?;
        }
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copies below have waited.
        unsafe { ready.launch_raw(&held.tensors(), self.stream.raw())? };
        for (slot, data) in GRADIENTS.into_iter().zip(&mut gradients.qkv) {
            held.download(slot, data.bytes_mut())?;
        }
        if let Some(sinks) = gradients.sinks {
            held.download(slots::D_SINKS, bytemuck::cast_slice_mut(sinks))?;
        }
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}

/// The slots of the gradients of Q, K and V.
const GRADIENTS: [Slot; 3] = [slots::DQ, slots::DK, slots::DV];

/// Copies of a call's arrays on the GPU.
struct Held<'a> {
    cuda: &'a Cuda,
    buffers: Vec<(Slot, DeviceBuffer)>,
}

impl Held<'_> {
    fn upload(&mut self, slot: Slot, bytes: &[u8]) -> Result<(), Error> {
        self.buffers.push((slot, DeviceBuffer::from_host(&self.cuda.stream, bytes)?));
        Ok(())
    }

    fn download(&self, slot: Slot, bytes: &mut [u8]) -> Result<(), Error> {
        if let Some((_, buffer)) = self.buffers.iter().find(|held| held.0 == slot) {
            buffer.copy_to_host(&self.cuda.stream, 0, bytes)?;
        }
        Ok(())
    }

    fn tensors(&self) -> BackwardTensors {
        let at = |slot| self.buffers.iter().find(|held| held.0 == slot).map_or(0, |held| held.1.address());
        BackwardTensors {
            q: at(slots::Q),
            k: at(slots::K),
            v: at(slots::V),
            out: at(slots::OUT),
            lse: at(slots::LSE),
            d_out: at(slots::D_OUT),
            row_sums: at(slots::ROW_SUMS),
            dq: at(slots::DQ),
            dk: at(slots::DK),
            dv: at(slots::DV),
            lengths_q: at(slots::LENGTHS_Q),
            lengths_kv: at(slots::LENGTHS_KV),
            sinks: at(slots::SINKS),
            bias: at(slots::BIAS),
            d_sinks: at(slots::D_SINKS),
        }
    }
}
