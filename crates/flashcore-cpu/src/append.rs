//! New rows of a cache, sequential per group of heads: two may have the same place. Called by `cpu`.

use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendSpec, DType, Data, Dims, E4M3, Element,
    Layout, Rotary, Slots,
};
use half::{bf16, f16};

use crate::{crew::Crew, output::Shared};

/// Elements that one thread appends before others could help.
const ALONE: usize = 1 << 16;

/// Whether a call is too small to be shared among threads.
pub(crate) fn is_small(problem: &AppendProblem) -> bool {
    let AppendSpec { k, v, q, .. } = problem.spec();
    let len = |layout: &Layout| {
        let Dims { batch, heads, seq, dim } = layout.dims();
        batch * heads * seq * dim
    };
    len(k) + len(v) + q.map_or(0, |[q, _]| len(&q)) < ALONE
}

/// Appends; `None` where the element types are not known.
pub(crate) fn append(call: &mut AppendCall<'_>, crew: Crew) -> Option<&'static str> {
    match (call.problem().spec().dtype, call.problem().cache_dtype()) {
        (DType::F16, DType::F16) => rows::<f16, f16>(call, crew),
        (DType::BF16, DType::BF16) => rows::<bf16, bf16>(call, crew),
        (DType::F32, DType::F32) => rows::<f32, f32>(call, crew),
        (DType::F16, DType::E4M3) => rows::<f16, E4M3>(call, crew),
        (DType::BF16, DType::E4M3) => rows::<bf16, E4M3>(call, crew),
        (DType::F32, DType::E4M3) => rows::<f32, E4M3>(call, crew),
        _ => None,
    }
}

/// Appends rows of `T` to a cache of `C`.
fn rows<T: Element, C: Element>(call: &mut AppendCall<'_>, crew: Crew) -> Option<&'static str> {
    let (problem, values, inputs) = (call.problem(), call.values(), call.inputs());
    let spec = problem.spec();
    let turn = Turn::<T>::of(spec, inputs);
    let AppendOutputs { cache_k, cache_v, q: turned } = call.outputs();
    let keys = Rows {
        from: (inputs.k.slice::<T>()?, &spec.k),
        to: cache_k.into_slice::<C>()?,
        layout: &spec.cache_k,
        turn,
    };
    let new = Rows {
        from: (inputs.v.slice::<T>()?, &spec.v),
        to: cache_v.into_slice::<C>()?,
        layout: &spec.cache_v,
        turn: None,
    };
    // Slots and pages may give several rows one place; heads share none.
    let share = if spec.slots == Slots::Behind && spec.pages.is_none() { Share::Rows } else { Share::Heads };
    let place = |batch: usize, row: usize| {
        let position = values.lengths.get(batch).map_or(0, |&len| len.max(0) as usize) + row;
        Some((values.place(problem, batch, row)?, position))
    };
    let divisor = |which: usize, batch: usize, head: usize| values.divisors(problem, batch, head)[which];
    append_rows([keys, new], (share, crew), place, divisor);
    if let (Some(q), Some(turned), Some([of_q, of_out])) = (inputs.q, turned, spec.q) {
        let (from, to) = ((q.slice::<T>()?, &of_q), turned.into_slice::<T>()?);
        let moves = !spec.rotary.is_some_and(|rotary| rotary.together);
        let place = |batch: usize, row: usize| {
            let position = values.position(batch).unwrap_or(0) + if moves { row } else { 0 };
            Some(((batch, row), position))
        };
        let queries = Rows { from, to, layout: &of_out, turn };
        append_rows([queries], (Share::Rows, crew), place, |_, _, _| 1.0);
    }
    Some("append")
}

/// New rows, and where they go.
struct Rows<'a, T, C> {
    from: (&'a [T], &'a Layout),
    to: &'a mut [C],
    layout: &'a Layout,
    turn: Option<Turn<'a, T>>,
}

/// What threads divide among them.
#[derive(Clone, Copy, PartialEq)]
enum Share {
    Rows,
    Heads,
}

/// Batch entry and row that a new row goes to, and its position, unless it has no place.
type Place = Option<((usize, usize), usize)>;

/// Copies rows of several tensors to where `place` says, on all threads.
fn append_rows<T: Element, C: Element, const N: usize>(
    tensors: [Rows<'_, T, C>; N],
    (share, crew): (Share, Crew),
    place: impl Fn(usize, usize) -> Place + Sync,
    divisor: impl Fn(usize, usize, usize) -> f32 + Sync,
) {
    let shared = tensors.map(|Rows { from, to, layout, turn }| (from, Shared::new(to), layout, turn));
    let Dims { batch, heads, seq, .. } = shared[0].0.1.dims();
    let parts = crew.threads();
    let part = |n: usize, all: usize| all * n / parts..all * (n + 1) / parts;
    crew.each(N * parts, |n| {
        let ((from, layout), to, target, turn) = &shared[n / parts];
        let (rows, heads) = match share {
            Share::Rows => (part(n % parts, batch * seq), 0..heads),
            Share::Heads => (0..batch * seq, part(n % parts, heads)),
        };
        let dim = layout.dims().dim;
        // Heads that lie side by side are copied at once.
        let side_by_side = [layout, target].iter().all(|layout| layout.strides()[1] == dim);
        let together = turn.is_none() && T::DTYPE == C::DTYPE && side_by_side;
        let step = if together { heads.len().max(1) } else { 1 };
        for (batch, row) in rows.map(|n| (n / seq, n % seq)) {
            let Some(((page, at), position)) = place(batch, row) else { continue };
            for head in heads.clone().step_by(step) {
                let from = &from[layout.row(batch, head, row)..][..step * dim];
                // SAFETY: rows of a cache are disjoint (`AppendSpec::parse`), and no other thread has these heads of them.
                let to = unsafe { to.range(target.row(page, head, at), step * dim) };
                write(*turn, from, to, position, divisor(n / parts, batch, head));
            }
        }
    });
}

/// Copies a row, rotated if `turn` says so, and divided.
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
