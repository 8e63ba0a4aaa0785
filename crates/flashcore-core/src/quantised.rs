//! Attention over tensors of 16 or 32 bits that are rounded to 8 bits first: a backend quantises Q, K and V, then computes.
//!
//! Q and K have a factor for each block of rows, V for each feature. Keys are centred unless scores are combined with
//! something other than scores of these keys (a softcap, sinks, an accumulated result): subtracting their mean shifts all
//! scores of a query equally. The shift is added back to the LSE.

use std::sync::Arc;

use crate::{
    backend::{Backend, BackendError, Ran},
    call::{Data, DataMut, HostCall},
    dtype::DType,
    error::ProblemError,
    float8::E4M3,
    layout::{Dims, Layout},
    lengths::{Index, Lengths},
    problem::Spec,
    quantise::{Granularity, QuantiseCall, QuantiseSpec, QuantisedMut},
    scales::Factors,
    values::{Instance, Values},
};

/// Rows of a block of Q and of K: as many as kernels have together anyway.
pub const BLOCK_ROWS: [usize; 2] = [64, 128];

/// A tensor of 8 bits with its factors and means.
struct Narrowed {
    layout: Layout,
    values: Vec<E4M3>,
    factors: Arc<[f32]>,
    means: Option<Vec<f32>>,
}

/// Computes a call whose tensors have 16 or 32 bits by way of E4M3 ones.
pub fn forward_quantised(backend: &dyn Backend, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
    let (instance, [q, k, v]) = (call.instance(), call.inputs());
    let spec = instance.problem().spec();
    if instance.pages().is_some() {
        let (what, instead) = ("quantising keys in pages", "keep a cache of e4m3 pages");
        let (what, instead) = (what.to_owned(), instead.to_owned());
        return Err(BackendError::Unsupported { backend: backend.name(), what, instead });
    }
    let centred = spec.softcap.is_none() && spec.sinks.is_none() && !spec.accumulate;
    let [of_q, of_kv] = match &instance.values().lengths {
        Lengths::Used { q, kv } => [q.as_deref(), kv.as_deref()],
        _ => [None, None],
    };
    let [rows_q, rows_k] = BLOCK_ROWS;
    let q8 = narrowed(backend, (spec.q, q), (Granularity::PerBlock(rows_q), false), of_q)?;
    let k8 = narrowed(backend, (spec.k, k), (Granularity::PerBlock(rows_k), centred), of_kv)?;
    let v8 = narrowed(backend, (spec.v, v), (Granularity::PerChannel, false), of_kv)?;
    let factors = [&q8, &k8, &v8].map(|tensor| tensor.factors.clone());
    let values =
        Values { factors: Some(Factors::per_block(BLOCK_ROWS, factors)), ..instance.values().clone() };
    let out_dtype = Some(instance.out_dtype());
    let narrow =
        Spec { dtype: DType::E4M3, q: q8.layout, k: k8.layout, v: v8.layout, out_dtype, ..spec.clone() };
    let problem = narrow.with(&values).parse()?;
    let (out, mut lse) = call.outputs();
    let inputs = [&q8, &k8, &v8].map(|tensor| Data::E4M3(&tensor.values));
    let ran =
        backend.forward(&mut HostCall::bind_erased(&problem, &values, inputs, out, lse.as_deref_mut())?)?;
    if let (Some(lse), Some(means)) = (lse, &k8.means) {
        give_back(instance, q, means, lse);
    }
    Ok(ran)
}

/// Quantises one tensor, dense.
fn narrowed(
    backend: &dyn Backend,
    (layout, data): (Layout, Data<'_>),
    (per, centred): (Granularity, bool),
    used: Option<&[u32]>,
) -> Result<Narrowed, BackendError> {
    let index = used.map(|_| Index::I32);
    let spec = QuantiseSpec { per, centred, used: index, ..QuantiseSpec::new(data.dtype(), layout) };
    let problem = spec.parse()?;
    let mut values: Vec<E4M3> = zeroed(problem.out().span(), problem.dims())?;
    let mut factors = zeroed(problem.factors(), problem.dims())?;
    let mut means = centred.then(|| zeroed(problem.means(), problem.dims())).transpose()?;
    let into =
        QuantisedMut { out: DataMut::E4M3(&mut values), factors: &mut factors, means: means.as_deref_mut() };
    backend.quantise(&mut QuantiseCall::bind(&problem, data, used, into)?)?;
    Ok(Narrowed { layout: *problem.out(), values, factors: factors.into(), means })
}

fn zeroed<T: bytemuck::Zeroable>(count: usize, dims: Dims) -> Result<Vec<T>, ProblemError> {
    let bytes = count.saturating_mul(size_of::<T>());
    bytemuck::allocation::try_zeroed_vec(count).map_err(|()| ProblemError::OutOfMemory { bytes, dims })
}

/// Adds to each LSE what the means would have added to its query's scores.
fn give_back(problem: Instance<'_>, q: Data<'_>, means: &[f32], lse: &mut [f32]) {
    let dims = problem.q().dims();
    for (n, lse) in lse.iter_mut().enumerate() {
        let (batch, head, seq) = (n / (dims.heads * dims.seq), n / dims.seq % dims.heads, n % dims.seq);
        let plane = batch * problem.heads_kv() + head / problem.group();
        let means = &means[plane * dims.dim..][..dims.dim];
        // A row without keys, or without a query, has no scores that were moved.
        if lse.is_finite() {
            *lse += problem.scale() * dot(q, problem.q().row(batch, head, seq), means);
        }
    }
}

fn dot(q: Data<'_>, start: usize, means: &[f32]) -> f32 {
    let at = |n: usize| match q {
        Data::F16(q) => q[start + n].to_f32(),
        Data::BF16(q) => q[start + n].to_f32(),
        Data::F32(q) => q[start + n],
        Data::E4M3(_) | Data::E5M2(_) => 0.0,
    };
    means.iter().enumerate().map(|(n, mean)| at(n) * mean).sum()
}
