//! Host tensors on the GPU: copied there, computed, copied back.

use flashcore_core::{Backend, BackendError, HostCall, Ran};
use flashcore_cuda::DeviceBuffer;

use super::{Cuda, DeviceTensors, Error};

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        self.compute(call).map_err(|error| match error {
            Error::Plan(refusal) => BackendError::Unsupported {
                backend: "cuda",
                what: "this problem".to_owned(),
                instead: refusal.to_string(),
            },
            other => BackendError::Failed { backend: "cuda", source: Box::new(other) },
        })
    }
}

impl Cuda {
    fn compute(&self, call: &mut HostCall<'_>) -> Result<Ran, Error> {
        let ready = self.prepare(call.problem())?;
        let [q, k, v] = call.inputs().map(|data| DeviceBuffer::from_host(&self.stream, data.bytes()));
        let (q, k, v) = (q?, k?, v?);
        let (mut out, lse) = call.outputs();
        // What lies between the rows of a strided output comes back as it was.
        let device_out = DeviceBuffer::from_host(&self.stream, out.bytes_mut())?;
        let lse_bytes = lse.as_ref().map_or(0, |lse| size_of_val(&**lse));
        let device_lse = DeviceBuffer::new(self.device, lse_bytes as u64)?;
        let tensors = DeviceTensors {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            out: device_out.address(),
            lse: if lse_bytes > 0 { device_lse.address() } else { 0 },
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
