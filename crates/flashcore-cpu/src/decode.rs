//! A few rows: stream keys and values once. Called by `forward`; calls the row kernel.

use std::ops::Range;

use flashcore_core::{Layout, Sequence};

use crate::{
    forward::{Call, Queries, Seen, UnitKeys},
    plan::Unit,
    scratch::{Worker, padded, take},
    simd::{
        Lane,
        convert::Widen,
        rows::{BLOCK, RowBlock},
        tile::NO_MAX,
    },
};

/// Memory of a unit's rows.
struct State<'a> {
    q: &'a mut [f32],
    scores: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
    /// What is added to scores, if anything.
    bias: &'a mut [f32],
    /// A block of keys and values, where features must be padded.
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// Features padded to whole vectors.
fn dims<T>(call: &Call<'_, T>) -> [usize; 2] {
    [call.problem.dim_qk(), call.problem.dim_v()].map(|d| d.next_multiple_of(call.shape.lanes))
}

/// Whether K and V can be read where they are.
fn reads_in_place<T>(call: &Call<'_, T>) -> bool {
    dims(call) == [call.problem.dim_qk(), call.problem.dim_v()]
}

/// Floats of each part of [`State`].
fn sizes<T: Lane>(call: &Call<'_, T>, rows: usize) -> [usize; 8] {
    let [dim_qk, dim_v] = dims(call);
    let blocks = if reads_in_place(call) { 0 } else { BLOCK };
    let bias = if call.problem.bias().is_some() { rows * BLOCK } else { 0 };
    [rows * dim_qk, rows * BLOCK, rows, rows, rows * dim_v, bias, blocks * dim_qk, blocks * dim_v]
}

/// Floats that a unit of `rows` rows needs.
pub(crate) fn memory<T: Lane>(call: &Call<'_, T>, rows: usize) -> usize {
    sizes(call, rows).into_iter().map(padded).sum()
}

/// Computes a unit.
pub(crate) fn run<T: Lane>(call: &Call<'_, T>, unit: &mut Unit, s: &Sequence, worker: &mut Worker) {
    let Worker { buffer, redo, visible } = worker;
    let mut rest = buffer.get(memory(call, unit.rows.len()));
    let [q, scores, max, sum, out, bias, k, v] = sizes(call, unit.rows.len()).map(|len| take(&mut rest, len));
    let mut state = State { q, scores, max, sum, out, bias, k, v };
    state.load(call, unit, s);
    let mut start = unit.keys.start;
    while start < unit.keys.end {
        let end = unit.keys.end.min((start / BLOCK + 1) * BLOCK);
        state.block(call, unit, s, start..end, visible);
        start = end;
    }
    state.finish(call, unit, s, redo);
}

