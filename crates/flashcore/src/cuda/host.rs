//! Host tensors on the GPU: copied there, computed, copied back.
//!
//! The backend's methods are here, and [`Held`], which does the copying; `…_host` in the file of each operation says what
//! goes where.

use flashcore_core::{
    AppendCall, Backend, BackendError, BackwardCall, GroupedCall, HostCall, MergeCall, MoeCall, QuantiseCall,
    Ran,
};
use flashcore_cuda::{DeviceBuffer, Stream};
use flashcore_kernels::slots::Slot;

use super::{Cuda, Error};

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        self.forward_host(call).map_err(refused)
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
    /// Nothing yet, to be filled with a call's arrays.
    pub(super) fn held(&self) -> Held<'_> {
        Held { stream: &self.stream, buffers: Vec::new(), outputs: Vec::new() }
    }
}

/// Copies of a call's host arrays on the GPU, each for a slot.
pub(super) struct Held<'a> {
    stream: &'a Stream,
    buffers: Vec<(Slot, DeviceBuffer)>,
    /// Where outputs go, with the numbers of their buffers.
    outputs: Vec<(usize, &'a mut [u8])>,
}

impl<'a> Held<'a> {
    /// Copies arrays to the GPU.
    pub(super) fn inputs<B: AsRef<[u8]>>(
        &mut self,
        arrays: impl IntoIterator<Item = (Slot, B)>,
    ) -> Result<(), Error> {
        for (slot, bytes) in arrays {
            self.buffers.push((slot, DeviceBuffer::from_host(self.stream, bytes.as_ref())?));
        }
        Ok(())
    }

    /// Makes room for an output. It is copied there, too: what lies between the rows of a strided one comes back as it
    /// was.
    pub(super) fn output(&mut self, slot: Slot, bytes: &'a mut [u8]) -> Result<(), Error> {
        self.inputs([(slot, &*bytes)])?;
        self.outputs.push((self.buffers.len() - 1, bytes));
        Ok(())
    }

    /// Where the array of a slot lies; 0 for an empty one, or none.
    pub(super) fn at(&self, slot: Slot) -> u64 {
        self.buffers.iter().find(|held| held.0 == slot).map_or(0, |held| held.1.address())
    }

    /// Copies the outputs back, once what was launched is done.
    pub(super) fn fetch(self) -> Result<(), Error> {
        for (n, bytes) in self.outputs {
            self.buffers[n].1.copy_to_host(self.stream, 0, bytes)?;
        }
        Ok(())
    }
}
