//! New rows of a cache, one after another: they are few, and two of them may have one place. Called by `cpu`.

use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendSpec, DType, Data, Element, Layout, Rotary,
};
use half::{bf16, f16};

/// Appends; `None` where the element type is not known.
pub(crate) fn append(call: &mut AppendCall<'_>) -> Option<&'static str> {
    match call.problem().spec().dtype {
        DType::F16 => rows::<f16>(call),
        DType::BF16 => rows::<bf16>(call),
        DType::F32 => rows::<f32>(call),
        _ => None,
    }
}

fn rows<T: Element>(call: &mut AppendCall<'_>) -> Option<&'static str> {
    let (problem, values, inputs) = (call.problem(), call.values(), call.inputs());
    let spec = problem.spec();
    let turn = Turn::<T>::of(spec, inputs);
    let AppendOutputs { cache_k, cache_v, q: turned } = call.outputs();
    let mut tensors = [
        (inputs.k.slice::<T>()?, &spec.k, cache_k.into_slice::<T>()?, &spec.cache_k, turn),
        (inputs.v.slice::<T>()?, &spec.v, cache_v.into_slice::<T>()?, &spec.cache_v, None),
    ];
    for (from, layout, cache, to, turn) in &mut tensors {
        for_each_row(layout, |[batch, head, row], source| {
            let Some((page, at)) = values.place(problem, batch, row) else { return };
            let target = &mut cache[to.row(page, head, at)..][..layout.dims().dim];
            let position = values.lengths.get(batch).map_or(0, |&len| len.max(0) as usize) + row;
            write(*turn, &from[source..][..target.len()], target, position);
        });
    }
    if let (Some(q), Some(turned), Some([of_q, of_out])) = (inputs.q, turned, spec.q) {
        let (q, turned) = (q.slice::<T>()?, turned.into_slice::<T>()?);
        for_each_row(&of_q, |[batch, head, row], source| {
            let target = &mut turned[of_out.row(batch, head, row)..][..of_q.dims().dim];
            let moved = if spec.rotary.is_some_and(|rotary| rotary.together) { 0 } else { row };
            let position = values.position(batch).unwrap_or(0) + moved;
            write(turn, &q[source..][..target.len()], target, position);
        });
    }
    Some("append")
}

/// Copies a row, turned where `turn` says so.
fn write<T: Element>(turn: Option<Turn<'_, T>>, from: &[T], to: &mut [T], position: usize) {
    to.copy_from_slice(from);
    if let Some(turn) = turn {
        turn.row(from, to, position);
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

    fn row(&self, from: &[T], to: &mut [T], position: usize) {
        let half = self.rotary.dim / 2;
        let first = position.min(self.rotary.positions - 1) * half;
        for n in 0..half {
            let (a, b) = if self.rotary.interleaved { (2 * n, 2 * n + 1) } else { (n, n + half) };
            let (x, y) = (from[a].to_f32(), from[b].to_f32());
            let (cos, sin) = (self.cos[first + n].to_f32(), self.sin[first + n].to_f32());
            to[a] = T::from_f32(x * cos - y * sin);
            to[b] = T::from_f32(y * cos + x * sin);
        }
    }
}
