//! Device tensors: prepared by FlashCore's one cache, launched on the caller's stream.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};

use flashcore::{
    BackwardProblem, Problem,
    cuda::{
        AppendTensors, BackwardTensors, Cuda, DeviceTensors, GroupedTensors, MergeTensors, MoeTensors,
        QuantiseTensors, driver::Stream,
    },
};
use flashcore_core::{AppendProblem, GroupedProblem, MergeProblem, MoeProblem, QuantiseProblem};

use crate::error::CallError;

/// Whether this process is the child of one that used CUDA.
static LOST: AtomicBool = AtomicBool::new(false);
/// Whether a GPU was opened, to be read in a forked child, where locks may be held for ever.
static USED: AtomicBool = AtomicBool::new(false);

/// GPU number `index`.
pub(crate) fn open(index: u32) -> Result<&'static Cuda, CallError> {
    if LOST.load(Ordering::Relaxed) {
        return Err(CallError::Forked);
    }
    let cuda = Cuda::shared(index)?;
    USED.store(true, Ordering::Relaxed);
    Ok(cuda)
}

/// Notes that the driver does not survive a fork.
pub(crate) fn after_fork() {
    LOST.store(USED.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Where launches go.
#[derive(Clone, Copy)]
pub(crate) struct Queue<'a> {
    /// A stream of the GPU's; meaningless for host tensors.
    pub(crate) stream: usize,
    /// Who gives scratch memory, in bytes; FlashCore itself where it is None.
    pub(crate) scratch: Option<&'a dyn Fn(u64) -> Option<u64>>,
}

impl From<usize> for Queue<'_> {
    fn from(stream: usize) -> Self {
        Self { stream, scratch: None }
    }
}

/// Launches.
///
/// # Safety
/// As [`flashcore::cuda::Ready::launch_with`].
pub(crate) unsafe fn launch(
    index: u32,
    problem: &Problem,
    alignment: u64,
    tensors: &DeviceTensors,
    queue: Queue<'_>,
) -> Result<(), CallError> {
    let (ready, stream) = (open(index)?.prepare_aligned(problem, alignment)?, queue.stream as *mut c_void);
    // SAFETY: the caller's promise.
    unsafe {
        match queue.scratch {
            Some(allocate) => ready.launch_with(tensors, stream, allocate)?,
            None => ready.launch_raw(tensors, stream)?,
        }
    }
    Ok(())
}

/// Launches gradients.
///
/// # Safety
/// As [`flashcore::cuda::ReadyBackward::launch_with`].
pub(crate) unsafe fn backward(
    index: u32,
    problem: &BackwardProblem,
    alignment: u64,
    tensors: &BackwardTensors,
    queue: Queue<'_>,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_backward_aligned(problem, alignment)?;
    let stream = queue.stream as *mut c_void;
    // SAFETY: the caller's promise.
    unsafe {
        match queue.scratch {
            Some(allocate) => ready.launch_with(tensors, stream, allocate)?,
            None => ready.launch_raw(tensors, stream)?,
        }
    }
    Ok(())
}

/// Sets bytes to 0, in the order of the queue.
///
/// # Safety
/// As [`flashcore::cuda::driver::Stream::fill`]; the stream must be alive.
pub(crate) unsafe fn zero(
    index: u32,
    address: usize,
    bytes: usize,
    queue: Queue<'_>,
) -> Result<(), CallError> {
    let device = open(index)?.device();
    // SAFETY: the caller's promise.
    unsafe { Stream::from_raw(device, queue.stream as *mut c_void)?.fill(address as u64, 0, bytes as u64)? };
    Ok(())
}

/// Launches a merge on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyMerge::launch_raw`].
pub(crate) unsafe fn merge(
    index: u32,
    problem: &MergeProblem,
    alignment: u64,
    tensors: &MergeTensors<'_>,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_merge_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}

/// Launches grouped products on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyGrouped::launch_raw`].
pub(crate) unsafe fn grouped(
    index: u32,
    problem: &GroupedProblem,
    alignment: u64,
    tensors: &GroupedTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_grouped_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}

/// Launches an append on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyAppend::launch_raw`].
pub(crate) unsafe fn append(
    index: u32,
    problem: &AppendProblem,
    tensors: &AppendTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_append(problem)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}

/// Launches what quantises a tensor on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyQuantise::launch_raw`].
pub(crate) unsafe fn quantise(
    index: u32,
    problem: &QuantiseProblem,
    alignment: u64,
    tensors: &QuantiseTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_quantise_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}

/// Launches a mixture of experts on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyMoe::launch_raw`].
pub(crate) unsafe fn moe(
    index: u32,
    problem: &MoeProblem,
    alignment: u64,
    tensors: &MoeTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_moe_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}
