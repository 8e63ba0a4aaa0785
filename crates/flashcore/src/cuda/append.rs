//! New rows of a cache on the GPU: prepared once, launched on device memory, or over host tensors that are copied there
//! and back.

use std::sync::Arc;

use flashcore_core::{AppendCall, AppendOutputs, AppendProblem, Layout, Operand, Ran, Slots};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, append_values, plan_append, slots::append as slots};

use super::{
    Cuda, Error, Operation, ReadyOf,
    ready::{Asked, FLOAT},
};

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

/// An append ready to launch.
pub type ReadyAppend = ReadyOf<AppendProblem>;

impl Operation for AppendProblem {
    type Tensors<'a> = AppendTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyAppend, tensors: &AppendTensors) -> Result<Self::Slots, Error> {
        let (problem, spec) = (ready.problem(), ready.problem().spec());
        let element = spec.dtype.bytes() as u64;
        let cached = problem.cache_dtype().bytes() as u64;
        let behind = spec.slots == Slots::Behind;
        let lengths = behind.then_some(spec.index.bytes().into());
        let rotary = spec.rotary.as_ref().map(|_| element);
        let queries = spec.q.as_ref().map(|_| element);
        let scaled = spec.scales.map(|_| FLOAT);
        let tensor = |slot, operand, address, layout: &Layout, unit| {
            Asked::new(slot, operand, address, unit).nullable(problem.rows() == 0 || layout.span() == 0)
        };
        let number = |slot, operand, address, unit: Option<u64>| {
            Asked::new(slot, operand, address, unit).nullable(problem.rows() == 0)
        };
        // Where nothing is turned, these are asked for nothing.
        let [q, out] = spec.q.unwrap_or([spec.k; 2]);
        ready.bind([
            tensor(slots::K, Operand::K, tensors.k, &spec.k, Some(element)),
            tensor(slots::V, Operand::V, tensors.v, &spec.v, Some(element)),
            tensor(slots::CACHE_K, Operand::CacheK, tensors.cache_k, &spec.cache_k, Some(cached)),
            tensor(slots::CACHE_V, Operand::CacheV, tensors.cache_v, &spec.cache_v, Some(cached)),
            number(slots::LENGTHS, Operand::LengthsKv, tensors.lengths, lengths),
            number(slots::SLOTS, Operand::Slots, tensors.slots, (!behind).then_some(8)),
            number(slots::TABLE, Operand::Table, tensors.table, spec.pages.map(|_| 4)),
            number(slots::COS, Operand::Rotary, tensors.cos, rotary),
            number(slots::SIN, Operand::Rotary, tensors.sin, rotary),
            tensor(slots::Q, Operand::Q, tensors.q, &q, queries),
            tensor(slots::OUT, Operand::Out, tensors.out, &out, queries),
            number(slots::FACTORS_K, Operand::Factors, tensors.factors[0], scaled),
            number(slots::FACTORS_V, Operand::Factors, tensors.factors[1], scaled),
        ])
    }
}

impl Cuda {
    /// Makes an append ready to launch: builds or finds its kernel and lays out the arguments. Later calls with an equal
    /// problem return the same.
    pub fn prepare_append(&self, problem: &AppendProblem) -> Result<Arc<ReadyAppend>, Error> {
        let plan = || plan_append(problem, &self.gpu);
        self.find_or_prepare(&self.appends, problem, ALLOCATED_ALIGNMENT, plan)
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn append_host(&self, call: &mut AppendCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_append(call.problem())?, self.held());
        let inputs = call.inputs();
        let rotary = [slots::COS, slots::SIN].into_iter().zip(inputs.rotary.into_iter().flatten());
        let tensors = [(slots::K, inputs.k), (slots::V, inputs.v)].into_iter().chain(rotary);
        let tensors = tensors.chain(inputs.q.map(|q| (slots::Q, q)));
        held.inputs(tensors.map(|(slot, data)| (slot, data.bytes())))?;
        held.inputs(append_values(call))?;
        let AppendOutputs { mut cache_k, mut cache_v, mut q } = call.outputs();
        held.output(slots::CACHE_K, cache_k.bytes_mut())?;
        held.output(slots::CACHE_V, cache_v.bytes_mut())?;
        if let Some(q) = &mut q {
            held.output(slots::OUT, q.bytes_mut())?;
        }
        let tensors = AppendTensors {
            k: held.at(slots::K),
            v: held.at(slots::V),
            cache_k: held.at(slots::CACHE_K),
            cache_v: held.at(slots::CACHE_V),
            lengths: held.at(slots::LENGTHS),
            slots: held.at(slots::SLOTS),
            table: held.at(slots::TABLE),
            cos: held.at(slots::COS),
            sin: held.at(slots::SIN),
            q: held.at(slots::Q),
            out: held.at(slots::OUT),
            factors: [slots::FACTORS_K, slots::FACTORS_V].map(|slot| held.at(slot)),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
