//! Host tensors: on the CPU backend, on the threads of PyTorch's OpenMP or in a pool of its own, which a forked process
//! replaces.

use std::{
    ptr::null_mut,
    slice::{from_raw_parts, from_raw_parts_mut},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
};

use flashcore::{
    Backend, BackendError, BackwardProblem, DType, Ids, Index, Layout, Problem, Routing, Values, bf16,
    cuda::{AppendTensors, MoeTensors, QuantiseTensors},
    f16,
};
use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendValues, BackwardCall, BackwardInputs, Data,
    DataMut, E4M3, E5M2, Factors, GradientsMut, HostCall, MergeCall, MergeProblem, MoeCall, MoeGradientCall,
    MoeGradientsMut, MoeInputs, MoeProblem, PageTable, QuantiseCall, QuantiseProblem, QuantisedMut, Routed,
    RowTerms,
};
use flashcore_cpu::Cpu;
use rayon::ThreadPoolBuilder;

use crate::{
    array::{Array, Numbers, Table},
    error::CallError,
};

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

/// Computes `problem` on host memory.
///
/// # Safety
/// The addresses must be those of live tensors with the problem's layouts (q, k, v, out), and of as many f32 as the
/// problem has rows (lse). Out and lse must share no memory with the others, and nobody may write any of it meanwhile.
pub(crate) unsafe fn run(
    problem: &Problem,
    values: &Values,
    [q, k, v, out]: [usize; 4],
    lse: Option<usize>,
) -> Result<(), CallError> {
    let (dtype, of_kv) = (problem.dtype(), problem.kv_dtype());
    // SAFETY: the caller's promise.
    let inputs =
        unsafe { [read(q, dtype, problem.q())?, read(k, of_kv, problem.k())?, read(v, of_kv, problem.v())?] };
    // SAFETY: the caller's promise.
    let out = unsafe { write(out, problem.out_dtype(), problem.out())? };
    // SAFETY: the caller's promise.
    let lse = lse.map(|at| unsafe { from_raw_parts_mut(pointer::<f32>(at, problem.rows()), problem.rows()) });
    let mut call = HostCall::bind_erased(problem, values, inputs, out, lse)?;
    cpu()?.forward(&mut call)?;
    Ok(())
}

/// Merges partial results on host memory: addresses of the parts and of their LSE, or of the first of all where they are
/// stacked.
///
/// # Safety
/// As [`run`].
pub(crate) unsafe fn merge(
    problem: &MergeProblem,
    parts: &[u64],
    lses: &[u64],
    out: usize,
    lse: Option<usize>,
) -> Result<(), CallError> {
    let (rows, count) = (problem.rows(), problem.parts().count() / problem.parts().tensors());
    let reach = problem.part().span() + (count - 1) * problem.stride();
    // SAFETY: the caller's promise.
    let parts = parts.iter().map(|&at| unsafe { elements(at as usize, problem.dtype(), reach) });
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    // SAFETY: the caller's promise.
    let values = |at: usize, len: usize| unsafe { from_raw_parts(pointer::<f32>(at, len), len) };
    let lses: Vec<_> = lses.iter().map(|&at| values(at as usize, rows * count)).collect();
    // SAFETY: the caller's promise.
    let out = unsafe { write(out, problem.out_dtype(), problem.out())? };
    // SAFETY: the caller's promise.
    let lse = lse.map(|at| unsafe { from_raw_parts_mut(pointer::<f32>(at, rows), rows) });
    cpu()?.merge(&mut MergeCall::bind(problem, &parts, &lses, out, lse)?)?;
    Ok(())
}

/// Quantises a tensor in host memory.
///
/// # Safety
/// As [`run`]; factors and means are as many as the problem has.
pub(crate) unsafe fn quantise(
    problem: &QuantiseProblem,
    used: Option<&[u32]>,
    tensors: &QuantiseTensors,
) -> Result<(), CallError> {
    let spec = problem.spec();
    // SAFETY: the caller's promise.
    let floats = |at: u64, len: usize| unsafe { from_raw_parts_mut(pointer::<f32>(at as usize, len), len) };
    // SAFETY: the caller's promise.
    let (x, out) = unsafe {
        (
            read(tensors.x as usize, spec.dtype, problem.x())?,
            write(tensors.out as usize, spec.to, problem.out())?,
        )
    };
    let factors = floats(tensors.factors, problem.factors());
    let means = spec.centred.then(|| floats(tensors.means, problem.means()));
    cpu()?.quantise(&mut QuantiseCall::bind(problem, x, used, QuantisedMut { out, factors, means })?)?;
    Ok(())
}

