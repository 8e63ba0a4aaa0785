//! Attention on the GPU: prepared once, launched on device memory, or over host tensors that are copied there and back.

use std::sync::Arc;

use flashcore_core::{HostCall, Operand, Problem, Ran};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Tile, host_values, plan_tile, slots};

use super::{
    Cuda, Error, Operation, ReadyOf,
    ready::{Asked, FLOAT, SEED},
};

/// Addresses in device memory that a launch binds. The kernels read their contents when they run, so a captured
/// graph stays correct when the contents change between replays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceTensors {
    /// Queries, in the problem's layout, like the other tensors.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// The result.
    pub out: u64,
    /// f32 log-sum-exp, dense batch × heads × sequence; 0 if it is not needed.
    pub lse: u64,
    /// Used queries of each batch entry, or offsets of packed sequences, one after another in the problem's index type;
    /// 0 where the problem has none.
    ///
    /// Numbers below 0 count as 0, those beyond the tensor as all of it. Rows of packed tensors that belong to no
    /// sequence are not written.
    pub lengths_q: u64,
    /// The same of keys and values.
    pub lengths_kv: u64,
    /// i32 page numbers, a row for each sequence; 0 where keys are not paged.
    ///
    /// Numbers beyond a sequence's keys are not read; others are clamped to the range of the pages.
    pub table: u64,
    /// One sink per query head in the problem's type for them; 0 where it has none.
    pub sinks: u64,
    /// f32 factors of Q, K and V, as many as the problem's scales say; 0 where it has none, as queries over a cache of fewer
    /// bits.
    pub factors: [u64; 3],
    /// The bias, as the problem describes it; 0 where it has none.
    pub bias: u64,
    /// The u64 seed of dropout; 0 where the problem has none.
    pub seed: u64,
}

/// Attention ready to launch.
pub type Ready = ReadyOf<Problem>;

impl Operation for Problem {
    type Tensors<'a> = DeviceTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &Ready, tensors: &DeviceTensors) -> Result<Self::Slots, Error> {
        let (problem, alignment) = (ready.problem(), ready.tensor_alignment());
        // Tensors without elements may have any address, 0 as well.
        let tensor = |slot, operand, address| Asked::new(slot, operand, address, alignment).nullable(true);
        let table = problem.pages().map(|_| size_of::<i32>() as u64);
        let given = [tensors.lengths_q, tensors.lengths_kv, tensors.sinks, tensors.bias, tensors.seed];
        let [lengths_q, lengths_kv, sinks, bias, seed] = values(problem, given);
        let factors = problem.scales().map(|_| FLOAT);
        // Queries over a cache of fewer bits have no factors.
        let factors_q = factors.filter(|_| problem.kv_dtype() == problem.dtype());
        ready.bind([
            tensor(slots::Q, Operand::Q, tensors.q),
            tensor(slots::K, Operand::K, tensors.k),
            tensor(slots::V, Operand::V, tensors.v),
            tensor(slots::OUT, Operand::Out, tensors.out),
            lengths_q,
            lengths_kv,
            Asked::new(slots::TABLE, Operand::Table, tensors.table, table),
            sinks,
            bias,
            seed,
            Asked::new(slots::FACTORS_Q, Operand::Factors, tensors.factors[0], factors_q),
            Asked::new(slots::FACTORS_K, Operand::Factors, tensors.factors[1], factors),
            Asked::new(slots::FACTORS_V, Operand::Factors, tensors.factors[2], factors),
            Asked::new(slots::LSE, Operand::Lse, tensors.lse, 1).nullable(!problem.accumulate()),
        ])
    }
}

/// Lengths of queries and of keys, sinks, bias and seed, which forward and gradients read alike.
pub(super) fn values(problem: &Problem, addresses: [u64; 5]) -> [Asked; 5] {
    let [lengths_q, lengths_kv, sinks, bias, seed] = addresses;
    let index = u64::from(problem.index().bytes());
    let [of_q, of_kv] = problem.sequences_kind().numbers().map(|given| given.then_some(index));
    [
        Asked::new(slots::LENGTHS_Q, Operand::LengthsQ, lengths_q, of_q),
        Asked::new(slots::LENGTHS_KV, Operand::LengthsKv, lengths_kv, of_kv),
        Asked::new(slots::SINKS, Operand::Sinks, sinks, problem.sinks().map(|sinks| sinks.bytes() as u64)),
        Asked::new(slots::BIAS, Operand::Bias, bias, problem.bias().map(|bias| bias.bytes() as u64)),
        Asked::new(slots::SEED, Operand::Seed, seed, problem.dropout().map(|_| SEED)),
    ]
}

impl Cuda {
    /// Makes a problem ready to launch: plans, builds or finds its kernel, lays out the arguments. Later calls with an
    /// equal problem return the same.
    pub fn prepare(&self, problem: &Problem) -> Result<Arc<Ready>, Error> {
        self.prepare_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare`](Self::prepare), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_aligned(&self, problem: &Problem, alignment: u64) -> Result<Arc<Ready>, Error> {
        let plan = || self.choice.plan(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.ready, problem, alignment, plan)
    }

    /// As [`prepare`](Self::prepare) with exactly this tile, or an error that says why it cannot be used: for tuning.
    /// Nothing is cached but the built kernel.
    pub fn prepare_tile(&self, problem: &Problem, tile: Tile) -> Result<Arc<Ready>, Error> {
        let plan = plan_tile(problem, &self.gpu, ALLOCATED_ALIGNMENT, tile)?;
        plan.check_build(problem)?;
        Ok(Arc::new(self.prepare_plan(plan, problem, ALLOCATED_ALIGNMENT)?))
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn forward_host(&self, call: &mut HostCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare(call.problem())?, self.held());
        let [q, k, v] = call.inputs().map(|data| data.bytes());
        held.inputs([(slots::Q, q), (slots::K, k), (slots::V, v)])?;
        held.inputs(host_values(call.instance()))?;
        let (mut out, lse) = call.outputs();
        held.output(slots::OUT, out.bytes_mut())?;
        if let Some(lse) = lse {
            held.output(slots::LSE, bytemuck::cast_slice_mut(lse))?;
        }
        let tensors = DeviceTensors {
            q: held.at(slots::Q),
            k: held.at(slots::K),
            v: held.at(slots::V),
            out: held.at(slots::OUT),
            lse: held.at(slots::LSE),
            lengths_q: held.at(slots::LENGTHS_Q),
            lengths_kv: held.at(slots::LENGTHS_KV),
            table: held.at(slots::TABLE),
            sinks: held.at(slots::SINKS),
            factors: [slots::FACTORS_Q, slots::FACTORS_K, slots::FACTORS_V].map(|slot| held.at(slot)),
            bias: held.at(slots::BIAS),
            seed: held.at(slots::SEED),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch(&tensors, &self.stream)? };
        held.fetch()?;
        Ok(ready.ran())
    }
}
