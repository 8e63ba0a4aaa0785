//! Attention and its gradients inside of programs that XLA compiles: handlers of its foreign function interface.
//!
//! `python/flashcore/_jit.py` registers the capsules and writes calls of them into what JAX traces. A handler reads its
//! [`frame`], whose structures [`abi`] declares, makes a call of the arrays ([`mapped`] by `jax.vmap` or not) and computes
//! it on the spot or launches it on XLA's stream, in XLA's memory alone. It runs in threads of XLA's and touches nothing
//! of Python's.

mod abi;
mod frame;
mod mapped;

use std::ffi::{c_int, c_void};

use flashcore::{Mask, Operand};
use pyo3::{ffi, prelude::*, types::PyDict};

use crate::{
    array::{Order, Place},
    backward::Backward,
    call::Call,
    device::{self, Queue},
    error::CallError,
    options::{Options, order},
};
use abi::{CallFrame, Failure, element};
use frame::Frame;
use mapped::{Arrays, Mapped, One};

/// First and one-past-last keys of batch entries.
type Ranges = Option<(Vec<u32>, Vec<u32>)>;

/// The handlers as capsules, by target and platform. `minor` is the version of XLA's interface that jaxlib has.
#[pyfunction]
pub(crate) fn xla_handlers(py: Python<'_>, minor: c_int) -> PyResult<Bound<'_, PyDict>> {
    frame::speak(minor);
    let all = PyDict::new(py);
    for (target, platform, handler) in [
        ("flashcore_attention", "cpu", forward_on_host as Handler),
        ("flashcore_attention", "CUDA", forward_on_gpu),
        ("flashcore_attention_backward", "cpu", backward_on_host),
        ("flashcore_attention_backward", "CUDA", backward_on_gpu),
    ] {
        // SAFETY: a capsule without a name or a destructor, as XLA wants it; functions live as long as the process.
        let capsule = unsafe {
            let raw = ffi::PyCapsule_New(handler as *mut c_void, std::ptr::null(), None);
            Bound::from_owned_ptr_or_err(py, raw)?
        };
        all.set_item((target, platform), capsule)?;
    }
    Ok(all)
}

/// Finds mistakes in a call before it is compiled: names, types (as NumPy calls them) and shapes of all its arrays.
#[pyfunction]
#[pyo3(signature = (arrays, options, longest=None, ranges=None))]
pub(crate) fn xla_check(
    arrays: Vec<(String, String, Vec<i64>)>,
    options: &Options,
    longest: Option<(usize, usize)>,
    ranges: Ranges,
) -> PyResult<()> {
    let operands: Vec<_> = arrays
        .iter()
        .map(|(_, dtype, extents)| frame::Operand { element: element_of(dtype), address: 0, extents })
        .collect();
    let names = arrays.iter().map(|(name, ..)| name.as_str());
    let found = Arrays::new(names, &operands, 0, Place::Host)?;
    let settings = Settings { options, longest, ranges };
    settings.check(found.only(options.order)).map_err(|error| error.in_order(options.order))?;
    Ok(())
}

type Handler = extern "C" fn(*mut CallFrame) -> *mut Failure;

extern "C" fn forward_on_host(frame: *mut CallFrame) -> *mut Failure {
    // SAFETY: called by XLA.
    unsafe { Frame::answer(frame, |frame| run(frame, Place::Host, 0.into(), forward)) }
}

extern "C" fn backward_on_host(frame: *mut CallFrame) -> *mut Failure {
    // SAFETY: called by XLA.
    unsafe { Frame::answer(frame, |frame| run(frame, Place::Host, 0.into(), backward)) }
}

extern "C" fn forward_on_gpu(frame: *mut CallFrame) -> *mut Failure {
    // SAFETY: called by XLA.
    unsafe { Frame::answer(frame, |frame| on_gpu(frame, forward)) }
}

extern "C" fn backward_on_gpu(frame: *mut CallFrame) -> *mut Failure {
    // SAFETY: called by XLA.
    unsafe { Frame::answer(frame, |frame| on_gpu(frame, backward)) }
}

/// What is computed of the arrays of a call.
type Compute = fn(&Arrays<'_>, &Settings<'_>, Place, Queue<'_>) -> Result<(), CallError>;

fn on_gpu(frame: Frame<'_>, compute: Compute) -> Result<(), CallError> {
    let (stream, index) = frame.stream()?;
    let scratch = |bytes: u64| frame.scratch(bytes);
    run(frame, Place::Cuda(index), Queue { stream, scratch: Some(&scratch) }, compute)
}

fn run(frame: Frame<'_>, place: Place, queue: Queue<'_>, compute: Compute) -> Result<(), CallError> {
    let missing = CallError::Xla("a compiled call lacks an attribute");
    let (Some(names), Some(mapped)) = (frame.text("arrays"), frame.whole("mapped_from")) else {
        return Err(missing);
    };
    let operands: Vec<_> = frame.arguments()?.into_iter().chain(frame.results()?).collect();
    // How many dimensions q had when it was traced; those that came since are mapped ones.
    let rank = operands.first().map_or(0, |q| q.extents.len());
    let mapped = rank.saturating_sub(usize::try_from(mapped).unwrap_or(rank));
    let arrays = Arrays::new(names.split(' '), &operands, mapped, place)?;
    let options = options_of(frame)?;
    let longest = frame.whole("longest_q").zip(frame.whole("longest_kv"));
    let longest = longest.map(|(q, kv)| (q.max(0) as usize, kv.max(0) as usize));
    let narrow = |list: Vec<i64>| list.into_iter().map(|x| x.clamp(0, u32::MAX.into()) as u32).collect();
    let ranges =
        frame.list("starts").zip(frame.list("ends")).map(|(starts, ends)| (narrow(starts), narrow(ends)));
    let settings = Settings { options: &options, longest, ranges };
    compute(&arrays, &settings, place, queue).map_err(|error| error.in_order(options.order))
}

/// What [`Options::attributes`] wrote.
fn options_of(frame: Frame<'_>) -> Result<Options, CallError> {
    let bound = |name: &str| frame.whole(name).and_then(|keys| u32::try_from(keys).ok());
    let shift = frame.whole("shift").and_then(|keys| i32::try_from(keys).ok()).unwrap_or(0);
    let mask = Mask::window(bound("left"), bound("right")).shifted(shift);
    Ok(Options {
        order: order(frame.text("layout").unwrap_or("bhsd"))?,
        mask: if frame.whole("top_left") == Some(1) { mask.top_left() } else { mask },
        scale: frame.float("scale"),
        softcap: frame.float("softcap"),
        dropout: frame.float("dropout"),
        accumulate: false,
        batch_invariant: frame.whole("batch_invariant") == Some(1),
    })
}

/// What a call has beside its arrays.
struct Settings<'a> {
    options: &'a Options,
    longest: Option<(usize, usize)>,
    ranges: Ranges,
}

impl Settings<'_> {
    fn forward(&self, one: One<'_>) -> Result<Call<'_>, CallError> {
        let qkv = [one.need(Operand::Q)?, one.need(Operand::K)?, one.need(Operand::V)?];
        let result = if let Some(out) = one.array(Operand::Out)? { out } else { one.need(Operand::DOut)? };
        let mut call = Call::new(qkv, result);
        call.lse = one.array(Operand::Lse)?;
        call.lengths = [one.numbers(Operand::LengthsQ)?, one.numbers(Operand::LengthsKv)?];
        (call.sinks, call.bias) = (one.array(Operand::Sinks)?, one.array(Operand::Bias)?);
        (call.table, call.seed) = (one.table()?, one.seed()?);
        (call.longest, call.ranges) = (self.longest, self.ranges.as_ref());
        Ok(call)
    }

    fn backward(&self, one: One<'_>) -> Result<Backward<'_>, CallError> {
        Ok(Backward {
            call: self.forward(one)?,
            has_out: one.array(Operand::Out)?.is_some(),
            rows: one.array(Operand::RowSums)?,
            d_out: one.need(Operand::DOut)?,
            grads: [one.need(Operand::DQ)?, one.need(Operand::DK)?, one.need(Operand::DV)?],
            d_sinks: one.array(Operand::DSinks)?,
        })
    }

    /// Demands arrays that make a problem.
    fn check(&self, one: One<'_>) -> Result<(), CallError> {
        let call = self.forward(one)?;
        let parts = call.device_parts(self.options)?;
        for part in &parts {
            let problem = part.spec.clone().parse()?;
            if self.ranges.is_none() {
                call.check_counts(&problem)?;
            }
            if one.array(Operand::DQ)?.is_some() {
                self.backward(one)?.spec(part, self.options)?.parse()?;
            }
        }
        Ok(())
    }
}

fn forward(
    arrays: &Arrays<'_>,
    settings: &Settings<'_>,
    place: Place,
    queue: Queue<'_>,
) -> Result<(), CallError> {
    let options = settings.options;
    if leaves_rows_alone(options.order, place) {
        [Operand::Out, Operand::Lse]
            .iter()
            .try_for_each(|&result| zero(arrays.find(result), place, queue))?;
    }
    arrays.each(options.order, settings.ranges.is_some(), |one| {
        settings.forward(one)?.compute(options, place, queue)
    })
}

fn backward(
    arrays: &Arrays<'_>,
    settings: &Settings<'_>,
    place: Place,
    queue: Queue<'_>,
) -> Result<(), CallError> {
    let options = settings.options;
    // Keys before and after those that a mask leaves are not written, and gradients of sinks are added up.
    if settings.ranges.is_some() || leaves_rows_alone(options.order, place) {
        [Operand::DQ, Operand::DK, Operand::DV]
            .iter()
            .try_for_each(|&grad| zero(arrays.find(grad), place, queue))?;
    }
    zero(arrays.find(Operand::DSinks), place, queue)?;
    arrays.each(options.order, settings.ranges.is_some(), |one| {
        let mut call = settings.backward(one)?;
        if place == Place::Host {
            // A row for each batch entry, of which the CPU needs one.
            call.d_sinks = call.d_sinks.map(|sinks| sinks.first_row());
        }
        call.compute(options, place, queue)
    })
}

/// Whether kernels leave rows that belong to no sequence as they are; memory of XLA's may hold anything.
fn leaves_rows_alone(order: Order, place: Place) -> bool {
    order == Order::Packed && place != Place::Host
}

fn zero(array: Option<&Mapped<'_>>, place: Place, queue: Queue<'_>) -> Result<(), CallError> {
    let Some(array) = array.filter(|array| array.bytes() > 0) else { return Ok(()) };
    match place {
        Place::Host => {
            // SAFETY: memory of a result, which is ours to write while the handler runs.
            unsafe { (array.address as *mut u8).write_bytes(0, array.bytes()) };
            Ok(())
        }
        // SAFETY: as above, in the order of XLA's stream.
        Place::Cuda(index) => unsafe { device::zero(index, array.address, array.bytes(), queue) },
    }
}

/// XLA's number for a type that NumPy calls so; 0 for those that nobody takes.
fn element_of(dtype: &str) -> c_int {
    element::NAMES.iter().find(|(name, _)| *name == dtype).map_or(0, |&(_, number)| number)
}
