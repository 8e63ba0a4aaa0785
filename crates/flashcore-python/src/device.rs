//! Device tensors: prepared by FlashCore's one cache, launched on the caller's stream.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};

use flashcore::cuda::{Cuda, Operation, ReadyOf, driver::Stream};

use crate::{call::WIDEST, error::CallError};

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

/// What tensors' addresses are multiples of, as far as kernels make use of it.
pub(crate) fn alignment(addresses: impl IntoIterator<Item = u64>) -> u64 {
    let bits = addresses.into_iter().fold(WIDEST as u64, |bits, address| bits | address);
    1 << bits.trailing_zeros()
}

/// Launches what was made ready.
///
/// # Safety
/// As [`flashcore::cuda::ReadyOf::launch_with`].
pub(crate) unsafe fn launch<P: Operation>(
    ready: &ReadyOf<P>,
    tensors: &P::Tensors<'_>,
    queue: Queue<'_>,
) -> Result<(), CallError> {
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
