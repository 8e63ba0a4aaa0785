//! Attention of 16-bit queries over a cache of 8 bits: what sequences use of it is widened to f32 and computed there. Called
//! by `cpu`, which it calls back.
//!
//! Factors of K are multiplied into the queries, those of V into the result, so that keys and values may lie in whatever
//! layout, shared by sequences or in pages.

use flashcore_core::{BackendError, DType, Data, HostCall, Instance, Layout, ProblemError, Spec, Values};
use half::{bf16, f16};

use crate::{
    narrow::{UNWRITTEN, floats, table, write},
    scratch::Scratch,
};

/// Computes a call over a cache by way of `wide`, which computes one of f32 tensors.
pub(crate) fn forward(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    let (instance, [q, k, v]) = (call.instance(), call.inputs());
    let spec = instance.problem().spec();
    let widened = Spec {
        dtype: DType::F32,
        kv_dtype: None,
        q: Layout::bhsd(spec.q.dims())?,
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
    let q = match q {
        Data::F16(q) => queries(instance, &owners, q, f16::to_f32)?,
        Data::BF16(q) => queries(instance, &owners, q, bf16::to_f32)?,
        // A problem over a cache has no other queries.
        _ => Vec::new(),
    };
    let mut out = floats(problem.out().span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let mut inner = HostCall::bind(&problem, &values, [&q[..], &k, &v], &mut out, Some(&mut lse))?;
    let kernel = wide(&mut inner, scratch)?;
    write(call, (&out, &lse), |place, _| owners.factors(instance, place)[2]);
    Ok(kernel)
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

/// The queries, dense, multiplied by the factors of the keys.
fn queries<T: Copy>(
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
            let [_, of_k, _] = owners.factors(problem, [batch, head, seq]);
            let from = &q[problem.q().row(batch, head, seq)..];
            row.iter_mut().zip(from).for_each(|(to, &x)| *to = value(x) * of_k);
        }
    }
    Ok(wide)
}