impl State<'_> {
    fn load<T: Lane>(&mut self, call: &Call<'_, T>, unit: &Unit, s: &Sequence) {
        let (layout, group, dim) = (call.problem.q(), call.problem.group(), call.problem.dim_qk());
        self.out.fill(0.0);
        self.q.fill(0.0);
        self.max.fill(NO_MAX);
        self.sum.fill(0.0);
        let factor = call.query_factor(unit, s);
        for (n, r) in unit.rows.clone().enumerate() {
            let at = layout.row(s.batch, unit.kv_head * group + r % group, s.q_start + r / group);
            let to = &mut self.q[n * dims(call)[0]..][..dim];
            match call.q {
                Queries::Same(q) => call.runner.run(Widen { from: &q[at..at + dim], to: &mut *to }),
                Queries::Wide(q) => to.copy_from_slice(&q[at..at + dim]),
            }
            to.iter_mut().for_each(|x| *x *= factor);
        }
    }

    fn block<T: Lane>(
        &mut self,
        call: &Call<'_, T>,
        unit: &Unit,
        s: &Sequence,
        keys: Range<usize>,
        visible: &mut Vec<[usize; 2]>,
    ) {
        visible.clear();
        let relative = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
        visible.extend(unit.rows.clone().map(|row| {
            let seen = call.problem.mask().keys(row / call.problem.group(), s.q_len, s.kv_len);
            [relative(seen.start), relative(seen.end)]
        }));
        self.set_bias(call, unit, &keys);
        let (rows, k, v) = (call.keys(unit), call.problem.k(), call.problem.v());
        let (count, mut starts) = (keys.len(), [[0; BLOCK]; 2]);
        if reads_in_place(call) {
            let size = call.problem.page_size();
            rows.rows(k, keys.clone(), size, &mut starts[0]);
            rows.rows(v, keys.clone(), size, &mut starts[1]);
            let mut next = starts[0];
            rows.rows(k, keys.end..unit.keys.end.min(keys.end + BLOCK), size, &mut next);
            return self.attend(
                call,
                (call.k, call.v),
                (&starts.each_ref().map(|starts| &starts[..count]), &next),
                visible,
            );
        }
        let [dim_qk, dim_v] = dims(call);
        for (starts, dim) in starts.iter_mut().zip([dim_qk, dim_v]) {
            starts.iter_mut().enumerate().for_each(|(n, start)| *start = n * dim);
        }
        let (mut padded_k, mut padded_v) = (std::mem::take(&mut self.k), std::mem::take(&mut self.v));
        pad(call, (call.k, k), (rows, &keys), dim_qk, padded_k);
        pad(call, (call.v, v), (rows, &keys), dim_v, padded_v);
        self.attend(
            call,
            (&*padded_k, &*padded_v),
            (&starts.each_ref().map(|starts| &starts[..count]), &starts[0]),
            visible,
        );
        std::mem::swap(&mut self.k, &mut padded_k);
        std::mem::swap(&mut self.v, &mut padded_v);
    }

    /// Fills in what is added to the scores of a block of keys.
    fn set_bias<T: Lane>(&mut self, call: &Call<'_, T>, unit: &Unit, keys: &Range<usize>) {
        let group = call.problem.group();
        for (row, to) in unit.rows.clone().zip(self.bias.chunks_exact_mut(BLOCK)) {
            let head = unit.kv_head * group + row % group;
            let Some(bias) = call.problem.bias_of(unit.sequence, head) else { return };
            to.fill(0.0);
            to.iter_mut().zip(keys.clone()).for_each(|(to, key)| *to = bias.at(row / group, key) as f32);
        }
    }

    fn attend<T: Lane, U: Lane>(
        &mut self,
        call: &Call<'_, T>,
        (k, v): (&[U], &[U]),
        (starts, next): (&[&[usize]; 2], &[usize; BLOCK]),
        visible: &[[usize; 2]],
    ) {
        call.runner.run(RowBlock {
            rows: visible.len(),
            dims: dims(call),
            keys: starts[0].len(),
            q: self.q,
            k,
            v,
            starts: *starts,
            next,
            logits: call.logits,
            bias: call.problem.bias().map(|_| &*self.bias),
            visible,
            scores: self.scores,
            max: self.max,
            sum: self.sum,
            out: self.out,
        });
    }

    fn finish<T: Lane>(&self, call: &Call<'_, T>, unit: &mut Unit, s: &Sequence, redo: &mut Vec<usize>) {
        for (n, r) in unit.rows.clone().enumerate() {
            let sums = &self.out[n * dims(call)[1]..][..call.problem.dim_v()];
            call.finish_or_redo(unit, s, r, (sums, Seen { max: self.max[n], sum: self.sum[n] }), redo);
        }
    }
}

/// Widens rows to f32 with zeros up to `dim` features.
fn pad<T: Lane>(
    call: &Call<'_, T>,
    (from, layout): (&[T], &Layout),
    (rows, keys): (UnitKeys<'_>, &Range<usize>),
    dim: usize,
    to: &mut [f32],
) {
    let used = layout.dims().dim;
    for (key, to) in keys.clone().zip(to.chunks_exact_mut(dim)) {
        call.runner.run(Widen { from: &from[rows.row(layout, key)..][..used], to: &mut to[..used] });
        to[used..].fill(0.0);
    }
}
