//! Operations on host tensors: addresses become slices, which the CPU backend takes.

mod memory;
mod moe;
mod numbers;
mod pool;

use std::slice::{from_raw_parts, from_raw_parts_mut};

use flashcore::{
    Backend, BackwardProblem, Problem, Values,
    cuda::{AppendTensors, QuantiseTensors},
};
use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendValues, BackwardCall, BackwardInputs,
    GradientsMut, HostCall, MergeCall, MergeProblem, QuantiseCall, QuantiseProblem, QuantisedMut, RowTerms,
};

use self::memory::read;
pub(crate) use self::{
    memory::{elements, pointer, store, write},
    moe::{MoeGradientAddresses, MoeLengths, moe, moe_gradients},
    numbers::{bias, cache_factors, factors, lengths, page_lengths, seed, sinks, table, wide},
    pool::{after_fork, cpu},
};
use crate::error::CallError;

/// Computes `problem` on host memory.
///
/// # Safety
/// The addresses must be those of live tensors with the problem's layouts (q, k, v, out), and of as many f32 as the
/// problem has rows (lse). Out and lse must share no memory with the others, and nobody may write any of it meanwhile.
pub(crate) unsafe fn run(
    problem: &Problem,
    values: &Values,
    [q, k, v, out]: [usize; 4],
    lse: Option<usize>,
) -> Result<(), CallError> {
    let (dtype, of_kv) = (problem.dtype(), problem.kv_dtype());
    // SAFETY: the caller's promise.
    let inputs =
        unsafe { [read(q, dtype, problem.q())?, read(k, of_kv, problem.k())?, read(v, of_kv, problem.v())?] };
    // SAFETY: the caller's promise.
    let out = unsafe { write(out, problem.out_dtype(), problem.out())? };
    // SAFETY: the caller's promise.
    let lse = lse.map(|at| unsafe { from_raw_parts_mut(pointer::<f32>(at, problem.rows()), problem.rows()) });
    let mut call = HostCall::bind_erased(problem, values, inputs, out, lse)?;
    cpu()?.forward(&mut call)?;
    Ok(())
}

/// Merges partial results on host memory: addresses of the parts and of their LSE, or of the first of all where they are
/// stacked.
///
/// # Safety
/// As [`run`].
pub(crate) unsafe fn merge(
    problem: &MergeProblem,
    parts: &[u64],
    lses: &[u64],
    out: usize,
    lse: Option<usize>,
) -> Result<(), CallError> {
    let (rows, count) = (problem.rows(), problem.parts().count() / problem.parts().tensors());
    let reach = problem.part().span() + (count - 1) * problem.stride();
    // SAFETY: the caller's promise.
    let parts = parts.iter().map(|&at| unsafe { elements(at as usize, problem.dtype(), reach) });
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    // SAFETY: the caller's promise.
    let values = |at: usize, len: usize| unsafe { from_raw_parts(pointer::<f32>(at, len), len) };
    let lses: Vec<_> = lses.iter().map(|&at| values(at as usize, rows * count)).collect();
    // SAFETY: the caller's promise.
    let out = unsafe { write(out, problem.out_dtype(), problem.out())? };
    // SAFETY: the caller's promise.
    let lse = lse.map(|at| unsafe { from_raw_parts_mut(pointer::<f32>(at, rows), rows) });
    cpu()?.merge(&mut MergeCall::bind(problem, &parts, &lses, out, lse)?)?;
    Ok(())
}

/// Quantises a tensor in host memory.
///
/// # Safety
/// As [`run`]; factors and means are as many as the problem has.
pub(crate) unsafe fn quantise(
    problem: &QuantiseProblem,
    used: Option<&[u32]>,
    tensors: &QuantiseTensors,
) -> Result<(), CallError> {
    let spec = problem.spec();
    // SAFETY: the caller's promise.
    let floats = |at: u64, len: usize| unsafe { from_raw_parts_mut(pointer::<f32>(at as usize, len), len) };
    // SAFETY: the caller's promise.
    let (x, out) = unsafe {
        (
            read(tensors.x as usize, spec.dtype, problem.x())?,
            write(tensors.out as usize, spec.to, problem.out())?,
        )
    };
    let factors = floats(tensors.factors, problem.factors());
    let means = spec.centred.then(|| floats(tensors.means, problem.means()));
    cpu()?.quantise(&mut QuantiseCall::bind(problem, x, used, QuantisedMut { out, factors, means })?)?;
    Ok(())
}

