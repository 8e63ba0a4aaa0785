//! Device tensors: GPUs opened once per process, launches on the caller's stream.

use std::{
    ffi::c_void,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use flashcore::{
    Lengths, Problem,
    cuda::{Cuda, DeviceTensors, Ready, driver::Stream},
};

use crate::error::CallError;

/// A GPU in use, and a stream for frameworks that have none to offer.
struct Opened {
    index: u32,
    cuda: Arc<Cuda>,
    stream: Arc<Stream>,
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
/// Whether this process is the child of one that used CUDA.
static LOST: AtomicBool = AtomicBool::new(false);
/// Whether a GPU was opened, to be read in a forked child, where `OPENED` may be locked for ever.
static USED: AtomicBool = AtomicBool::new(false);

/// GPU number `index` and its stream.
pub(crate) fn open(index: u32) -> Result<(Arc<Cuda>, Arc<Stream>), CallError> {
    if LOST.load(Ordering::Relaxed) {
        return Err(CallError::Forked);
    }
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = opened.iter().find(|gpu| gpu.index == index) {
        return Ok((found.cuda.clone(), found.stream.clone()));
    }
    let cuda = Arc::new(Cuda::open(index)?);
    let stream = Arc::new(Stream::new(cuda.device())?);
    USED.store(true, Ordering::Relaxed);
    opened.push(Opened { index, cuda: cuda.clone(), stream: stream.clone() });
    Ok((cuda, stream))
}

/// Notes that the driver does not survive a fork.
pub(crate) fn after_fork() {
    LOST.store(USED.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Makes a problem ready for a GPU.
pub(crate) fn prepare(index: u32, problem: &Problem, alignment: u64) -> Result<Arc<Ready>, CallError> {
    let (cuda, _) = open(index)?;
    Ok(cuda.prepare_aligned(problem, alignment)?)
}

/// Launches on `stream`.
///
/// # Safety
/// As [`Ready::launch_raw`].
pub(crate) unsafe fn launch(
    ready: &Arc<Ready>,
    tensors: &DeviceTensors,
    stream: *mut c_void,
) -> Result<(), CallError> {
    if LOST.load(Ordering::Relaxed) {
        return Err(CallError::Forked);
    }
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream)? };
    if has_side_arrays(ready.problem()) {
        // SAFETY: the caller's promise: the stream is alive.
        unsafe { keep_for_replays(ready, stream)? };
    }
    Ok(())
}

fn has_side_arrays(problem: &Problem) -> bool {
    problem.sinks().is_some() || *problem.lengths() != Lengths::Uniform
}

/// A graph under capture will read the launch's side arrays in every replay, and nobody tells us when it ends: they are
/// kept for the life of the process.
///
/// # Safety
/// The stream must be alive and of the GPU.
unsafe fn keep_for_replays(ready: &Arc<Ready>, stream: *mut c_void) -> Result<(), CallError> {
    // SAFETY: the caller's promise.
    let stream = unsafe { Stream::from_raw(ready.kernel().device(), stream)? };
    if stream.is_capturing()? {
        std::mem::forget(ready.clone());
    }
    Ok(())
}
