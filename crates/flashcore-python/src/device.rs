//! Device tensors: prepared by FlashCore's one cache, launched on the caller's stream.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};

use flashcore::{
    BackwardProblem, Problem,
    cuda::{
        AppendTensors, BackwardTensors, Cuda, DeviceTensors, GroupedTensors, MergeTensors, MoeTensors,
        QuantiseTensors,
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

/// Launches on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::Ready::launch_raw`].
pub(crate) unsafe fn launch(
    index: u32,
    problem: &Problem,
    alignment: u64,
    tensors: &DeviceTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    Ok(())
}

/// Launches gradients on `stream`.
///
/// # Safety
/// As [`flashcore::cuda::ReadyBackward::launch_raw`].
pub(crate) unsafe fn backward(
    index: u32,
    problem: &BackwardProblem,
    alignment: u64,
    tensors: &BackwardTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    let ready = open(index)?.prepare_backward_aligned(problem, alignment)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
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
