//! Mixtures of experts on the GPU: prepared once, launched on device memory, or over host tensors that are copied there
//! and back.

use std::sync::Arc;

use flashcore_core::{Ids, MoeCall, MoeProblem, Operand, Ran, Routed, Routing};
use flashcore_kernels::{
    ALLOCATED_ALIGNMENT,
    moe::Cut,
    plan_moe, plan_moe_tiles,
    slots::{Slot, moe as slots},
};

use super::{Cuda, Error, Operation, ReadyOf, ready::Asked};

/// Addresses in device memory that the launches of a mixture of experts bind; 0 for what the problem does not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoeTensors {
    /// Tokens.
    pub x: u64,
    /// Matrices of the first product.
    pub gate_up: u64,
    /// Matrices of the second product.
    pub down: u64,
    /// Biases of both.
    pub biases: [u64; 2],
    /// Matrices of the shared expert.
    pub shared: [u64; 2],
    /// The result.
    pub out: u64,
    /// Experts of each token, where the problem says that they are given; any numbers will do.
    pub ids: u64,
    /// What each of them counts for.
    pub weights: u64,
    /// What experts are chosen by, where the problem says that they are computed.
    pub logits: u64,
    /// What is added for the choice.
    pub routing_bias: u64,
}

/// A mixture of experts ready to launch. A captured graph is right for the routing that it finds.
pub type ReadyMoe = ReadyOf<MoeProblem>;

impl Operation for MoeProblem {
    type Tensors<'a> = MoeTensors;
    type Slots = [u64; slots::COUNT];

    fn slots(ready: &ReadyMoe, tensors: &MoeTensors) -> Result<Self::Slots, Error> {
        let (spec, tensor) = (ready.problem().spec(), ready.tensor_alignment());
        let given = matches!(spec.routing, Routing::Given { .. });
        let biases = spec.biases.then_some(2);
        let shared = spec.shared.as_ref().map(|_| tensor);
        let routing_bias = spec.routing.has_bias().then_some(4);
        ready.bind([
            Asked::new(slots::X, Operand::X, tensors.x, tensor),
            Asked::new(slots::GATE_UP, Operand::GateUp, tensors.gate_up, tensor),
            Asked::new(slots::DOWN, Operand::Down, tensors.down, tensor),
            Asked::new(slots::OUT, Operand::Out, tensors.out, tensor),
            Asked::new(slots::IDS, Operand::Ids, tensors.ids, given.then_some(4)),
            Asked::new(slots::WEIGHTS, Operand::RoutingWeights, tensors.weights, given.then_some(2)),
            Asked::new(slots::LOGITS, Operand::Logits, tensors.logits, (!given).then_some(2)),
            Asked::new(slots::ROUTING_BIAS, Operand::RoutingBias, tensors.routing_bias, routing_bias),
            Asked::new(slots::GATE_UP_BIAS, Operand::Biases, tensors.biases[0], biases),
            Asked::new(slots::DOWN_BIAS, Operand::Biases, tensors.biases[1], biases),
            Asked::new(slots::SHARED_GATE_UP, Operand::SharedGateUp, tensors.shared[0], shared),
            Asked::new(slots::SHARED_DOWN, Operand::SharedDown, tensors.shared[1], shared),
        ])
    }
}

/// The slots of both biases.
const BIASES: [Slot; 2] = [slots::GATE_UP_BIAS, slots::DOWN_BIAS];
/// The slots of the shared expert.
const SHARED: [Slot; 2] = [slots::SHARED_GATE_UP, slots::SHARED_DOWN];

impl Cuda {
    /// Makes a mixture of experts ready to launch: builds or finds its kernels and lays out the arguments. Later calls
    /// with an equal problem return the same.
    pub fn prepare_moe(&self, problem: &MoeProblem) -> Result<Arc<ReadyMoe>, Error> {
        self.prepare_moe_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_moe`](Self::prepare_moe), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_moe_aligned(&self, problem: &MoeProblem, alignment: u64) -> Result<Arc<ReadyMoe>, Error> {
        let plan = || plan_moe(problem, &self.gpu, alignment);
        self.find_or_prepare(&self.experts, problem, alignment, plan)
    }

    /// As [`prepare_moe`](Self::prepare_moe), with tiles of these shapes for both products and kept by nobody: for tuning.
    pub fn prepare_moe_tiles(&self, problem: &MoeProblem, cuts: [Cut; 2]) -> Result<ReadyMoe, Error> {
        let plan = plan_moe_tiles(problem, &self.gpu, ALLOCATED_ALIGNMENT, cuts)?;
        self.prepare_plan(plan, problem, ALLOCATED_ALIGNMENT)
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn moe_host(&self, call: &mut MoeCall<'_>) -> Result<Ran, Error> {
        let (ready, mut held) = (self.prepare_moe(call.problem())?, self.held());
        let inputs = *call.inputs();
        let tensors = [(slots::X, inputs.x), (slots::GATE_UP, inputs.gate_up), (slots::DOWN, inputs.down)];
        let biases = BIASES.into_iter().zip(inputs.biases.into_iter().flatten());
        let shared = SHARED.into_iter().zip(inputs.shared.into_iter().flatten());
        let tensors = tensors.into_iter().chain(biases).chain(shared);
        held.inputs(tensors.map(|(slot, data)| (slot, data.bytes())))?;
        held.inputs(routing_bytes(&inputs.routed).into_iter().flatten())?;
        let mut out = call.out();
        held.output(slots::OUT, out.bytes_mut())?;
        let tensors = MoeTensors {
            x: held.at(slots::X),
            gate_up: held.at(slots::GATE_UP),
            down: held.at(slots::DOWN),
            biases: BIASES.map(|slot| held.at(slot)),
            shared: SHARED.map(|slot| held.at(slot)),
            out: held.at(slots::OUT),
            ids: held.at(slots::IDS),
            weights: held.at(slots::WEIGHTS),
            logits: held.at(slots::LOGITS),
            routing_bias: held.at(slots::ROUTING_BIAS),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the outputs are fetched.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        held.fetch()?;
        Ok(ready.ran())
    }
}

/// Ids and weights, or logits and what is added to them.
fn routing_bytes<'a>(routed: &Routed<'a>) -> [Option<(Slot, &'a [u8])>; 2] {
    match *routed {
        Routed::Given { ids, weights } => {
            let ids = match ids {
                Ids::I32(ids) => bytemuck::cast_slice(ids),
                Ids::I64(ids) => bytemuck::cast_slice(ids),
            };
            [Some((slots::IDS, ids)), Some((slots::WEIGHTS, weights.bytes()))]
        }
        Routed::Computed { logits, bias } => {
            let bias = bias.map(|bias| (slots::ROUTING_BIAS, bytemuck::cast_slice(bias)));
            [Some((slots::LOGITS, logits.bytes())), bias]
        }
    }
}
