//! The layout of a block of keys and values for the tile kernels: f32 rows, bf16 pairs, or matrices. Called by
//! `prefill`; calls `matrices`.

use std::ops::Range;

use flashcore_core::{Layout, Problem};
use half::bf16;

use crate::{
    forward::{Call, UnitKeys},
    matrices::{self, Space},
    plan::Unit,
    scratch::padded,
    simd::{
        Lane,
        convert::{Widen, Zip},
        dropout::BlockDropout,
        matrix::{DEPTH, MOST_PARTS, MatrixBlock, ROWS},
        pairs::PairBlock,
        runner::Runner,
        tile::{Logits, Rows, TileBlock, TileState},
    },
};

/// Keys and values of a block, ready for a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Panels<'a> {
    /// Rows of f32.
    Single { k: Rows<'a>, v: Rows<'a> },
    /// Keys where they lie, values in pairs of rows.
    Pairs { k: (&'a [bf16], usize), v: &'a [u32] },
    /// Parts of both, values transposed.
    Matrix { k: &'a [bf16], v: &'a [bf16] },
}

/// What kernels multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    /// f32.
    Single,
    /// Pairs of bf16.
    Pairs,
    /// Small matrices of bf16.
    Matrix,
}

impl Form {
    /// The form for tensors of a type. What is added to scores is added in f32, and so they are multiplied then.
    pub(crate) fn of<T: Lane>(runner: Runner, problem: &Problem, logits: Logits) -> Self {
        let is_bf16 = T::as_bf16(&[]).is_some();
        // Factors of 8-bit tensors are multiplied into the queries, which then have more digits.
        if logits.query != 1.0 || problem.bias().is_some() || T::DTYPE.is_narrow() {
            Self::Single
        } else if runner.has_matrix() && T::PARTS <= MOST_PARTS {
            Self::Matrix
        } else if runner.has_pairs() && is_bf16 && problem.dim_qk().is_multiple_of(2) {
            Self::Pairs
        } else {
            Self::Single
        }
    }

    /// What first keys must be a multiple of.
    pub(crate) fn alignment(self) -> usize {
        match self {
            Self::Single => 1,
            Self::Pairs => 2,
            Self::Matrix => DEPTH,
        }
    }
}

/// Sizes of a tile's memory.
pub(crate) struct TileLens {
    /// Rows with padding.
    pub(crate) height: usize,
    /// Floats of the queries.
    pub(crate) q: usize,
    /// Floats of the result.
    pub(crate) out: usize,
}

/// What a tile of `rows` rows needs.
pub(crate) fn tile_lens<T: Lane>(call: &Call<'_, T>, rows: usize) -> TileLens {
    if call.form == Form::Matrix {
        let out = ROWS * matrices::dims(call)[1];
        return TileLens { height: ROWS, q: matrices::query_len(call), out };
    }
    let height = call.shape.tile_for(rows);
    TileLens { height, q: height * call.problem.dim_qk(), out: height * call.problem.dim_v() }
}

/// A tile for a kernel, without its keys.
pub(crate) struct Target<'a> {
    pub(crate) rows: usize,
    pub(crate) q: &'a [f32],
    pub(crate) bounds: Option<[&'a [f32]; 2]>,
    pub(crate) dropout: Option<BlockDropout<'a>>,
    pub(crate) scores: &'a mut [f32],
    pub(crate) weights: &'a mut [f32],
    pub(crate) state: TileState<'a>,
}

/// Floats that hold the converted keys and values of a block, rows on their way there, and weights apart from scores.
pub(crate) fn space<T: Lane>(call: &Call<'_, T>) -> [usize; 4] {
    let ([dim_qk, dim_v], block) = ([call.problem.dim_qk(), call.problem.dim_v()], call.shape.tiles.keys());
    let whole = [padded(block * dim_qk), padded(block * dim_v)];
    let [k, v] = match (call.form, T::as_f32(&[]).is_some(), call.blocks_together(block)) {
        (Form::Matrix, ..) => {
            let [k, v, stage] = matrices::space(call);
            return [k, v, stage, padded(T::PARTS * block / 2 * ROWS)];
        }
        (_, true, true) => [0, 0],
        (Form::Pairs, false, true) => [0, padded(block / 2 * dim_v)],
        (Form::Pairs, false, false) => [padded(block / 2 * dim_qk), padded(block / 2 * dim_v)],
        _ => whole,
    };
    [k, v, padded(dim_qk.max(dim_v)), 0]
}

/// Lays out `keys` of a unit, the first of which is aligned.
pub(crate) fn prepare<'a, T: Lane>(
    call: &Call<'a, T>,
    unit: &Unit,
    keys: &Range<usize>,
    Space { k: k_space, v: v_space, stage }: Space<'a>,
) -> Panels<'a> {
    let (k, v) = (call.problem.k(), call.problem.v());
    if call.form == Form::Matrix {
        matrices::load_keys(call, unit, keys, stage, k_space);
        matrices::load_values(call, unit, keys, stage, v_space);
        return Panels::Matrix { k: bytemuck::cast_slice(k_space), v: bytemuck::cast_slice(v_space) };
    }
    match T::as_bf16(call.k).filter(|_| call.form == Form::Pairs) {
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

/// Pairs of value rows; keys outside the unit are zero, whatever is there.
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

/// Puts one query, times a factor, into lane `lane` of a tile `height` rows high.
pub(crate) fn place<T: Lane>(
    call: &Call<'_, T>,
    (query, factor): (&[T], f32),
    row: &mut [f32],
    ([lane, height], q): ([usize; 2], &mut [f32]),
) {
    if let Some(query) = T::as_bf16(query).filter(|_| call.form == Form::Pairs) {
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
    spread((row, factor), ([lane, height], q));
}

/// The same where it is f32 already.
pub(crate) fn spread((row, factor): (&[f32], f32), ([lane, height], q): ([usize; 2], &mut [f32])) {
    for (to, x) in q.chunks_exact_mut(height).zip(row) {
        to[lane] = *x * factor;
    }
}

impl Panels<'_> {
    /// Folds `keys`, counted from the block's first, into a tile.
    pub(crate) fn attend<T: Lane>(&self, call: &Call<'_, T>, keys: Range<usize>, target: Target<'_>) {
        let Target { rows, q, bounds, dropout, scores, weights, state } = target;
        let (dims, logits) = ([call.problem.dim_qk(), call.problem.dim_v()], call.logits);
        let (skip, keys) = (keys.start, keys.len());
        match *self {
            Self::Single { k, v } => {
                let (k, v) = (k.skip(skip), v.skip(skip));
                call.runner.run(TileBlock {
                    rows,
                    dims,
                    keys,
                    q,
                    k,
                    v,
                    logits,
                    bounds,
                    dropout,
                    scores,
                    state,
                });
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
                    dropout,
                    scores,
                    state,
                });
            }
            Self::Matrix { k, v } => call.runner.run_matrix(&mut MatrixBlock {
                dims: matrices::dims(call),
                parts: T::PARTS,
                keys,
                skip,
                room: call.shape.tiles.keys(),
                q: bytemuck::cast_slice(q),
                k,
                v,
                logits,
                bounds,
                dropout,
                scores,
                weights: bytemuck::cast_slice_mut(weights),
                state,
            }),
        }
    }
}
