//! One call: tensors in, a job found or made, computed on the CPU or launched on the caller's stream.

use std::sync::Arc;

use flashcore::{Operand, cuda::DeviceTensors};
use pyo3::prelude::*;

use crate::{
    array::{Array, Place},
    device,
    error::CallError,
    host,
    import::{Imported, Request, common_place},
    job::{self, Job, Key, Step, Work},
    launched::Launched,
    options::Options,
};

/// Attention over `q`, `k` and `v`, written to `out` and, where wanted, `lse`.
///
/// Tensors on a GPU are computed on `stream` (a DLPack stream number) or, where that is None, on the current stream of
/// q's framework. With `record`, returns the launch, which holds the inputs while it is under way. `bits_are_bf16` says
/// of q, k, v and out whether their 16-bit integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, options, stream=None, record=false, bits_are_bf16=[false; 4]))]
#[expect(clippy::too_many_arguments, reason = "five tensors and how to compute them")]
pub(crate) fn forward(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    options: &Options,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: [bool; 4],
) -> PyResult<Option<Launched>> {
    let order = options.asked.order;
    let [of_q, of_k, of_v, of_out] =
        bits_are_bf16.map(|bits_are_bf16| Request { stream, order, bits_are_bf16 });
    let inputs = [of_q.input(q, Operand::Q)?, of_k.input(k, Operand::K)?, of_v.input(v, Operand::V)?];
    let out = of_out.output(out, Operand::Out)?;
    let lse = lse.map(|lse| of_out.output(lse, Operand::Lse)).transpose()?;
    Ok(Call { inputs, out, lse }.compute(py, options, stream, record)?)
}

/// The tensors of one call.
pub(crate) struct Call {
    pub(crate) inputs: [Imported; 3],
    pub(crate) out: Imported,
    pub(crate) lse: Option<Imported>,
}

impl Call {
    pub(crate) fn compute(
        self,
        py: Python<'_>,
        options: &Options,
        stream: Option<usize>,
        record: bool,
    ) -> Result<Option<Launched>, CallError> {
        let arrays = self.arrays();
        let [q, k, v, out] = arrays;
        let place = common_place(&arrays)?;
        let key = Key::new([q, k, v], Some(out), place, &options.asked)?;
        let job = match job::find(&key) {
            Some(job) => job,
            None => py.detach(|| job::prepare(key, arrays, None))?,
        };
        let stream = self.run(py, &job, place, stream)?;
        match place {
            Place::Cuda(index) if record => {
                let inputs = self.inputs.into_iter().filter_map(|imported| imported.owned).collect();
                // SAFETY: the framework's stream, or ours: alive.
                Ok(Some(unsafe { Launched::record(index, stream, inputs)? }))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn arrays(&self) -> [&Array; 4] {
        let [q, k, v] = &self.inputs;
        [&q.array, &k.array, &v.array, &self.out.array]
    }

    /// Computes or launches the call's job; tells on which stream.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        job: &Arc<Job>,
        place: Place,
        stream: Option<usize>,
    ) -> Result<usize, CallError> {
        let arrays = self.arrays();
        job.check_memory(arrays)?;
        if let Some(lse) = &self.lse {
            common_place(&[arrays[0], &lse.array])?;
            lse.array.check_dense_f32(job.lse)?;
        }
        let addresses = Addresses {
            tensors: arrays.map(|array| array.address),
            lse: self.lse.as_ref().map(|lse| lse.array.address),
        };
        let stream = self.stream(py, place, stream)?;
        py.detach(|| addresses.compute(job, stream))?;
        Ok(stream)
    }

    /// The stream to launch on; meaningless for host tensors.
    fn stream(&self, py: Python<'_>, place: Place, given: Option<usize>) -> Result<usize, CallError> {
        match (given, place, self.inputs[0].exchange) {
            (Some(stream), ..) => Ok(stream),
            (None, Place::Cuda(index), Some(exchange)) => Ok(exchange.current_stream(py, index)? as usize),
            (None, ..) => Ok(0),
        }
    }
}

/// Where the tensors of a call are: q, k, v, out, and lse where wanted.
struct Addresses {
    tensors: [usize; 4],
    lse: Option<usize>,
}

impl Addresses {
    fn compute(&self, job: &Arc<Job>, stream: usize) -> Result<(), CallError> {
        job.steps.iter().try_for_each(|step| self.step(step, stream))
    }

    fn step(&self, Step { offsets, work }: &Step, stream: usize) -> Result<(), CallError> {
        let [q, k, v, out] = [0, 1, 2, 3].map(|at| self.tensors[at].wrapping_add(offsets[at]));
        let lse = self.lse.map(|lse| lse.wrapping_add(offsets[4]));
        match work {
            // SAFETY: views that their producers handed out, checked against the problem's layouts; the caller of
            // Python's function holds them, and `check_memory` found the output apart from the inputs.
            Work::Host(problem) => unsafe { host::run(problem, [q, k, v, out], lse) },
            Work::Device(ready) => {
                let address = |at: usize| at as u64;
                let tensors = DeviceTensors {
                    q: address(q),
                    k: address(k),
                    v: address(v),
                    out: address(out),
                    lse: lse.map_or(0, address),
                };
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(ready, &tensors, stream as *mut _) }
            }
        }
    }
}
