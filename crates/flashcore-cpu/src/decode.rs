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
        dropout::RowWords,
        rows::{BLOCK, Listed, RowBlock, Starts, Strided},
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
    /// What hashes of rows begin with, where weights are dropped.
    words: RowWords<'a>,
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
fn sizes<T: Lane>(call: &Call<'_, T>, rows: usize) -> [usize; 10] {
    let [dim_qk, dim_v] = dims(call);
    let blocks = if reads_in_place(call) { 0 } else { BLOCK };
    let bias = if call.problem.bias().is_some() { rows * BLOCK } else { 0 };
    let words = call.dropout_rows(rows);
    let (q, scores, out) = (rows * dim_qk, rows * BLOCK, rows * dim_v);
    [q, scores, rows, rows, out, bias, words, words, blocks * dim_qk, blocks * dim_v]
}

/// Floats that a unit of `rows` rows needs.
pub(crate) fn memory<T: Lane>(call: &Call<'_, T>, rows: usize) -> usize {
    sizes(call, rows).into_iter().map(padded).sum()
}

/// Computes a unit.
pub(crate) fn run<T: Lane>(call: &Call<'_, T>, unit: &mut Unit, s: &Sequence, worker: &mut Worker) {
    let Worker { buffer, redo, visible } = worker;
    let mut rest = buffer.get(memory(call, unit.rows.len()));
    let [q, scores, max, sum, out, bias, first, second, k, v] =
        sizes(call, unit.rows.len()).map(|len| take(&mut rest, len));
    let mut state = State { q, scores, max, sum, out, bias, words: RowWords::new([first, second]), k, v };
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
        call.set_words(unit, unit.rows.clone(), &mut self.words);
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
        let (rows, layouts) = (call.keys(unit), [call.problem.k(), call.problem.v()]);
        if reads_in_place(call) {
            if call.blocks_together(BLOCK) {
                let starts = layouts
                    .map(|layout| Strided { first: rows.row(layout, keys.start), step: layout.strides()[2] });
                return self.attend(call, (call.k, call.v), starts, (&keys, visible));
            }
            return self.block_of_pages(call, unit, keys, visible);
        }
        let dims = dims(call);
        let (mut padded_k, mut padded_v) = (std::mem::take(&mut self.k), std::mem::take(&mut self.v));
        pad(call, (call.k, layouts[0]), (rows, &keys), dims[0], padded_k);
        pad(call, (call.v, layouts[1]), (rows, &keys), dims[1], padded_v);
        let starts = dims.map(|step| Strided { first: 0, step });
        self.attend(call, (&*padded_k, &*padded_v), starts, (&keys, visible));
        std::mem::swap(&mut self.k, &mut padded_k);
        std::mem::swap(&mut self.v, &mut padded_v);
    }

    /// A block whose keys lie in several pages.
    fn block_of_pages<T: Lane>(
        &mut self,
        call: &Call<'_, T>,
        unit: &Unit,
        keys: Range<usize>,
        visible: &[[usize; 2]],
    ) {
        let (rows, size) = (call.keys(unit), call.problem.page_size());
        let [mut k, mut v] = [[0; BLOCK]; 2];
        rows.rows(call.problem.k(), keys.clone(), size, &mut k);
        rows.rows(call.problem.v(), keys.clone(), size, &mut v);
        let mut later = k;
        rows.rows(call.problem.k(), keys.end..unit.keys.end.min(keys.end + BLOCK), size, &mut later);
        let starts = [&k, &v].map(|starts| Listed { starts, later: &later });
        self.attend(call, (call.k, call.v), starts, (&keys, visible));
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
        starts: [impl Starts; 2],
        (keys, visible): (&Range<usize>, &[[usize; 2]]),
    ) {
        call.runner.run(RowBlock {
            rows: visible.len(),
            dims: dims(call),
            keys: keys.len(),
            q: self.q,
            k,
            v,
            starts,
            logits: call.logits,
            bias: call.problem.bias().map(|_| &*self.bias),
            dropout: self.words.block(call.problem.dropout(), keys.start),
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
