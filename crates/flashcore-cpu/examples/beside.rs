//! The CPU backend as a library for `bench/cpu/beside.py`, which calls it in the process in which PyTorch runs.
//!
//! Tensors are dense batch × heads × sequence × dim. Functions return 0, or 1 where something was refused.

use std::{
    ffi::{CStr, c_char},
    slice::{from_raw_parts, from_raw_parts_mut},
    sync::OnceLock,
};

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardSpec, Dims, Element, GradientsMut, HostCall, Layout, Mask,
    RowTerms, Spec, Values,
};
use flashcore_cpu::{Cpu, SimdLevel};
use half::{bf16, f16};
use rayon::prelude::*;

type Failure = Box<dyn std::error::Error>;

/// One call: addresses, extents, options.
#[repr(C)]
pub struct Request {
    /// Q, K, V and the output.
    tensors: [usize; 4],
    /// The LSE of each row, or 0.
    lse: usize,
    /// dO, dQ, dK and dV: all 0 for attention itself.
    grads: [usize; 4],
    /// Batch, query heads, key heads, queries, keys, dim.
    shape: [usize; 6],
    causal: usize,
    /// 0, 1, 2: f32, f16, bf16.
    dtype: usize,
    /// 0: threads of OpenMP where the program has some; 1: threads of its own.
    threads: usize,
    /// A level by its number among all, or beyond them for the usual one.
    level: usize,
}

/// Computes attention, or its gradients.
///
/// # Safety
/// All addresses are those of tensors of the shape, which nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_run(request: &Request) -> i32 {
    // SAFETY: the caller's promise.
    let ran = unsafe {
        match request.dtype {
            0 => run::<f32>(request),
            1 => run::<f16>(request),
            _ => run::<bf16>(request),
        }
    };
    ran.map_err(|error| eprintln!("{error}")).is_err().into()
}

/// The number of a level, or -1 for a name that is none or one that this machine lacks.
///
/// # Safety
/// The name ends in 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_level(name: *const c_char) -> i32 {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default();
    let found = SimdLevel::ALL.iter().position(|level| level.name() == name && level.is_available());
    found.map_or(-1, |n| n as i32)
}

/// Reads memory from all threads; returns the sum.
///
/// # Safety
/// There are `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_read(data: *const u64, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    let data = unsafe { from_raw_parts(data, len) };
    data.par_chunks(1 << 16).map(|chunk| chunk.iter().fold(0u64, |a, x| a.wrapping_add(*x))).sum()
}

fn cpu(request: &Request) -> Result<Cpu, Failure> {
    static BESIDE: OnceLock<Cpu> = OnceLock::new();
    static APART: OnceLock<Cpu> = OnceLock::new();
    let cpu = match request.threads {
        0 => BESIDE.get_or_init(|| Cpu::new().beside_openmp()),
        _ => APART.get_or_init(Cpu::new),
    };
    Ok(match SimdLevel::ALL.get(request.level) {
        Some(level) => cpu.clone().with_simd(*level)?,
        None => cpu.clone(),
    })
}

unsafe fn run<T: Element>(request: &Request) -> Result<(), Failure> {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim] = request.shape;
    let q = Layout::bhsd(Dims::new(batch, heads_q, seq_q, dim))?;
    let kv = Layout::bhsd(Dims::new(batch, heads_kv, seq_kv, dim))?;
    // PyTorch's `is_causal` starts in the top left corner.
    let mask = if request.causal == 1 { Mask::CAUSAL.top_left() } else { Mask::NONE };
    let problem = Spec { mask, ..Spec::new(T::DTYPE, q, kv, kv) }.parse()?;
    // SAFETY: the caller's promise.
    let read = |at: usize, layout: &Layout| unsafe { from_raw_parts(at as *const T, layout.span()) };
    // SAFETY: the caller's promise.
    let write = |at: usize, layout: &Layout| unsafe { from_raw_parts_mut(at as *mut T, layout.span()) };
    let [q_at, k_at, v_at, out_at] = request.tensors;
    let (qkv, cpu) = ([read(q_at, &q), read(k_at, &kv), read(v_at, &kv)], cpu(request)?);
    let rows = problem.rows();
    if request.grads == [0; 4] {
        // SAFETY: the caller's promise.
        let lse = (request.lse != 0).then(|| unsafe { from_raw_parts_mut(request.lse as *mut f32, rows) });
        cpu.forward(&mut HostCall::bind(&problem, Values::NONE, qkv, write(out_at, &q), lse)?)?;
        return Ok(());
    }
    let backward = BackwardSpec::new(problem.spec().clone()).parse()?;
    let [d_out, dq, dk, dv] = request.grads;
    // SAFETY: the caller's promise.
    let lse = unsafe { from_raw_parts(request.lse as *const f32, rows) };
    let inputs = BackwardInputs {
        qkv: qkv.map(T::erase),
        lse,
        terms: RowTerms::Out(T::erase(read(out_at, &q))),
        d_out: T::erase(read(d_out, &q)),
    };
    let grads = [(dq, &q), (dk, &kv), (dv, &kv)].map(|(at, layout)| T::erase_mut(write(at, layout)));
    let grads = GradientsMut { qkv: grads, sinks: None };
    cpu.backward(&mut BackwardCall::bind(&backward, Values::NONE, inputs, grads)?)?;
    Ok(())
}
