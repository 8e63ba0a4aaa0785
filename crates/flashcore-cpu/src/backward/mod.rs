//! Gradients: key block by key block, weights recomputed from the LSE. Called by `cpu`; calls `simd`.
//!
//! A *unit* is a block of keys of one key head. It visits the query tiles that see it, in order, and sums its own dK and
//! dV. dQ of a tile is a sum over units: they add to it in the order of their keys, each waiting for its predecessor at
//! that tile (`turns`). So every sum has a fixed order, whatever the number of threads, with five products, no partial
//! results and no matrix of scores.
//!
//! The path of a call: `terms` (row sums, gradients that are zero) → `plan` (which units) → `unit` (one of them) with
//! `panels` (operands of its products) → `grads` (rows to the caller's tensors).

#[allow(unsafe_code)]
mod grads;
mod panels;
mod plan;
#[allow(unsafe_code)]
mod terms;
mod turns;
#[allow(unsafe_code)]
mod unit;

use flashcore_core::{BackwardCall, BackwardInputs, BackwardProblem, Data, Dims, Instance, ProblemError};

use crate::{
    SimdLevel, Tiles,
    crew::Crew,
    forward::{drain, is_serial},
    output::Shared,
    scratch::{Scratch, Worker},
    simd::{product::Pair, runner::Runner},
};
use grads::Grads;
use terms::Terms;
use turns::Turns;

/// What units share.
struct Call<'a> {
    problem: &'a BackwardProblem,
    forward: Instance<'a>,
    runner: Runner,
    /// Elements of a vector.
    lanes: usize,
    inputs: BackwardInputs<'a>,
    terms: Terms<'a>,
    grads: &'a Grads<'a>,
    /// Sums of dQ so far, dense batch × heads × sequence × [`Self::dq_width`].
    dq_sums: Shared<'a, f32>,
    turns: Turns,
}

impl Call<'_> {
    /// Floats of a row of dQ: whole vectors.
    fn dq_width(&self) -> usize {
        self.forward.dim_qk().next_multiple_of(self.lanes)
    }
}

/// Computes gradients on the threads of `crew`. Returns the kernel's name.
pub(crate) fn backward(
    call: &mut BackwardCall<'_>,
    runner: Runner,
    (scratch, crew): (&mut Scratch, Crew),
) -> Result<&'static str, ProblemError> {
    let (problem, forward, inputs) = (call.problem(), call.instance(), call.inputs());
    let lanes = runner.level().shape(Tiles::USUAL).lanes;
    let rows = forward.rows();
    // Empty sequences take no memory, so that there may be any number of them.
    if rows == 0 && forward.k().span() == 0 {
        if let (Some(d_sinks), false) = (call.gradients().sinks, problem.accumulate()) {
            d_sinks.fill(0.0);
        }
        return Ok(kernel_name(runner.level(), false));
    }
    let width = forward.dim_qk().next_multiple_of(lanes);
    let mut memory = workspace(forward.q().dims(), rows, 2 + width)?;
    let (row_terms, dq_sums) = memory.split_at_mut(2 * rows);
    let (grads, d_sinks) = Grads::new(problem, call.gradients());
    terms::compute(&terms::Task { problem, forward, runner, inputs, grads: &grads }, row_terms, crew);
    let terms = Terms::new(row_terms);
    if let Some(d_sinks) = d_sinks {
        terms::sink_gradients(problem, forward, &terms, d_sinks);
    }
    let mut units = plan::units(forward);
    let (turns, dq_sums) = (Turns::new(units.len()), Shared::new(dq_sums));
    let work = Call { problem, forward, runner, lanes, inputs, terms, grads: &grads, dq_sums, turns };
    let pairs = in_pairs(&work);
    let workers = workers(scratch, crew.threads(), work.turns.len());
    drain(&mut units, (workers, crew), |unit, worker| match pairs {
        true => unit::run::<Pair>(&work, unit, worker),
        false => unit::run::<f32>(&work, unit, worker),
    });
    Ok(kernel_name(runner.level(), pairs))
}

/// Whether a problem is so small that the calling thread alone is fastest: less than so many nanoseconds of work.
pub(crate) fn is_small(problem: &BackwardProblem, nanoseconds: f64) -> bool {
    is_serial(problem.forward(), nanoseconds)
}

/// Zeros: `width` for each row.
fn workspace(dims: Dims, rows: usize, width: usize) -> Result<Vec<f32>, ProblemError> {
    let len = rows.saturating_mul(width);
    let no_memory = |()| ProblemError::OutOfMemory { bytes: len.saturating_mul(size_of::<f32>()), dims };
    bytemuck::allocation::try_zeroed_vec(len).map_err(no_memory)
}

/// One worker for each thread that finds a unit.
fn workers(scratch: &mut Scratch, threads: usize, units: usize) -> &mut [Worker] {
    let threads = threads.min(units).max(1);
    if scratch.workers.len() < threads {
        scratch.workers.resize_with(threads, Worker::default);
    }
    &mut scratch.workers[..threads]
}

/// Whether products are those of bf16 pairs.
fn in_pairs(call: &Call<'_>) -> bool {
    let narrow = |data: Data<'_>| matches!(data, Data::BF16(_));
    call.runner.has_pairs() && narrow(call.inputs.qkv[0]) && narrow(call.inputs.d_out)
}

/// What to call the kernel that ran.
fn kernel_name(level: SimdLevel, pairs: bool) -> &'static str {
    match level {
        SimdLevel::Portable => "backward-portable",
        SimdLevel::Neon => "backward-neon",
        SimdLevel::Avx2 => "backward-avx2",
        _ if pairs => "backward-avx512bf16",
        _ => "backward-avx512",
    }
}