/// Appends to a cache in host memory.
///
/// # Safety
/// As [`run`]; the caches and the turned queries share no memory with each other or with anything else.
pub(crate) unsafe fn append(
    problem: &AppendProblem,
    values: &AppendValues,
    at: &AppendTensors,
) -> Result<(), CallError> {
    let (spec, dtype) = (problem.spec(), problem.spec().dtype);
    // SAFETY: the caller's promise.
    unsafe {
        let table = |at: u64, len: usize| elements(at as usize, dtype, len);
        let rotary = match spec.rotary.map(|rotary| rotary.positions * (rotary.dim / 2)) {
            Some(len) => Some([table(at.cos, len)?, table(at.sin, len)?]),
            None => None,
        };
        let (q, turned) = match &spec.q {
            Some([q, turned]) => {
                (Some(read(at.q as usize, dtype, q)?), Some(write(at.out as usize, dtype, turned)?))
            }
            None => (None, None),
        };
        let (k, v) = (read(at.k as usize, dtype, &spec.k)?, read(at.v as usize, dtype, &spec.v)?);
        let outputs = AppendOutputs {
            cache_k: write(at.cache_k as usize, problem.cache_dtype(), &spec.cache_k)?,
            cache_v: write(at.cache_v as usize, problem.cache_dtype(), &spec.cache_v)?,
            q: turned,
        };
        cpu()?.append(&mut AppendCall::bind(problem, values, AppendInputs { k, v, rotary, q }, outputs)?)?;
    }
    Ok(())
}

/// How many numbers lie at addresses whose tensors have no layout.
pub(crate) struct MoeLengths {
    pub(crate) ids: usize,
    /// Routing weights or logits.
    pub(crate) routing: usize,
    pub(crate) routing_bias: Option<usize>,
    pub(crate) biases: Option<[usize; 2]>,
}

/// Computes a mixture of experts on host memory.
///
/// # Safety
/// As [`run`], with as many numbers as `lens` says.
pub(crate) unsafe fn moe(problem: &MoeProblem, at: &MoeTensors, lens: &MoeLengths) -> Result<(), CallError> {
    // SAFETY: the caller's promise.
    let (inputs, out) =
        unsafe { (moe_inputs(problem, at, lens)?, write(at.out as usize, problem.dtype(), problem.out())?) };
    cpu()?.moe(&mut MoeCall::bind(problem, inputs, out)?)?;
    Ok(())
}

/// Where gradients of a mixture of experts go.
pub(crate) struct MoeGradientAddresses {
    pub(crate) x: usize,
    pub(crate) gate_up: usize,
    pub(crate) down: usize,
    /// f32, tokens × top-k.
    pub(crate) weights: usize,
    pub(crate) biases: Option<[usize; 2]>,
    pub(crate) shared: Option<[usize; 2]>,
}

