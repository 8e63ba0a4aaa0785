//! Memory: nothing is allocated once a size has been seen, and what is held stays small.

use std::{
    alloc::{GlobalAlloc, Layout as Memory, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use flashcore_core::{DType, Dims, Element, HostCall, Layout, Mask, Problem, Spec, Values};
use flashcore_cpu::{Cpu, Scratch};
use half::{bf16, f16};

/// Counts allocations.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Memory) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn problem(dtype: DType, [batch, heads, seq_q, seq_kv, dim]: [usize; 5], mask: Mask) -> Problem {
    let layout = |seq| Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
    Spec { mask, ..Spec::new(dtype, layout(seq_q), layout(seq_kv), layout(seq_kv)) }.parse().unwrap()
}

fn run<T: Element>(cpu: &Cpu, problem: &Problem, scratch: &mut Scratch, calls: usize) -> usize {
    let input = |layout: &Layout| vec![T::from_f32(0.5); layout.span()];
    let (q, k, v) = (input(problem.q()), input(problem.k()), input(problem.v()));
    let mut out = input(problem.out());
    cpu.install(|| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..calls {
            let mut call = HostCall::bind(problem, Values::NONE, [&q, &k, &v], &mut out, None).unwrap();
            cpu.run_with(&mut call, scratch).unwrap();
        }
        ALLOCATIONS.load(Ordering::Relaxed) - before
    })
}

/// A thread of rayon allocates once when it first steals, which may come late: `allowed` times.
fn check_no_allocation<T: Element>(cpu: &Cpu, shape: [usize; 5], mask: Mask, allowed: usize) {
    let (problem, mut scratch) = (problem(T::DTYPE, shape, mask), Scratch::new());
    run::<T>(cpu, &problem, &mut scratch, 3);
    let count = run::<T>(cpu, &problem, &mut scratch, 20);
    assert!(count <= allowed, "{count} allocations for {} {shape:?} {mask}", T::DTYPE);
}

/// One test: the counter is the whole process's.
#[test]
fn memory_is_reused_and_small() {
    for (threads, allowed) in [(1, 0), (2, 2)] {
        let cpu = Cpu::with_threads(threads).unwrap();
        for shape in [[1, 4, 300, 300, 64], [2, 2, 1, 3000, 64], [1, 1, 9, 2000, 40]] {
            for mask in [Mask::NONE, Mask::CAUSAL] {
                check_no_allocation::<f32>(&cpu, shape, mask, allowed);
                check_no_allocation::<f16>(&cpu, shape, mask, allowed);
                check_no_allocation::<bf16>(&cpu, shape, mask, allowed);
            }
        }
    }
    // A narrow band keeps the test short; memory depends on the shape alone.
    let (cpu, mut scratch) = (Cpu::with_threads(2).unwrap(), Scratch::new());
    run::<f32>(&cpu, &problem(DType::F32, [1, 8, 32768, 32768, 64], Mask::window(64, 0)), &mut scratch, 1);
    run::<f16>(&cpu, &problem(DType::F16, [1, 8, 32768, 32768, 64], Mask::window(64, 0)), &mut scratch, 1);
    run::<f16>(&cpu, &problem(DType::F16, [1, 2, 1000, 1000, 256], Mask::CAUSAL), &mut scratch, 1);
    assert!(scratch.bytes() < 2 * (4 << 20), "{} bytes for two threads", scratch.bytes());
}
