//! Attention of 8-bit tensors: computed to dense rows of f32, which are then scaled and rounded. Called by `cpu`, which it
//! calls back.
//!
//! Keys and values are widened as they are read. Factors of Q and K are multiplied into the queries (`forward`), that of V
//! into the result here.

use flashcore_core::{
    BackendError, DType, DataMut, Element, HostCall, Instance, Layout, Problem, ProblemError, Spec,
};

use crate::{forward::merge_weights, scratch::Scratch};

/// What the LSE of a row holds that nobody has written.
const UNWRITTEN: u32 = 0x7fc0_5eed;

/// Computes a call whose tensors have 8 bits by way of `wide`, which computes the same with a dense result of f32 and no
/// factor of V.
pub(crate) fn forward(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    let (instance, inputs) = (call.instance(), call.inputs());
    let out = Layout::bhsd(instance.out().dims())?;
    let spec = instance.problem().spec().clone();
    let problem = Spec { out: Some(out), out_dtype: Some(DType::F32), accumulate: false, ..spec }.parse()?;
    let mut rows = floats(out.span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let target = DataMut::F32(&mut rows);
    let mut inner = HostCall::bind_erased(&problem, instance.values(), inputs, target, Some(&mut lse))?;
    let kernel = wide(&mut inner, scratch)?;
    write(call, &rows, &lse);
    Ok(kernel)
}

fn floats(count: usize, problem: &Problem) -> Result<Vec<f32>, ProblemError> {
    let no_memory =
        |()| ProblemError::OutOfMemory { bytes: count.saturating_mul(4), dims: problem.out().dims() };
    bytemuck::allocation::try_zeroed_vec(count).map_err(no_memory)
}

/// Writes dense f32 rows as the call wants them.
fn write(call: &mut HostCall<'_>, rows: &[f32], lse: &[f32]) {
    let instance = call.instance();
    match call.outputs() {
        (DataMut::F16(out), to) => write_rows(instance, (rows, lse), out, to),
        (DataMut::BF16(out), to) => write_rows(instance, (rows, lse), out, to),
        (DataMut::F32(out), to) => write_rows(instance, (rows, lse), out, to),
        // A problem has no other outputs.
        _ => {}
    }
}

fn write_rows<O: Element>(
    problem: Instance<'_>,
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
        let [_, _, factor] = problem.factors(batch, head / problem.group());
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
