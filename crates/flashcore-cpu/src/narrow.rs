//! Attention of 8-bit tensors: computed to dense rows of f32, which are then scaled and rounded. Called by `cpu`, which it
//! calls back.
//!
//! Keys and values are widened as they are read. Factors of Q and K are multiplied into the queries (`forward`), those of V
//! into the result here. If blocks of rows have their own factors, tensors are widened and multiplied first.

use flashcore_core::{
    BackendError, DType, Data, DataMut, E4M3, E5M2, Element, HostCall, Instance, Layout, Operand, Problem,
    ProblemError, Scales, Spec, Values, unturned_values,
};

use crate::{forward::merge_weights, scratch::Scratch};

/// What the LSE of a row holds that nobody has written.
pub(crate) const UNWRITTEN: u32 = 0x7fc0_5eed;

/// Computes a call whose tensors have 8 bits by way of `wide`, which computes the same with a dense result of f32 and no
/// factor of V.
pub(crate) fn forward(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    if call.problem().turned() {
        return turned_back(call, scratch, wide);
    }
    let (instance, inputs) = (call.instance(), call.inputs());
    if matches!(instance.scales(), Some(Scales::PerBlock { .. })) {
        return by_blocks(call, scratch, wide);
    }
    let out = Layout::bhsd(instance.out().dims())?;
    let spec = instance.problem().spec().clone();
    let problem = Spec { out: Some(out), out_dtype: Some(DType::F32), accumulate: false, ..spec }.parse()?;
    let mut rows = floats(out.span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let target = DataMut::F32(&mut rows);
    let mut inner = HostCall::bind_erased(&problem, instance.values(), inputs, target, Some(&mut lse))?;
    let kernel = wide(&mut inner, scratch)?;
    write(call, (&rows, &lse), of_values(instance));
    Ok(kernel)
}

/// The same where values are turned, which they are not for long.
fn turned_back(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    let (instance, [q, k, v]) = (call.instance(), call.inputs());
    let turned = v.slice::<E4M3>().unwrap_or(&[]);
    let (v, values) = unturned_values((instance.v(), turned), instance.seq_kv())?;
    let spec = Spec { turned: false, v, ..instance.problem().spec().clone() };
    let problem = spec.parse()?;
    let (out, lse) = call.outputs();
    let inputs = [q, k, Data::E4M3(&values)];
    forward(&mut HostCall::bind_erased(&problem, instance.values(), inputs, out, lse)?, scratch, wide)
}

/// The same where blocks of rows have factors of their own: `wide` computes a problem of f32 tensors.
fn by_blocks(
    call: &mut HostCall<'_>,
    scratch: &mut Scratch,
    wide: impl FnOnce(&mut HostCall<'_>, &mut Scratch) -> Result<&'static str, BackendError>,
) -> Result<&'static str, BackendError> {
    let (instance, [q, k, v]) = (call.instance(), call.inputs());
    let spec = instance.problem().spec();
    let widened = Spec {
        dtype: DType::F32,
        q: Layout::bhsd(spec.q.dims())?,
        k: Layout::bhsd(spec.k.dims())?,
        out: None,
        out_dtype: None,
        scales: None,
        accumulate: false,
        ..spec.clone()
    };
    let problem = widened.parse()?;
    let values = Values { factors: None, ..instance.values().clone() };
    let (q, k) = (rows(instance, Operand::Q, q)?, rows(instance, Operand::K, k)?);
    let v = widen(v, spec.v.span());
    let mut out = floats(problem.out().span(), &problem)?;
    let mut lse = vec![f32::from_bits(UNWRITTEN); problem.rows()];
    let mut inner = HostCall::bind(&problem, &values, [&q[..], &k, &v], &mut out, Some(&mut lse))?;
    let kernel = wide(&mut inner, scratch)?;
    write(call, (&out, &lse), of_values(instance));
    Ok(kernel)
}

/// What a feature of a row of the result is multiplied by, for its batch entry, head and position.
fn of_values(problem: Instance<'_>) -> impl Fn([usize; 3], usize) -> f32 {
    move |[batch, head, _], feature| problem.factor(Operand::V, [batch, head / problem.group()], feature)
}

pub(crate) fn floats(count: usize, problem: &Problem) -> Result<Vec<f32>, ProblemError> {
    let no_memory =
        |()| ProblemError::OutOfMemory { bytes: count.saturating_mul(4), dims: problem.out().dims() };
    bytemuck::allocation::try_zeroed_vec(count).map_err(no_memory)
}

/// The first `count` elements as f32.
fn widen(data: Data<'_>, count: usize) -> Vec<f32> {
    let (bytes, table) = (data.bytes(), table(data));
    bytes[..count].iter().map(|&byte| table[usize::from(byte)]).collect()
}

/// The value of every byte.
pub(crate) fn table(data: Data<'_>) -> [f32; 256] {
    let value: fn(u8) -> f32 = match data {
        Data::E5M2(_) => |bits| E5M2::from_bits(bits).to_f32(),
        _ => |bits| E4M3::from_bits(bits).to_f32(),
    };
    std::array::from_fn(|bits| value(bits as u8))
}

/// Queries or keys, dense, multiplied by their factors.
fn rows(problem: Instance<'_>, operand: Operand, data: Data<'_>) -> Result<Vec<f32>, ProblemError> {
    let layout = if operand == Operand::Q { problem.q() } else { problem.k() };
    let (bytes, table, dims) = (data.bytes(), table(data), layout.dims());
    let mut wide = floats(Layout::bhsd(dims)?.span(), problem.problem())?;
    let mut rows = wide.chunks_exact_mut(dims.dim);
    for (batch, head) in (0..dims.batch).flat_map(|batch| (0..dims.heads).map(move |head| (batch, head))) {
        for (seq, row) in (0..dims.seq).zip(&mut rows) {
            let from = &bytes[layout.row(batch, head, seq)..];
            let factor = problem.factor(operand, [batch, head], seq);
            row.iter_mut().zip(from).for_each(|(to, &byte)| *to = table[usize::from(byte)] * factor);
        }
    }
    Ok(wide)
}

/// Writes dense f32 rows as the call wants them, multiplied by the factor of a place and feature.
pub(crate) fn write(
    call: &mut HostCall<'_>,
    from: (&[f32], &[f32]),
    factor: impl Fn([usize; 3], usize) -> f32,
) {
    let instance = call.instance();
    match call.outputs() {
        (DataMut::F16(out), to) => write_rows(instance, from, factor, out, to),
        (DataMut::BF16(out), to) => write_rows(instance, from, factor, out, to),
        (DataMut::F32(out), to) => write_rows(instance, from, factor, out, to),
        // A problem has no other outputs.
        _ => {}
    }
}

fn write_rows<O: Element>(
    problem: Instance<'_>,
    (rows, lses): (&[f32], &[f32]),
    factor: impl Fn([usize; 3], usize) -> f32,
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
        let factor = |feature| factor([batch, head, seq], feature);
        let to = &mut out[problem.out().row(batch, head, seq)..][..dims.dim];
        let mut own = out_lse.as_mut().map(|all| &mut all[n]);
        match own.as_deref_mut().filter(|_| problem.accumulate()) {
            Some(old) => {
                let (total, [kept, new]) = merge_weights([*old, lse]);
                *old = total;
                for (n, (to, &x)) in to.iter_mut().zip(row).enumerate() {
                    let before = if kept == 0.0 { 0.0 } else { to.to_f32() * kept };
                    *to = O::from_f32(before + x * factor(n) * new);
                }
            }
            None => {
                let numbers = to.iter_mut().zip(row).enumerate();
                numbers.for_each(|(n, (to, &x))| *to = O::from_f32(x * factor(n)));
                own.into_iter().for_each(|own| *own = lse);
            }
        }
    }
}