/// Computes gradients of a mixture of experts on host memory; `at.out` is the gradient of its result.
///
/// # Safety
/// As [`moe`]; gradients lie as [`flashcore_core::MoeGradientsMut`] says and share no memory with anything else.
pub(crate) unsafe fn moe_gradients(
    problem: &MoeProblem,
    at: &MoeTensors,
    lens: &MoeLengths,
    to: &MoeGradientAddresses,
) -> Result<(), CallError> {
    let (spec, dtype) = (problem.spec(), problem.dtype());
    // SAFETY: the caller's promise.
    unsafe {
        let some = |at: usize, len: usize| write(at, dtype, &Layout::matrix(1, len)?);
        let both = |at: Option<[usize; 2]>, lens: [usize; 2]| match at {
            Some([first, second]) => {
                Ok::<_, CallError>(Some([some(first, lens[0])?, some(second, lens[1])?]))
            }
            None => Ok(None),
        };
        let rows = [spec.gate_up.rows(), problem.hidden()].map(|rows| problem.experts() * rows);
        let shared = spec.shared.map_or([0; 2], |shared| [shared.gate_up.elements(), shared.down.elements()]);
        let entries = problem.entries();
        let grads = MoeGradientsMut {
            x: some(to.x, problem.tokens() * problem.hidden())?,
            gate_up: some(to.gate_up, spec.gate_up.elements())?,
            down: some(to.down, spec.down.elements())?,
            biases: both(to.biases, rows)?,
            shared: both(to.shared, shared)?,
            weights: from_raw_parts_mut(pointer::<f32>(to.weights, entries), entries),
        };
        let (inputs, d_out) = (moe_inputs(problem, at, lens)?, read(at.out as usize, dtype, problem.out())?);
        cpu()?.moe_gradients(&mut MoeGradientCall::bind(problem, inputs, d_out, grads)?)?;
    }
    Ok(())
}

/// # Safety
/// As [`moe`].
unsafe fn moe_inputs<'a>(
    problem: &MoeProblem,
    at: &MoeTensors,
    lens: &MoeLengths,
) -> Result<MoeInputs<'a>, CallError> {
    let (spec, dtype) = (problem.spec(), problem.dtype());
    // SAFETY: the caller's promise.
    unsafe {
        let weights = |at: u64, span: usize| elements(at as usize, dtype, span);
        let routed = match *problem.routing() {
            Routing::Given { ids, weights, .. } => {
                let (first, len) = (at.ids as usize, lens.ids);
                let ids = match ids {
                    Index::I32 => Ids::I32(from_raw_parts(pointer::<i32>(first, len), len)),
                    Index::I64 => Ids::I64(from_raw_parts(pointer::<i64>(first, len), len)),
                };
                Routed::Given { ids, weights: elements(at.weights as usize, weights, lens.routing)? }
            }
            Routing::Computed { logits, .. } => {
                let floats = |len: usize| from_raw_parts(pointer::<f32>(at.routing_bias as usize, len), len);
                let logits = elements(at.logits as usize, logits, lens.routing)?;
                Routed::Computed { logits, bias: lens.routing_bias.map(floats) }
            }
        };
        let biases = match lens.biases {
            Some([first, second]) => Some([weights(at.biases[0], first)?, weights(at.biases[1], second)?]),
            None => None,
        };
        let shared = match spec.shared {
            Some(layouts) => Some([
                weights(at.shared[0], layouts.gate_up.span())?,
                weights(at.shared[1], layouts.down.span())?,
            ]),
            None => None,
        };
        Ok(MoeInputs {
            x: read(at.x as usize, dtype, &spec.x)?,
            gate_up: weights(at.gate_up, spec.gate_up.span())?,
            down: weights(at.down, spec.down.span())?,
            biases,
            shared,
            routed,
        })
    }
}

/// Where the tensors of gradients lie.
pub(crate) struct GradAddresses {
    pub(crate) qkv: [usize; 3],
    pub(crate) out: Option<usize>,
    /// Row sums, where there is no output.
    pub(crate) rows: Option<usize>,
    pub(crate) lse: usize,
    pub(crate) d_out: usize,
    pub(crate) grads: [usize; 3],
}

