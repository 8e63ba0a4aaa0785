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
        matrix::{DEPTH, ROWS, SIDE},
    },
};

/// Rows of a sequence from which on matrix units are faster than vectors of f32, keys laid out anew and all.
pub(crate) const fn worthwhile<T: Lane>() -> usize {
    if T::PARTS == 1 { 16 } else { 64 }
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
    /// Rows being converted.
    pub(crate) stage: &'a mut [f32],
}

/// Floats of [`Space::k`], [`Space::v`] and [`Space::stage`].
pub(crate) fn space<T: Lane>(call: &Call<'_, T>) -> [usize; 3] {
    let ([dim_qk, dim_v], room) = (dims(call), call.shape.tiles.keys());
    let (queries, values) = (T::PARTS * SIDE * dim_qk / 2, (T::PARTS + 1) * SIDE * dim_v);
    let stage = queries.max(values).max(ROWS * dim_v);
    [T::PARTS * room * dim_qk / 2, T::PARTS * room * dim_v / 2, stage].map(padded)
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
    let (stage, q) = (&mut stage[..T::PARTS * SIDE * dim / 2], bytemuck::cast_slice_mut(q));
    for first in (0..ROWS).step_by(SIDE) {
        stage.fill(0.0);
        let halves: &mut [bf16] = bytemuck::cast_slice_mut(stage);
        for n in first..rows.min(first + SIDE) {
            let to = &mut halves[(n - first) * dim..];
            call.runner.run(Split { from: query(n), to, plane: SIDE * dim, parts: T::PARTS });
        }
        let numbers: &[u32] = bytemuck::cast_slice(stage);
        for (part, rows) in numbers.chunks_exact(SIDE * dim / 2).enumerate() {
            let to: &mut [u32] = &mut q[part * dim / 2 * ROWS + first..];
            call.runner.turn(rows, dim / 2, to, [ROWS, SIDE * ROWS]);
        }
    }
}

/// Lays out keys, `[part][key][feature]` in squares.
pub(crate) fn load_keys<T: Lane>(
    call: &Call<'_, T>,
    unit: &Unit,
    keys: &Range<usize>,
    stage: &mut [f32],
    to: &mut [f32],
) {
    let (layout, rows, len) = (call.problem.k(), call.keys(unit), call.problem.dim_qk());
    let ([dim, _], room) = (dims(call), call.shape.tiles.keys());
    let (stage, to): (&mut [bf16], &mut [bf16]) =
        (bytemuck::cast_slice_mut(stage), bytemuck::cast_slice_mut(to));
    let stage = &mut stage[..T::PARTS * dim];
    stage.fill(bf16::ZERO);
    for (n, key) in keys.clone().enumerate() {
        let from = &call.k[rows.row(layout, key)..][..len];
        let row = match T::as_bf16(from).filter(|_| len == dim) {
            Some(row) => row,
            None => {
                call.runner.run(Split { from, to: stage, plane: dim, parts: T::PARTS });
                &*stage
            }
        };
        for (part, row) in row.chunks_exact(dim).enumerate() {
            let first = part * room * dim + n / SIDE * SIDE * dim + n % SIDE * DEPTH;
            for (square, piece) in row.chunks_exact(DEPTH).enumerate() {
                to[first + square * SIDE * DEPTH..][..DEPTH].copy_from_slice(piece);
            }
        }
    }
}

/// Lays out values, `[part][feature][key]` in squares; those of keys outside the unit are zero, whatever lies there.
pub(crate) fn load_values<T: Lane>(
    call: &Call<'_, T>,
    unit: &Unit,
    keys: &Range<usize>,
    stage: &mut [f32],
    to: &mut [f32],
) {
    let (layout, rows, len) = (call.problem.v(), call.keys(unit), call.problem.dim_v());
    let ([_, dim], room) = (dims(call), call.shape.tiles.keys());
    let (halves, pairs) = stage[..(T::PARTS + 1) * SIDE * dim].split_at_mut(T::PARTS * SIDE * dim);
    let halves: &mut [bf16] = bytemuck::cast_slice_mut(halves);
    let (pairs, to): (&mut [u32], &mut [u32]) =
        (bytemuck::cast_slice_mut(pairs), bytemuck::cast_slice_mut(to));
    let value = |key: usize| &call.v[rows.row(layout, key)..][..len];
    for first in (0..keys.len()).step_by(DEPTH) {
        let used =
            |n: usize| Some(keys.start + first + n).filter(|key| *key < keys.end && unit.keys.contains(key));
        if T::PARTS > 1 || len < dim {
            halves.fill(bf16::ZERO);
            for (n, key) in (0..DEPTH).filter_map(|n| Some((n, used(n)?))) {
                let to = &mut halves[n * dim..];
                call.runner.run(Split { from: value(key), to, plane: DEPTH * dim, parts: T::PARTS });
            }
        }
        for part in 0..T::PARTS {
            let row = |n: usize| match T::as_bf16(&call.v[..0]).filter(|_| len == dim) {
                Some(_) => used(n).and_then(|key| T::as_bf16(value(key))),
                None => Some(&halves[(part * DEPTH + n) * dim..][..dim]),
            };
            for (n, to) in pairs.chunks_exact_mut(dim).enumerate() {
                call.runner.run(Zip { first: row(2 * n), second: row(2 * n + 1), to });
            }
            let to = &mut to[(part * room * dim + SIDE * first) / 2..];
            call.runner.turn(pairs, dim, to, [DEPTH / 2, SIDE * room / 2]);
        }
    }
}

/// Turns a tile's result, `[feature][row]`, into rows, which are so many floats long.
pub(crate) fn turn_result<T>(call: &Call<'_, T>, out: &[f32], to: &mut [f32]) -> usize {
    let [_, dim] = dims(call);
    let (out, to): (&[u32], &mut [u32]) = (bytemuck::cast_slice(out), bytemuck::cast_slice_mut(to));
    for (features, d) in out.chunks_exact(SIDE * ROWS).zip((0..dim).step_by(SIDE)) {
        call.runner.turn(features, ROWS, &mut to[d..], [dim, SIDE * dim]);
    }
    dim
}
