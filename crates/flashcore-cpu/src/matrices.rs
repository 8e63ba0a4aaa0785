//! How queries, keys and values are laid out for matrix units: parts of bf16, padded. Called by `panels`.

use std::ops::Range;

use half::bf16;

use crate::{
    forward::Call,
    plan::Unit,
    scratch::padded,
    simd::{
        Lane,
        convert::{Split, Zip},
        matrix::{DEPTH, ROWS},
    },
};

/// Rows that are turned round at once.
const TURNED: usize = 16;

/// Rows of a sequence from which on matrix units are faster than vectors of f32, keys laid out anew and all.
pub(crate) const fn worthwhile<T: Lane>() -> usize {
    match T::PARTS {
        1 => 16,
        2 => 32,
        _ => 64,
    }
}

/// Features of queries and keys, and of values, with padding.
pub(crate) fn dims<T>(call: &Call<'_, T>) -> [usize; 2] {
    [call.problem.dim_qk(), call.problem.dim_v()].map(|dim| dim.next_multiple_of(DEPTH))
}

/// Floats that hold the queries of a tile.
pub(crate) fn query_len<T: Lane>(call: &Call<'_, T>) -> usize {
    T::PARTS * dims(call)[0] / 2 * ROWS
}

/// Memory for what a block of keys is laid out in.
pub(crate) struct Space<'a> {
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    /// Rows on their way.
    pub(crate) stage: &'a mut [f32],
}

/// Floats of [`Space::k`], [`Space::v`] and [`Space::stage`].
pub(crate) fn space<T: Lane>(call: &Call<'_, T>) -> [usize; 3] {
    let ([dim_qk, dim_v], room) = (dims(call), call.shape.tiles.keys());
    let (queries, values) = (T::PARTS * TURNED * dim_qk / 2, (T::PARTS + 1) * TURNED * dim_v);
    [T::PARTS * room * dim_qk / 2, T::PARTS * room * dim_v / 2, queries.max(values)].map(padded)
}

/// Lays out up to 32 queries, `[part][feature pair][row]`; `query` finds each of them.
pub(crate) fn load_queries<'a, T: Lane>(
    call: &Call<'_, T>,
    rows: usize,
    query: impl Fn(usize) -> &'a [T],
    stage: &mut [f32],
    q: &mut [f32],
) {
    let [dim, _] = dims(call);
    let (stage, q) = (&mut stage[..T::PARTS * TURNED * dim / 2], bytemuck::cast_slice_mut(q));
    for first in (0..ROWS).step_by(TURNED) {
        stage.fill(0.0);
        let halves: &mut [bf16] = bytemuck::cast_slice_mut(stage);
        for n in first..rows.min(first + TURNED) {
            let to = &mut halves[(n - first) * dim..];
            call.runner.run(Split { from: query(n), to, plane: TURNED * dim, parts: T::PARTS });
        }
        let numbers: &[u32] = bytemuck::cast_slice(stage);
        for (part, rows) in numbers.chunks_exact(TURNED * dim / 2).enumerate() {
            let to: &mut [u32] = &mut q[part * dim / 2 * ROWS + first..];
            call.runner.turn(rows, dim / 2, to, ROWS);
        }
    }
}

/// Lays out keys, `[part][key][feature]`.
pub(crate) fn load_keys<T: Lane>(call: &Call<'_, T>, unit: &Unit, keys: &Range<usize>, to: &mut [f32]) {
    let (layout, rows, len) = (call.problem.k(), call.keys(unit), call.problem.dim_qk());
    let ([dim, _], room) = (dims(call), call.shape.tiles.keys());
    let to: &mut [bf16] = bytemuck::cast_slice_mut(to);
    for (n, key) in keys.clone().enumerate() {
        let from = &call.k[rows.row(layout, key)..][..len];
        call.runner.run(Split { from, to: &mut to[n * dim..], plane: room * dim, parts: T::PARTS });
        if len < dim {
            for part in 0..T::PARTS {
                to[part * room * dim + n * dim..][len..dim].fill(bf16::ZERO);
            }
        }
    }
}

/// Lays out values, `[part][feature][key]`; those of keys outside the unit are zero, whatever lies there.
pub(crate) fn load_values<T: Lane>(
    call: &Call<'_, T>,
    unit: &Unit,
    keys: &Range<usize>,
    stage: &mut [f32],
    to: &mut [f32],
) {
    let (layout, rows, len) = (call.problem.v(), call.keys(unit), call.problem.dim_v());
    let ([_, dim], room) = (dims(call), call.shape.tiles.keys());
    let (halves, pairs) = stage[..(T::PARTS + 1) * TURNED * dim].split_at_mut(T::PARTS * TURNED * dim);
    let halves: &mut [bf16] = bytemuck::cast_slice_mut(halves);
    let (pairs, to): (&mut [u32], &mut [u32]) =
        (bytemuck::cast_slice_mut(pairs), bytemuck::cast_slice_mut(to));
    for first in (0..keys.len()).step_by(DEPTH) {
        halves.fill(bf16::ZERO);
        for n in 0..DEPTH.min(keys.len() - first) {
            let key = keys.start + first + n;
            if unit.keys.contains(&key) {
                let from = &call.v[rows.row(layout, key)..][..len];
                let to = &mut halves[n * dim..];
                call.runner.run(Split { from, to, plane: DEPTH * dim, parts: T::PARTS });
            }
        }
        for (part, rows) in halves.chunks_exact(DEPTH * dim).enumerate() {
            for (pair, to) in rows.chunks_exact(2 * dim).zip(pairs.chunks_exact_mut(dim)) {
                let (first, second) = pair.split_at(dim);
                call.runner.run(Zip { first: Some(first), second: Some(second), to });
            }
            let to = &mut to[(part * room * dim + first) / 2..];
            call.runner.turn(pairs, dim, to, room / 2);
        }
    }
}