/// Computes gradients on host memory, those of the sinks in memory of ours.
///
/// # Safety
/// As [`run`].
pub(crate) unsafe fn backward(
    problem: &BackwardProblem,
    values: &Values,
    at: &GradAddresses,
    sinks: Option<&mut [f32]>,
) -> Result<(), CallError> {
    let forward = problem.forward();
    let (dtype, out_dtype, rows) = (forward.dtype(), forward.out_dtype(), forward.rows());
    // SAFETY: the caller's promise.
    unsafe {
        let floats = |at: usize| from_raw_parts(pointer::<f32>(at, rows), rows);
        let [q, k, v] = at.qkv;
        let qkv = [read(q, dtype, forward.q())?, read(k, dtype, forward.k())?, read(v, dtype, forward.v())?];
        let terms = match (at.out, at.rows) {
            (Some(out), _) => RowTerms::Out(read(out, out_dtype, forward.out())?),
            (None, sums) => RowTerms::Sums(sums.map_or(&[], floats)),
        };
        let d_out = read(at.d_out, out_dtype, problem.d_out())?;
        let inputs = BackwardInputs { qkv, lse: floats(at.lse), terms, d_out };
        let ([dq, dk, dv], grad) = (at.grads, problem.grad_dtype());
        let qkv =
            [write(dq, grad, problem.dq())?, write(dk, grad, problem.dk())?, write(dv, grad, problem.dv())?];
        let grads = GradientsMut { qkv, sinks };
        cpu()?.backward(&mut BackwardCall::bind(problem, values, inputs, grads)?)?;
    }
    Ok(())
}

/// Writes values one after another.
///
/// # Safety
/// There must be as many live f32 at that address, which nobody else uses.
pub(crate) unsafe fn store(at: usize, values: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe { from_raw_parts_mut(pointer::<f32>(at, values.len()), values.len()) }.copy_from_slice(values);
}

/// Lengths or offsets on the host; a view that its producer handed out and its caller holds.
pub(crate) fn lengths(numbers: &Numbers) -> Result<Arc<[u32]>, CallError> {
    let operand = numbers.operand;
    let narrow = |(at, value): (usize, i64)| {
        u32::try_from(value).map_err(|_| CallError::Negative { operand, at, value })
    };
    wide(numbers).into_iter().enumerate().map(narrow).collect()
}

/// As [`lengths`] of keys in pages, where a sequence that is none has a length below 0: nothing.
pub(crate) fn page_lengths(numbers: &Numbers) -> Result<Arc<[u32]>, CallError> {
    let narrow = |value: i64| u32::try_from(value.max(0)).unwrap_or(u32::MAX);
    Ok(wide(numbers).into_iter().map(narrow).collect())
}

/// The page table on the host; a view that its producer handed out and its caller holds.
pub(crate) fn table(table: &Table) -> PageTable {
    let Table { address, rows, columns, row_stride, .. } = *table;
    let row = |n: usize| {
        let at = address + n * row_stride * size_of::<i32>();
        // SAFETY: `Table::read` saw as many numbers one after another in each row, at aligned addresses.
        unsafe { from_raw_parts(pointer::<i32>(at, columns), columns) }.iter().copied()
    };
    PageTable::new((0..rows).flat_map(row).collect::<Vec<_>>(), columns)
}

/// Numbers on the host; a view that its producer handed out and its caller holds.
pub(crate) fn wide(numbers: &Numbers) -> Vec<i64> {
    let Numbers { address, len, .. } = *numbers;
    // SAFETY: `Numbers::read` saw as many numbers of that width, one after another, at an aligned address.
    unsafe {
        match numbers.index {
            Index::I32 => {
                from_raw_parts(pointer::<i32>(address, len), len).iter().map(|&x| x.into()).collect()
            }
            Index::I64 => from_raw_parts(pointer::<i64>(address, len), len).to_vec(),
        }
    }
}

/// The sinks of `len` heads on the host; a view that its producer handed out and its caller holds.
pub(crate) fn sinks(array: &Array, len: usize) -> Result<Arc<[f32]>, CallError> {
    array.check_sinks(len)?;
    // SAFETY: checked just now: as many values, one after another, at an aligned address.
    unsafe {
        match array.dtype {
            DType::F16 => {
                let values = from_raw_parts(pointer::<f16>(array.address, len), len);
                Ok(values.iter().map(|x| x.to_f32()).collect())
            }
            DType::BF16 => {
                let values = from_raw_parts(pointer::<bf16>(array.address, len), len);
                Ok(values.iter().map(|x| x.to_f32()).collect())
            }
            DType::F32 => Ok(from_raw_parts(pointer::<f32>(array.address, len), len).into()),
            other => Err(unsupported(other)),
        }
    }
}

