//! Attention of 8-bit tensors, or over a cache of 8 bits: widened to f32 and computed there. Called by `cpu`, which it
//! calls back.
//!
//! Factors of Q and K are multiplied into the queries, that of V into the result, so that keys and values may lie in
//! whatever layout, shared by batch entries or in pages. Rows that no sequence uses are not looked at.

use flashcore_core::{
    BackendError, DType, Data, DataMut, E4M3, E5M2, Element, HostCall, Instance, Layout, Problem,
    ProblemError, Spec, Values,
};

use half::{bf16, f16};

use crate::{forward::merge_weights, scratch::Scratch};

/// What the LSE of a row holds that nobody has written.
const UNWRITTEN: u32 = 0x7fc0_5eed;

/// Computes a call whose keys and values have 8 bits by way of `wide`, which computes one of f32 tensors.
pub(crate) fn forward(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    let (instance, [q, k, v]) = (call.instance(), call.inputs());
    let spec = instance.problem().spec();
    let q_layout = Layout::bhsd(spec.q.dims())?;
    let widened = Spec {
        dtype: DType::F32,
        kv_dtype: None,
        q: q_layout,
        out: None,
        out_dtype: None,
        scales: None,
        accumulate: false,
        ..spec.clone()
    };
    let problem = widened.parse()?;
    let values = Values { factors: None, ..instance.values().clone() };
    let owners = Owners::of(instance);
    let [k, v] = [widen(instance, k, &spec.k)?, widen(instance, v, &spec.v)?];
    let q = queries(instance, &owners, q)?;
    let mut out = floats(problem.out().span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let mut inner = HostCall::bind(&problem, &values, [&q[..], &k, &v], &mut out, Some(&mut lse))?;
    let kernel = wide(&mut inner, scratch)?;
    write(call, &owners, (&out, &lse));
    Ok(kernel)
}

fn floats(count: usize, problem: &Problem) -> Result<Vec<f32>, ProblemError> {
    let no_memory =
        |()| ProblemError::OutOfMemory { bytes: count.saturating_mul(4), dims: problem.out().dims() };
    bytemuck::allocation::try_zeroed_vec(count).map_err(no_memory)
}

/// Whose factors rows of Q have.
struct Owners {
    /// For each row, where sequences are packed and have factors of their own.
    packed: Option<Vec<usize>>,
}

impl Owners {
    fn of(problem: Instance<'_>) -> Self {
        let apart = problem.sequences() != problem.batch() && problem.scaled_entries() != problem.batch();
        let packed = apart.then(|| {
            let mut owners = vec![0; problem.seq_q()];
            for n in 0..problem.sequences() {
                let sequence = problem.sequence(n);
                owners[sequence.q_start..][..sequence.q_len].fill(n);
            }
            owners
        });
        Self { packed }
    }

    /// The factors of a row.
    fn factors(&self, problem: Instance<'_>, [batch, head, seq]: [usize; 3]) -> [f32; 3] {
        let entry = self.packed.as_ref().map_or(batch, |owners| owners[seq]);
        problem.factors(entry, head / problem.group())
    }
}

/// The keys or values of all sequences as f32, where they lay.
fn widen(problem: Instance<'_>, data: Data<'_>, layout: &Layout) -> Result<Vec<f32>, ProblemError> {
    let (bytes, table, dims) = (data.bytes(), table(data), layout.dims());
    let mut wide = floats(layout.span(), problem.problem())?;
    for n in 0..problem.sequences() {
        let keys = problem.keys(n);
        let places = (0..problem.sequence(n).kv_len).map(|key| keys.place(key));
        for ((batch, row), head) in places.flat_map(|place| (0..dims.heads).map(move |head| (place, head))) {
            let start = layout.row(batch, head, row);
            let to = wide[start..][..dims.dim].iter_mut();
            to.zip(&bytes[start..]).for_each(|(to, &byte)| *to = table[usize::from(byte)]);
        }
    }
    Ok(wide)
}

/// The value of every byte.
fn table(data: Data<'_>) -> [f32; 256] {
    let value: fn(u8) -> f32 = match data {
        Data::E5M2(_) => |bits| E5M2::from_bits(bits).to_f32(),
        _ => |bits| E4M3::from_bits(bits).to_f32(),
    };
    std::array::from_fn(|bits| value(bits as u8))
}

/// The queries, dense, multiplied by the factors of Q and K.
fn queries(problem: Instance<'_>, owners: &Owners, q: Data<'_>) -> Result<Vec<f32>, ProblemError> {
    match q {
        Data::F16(q) => scaled_queries(problem, owners, q, f16::to_f32),
        Data::BF16(q) => scaled_queries(problem, owners, q, bf16::to_f32),
        _ => {
            let table = table(q);
            scaled_queries(problem, owners, q.bytes(), |byte| table[usize::from(byte)])
        }
    }
}

fn scaled_queries<T: Copy>(
    problem: Instance<'_>,
    owners: &Owners,
    q: &[T],
    value: impl Fn(T) -> f32,
) -> Result<Vec<f32>, ProblemError> {
    let dims = problem.q().dims();
    let mut wide = floats(Layout::bhsd(dims)?.span(), problem.problem())?;
    let mut rows = wide.chunks_exact_mut(dims.dim);
    for (batch, head) in (0..dims.batch).flat_map(|batch| (0..dims.heads).map(move |head| (batch, head))) {
        for (seq, row) in (0..dims.seq).zip(&mut rows) {
            let [of_q, of_k, _] = owners.factors(problem, [batch, head, seq]);
            let from = &q[problem.q().row(batch, head, seq)..];
            row.iter_mut().zip(from).for_each(|(to, &x)| *to = value(x) * (of_q * of_k));
        }
    }
    Ok(wide)
}

/// Writes dense f32 rows as the call wants them.
fn write(call: &mut HostCall<'_>, owners: &Owners, from: (&[f32], &[f32])) {
    let instance = call.instance();
    match call.outputs() {
        (DataMut::F16(out), to) => write_rows(instance, owners, from, out, to),
        (DataMut::BF16(out), to) => write_rows(instance, owners, from, out, to),
        (DataMut::F32(out), to) => write_rows(instance, owners, from, out, to),
        // A problem has no other outputs.
        _ => {}
    }
}

fn write_rows<O: Element>(
    problem: Instance<'_>,
    owners: &Owners,
    (rows, lses): (&[f32], &[f32]),
    out: &mut [O],
    mut out_lse: Option<&mut [f32]>,
) {
    let dims = problem.out().dims();
    for (n, (row, &lse)) in rows.chunks_exact(dims.dim).zip(lses).enumerate() {
        let (batch, head, seq) = (n / (dims.heads * dims.seq), n / dims.seq % dims.heads, n % dims.seq);
        let nobodys = problem.accumulate() && lse == f32::NEG_INFINITY;
        if lse.to_bits() == UNWRITTEN || nobodys {
            continue;
        }
        let [_, _, factor] = owners.factors(problem, [batch, head, seq]);
        let to = &mut out[problem.out().row(batch, head, seq)..][..dims.dim];
        let mut own = out_lse.as_mut().map(|all| &mut all[n]);
        match own.as_deref_mut().filter(|_| problem.accumulate()) {
            Some(old) => {
                let (total, [kept, new]) = merge_weights([*old, lse]);
                *old = total;
                for (to, &x) in to.iter_mut().zip(row) {
                    let before = if kept == 0.0 { 0.0 } else { to.to_f32() * kept };
                    *to = O::from_f32(before + x * factor * new);
                }
            }
            None => {
                to.iter_mut().zip(row).for_each(|(to, &x)| *to = O::from_f32(x * factor));
                own.into_iter().for_each(|own| *own = lse);
            }
        }
    }
}
