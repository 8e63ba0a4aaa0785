//! Mixtures of experts and their gradients on host tensors.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use flashcore::{Backend, Ids, Index, Layout, Routing, cuda::MoeTensors};
use flashcore_core::{MoeCall, MoeGradientCall, MoeGradientsMut, MoeInputs, MoeProblem, Routed};

use super::{cpu, elements, memory::read, pointer, write};
use crate::error::CallError;

/// How many numbers lie at addresses whose tensors have no layout.
pub(crate) struct MoeLengths {
    pub(crate) ids: usize,
    /// Routing weights or logits.
    pub(crate) routing: usize,
    pub(crate) routing_bias: Option<usize>,
    pub(crate) biases: Option<[usize; 2]>,
}

/// Computes a mixture of experts on host memory.
///
/// # Safety
/// As [`run`], with as many numbers as `lens` says.
pub(crate) unsafe fn moe(problem: &MoeProblem, at: &MoeTensors, lens: &MoeLengths) -> Result<(), CallError> {
    // SAFETY: the caller's promise.
    let (inputs, out) =
        unsafe { (moe_inputs(problem, at, lens)?, write(at.out as usize, problem.dtype(), problem.out())?) };
    cpu()?.moe(&mut MoeCall::bind(problem, inputs, out)?)?;
    Ok(())
}

/// Where gradients of a mixture of experts go.
pub(crate) struct MoeGradientAddresses {
    pub(crate) x: usize,
    pub(crate) gate_up: usize,
    pub(crate) down: usize,
    /// f32, tokens × top-k.
    pub(crate) weights: usize,
    pub(crate) biases: Option<[usize; 2]>,
    pub(crate) shared: Option<[usize; 2]>,
}

/// Computes gradients of a mixture of experts on host memory; `at.out` is the gradient of its result.
///
/// # Safety
/// As [`moe`]; gradients lie as [`flashcore_core::MoeGradientsMut`] says and share no memory with anything else.
pub(crate) unsafe fn moe_gradients(
    problem: &MoeProblem,
    at: &MoeTensors,
    lens: &MoeLengths,
    to: &MoeGradientAddresses,
) -> Result<(), CallError> {
    let (spec, dtype) = (problem.spec(), problem.dtype());
    // SAFETY: the caller's promise.
    unsafe {
        let some = |at: usize, len: usize| write(at, dtype, &Layout::matrix(1, len)?);
        let both = |at: Option<[usize; 2]>, lens: [usize; 2]| match at {
            Some([first, second]) => {
                Ok::<_, CallError>(Some([some(first, lens[0])?, some(second, lens[1])?]))
            }
            None => Ok(None),
        };
        let rows = [spec.gate_up.rows(), problem.hidden()].map(|rows| problem.experts() * rows);
        let shared = spec.shared.map_or([0; 2], |shared| [shared.gate_up.elements(), shared.down.elements()]);
        let entries = problem.entries();
        let grads = MoeGradientsMut {
            x: some(to.x, problem.tokens() * problem.hidden())?,
            gate_up: some(to.gate_up, spec.gate_up.elements())?,
            down: some(to.down, spec.down.elements())?,
            biases: both(to.biases, rows)?,
            shared: both(to.shared, shared)?,
            weights: from_raw_parts_mut(pointer::<f32>(to.weights, entries), entries),
        };
        let (inputs, d_out) = (moe_inputs(problem, at, lens)?, read(at.out as usize, dtype, problem.out())?);
        cpu()?.moe_gradients(&mut MoeGradientCall::bind(problem, inputs, d_out, grads)?)?;
    }
    Ok(())
}

/// # Safety
/// As [`moe`].
unsafe fn moe_inputs<'a>(
    problem: &MoeProblem,
    at: &MoeTensors,
    lens: &MoeLengths,
) -> Result<MoeInputs<'a>, CallError> {
    let (spec, dtype) = (problem.spec(), problem.dtype());
    // SAFETY: the caller's promise.
    unsafe {
        let weights = |at: u64, span: usize| elements(at as usize, dtype, span);
        let routed = match *problem.routing() {
            Routing::Given { ids, weights, .. } => {
                let (first, len) = (at.ids as usize, lens.ids);
                let ids = match ids {
                    Index::I32 => Ids::I32(from_raw_parts(pointer::<i32>(first, len), len)),
                    Index::I64 => Ids::I64(from_raw_parts(pointer::<i64>(first, len), len)),
                };
                Routed::Given { ids, weights: elements(at.weights as usize, weights, lens.routing)? }
            }
            Routing::Computed { logits, .. } => {
                let floats = |len: usize| from_raw_parts(pointer::<f32>(at.routing_bias as usize, len), len);
                let logits = elements(at.logits as usize, logits, lens.routing)?;
                Routed::Computed { logits, bias: lens.routing_bias.map(floats) }
            }
        };
        let biases = match lens.biases {
            Some([first, second]) => Some([weights(at.biases[0], first)?, weights(at.biases[1], second)?]),
            None => None,
        };
        let shared = match spec.shared {
            Some(layouts) => Some([
                weights(at.shared[0], layouts.gate_up.span())?,
                weights(at.shared[1], layouts.down.span())?,
            ]),
            None => None,
        };
        Ok(MoeInputs {
            x: read(at.x as usize, dtype, &spec.x)?,
            gate_up: weights(at.gate_up, spec.gate_up.span())?,
            down: weights(at.down, spec.down.span())?,
            biases,
            shared,
            routed,
        })
    }
}
