//! How a block of keys and values is laid out for the tile kernels: f32 rows, or bf16 pairs. Called by `prefill`.

use std::ops::Range;

use flashcore_core::Layout;
use half::bf16;

use crate::{
    forward::{Call, UnitKeys},
    plan::Unit,
    scratch::padded,
    simd::{
        Lane,
        convert::{Widen, Zip},
        pairs::PairBlock,
        tile::{Rows, TileBlock, TileState},
    },
};

/// Keys and values of a block, ready for a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Panels<'a> {
    /// Rows of f32.
    Single { k: Rows<'a>, v: Rows<'a> },
    /// Keys where they lie, values in pairs of rows.
    Pairs { k: (&'a [bf16], usize), v: &'a [u32] },
}

/// A tile for a kernel, without its keys.
pub(crate) struct Target<'a> {
    pub(crate) rows: usize,
    pub(crate) q: &'a [f32],
    pub(crate) bounds: Option<[&'a [f32]; 2]>,
    pub(crate) scores: &'a mut [f32],
    pub(crate) state: TileState<'a>,
}

/// Whether `call` multiplies pairs of bf16.
pub(crate) fn in_pairs<T: Lane>(call: &Call<'_, T>) -> bool {
    let paired = call.problem.dim_qk().is_multiple_of(2) && call.logits.query == 1.0;
    call.runner.has_pairs() && T::as_bf16(&[]).is_some() && paired
}

/// What first keys must be a multiple of.
pub(crate) fn alignment<T: Lane>(call: &Call<'_, T>) -> usize {
    if in_pairs(call) { 2 } else { 1 }
}

/// Floats that hold the converted keys and values of a block.
pub(crate) fn space<T: Lane>(call: &Call<'_, T>) -> [usize; 2] {
    let ([dim_qk, dim_v], block) = ([call.problem.dim_qk(), call.problem.dim_v()], call.shape.tiles.keys());
    let whole = [padded(block * dim_qk), padded(block * dim_v)];
    match (T::as_f32(&[]).is_some(), in_pairs(call), call.blocks_together(block)) {
        (true, _, true) => [0, 0],
        (false, true, true) => [0, padded(block / 2 * dim_v)],
        (false, true, false) => [padded(block / 2 * dim_qk), padded(block / 2 * dim_v)],
        _ => whole,
    }
}

/// Lays out `keys` of a unit, the first of which is aligned.
pub(crate) fn prepare<'a, T: Lane>(
    call: &Call<'a, T>,
    unit: &Unit,
    keys: &Range<usize>,
    [k_space, v_space]: [&'a mut [f32]; 2],
) -> Panels<'a> {
    let (k, v) = (call.problem.k(), call.problem.v());
    match T::as_bf16(call.k).filter(|_| in_pairs(call)) {
        Some(data) => {
            let to = bytemuck::cast_slice_mut(v_space);
            zip_rows(call, unit, keys, to);
            Panels::Pairs { k: rows_bf16(call, data, unit, keys, k_space), v: to }
        }
        None => Panels::Single {
            k: rows_f32(call, (call.k, k), (call.keys(unit), keys), k_space),
            v: rows_f32(call, (call.v, v), (call.keys(unit), keys), v_space),
        },
    }
}

/// Rows as f32: the caller's memory where it is f32 already and the block lies together.
fn rows_f32<'a, T: Lane>(
    call: &Call<'a, T>,
    (data, layout): (&'a [T], &Layout),
    (rows, keys): (UnitKeys<'_>, &Range<usize>),
    space: &'a mut [f32],
) -> Rows<'a> {
    let (dim, together) = (layout.dims().dim, call.blocks_together(call.shape.tiles.keys()));
    if let Some(data) = T::as_f32(data).filter(|_| together) {
        return Rows { data: &data[rows.row(layout, keys.start)..], stride: layout.strides()[2] };
    }
    for (key, to) in keys.clone().zip(space.chunks_exact_mut(dim)) {
        call.runner.run(Widen { from: &data[rows.row(layout, key)..][..dim], to });
    }
    Rows { data: space, stride: dim }
}

