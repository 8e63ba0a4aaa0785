//! Which threads compute: the calling thread, rayon's, or those of the surrounding OpenMP program. Part of `Cpu`;
//! `forward` and `backward` give it their work.
//!
//! An OpenMP program's threads spin for a while before they sleep. Other threads compete with them for cores: on
//! two cores a call after one of PyTorch's took 1.4 times as long. So if there are such threads, they do the
//! work.

use std::{
    any::Any,
    ffi::{c_int, c_uint, c_void},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use rayon::prelude::*;

use crate::output::Shared;

/// Threads for one call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Crew {
    /// Only the calling thread.
    Caller,
    /// Those of rayon's current pool.
    Rayon,
    /// Those of the program's OpenMP.
    Program(OpenMp),
}

impl Crew {
    /// How many there are.
    pub(crate) fn threads(self) -> usize {
        match self {
            Self::Caller => 1,
            Self::Rayon => rayon::current_num_threads(),
            Self::Program(openmp) => openmp.threads(),
        }
    }

    /// Lets every thread work with a worker of its own. Workers may be left over: work must be taken from a shared list.
    pub(crate) fn work<W: Send>(self, workers: &mut [W], work: impl Fn(&mut W) + Sync) {
        match (self, workers) {
            (_, [worker]) => work(worker),
            (Self::Caller, workers) => workers.iter_mut().take(1).for_each(&work),
            (Self::Rayon, workers) => workers.par_iter_mut().with_max_len(1).for_each(&work),
            (Self::Program(openmp), workers) => {
                let (count, workers) = (workers.len(), Shared::new(workers));
                // SAFETY: OpenMP hands out each number once.
                openmp.run(count, &|n| work(unsafe { &mut workers.range(n, 1)[0] }));
            }
        }
    }

    /// Calls `work` with every number below `count`, on all threads.
    pub(crate) fn each(self, count: usize, work: impl Fn(usize) + Sync + Send) {
        self.each_with(count, |(), n| work(n));
    }

    /// The same, each thread with something of its own to work with.
    pub(crate) fn each_with<W: Default>(self, count: usize, work: impl Fn(&mut W, usize) + Sync + Send) {
        let all = |numbers: &mut dyn Iterator<Item = usize>| {
            let mut own = W::default();
            numbers.for_each(|n| work(&mut own, n));
        };
        match self {
            Self::Rayon if count > 1 => (0..count).into_par_iter().for_each_init(W::default, work),
            Self::Program(openmp) if count > 1 => {
                let next = AtomicUsize::new(0);
                let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&n| n < count);
                openmp.run(openmp.threads().min(count), &|_| all(&mut std::iter::from_fn(take)));
            }
            _ => all(&mut (0..count)),
        }
    }

    /// Calls `work` with every chunk of `len` elements and its number, on all threads.
    pub(crate) fn chunks<T: Send>(
        self,
        slice: &mut [T],
        len: usize,
        work: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        let (all, shared) = (slice.len(), Shared::new(slice));
        self.each(all.div_ceil(len), |n| {
            let start = n * len;
            // SAFETY: each number comes once, and chunks are disjoint.
            work(n, unsafe { shared.range(start, len.min(all - start)) });
        });
    }
}

/// The OpenMP that a program has loaded: what GCC's compiler calls, which LLVM's and Intel's libraries offer, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenMp {
    parallel: Parallel,
    max_threads: MaxThreads,
}

type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
type MaxThreads = unsafe extern "C" fn() -> c_int;

/// What the threads of a region share.
struct Region<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    threads: usize,
    arrived: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// What each thread calls; a panic must not leave it.
extern "C" fn enter(region: *mut c_void) {
    // SAFETY: `OpenMp::run` passes a region, which lives until all threads have left.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    let n = region.arrived.fetch_add(1, Ordering::Relaxed);
    if n < region.threads
        && let Err(panic) = catch_unwind(AssertUnwindSafe(|| (region.work)(n)))
    {
        region.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
    }
}

impl OpenMp {
    /// The one whose functions the whole program sees, as those of PyTorch are.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_program() -> Option<Self> {
        unsafe extern "C" {
            fn dlsym(library: *mut c_void, name: *const std::ffi::c_char) -> *mut c_void;
        }
        // SAFETY: looks up names that end in 0, in what is loaded already.
        let find = |name: &std::ffi::CStr| unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
        let (parallel, max_threads) = (find(c"GOMP_parallel"), find(c"omp_get_max_threads"));
        if parallel.is_null() || max_threads.is_null() {
            return None;
        }
        // SAFETY: OpenMP libraries agree on what lies behind these two names.
        unsafe {
            Some(Self {
                parallel: std::mem::transmute::<*mut c_void, Parallel>(parallel),
                max_threads: std::mem::transmute::<*mut c_void, MaxThreads>(max_threads),
            })
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn of_program() -> Option<Self> {
        None
    }

    /// As many as the program wants: with PyTorch, `torch.get_num_threads()`.
    fn threads(self) -> usize {
        // SAFETY: needs nothing.
        usize::try_from(unsafe { (self.max_threads)() }).unwrap_or(1).max(1)
    }

    /// Calls `work` with different numbers below `threads`, each on a thread of its own. There may be fewer: inside a
    /// region of the program there is one.
    fn run(self, threads: usize, work: &(dyn Fn(usize) + Sync)) {
        let mut region = Region { work, threads, arrived: AtomicUsize::new(0), panic: Mutex::new(None) };
        let count = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
        // SAFETY: `enter` takes a region, and all threads have left when this returns.
        unsafe { (self.parallel)(enter, (&raw mut region).cast(), count, 0) };
        if let Some(panic) = region.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An OpenMP of threads that are made for each region.
    unsafe extern "C" fn parallel(
        enter: extern "C" fn(*mut c_void),
        data: *mut c_void,
        count: c_uint,
        _: c_uint,
    ) {
        let data = data as usize;
        std::thread::scope(|scope| {
            (0..count).for_each(|_| drop(scope.spawn(move || enter(data as *mut c_void))));
        });
    }

    unsafe extern "C" fn max_threads() -> c_int {
        3
    }

    #[test]
    fn every_crew_does_all_work_once() {
        for crew in [Crew::Caller, Crew::Rayon, Crew::Program(OpenMp { parallel, max_threads })] {
            let done: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            crew.each(100, |n| _ = done[n].fetch_add(1, Ordering::Relaxed));
            assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{crew:?}");
            let (left, mut workers) = (AtomicUsize::new(0), vec![0; crew.threads()]);
            crew.work(&mut workers, |worker| {
                while left.fetch_add(1, Ordering::Relaxed) < 50 {
                    *worker += 1;
                }
            });
            assert_eq!(workers.iter().sum::<usize>(), 50, "{crew:?}");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let crew = Crew::Program(OpenMp { parallel, max_threads });
        let panicked = catch_unwind(|| crew.each(9, |n| assert!(n != 5, "a fault")));
        assert!(panicked.is_err());
    }
}
