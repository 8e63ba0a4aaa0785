//! New rows of a cache on the GPU: prepared once, launched on device memory, or over host tensors that are copied there
//! and back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{AppendCall, AppendOutputs, AppendProblem, Operand, Ran, Slots};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all};
use flashcore_kernels::{Plan, append_values, plan_append, slots::append as slots};

use super::{Cuda, Error};

/// Addresses in device memory that the launch of an append binds; the kernel reads lengths, slots and table when it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AppendTensors {
    /// New keys, in the problem's layout, like the other tensors.
    pub k: u64,
    /// New values.
    pub v: u64,
    /// The cache of keys.
    pub cache_k: u64,
    /// The cache of values.
    pub cache_v: u64,
    /// Keys that each sequence has, in the problem's index type, where rows go behind them; below 0 for no sequence.
    pub lengths: u64,
    /// i64 slots of the new rows, where they are listed; below 0 for none.
    pub slots: u64,
    /// i32 page numbers, a row for each sequence, where a table finds the pages.
    pub table: u64,
    /// Cosines and sines, where keys are turned.
    pub cos: u64,
    /// See `cos`.
    pub sin: u64,
    /// Queries, where some are turned.
    pub q: u64,
    /// Where they go.
    pub out: u64,
    /// f32 factors of keys and of values, as many as the problem's scales say, where it has some.
    pub factors: [u64; 2],
}

/// An append ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyAppend {
    problem: AppendProblem,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl ReadyAppend {
    /// The problem it computes.
    pub const fn problem(&self) -> &AppendProblem {
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
    /// (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or touch
    /// the caches meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &AppendTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &AppendTensors) -> Result<[u64; slots::COUNT], Error> {
        let spec = self.problem.spec();
        let element = spec.dtype.bytes() as u64;
        let cached = self.problem.cache_dtype().bytes() as u64;
        let scaled = spec.scales.map(|_| 4);
        let behind = spec.slots == Slots::Behind;
        let (turned, queries) = (spec.rotary.is_some(), spec.q.is_some());
        let operands = [
            (slots::K, Operand::K, tensors.k, Some(element)),
            (slots::V, Operand::V, tensors.v, Some(element)),
            (slots::CACHE_K, Operand::CacheK, tensors.cache_k, Some(cached)),
            (slots::CACHE_V, Operand::CacheV, tensors.cache_v, Some(cached)),
            (
                slots::LENGTHS,
                Operand::LengthsKv,
                tensors.lengths,
                behind.then_some(spec.index.bytes().into()),
            ),
            (slots::SLOTS, Operand::Slots, tensors.slots, (!behind).then_some(8)),
            (slots::TABLE, Operand::Table, tensors.table, spec.pages.map(|_| 4)),
            (slots::COS, Operand::Rotary, tensors.cos, turned.then_some(element)),
            (slots::SIN, Operand::Rotary, tensors.sin, turned.then_some(element)),
            (slots::Q, Operand::Q, tensors.q, queries.then_some(element)),
            (slots::OUT, Operand::Out, tensors.out, queries.then_some(element)),
            (slots::FACTORS_K, Operand::Factors, tensors.factors[0], scaled),
            (slots::FACTORS_V, Operand::Factors, tensors.factors[1], scaled),
        ];
        let mut addresses = [0; slots::COUNT];
        for (slot, operand, address, wanted) in operands {
            let Some(alignment) = wanted else { continue };
            // Tensors without elements may have any address.
            if address == 0 && !self.launches.is_empty() && self.problem.rows() > 0 {
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
    /// Makes an append ready to launch: builds or finds its kernel and lays out the arguments. Later calls with an equal
    /// problem return the same.
    pub fn prepare_append(&self, problem: &AppendProblem) -> Result<Arc<ReadyAppend>, Error> {
        self.appends.find_or(
            |ready: &ReadyAppend| ready.problem == *problem,
            || {
                let plan = plan_append(problem, &self.gpu)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyAppend { problem: problem.clone(), plan, launches })
            },
        )
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn append_host(&self, call: &mut AppendCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_append(call.problem())?;
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&self.stream, bytes);
        let inputs = call.inputs();
        let mut bound = vec![(slots::K, upload(inputs.k.bytes())?), (slots::V, upload(inputs.v.bytes())?)];
        for (slot, data) in [slots::COS, slots::SIN].into_iter().zip(inputs.rotary.into_iter().flatten()) {
            bound.push((slot, upload(data.bytes())?));
        }
        if let Some(q) = inputs.q {
            bound.push((slots::Q, upload(q.bytes())?));
        }
        for (slot, bytes) in append_values(call) {
            bound.push((slot, upload(&bytes)?));
        }
        let AppendOutputs { cache_k, cache_v, q } = call.outputs();
        let outputs = [(slots::CACHE_K, Some(cache_k)), (slots::CACHE_V, Some(cache_v)), (slots::OUT, q)];
        let mut outputs: Vec<_> =
            outputs.into_iter().filter_map(|(slot, data)| Some((slot, data?))).collect();
        for (slot, data) in &mut outputs {
            bound.push((*slot, upload(data.bytes_mut())?));
        }
        let at = |slot| bound.iter().find(|bound| bound.0 == slot).map_or(0, |bound| bound.1.address());
        let tensors = AppendTensors {
            k: at(slots::K),
            v: at(slots::V),
            cache_k: at(slots::CACHE_K),
            cache_v: at(slots::CACHE_V),
            lengths: at(slots::LENGTHS),
            slots: at(slots::SLOTS),
            table: at(slots::TABLE),
            cos: at(slots::COS),
            sin: at(slots::SIN),
            q: at(slots::Q),
            out: at(slots::OUT),
            factors: [slots::FACTORS_K, slots::FACTORS_V].map(at),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copies below have waited.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        for (slot, data) in &mut outputs {
            let from = bound.iter().find(|bound| bound.0 == *slot);
            if let Some((_, from)) = from {
                from.copy_to_host(&self.stream, 0, data.bytes_mut())?;
            }
        }
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}
