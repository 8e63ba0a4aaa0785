//! Host tensors on the GPU: copied there, computed, copied back.

use flashcore_core::{
    AppendCall, Backend, BackendError, BackwardCall, GroupedCall, HostCall, MergeCall, MoeCall, QuantiseCall,
    Ran,
};
use flashcore_cuda::DeviceBuffer;
use flashcore_kernels::{host_values, slots};

use super::{Cuda, DeviceTensors, Error};

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        self.compute(call).map_err(refused)
    }

    fn append(&self, call: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        self.append_host(call).map_err(refused)
    }

    fn merge(&self, call: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        self.merge_host(call).map_err(refused)
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        self.backward_host(call).map_err(refused)
    }

    fn quantise(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        self.quantise_host(call).map_err(refused)
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        self.moe_host(call).map_err(refused)
    }

    fn grouped(&self, call: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        self.grouped_host(call).map_err(refused)
    }
}

fn refused(error: Error) -> BackendError {
    match error {
        Error::Plan(refusal) => BackendError::Unsupported {
            backend: "cuda",
            what: "this problem".to_owned(),
            instead: refusal.to_string(),
        },
        other => BackendError::Failed { backend: "cuda", source: Box::new(other) },
    }
}

impl Cuda {
    fn compute(&self, call: &mut HostCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare(call.problem())?;
        let [q, k, v] = call.inputs().map(|data| DeviceBuffer::from_host(&self.stream, data.bytes()));
        let (q, k, v) = (q?, k?, v?);
        let mut values = Vec::new();
        for (slot, bytes) in host_values(call.instance()) {
            values.push((slot, DeviceBuffer::from_host(&self.stream, &bytes)?));
        }
        let bound = |slot| values.iter().find(|value| value.0 == slot).map_or(0, |value| value.1.address());
        let (mut out, lse) = call.outputs();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = DeviceBuffer::from_host(&self.stream, out.bytes_mut())?;
        let device_lse = match &lse {
            Some(lse) => DeviceBuffer::from_host(&self.stream, bytemuck::cast_slice(lse))?,
            None => DeviceBuffer::new(self.device, 0)?,
        };
        let tensors = DeviceTensors {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            out: device_out.address(),
            lse: if lse.as_ref().is_some_and(|lse| !lse.is_empty()) { device_lse.address() } else { 0 },
            lengths_q: bound(slots::LENGTHS_Q),
            lengths_kv: bound(slots::LENGTHS_KV),
            table: bound(slots::TABLE),
            sinks: bound(slots::SINKS),
            factors: [slots::FACTORS_Q, slots::FACTORS_K, slots::FACTORS_V].map(bound),
            bias: bound(slots::BIAS),
        };
        // SAFETY: the buffers hold what the call's layouts reach, and live until the copies below have waited.
        unsafe { ready.launch(&tensors, &self.stream)? };
        device_out.copy_to_host(&self.stream, 0, out.bytes_mut())?;
        if let Some(lse) = lse {
            device_lse.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(lse))?;
        }
        Ok(Ran { kernel: ready.plan().kernel().name() })
    }
}
