//! New rows of a cache, one after another: they are few, and two of them may have one place. Called by `cpu`.

use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendSpec, DType, Data, E4M3, Element, Layout, Rotary,
};
use half::{bf16, f16};

/// Appends; `None` where the element types are not known.
pub(crate) fn append(call: &mut AppendCall<'_>) -> Option<&'static str> {
    match (call.problem().spec().dtype, call.problem().cache_dtype()) {
        (DType::F16, DType::F16) => rows::<f16, f16>(call),
        (DType::BF16, DType::BF16) => rows::<bf16, bf16>(call),
        (DType::F32, DType::F32) => rows::<f32, f32>(call),
        (DType::F16, DType::E4M3) => rows::<f16, E4M3>(call),
        (DType::BF16, DType::E4M3) => rows::<bf16, E4M3>(call),
        (DType::F32, DType::E4M3) => rows::<f32, E4M3>(call),
        _ => None,
    }
}

/// Appends rows of `T` to a cache of `C`.
fn rows<T: Element, C: Element>(call: &mut AppendCall<'_>) -> Option<&'static str> {
    let (problem, values, inputs) = (call.problem(), call.values(), call.inputs());
    let spec = problem.spec();
    let turn = Turn::<T>::of(spec, inputs);
    let AppendOutputs { cache_k, cache_v, q: turned } = call.outputs();
    let mut tensors = [
        (inputs.k.slice::<T>()?, &spec.k, cache_k.into_slice::<C>()?, &spec.cache_k, turn),
        (inputs.v.slice::<T>()?, &spec.v, cache_v.into_slice::<C>()?, &spec.cache_v, None),
    ];
    for (which, (from, layout, cache, to, turn)) in tensors.iter_mut().enumerate() {
        for_each_row(layout, |[batch, head, row], source| {
            let Some((page, at)) = values.place(problem, batch, row) else { return };
            let target = &mut cache[to.row(page, head, at)..][..layout.dims().dim];
            let position = values.lengths.get(batch).map_or(0, |&len| len.max(0) as usize) + row;
            let divisor = values.divisors(problem, batch, head)[which];
            write(*turn, &from[source..][..target.len()], target, position, divisor);
        });
    }
    if let (Some(q), Some(turned), Some([of_q, of_out])) = (inputs.q, turned, spec.q) {
        let (q, turned) = (q.slice::<T>()?, turned.into_slice::<T>()?);
        for_each_row(&of_q, |[batch, head, row], source| {
            let target = &mut turned[of_out.row(batch, head, row)..][..of_q.dims().dim];
            let moved = if spec.rotary.is_some_and(|rotary| rotary.together) { 0 } else { row };
            let position = values.position(batch).unwrap_or(0) + moved;
            write(turn, &q[source..][..target.len()], target, position, 1.0);
        });
    }
    Some("append")
}

/// Copies a row, turned where `turn` says so, and divided.
fn write<T: Element, C: Element>(
    turn: Option<Turn<'_, T>>,
    from: &[T],
    to: &mut [C],
    position: usize,
    divisor: f32,
) {
    if T::DTYPE == C::DTYPE && divisor == 1.0 {
        bytemuck::cast_slice_mut::<C, u8>(to).copy_from_slice(bytemuck::cast_slice(from));
    } else {
        to.iter_mut().zip(from).for_each(|(to, x)| *to = C::from_f32(x.to_f32() / divisor));
    }
    if let Some(turn) = turn {
        turn.row(from, to, position, divisor);
    }
}

/// Calls `visit` with each row's batch entry, head and position and the index of its first element.
fn for_each_row(layout: &Layout, mut visit: impl FnMut([usize; 3], usize)) {
    let dims = layout.dims();
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            for row in 0..dims.seq {
                visit([batch, head, row], layout.row(batch, head, row));
            }
        }
    }
}

/// Rotary embedding with its tables.
#[derive(Clone, Copy)]
struct Turn<'a, T> {
    rotary: Rotary,
    cos: &'a [T],
    sin: &'a [T],
}

impl<'a, T: Element> Turn<'a, T> {
    fn of(spec: &AppendSpec, inputs: AppendInputs<'a>) -> Option<Self> {
        let [cos, sin] = inputs.rotary?.map(|table: Data<'a>| table.slice::<T>());
        Some(Self { rotary: spec.rotary?, cos: cos?, sin: sin? })
    }

    fn row<C: Element>(&self, from: &[T], to: &mut [C], position: usize, divisor: f32) {
        let half = self.rotary.dim / 2;
        let first = position.min(self.rotary.positions - 1) * half;
        for n in 0..half {
            let (a, b) = if self.rotary.interleaved { (2 * n, 2 * n + 1) } else { (n, n + half) };
            let (x, y) = (from[a].to_f32(), from[b].to_f32());
            let (cos, sin) = (self.cos[first + n].to_f32(), self.sin[first + n].to_f32());
            to[a] = C::from_f32((x * cos - y * sin) / divisor);
            to[b] = C::from_f32((y * cos + x * sin) / divisor);
        }
    }
}