/// Appends to a cache in host memory.
///
/// # Safety
/// As [`run`]; the caches and the turned queries share no memory with each other or with anything else.
pub(crate) unsafe fn append(
    problem: &AppendProblem,
    values: &AppendValues,
    at: &AppendTensors,
) -> Result<(), CallError> {
    let (spec, dtype) = (problem.spec(), problem.spec().dtype);
    // SAFETY: the caller's promise.
    unsafe {
        let table = |at: u64, len: usize| elements(at as usize, dtype, len);
        let rotary = match spec.rotary.map(|rotary| rotary.positions * (rotary.dim / 2)) {
            Some(len) => Some([table(at.cos, len)?, table(at.sin, len)?]),
            None => None,
        };
        let (q, turned) = match &spec.q {
            Some([q, turned]) => {
                (Some(read(at.q as usize, dtype, q)?), Some(write(at.out as usize, dtype, turned)?))
            }
            None => (None, None),
        };
        let (k, v) = (read(at.k as usize, dtype, &spec.k)?, read(at.v as usize, dtype, &spec.v)?);
        let outputs = AppendOutputs {
            cache_k: write(at.cache_k as usize, problem.cache_dtype(), &spec.cache_k)?,
            cache_v: write(at.cache_v as usize, problem.cache_dtype(), &spec.cache_v)?,
            q: turned,
        };
        cpu()?.append(&mut AppendCall::bind(problem, values, AppendInputs { k, v, rotary, q }, outputs)?)?;
    }
    Ok(())
}

/// Where the tensors of gradients lie.
pub(crate) struct GradAddresses {
    pub(crate) qkv: [usize; 3],
    pub(crate) out: Option<usize>,
    /// Row sums, where there is no output.
    pub(crate) rows: Option<usize>,
    pub(crate) lse: usize,
    pub(crate) d_out: usize,
    pub(crate) grads: [usize; 3],
}

/// Computes gradients on host memory, those of the sinks in memory of ours.
///
/// # Safety
/// As [`run`].
pub(crate) unsafe fn backward(
    problem: &BackwardProblem,
    values: &Values,
    at: &GradAddresses,
    sinks: Option<&mut [f32]>,
) -> Result<(), CallError> {
    let forward = problem.forward();
    let (dtype, out_dtype, rows) = (forward.dtype(), forward.out_dtype(), forward.rows());
    // SAFETY: the caller's promise.
    unsafe {
        let floats = |at: usize| from_raw_parts(pointer::<f32>(at, rows), rows);
        let [q, k, v] = at.qkv;
        let qkv = [read(q, dtype, forward.q())?, read(k, dtype, forward.k())?, read(v, dtype, forward.v())?];
        let terms = match (at.out, at.rows) {
            (Some(out), _) => RowTerms::Out(read(out, out_dtype, forward.out())?),
            (None, sums) => RowTerms::Sums(sums.map_or(&[], floats)),
        };
        let d_out = read(at.d_out, out_dtype, problem.d_out())?;
        let inputs = BackwardInputs { qkv, lse: floats(at.lse), terms, d_out };
        let ([dq, dk, dv], grad) = (at.grads, problem.grad_dtype());
        let qkv =
            [write(dq, grad, problem.dq())?, write(dk, grad, problem.dk())?, write(dv, grad, problem.dv())?];
        let grads = GradientsMut { qkv, sinks };
        cpu()?.backward(&mut BackwardCall::bind(problem, values, inputs, grads)?)?;
    }
    Ok(())
}
