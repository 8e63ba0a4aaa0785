//! Mixtures of experts on the GPU: prepared once, launched on device memory, or over host tensors that are copied there
//! and back.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{Ids, MoeCall, MoeProblem, Operand, Ran, Routed, Routing};
use flashcore_cuda::{DeviceBuffer, Prepared, launch_all};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Plan, moe::Cut, plan_moe, plan_moe_tiles, slots::moe as slots};

use super::{Cuda, Error, ready::MOST_ASKED};

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

/// A mixture of experts ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyMoe {
    problem: MoeProblem,
    alignment: u64,
    plan: Plan,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl ReadyMoe {
    fn serves(&self, problem: &MoeProblem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub const fn problem(&self) -> &MoeProblem {
        &self.problem
    }

    /// Which kernels, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Launches on a stream (`CUstream`, `cudaStream_t`; null is the legacy one); returns as soon as the launches are
    /// queued. Nothing is read back or waited for: a captured graph is right for the routing that it finds.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launches are
    /// done (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or
    /// touch the output meanwhile. `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &MoeTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &MoeTensors) -> Result<[u64; slots::COUNT], Error> {
        let spec = self.problem.spec();
        let given = matches!(spec.routing, Routing::Given { .. });
        let tensor = self.alignment.min(MOST_ASKED);
        let [first, second] = tensors.biases;
        let bound = [
            (Operand::X, slots::X, tensors.x, true, tensor),
            (Operand::GateUp, slots::GATE_UP, tensors.gate_up, true, tensor),
            (Operand::Down, slots::DOWN, tensors.down, true, tensor),
            (Operand::Out, slots::OUT, tensors.out, true, tensor),
            (Operand::Ids, slots::IDS, tensors.ids, given, 4),
            (Operand::RoutingWeights, slots::WEIGHTS, tensors.weights, given, 2),
            (Operand::Logits, slots::LOGITS, tensors.logits, !given, 2),
            (Operand::RoutingBias, slots::ROUTING_BIAS, tensors.routing_bias, spec.routing.has_bias(), 4),
            (Operand::Biases, slots::GATE_UP_BIAS, first, spec.biases, 2),
            (Operand::Biases, slots::DOWN_BIAS, second, spec.biases, 2),
            (Operand::SharedGateUp, slots::SHARED_GATE_UP, tensors.shared[0], spec.shared.is_some(), tensor),
            (Operand::SharedDown, slots::SHARED_DOWN, tensors.shared[1], spec.shared.is_some(), tensor),
        ];
        let mut addresses = [0; slots::COUNT];
        for (operand, slot, address, read, alignment) in bound {
            if read && address == 0 && !self.launches.is_empty() {
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
    /// Makes a mixture of experts ready to launch: builds or finds its kernels and lays out the arguments. Later calls
    /// with an equal problem return the same.
    pub fn prepare_moe(&self, problem: &MoeProblem) -> Result<Arc<ReadyMoe>, Error> {
        self.prepare_moe_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare_moe`](Self::prepare_moe), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_moe_aligned(&self, problem: &MoeProblem, alignment: u64) -> Result<Arc<ReadyMoe>, Error> {
        self.experts.find_or(
            |ready| ready.serves(problem, alignment),
            || {
                let plan = plan_moe(problem, &self.gpu, alignment)?;
                let (_, launches) = self.kernels.prepare(&plan)?;
                Ok(ReadyMoe { problem: problem.clone(), alignment, plan, launches })
            },
        )
    }

    /// As [`prepare_moe`](Self::prepare_moe), with tiles of these shapes for both products and kept by nobody: for tuning.
    pub fn prepare_moe_tiles(&self, problem: &MoeProblem, cuts: [Cut; 2]) -> Result<ReadyMoe, Error> {
        let alignment = ALLOCATED_ALIGNMENT;
        let plan = plan_moe_tiles(problem, &self.gpu, alignment, cuts)?;
        let (_, launches) = self.kernels.prepare(&plan)?;
        Ok(ReadyMoe { problem: problem.clone(), alignment, plan, launches })
    }

    /// Host tensors, copied to the GPU and back.
    pub(super) fn moe_host(&self, call: &mut MoeCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare_moe(call.problem())?;
        let inputs = *call.inputs();
        let upload = |bytes: &[u8]| DeviceBuffer::from_host(&self.stream, bytes);
        let held = [inputs.x, inputs.gate_up, inputs.down].map(|data| upload(data.bytes()));
        let [x, gate_up, down] = held;
        let (x, gate_up, down) = (x?, gate_up?, down?);
        let biases = inputs.biases.map(|biases| biases.map(|bias| upload(bias.bytes())));
        let biases = biases.map(|[first, second]| Ok::<_, Error>([first?, second?])).transpose()?;
        let shared = inputs.shared.map(|shared| shared.map(|data| upload(data.bytes())));
        let shared = shared.map(|[first, second]| Ok::<_, Error>([first?, second?])).transpose()?;
        let [first, second] = routing_bytes(&inputs.routed).map(|bytes| bytes.map(upload).transpose());
        let (first, second) = (first?, second?);
        let mut out = call.out();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = upload(out.bytes_mut())?;
        let address = |buffer: &Option<DeviceBuffer>| buffer.as_ref().map_or(0, DeviceBuffer::address);
        let routing = [address(&first), address(&second)];
        let given = matches!(inputs.routed, Routed::Given { .. });
        let (ids, computed) = if given { (routing, [0; 2]) } else { ([0; 2], routing) };
        let tensors = MoeTensors {
            x: x.address(),
            gate_up: gate_up.address(),
            down: down.address(),
            biases: addresses(&biases),
            shared: addresses(&shared),
            out: device_out.address(),
            ids: ids[0],
            weights: ids[1],
            logits: computed[0],
            routing_bias: computed[1],
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copy below has waited.
        unsafe { ready.launch_raw(&tensors, self.stream.raw())? };
        device_out.copy_to_host(&self.stream, 0, out.bytes_mut())?;
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}

fn addresses(pair: &Option<[DeviceBuffer; 2]>) -> [u64; 2] {
    pair.as_ref().map_or([0; 2], |pair| pair.each_ref().map(DeviceBuffer::address))
}

/// Ids and weights, or logits and what is added to them.
fn routing_bytes<'a>(routed: &Routed<'a>) -> [Option<&'a [u8]>; 2] {
    match *routed {
        Routed::Given { ids, weights } => {
            let ids = match ids {
                Ids::I32(ids) => bytemuck::cast_slice(ids),
                Ids::I64(ids) => bytemuck::cast_slice(ids),
            };
            [Some(ids), Some(weights.bytes())]
        }
        Routed::Computed { logits, bias } => [Some(logits.bytes()), bias.map(bytemuck::cast_slice)],
    }
}