/// Rows of keys and the distance between them: the caller's memory where the block lies together.
fn rows_bf16<'a, T: Lane>(
    call: &Call<'a, T>,
    data: &'a [bf16],
    unit: &Unit,
    keys: &Range<usize>,
    space: &'a mut [f32],
) -> (&'a [bf16], usize) {
    let (rows, layout, dim) = (call.keys(unit), call.problem.k(), call.problem.dim_qk());
    if call.blocks_together(call.shape.tiles.keys()) {
        return (&data[rows.row(layout, keys.start)..], layout.strides()[2]);
    }
    let space: &mut [bf16] = bytemuck::cast_slice_mut(space);
    for (key, to) in keys.clone().zip(space.chunks_exact_mut(dim)) {
        to.copy_from_slice(&data[rows.row(layout, key)..][..dim]);
    }
    (space, dim)
}

/// Pairs of value rows; keys outside the unit are zero, whatever lies there.
fn zip_rows<T: Lane>(call: &Call<'_, T>, unit: &Unit, keys: &Range<usize>, to: &mut [u32]) {
    let (layout, rows, dim) = (call.problem.v(), call.keys(unit), call.problem.dim_v());
    let row = |n: usize| {
        let key = keys.start + n;
        let used = unit.keys.contains(&key);
        T::as_bf16(call.v).filter(|_| used).map(|data| &data[rows.row(layout, key)..][..dim])
    };
    for (n, to) in to.chunks_exact_mut(dim).take(keys.len().div_ceil(2)).enumerate() {
        call.runner.run(Zip { first: row(2 * n), second: row(2 * n + 1), to });
    }
}

/// Puts one query into lane `lane` of a tile `height` rows high.
pub(crate) fn place<T: Lane>(
    call: &Call<'_, T>,
    query: &[T],
    row: &mut [f32],
    [lane, height]: [usize; 2],
    q: &mut [f32],
) {
    if let Some(query) = T::as_bf16(query).filter(|_| in_pairs(call)) {
        let q: &mut [u32] = bytemuck::cast_slice_mut(q);
        for (to, pair) in q.chunks_exact_mut(height).zip(query.chunks_exact(2)) {
            to[lane] = u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
        }
        return;
    }
    let row = match T::as_f32(query) {
        Some(query) => query,
        None => {
            let row = &mut row[..query.len()];
            call.runner.run(Widen { from: query, to: row });
            row
        }
    };
    for (to, x) in q.chunks_exact_mut(height).zip(row) {
        to[lane] = *x * call.logits.query;
    }
}

impl Panels<'_> {
    /// Folds `keys`, counted from the block's first, into a tile.
    pub(crate) fn attend<T>(&self, call: &Call<'_, T>, keys: Range<usize>, target: Target<'_>) {
        let Target { rows, q, bounds, scores, state } = target;
        let (dims, logits) = ([call.problem.dim_qk(), call.problem.dim_v()], call.logits);
        let (skip, keys) = (keys.start, keys.len());
        match *self {
            Self::Single { k, v } => {
                let (k, v) = (k.skip(skip), v.skip(skip));
                call.runner.run(TileBlock { rows, dims, keys, q, k, v, logits, bounds, scores, state });
            }
            Self::Pairs { k: (k, stride), v } => {
                let (k, v) = ((&k[skip * stride..], stride), &v[skip / 2 * dims[1]..]);
                let q = bytemuck::cast_slice(q);
                call.runner.run_pairs(&mut PairBlock {
                    rows,
                    dims,
                    keys,
                    q,
                    k,
                    v,
                    logits,
                    bounds,
                    scores,
                    state,
                });
            }
        }
    }
}
