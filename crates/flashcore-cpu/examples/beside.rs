//! The CPU backend as a library for `bench/cpu/beside.py`, which calls it in the process in which PyTorch runs.
//!
//! Tensors are dense batch × heads × sequence × dim. Functions return 0, or 1 where something was refused.

use std::{
    ffi::{CStr, c_char},
    slice::{from_raw_parts, from_raw_parts_mut},
    sync::OnceLock,
};

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardSpec, DType, Dims, E4M3, Element, GradientsMut, HostCall,
    Layout, Lengths, Mask, PageTable, RowTerms, Spec, Values,
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
    /// Whether keys and values are E4M3 under 16-bit queries.
    cache: usize,
    /// Keys of a page, in pools of pages × keys × heads × dim whose last page comes first; 0 for no pages.
    page: usize,
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

/// The layout of keys and values, what finds their pages, and how many keys each batch entry has.
fn keys(request: &Request) -> Result<(Layout, Option<PageTable>, Lengths), Failure> {
    let [batch, _, heads, _, keys, dim] = request.shape;
    if request.page == 0 {
        return Ok((Layout::bhsd(Dims::new(batch, heads, keys, dim))?, None, Lengths::Uniform));
    }
    let columns = keys / request.page;
    let pages = (batch * columns) as i32;
    let layout = Layout::bshd(Dims::new(batch * columns, heads, request.page, dim))?;
    let table = PageTable::new((0..pages).rev().collect::<Vec<_>>(), columns);
    let lengths = Lengths::Used { q: None, kv: Some(vec![keys as u32; batch].into()) };
    Ok((layout, Some(table), lengths))
}

unsafe fn run<T: Element>(request: &Request) -> Result<(), Failure> {
    let [batch, heads_q, _, seq_q, _, dim] = request.shape;
    let q = Layout::bhsd(Dims::new(batch, heads_q, seq_q, dim))?;
    let (kv, table, lengths) = keys(request)?;
    // PyTorch's `is_causal` starts in the top left corner.
    let mask = if request.causal == 1 { Mask::CAUSAL.top_left() } else { Mask::NONE };
    let kv_dtype = (request.cache == 1).then_some(DType::E4M3);
    let values = Values { lengths, table, ..Values::default() };
    let problem = Spec { mask, kv_dtype, ..Spec::new(T::DTYPE, q, kv, kv) }.with(&values).parse()?;
    // SAFETY: the caller's promise.
    let read = |at: usize, layout: &Layout| unsafe { from_raw_parts(at as *const T, layout.span()) };
    // SAFETY: the caller's promise.
    let write = |at: usize, layout: &Layout| unsafe { from_raw_parts_mut(at as *mut T, layout.span()) };
    let [q_at, k_at, v_at, out_at] = request.tensors;
    let cpu = cpu(request)?;
    let rows = problem.rows();
    if request.grads == [0; 4] {
        let [k, v] = [k_at, v_at].map(|at| match request.cache {
            1 => {
                // SAFETY: the caller's promise.
                let bytes = unsafe { from_raw_parts(at as *const E4M3, kv.span()) };
                E4M3::erase(bytes)
            }
            _ => T::erase(read(at, &kv)),
        });
        // SAFETY: the caller's promise.
        let lse = (request.lse != 0).then(|| unsafe { from_raw_parts_mut(request.lse as *mut f32, rows) });
        let (inputs, out) = ([T::erase(read(q_at, &q)), k, v], T::erase_mut(write(out_at, &q)));
        cpu.forward(&mut HostCall::bind_erased(&problem, &values, inputs, out, lse)?)?;
        return Ok(());
    }
    let qkv = [read(q_at, &q), read(k_at, &kv), read(v_at, &kv)];
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
