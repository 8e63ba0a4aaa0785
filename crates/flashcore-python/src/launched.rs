//! A launch that is under way, for frameworks whose memory is not ordered by the stream we launch on (JAX).

use std::sync::Mutex;

use flashcore::cuda::driver::{Event, Stream};
use pyo3::prelude::*;

use crate::{device, error::CallError, owned::Owned};

/// A launch under way; holds the tensors that it reads until it is dropped.
#[pyclass(frozen, module = "flashcore._native")]
pub(crate) struct Launched {
    index: u32,
    event: Event,
    _inputs: Mutex<Vec<Owned>>,
}

impl Launched {
    /// Marks the present end of `stream`, whose last launch reads `inputs`.
    ///
    /// # Safety
    /// The stream must be alive.
    pub(crate) unsafe fn record(index: u32, stream: usize, inputs: Vec<Owned>) -> Result<Self, CallError> {
        let device = device::open(index)?.device();
        let event = Event::new(device)?;
        // SAFETY: the caller's promise.
        event.record(&unsafe { Stream::from_raw(device, stream as *mut _)? })?;
        Ok(Self { index, event, _inputs: Mutex::new(inputs) })
    }
}

#[pymethods]
impl Launched {
    /// Whether the launch is done.
    fn is_done(&self) -> PyResult<bool> {
        Ok(self.event.is_done().map_err(CallError::from)?)
    }

    /// Makes later work of `stream` (a DLPack stream number) wait for the launch; without one, waits here.
    #[pyo3(signature = (stream=None))]
    fn wait(&self, py: Python<'_>, stream: Option<isize>) -> PyResult<()> {
        match stream {
            None => py.detach(|| self.event.synchronize()).map_err(CallError::from)?,
            // −1 is DLPack's "do not synchronise".
            Some(-1) => {}
            Some(stream) => {
                let device = device::open(self.index)?.device();
                // SAFETY: the consumer that asks is alive, and so is its stream.
                let stream =
                    unsafe { Stream::from_raw(device, stream as *mut _) }.map_err(CallError::from)?;
                stream.wait(&self.event).map_err(CallError::from)?;
            }
        }
        Ok(())
    }
}