/// The factors of a cache's keys or values on the host, with what lies between them; checked when their number was asked for.
pub(crate) fn cache_factors(array: &Array) -> Arc<[f32]> {
    let len = array.range().len() / size_of::<f32>();
    // SAFETY: `scales` found f32 at an aligned address, of which the view reaches as many; the caller holds it.
    unsafe { from_raw_parts(pointer::<f32>(array.address, len), len).into() }
}

/// The factors of Q, K and V on the host, checked when their number was asked for.
pub(crate) fn factors(arrays: &[Array; 3], blocks: Option<[usize; 2]>) -> Factors {
    let read = |array: &Array| -> Arc<[f32]> {
        let len = array.count();
        // SAFETY: `scales` found as many f32, one after another, at an aligned address; the caller holds the view.
        unsafe { from_raw_parts(pointer::<f32>(array.address, len), len).into() }
    };
    let all = arrays.each_ref().map(read);
    if let Some(blocks) = blocks {
        return Factors::per_block(blocks, all);
    }
    if all.iter().all(|factors| factors.len() == 1) {
        return Factors::per_tensor(all.map(|factors| factors[0]));
    }
    Factors::per_head(all)
}

/// A bias on the host, as its layout lies: a view that its producer handed out and its caller holds.
pub(crate) fn bias(array: &Array) -> Result<Arc<[f32]>, CallError> {
    array.check_alignment()?;
    let len = array.range().len() / array.dtype.bytes();
    // SAFETY: the view reaches as many elements, at an aligned address.
    Ok(match unsafe { elements(array.address, array.dtype, len)? } {
        Data::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
        Data::BF16(values) => values.iter().map(|x| x.to_f32()).collect(),
        Data::F32(values) => values.into(),
        other => return Err(unsupported(other.dtype())),
    })
}

/// # Safety
/// There must be a live tensor of that layout at that address.
unsafe fn read<'a>(at: usize, dtype: DType, layout: &Layout) -> Result<Data<'a>, CallError> {
    // SAFETY: the caller's promise.
    unsafe { elements(at, dtype, layout.span()) }
}

/// # Safety
/// There must be as many live elements at that address.
pub(crate) unsafe fn elements<'a>(at: usize, dtype: DType, len: usize) -> Result<Data<'a>, CallError> {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => Ok(Data::F16(from_raw_parts(pointer::<f16>(at, len), len))),
            DType::BF16 => Ok(Data::BF16(from_raw_parts(pointer::<bf16>(at, len), len))),
            DType::F32 => Ok(Data::F32(from_raw_parts(pointer::<f32>(at, len), len))),
            DType::E4M3 => Ok(Data::E4M3(from_raw_parts(pointer::<E4M3>(at, len), len))),
            DType::E5M2 => Ok(Data::E5M2(from_raw_parts(pointer::<E5M2>(at, len), len))),
            other => Err(unsupported(other)),
        }
    }
}

/// # Safety
/// There must be a live tensor of that layout at that address, which nobody else uses.
pub(crate) unsafe fn write<'a>(at: usize, dtype: DType, layout: &Layout) -> Result<DataMut<'a>, CallError> {
    let len = layout.span();
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => Ok(DataMut::F16(from_raw_parts_mut(pointer::<f16>(at, len), len))),
            DType::BF16 => Ok(DataMut::BF16(from_raw_parts_mut(pointer::<bf16>(at, len), len))),
            DType::F32 => Ok(DataMut::F32(from_raw_parts_mut(pointer::<f32>(at, len), len))),
            DType::E4M3 => Ok(DataMut::E4M3(from_raw_parts_mut(pointer::<E4M3>(at, len), len))),
            DType::E5M2 => Ok(DataMut::E5M2(from_raw_parts_mut(pointer::<E5M2>(at, len), len))),
            other => Err(unsupported(other)),
        }
    }
}

/// Empty tensors may have any address; slices may not.
pub(crate) fn pointer<T>(at: usize, len: usize) -> *mut T {
    if len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { at as *mut T }
}

fn unsupported(dtype: DType) -> CallError {
    let (what, instead) = (format!("{dtype} tensors"), "convert them to f32".to_owned());
    BackendError::Unsupported { backend: "cpu", what, instead }.into()
}
