//! The CPU backend of this process: on the threads of PyTorch's OpenMP or in a pool of its own, which a forked process
//! replaces.

use std::{
    ptr::null_mut,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
};

use flashcore::BackendError;
use flashcore_cpu::Cpu;
use rayon::ThreadPoolBuilder;

use crate::error::CallError;

/// The backend in use; replaced, never freed, because a forked child cannot join its parent's threads.
static CPU: AtomicPtr<Cpu> = AtomicPtr::new(null_mut());

/// The CPU backend of this process.
pub(crate) fn cpu() -> Result<&'static Cpu, CallError> {
    let found = CPU.load(Ordering::Acquire);
    if !found.is_null() {
        // SAFETY: made below and never freed.
        return Ok(unsafe { &*found });
    }
    let made = Box::leak(Box::new(open()?));
    // Two threads that come here at once both make one; the last stays in use, the other idles.
    CPU.store(made, Ordering::Release);
    Ok(made)
}

/// With `FLASHCORE_THREADS` a pool of that size. Otherwise PyTorch's threads, as many as `torch.get_num_threads()` says,
/// where it is loaded; and a pool for the rest.
fn open() -> Result<Cpu, BackendError> {
    if std::env::var("FLASHCORE_THREADS").is_ok_and(|threads| !threads.is_empty()) {
        return Cpu::from_environment();
    }
    let pool = ThreadPoolBuilder::new().thread_name(|n| format!("flashcore-{n}")).build();
    let pool = pool.map_err(|error| BackendError::Failed { backend: "cpu", source: Box::new(error) })?;
    let cpu = Cpu::with_pool(Arc::new(pool));
    Ok(if FORKED.load(Ordering::Relaxed) { cpu } else { cpu.beside_openmp() })
}

/// Whether this process is a forked child: OpenMP's threads stayed behind in its parent.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Forgets the parent's threads, which a forked child does not have.
pub(crate) fn after_fork() {
    FORKED.store(true, Ordering::Relaxed);
    CPU.store(null_mut(), Ordering::Release);
}
