//! Attention of 16-bit queries over a cache of 8 bits, which is widened as it is read. Called by `cpu`; calls `forward`.
//!
//! Factors of K are multiplied into the queries, those of V into the result, so keys and values may have any layout,
//! shared by sequences or in pages.

use flashcore_core::{BackendError, DType, Data, HostCall, Instance, Layout, ProblemError, Spec, Values};
use half::{bf16, f16};

use crate::{
    Tiles,
    crew::Crew,
    forward::{self, Queries},
    narrow::{UNWRITTEN, floats, write},
    output::Target,
    scratch::Scratch,
    simd::{Lane, runner::Runner},
};

/// Computes a call over a cache of keys and values, with queries and a dense result of f32.
pub(crate) fn forward<T: Lane>(
    call: &mut HostCall<'_>,
    cache: [&[T]; 2],
    with: (Runner, Tiles),
    work: (&mut Scratch, Crew),
) -> Result<&'static str, BackendError> {
    let (instance, [q, ..]) = (call.instance(), call.inputs());
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
    let q = match q {
        Data::F16(q) => queries(instance, &owners, q, f16::to_f32)?,
        Data::BF16(q) => queries(instance, &owners, q, bf16::to_f32)?,
        // A problem over a cache has no other queries.
        _ => Vec::new(),
    };
    let mut out = floats(problem.out().span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let (inputs, memory) = ((Queries::Wide(&q), cache), (Target::Wide(&mut out[..]), Some(&mut lse[..])));
    let kernel = forward::forward(Instance::new(&problem, &values)?, with, inputs, memory, work);
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
