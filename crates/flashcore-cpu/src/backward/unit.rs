//! One unit: a block of keys, the tiles that see it, five products for each.

use std::ops::Range;

use flashcore_core::Sequence;

use super::{
    Call,
    panels::{Element, Panel, Tile, cut, spread},
    plan::{KEYS, ROWS, Unit, tile, tiles, visible},
};
use crate::{
    scratch::{Worker, padded, take},
    simd::{
        dropout::RowWords,
        product::{Left, Product, Size},
        slopes::{RowFacts, TileSize},
    },
};

/// Numbers from one row of a small matrix to the next.
#[derive(Clone, Copy)]
struct Strides {
    qk: usize,
    v: usize,
    keys: usize,
}

/// Memory of a unit.
struct Memory<'a, E> {
    strides: Strides,
    k: Panel<'a, E>,
    v: Panel<'a, E>,
    k_turned: &'a mut [E],
    v_turned: &'a mut [E],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    q: Panel<'a, E>,
    d_out: Panel<'a, E>,
    tile: Tile<'a, E>,
    bounds: [&'a mut [f32]; 2],
    /// The bias of scores, in the layout of the tile, if any.
    bias: &'a mut [f32],
    /// What hashes of the tile's rows begin with, where weights are dropped.
    words: RowWords<'a>,
}

impl<'a, E: Element> Memory<'a, E> {
    fn take(call: &Call<'_>, worker: &'a mut Worker) -> Self {
        let [dim_qk, dim_v] = [call.forward.dim_qk(), call.forward.dim_v()];
        let strides = Strides { qk: spread(dim_qk), v: spread(dim_v), keys: spread(KEYS) };
        let Strides { qk, v, keys } = strides;
        let turned = [dim_qk, dim_v].map(|dim| dim.div_ceil(E::NUMBERS) * keys);
        let panels = Panel::<E>::len(KEYS, dim_qk) + Panel::<E>::len(KEYS, dim_v);
        let tile_panels = Panel::<E>::len(ROWS, dim_qk) + Panel::<E>::len(ROWS, dim_v);
        let sums = padded(KEYS * qk) + padded(KEYS * v);
        let floats = panels + padded(turned[0]) + padded(turned[1]) + sums;
        let floats = floats + tile_panels + Tile::<E>::len(ROWS, keys) + 2 * padded(ROWS);
        let biases = if call.forward.bias().is_some() { ROWS * keys } else { 0 };
        let words = if call.forward.dropout().is_some() { ROWS } else { 0 };
        let rest = &mut worker.buffer.get(floats + padded(biases) + 2 * padded(words));
        Self {
            strides,
            k: Panel::take(rest, KEYS, dim_qk),
            v: Panel::take(rest, KEYS, dim_v),
            k_turned: cut(rest, turned[0]),
            v_turned: cut(rest, turned[1]),
            dk: take(rest, KEYS * qk),
            dv: take(rest, KEYS * v),
            q: Panel::take(rest, ROWS, dim_qk),
            d_out: Panel::take(rest, ROWS, dim_v),
            tile: Tile::take(rest, ROWS, keys),
            bounds: [take(rest, ROWS), take(rest, ROWS)],
            bias: take(rest, biases),
            words: RowWords::new([take(rest, words), take(rest, words)]),
        }
    }

    /// Lays out the keys and values of a unit.
    fn load_keys(&mut self, call: &Call<'_>, unit: &Unit, s: &Sequence) {
        let (problem, count) = (call.forward, unit.keys.len());
        let ([_, k, v], place) = (call.inputs.qkv, [s.batch, unit.kv_head, s.kv_start + unit.keys.start]);
        self.k.load(call.runner, (k, problem.k()), place, count, |_| false);
        self.v.load(call.runner, (v, problem.v()), place, count, |_| false);
        self.k.turn(count, (self.k_turned, self.strides.keys));
        self.v.turn(count, (self.v_turned, self.strides.keys));
        self.dk[..count * self.strides.qk].fill(0.0);
        self.dv[..count * self.strides.v].fill(0.0);
    }

    /// Lays out the queries of a tile and the gradients of their outputs.
    fn load_queries(&mut self, call: &Call<'_>, s: &Sequence, step: &Step) {
        let place = [s.batch, step.head, s.q_start + step.queries.start];
        let lse = &call.terms.lse[step.row..];
        // What rows without gradients hold must not meet a weight of 0.
        let skip = |n: usize| lse[n] == f32::INFINITY;
        let count = step.queries.len();
        self.q.load(call.runner, (call.inputs.qkv[0], call.forward.q()), place, count, skip);
        self.d_out.load(call.runner, (call.inputs.d_out, call.problem.d_out()), place, count, skip);
    }
}

/// A tile that meets the unit's keys.
struct Step {
    /// The query head.
    head: usize,
    /// Queries, counted within the sequence.
    queries: Range<usize>,
    /// Their first row among all rows.
    row: usize,
    /// Visible keys, counted within the unit.
    keys: Range<usize>,
    /// Whether this unit is the first that adds to the tile's dQ.
    is_first: bool,
    /// Whether it is the last.
    is_last: bool,
}

impl Step {
    /// Tile `n` of a head, where it sees any of the unit's keys.
    fn new(call: &Call<'_>, unit: &Unit, s: &Sequence, head: usize, n: usize) -> Option<Self> {
        let (queries, problem) = (tile(s, n), call.forward);
        let all = visible(&problem, s, &queries);
        let (start, end) = (all.start.max(unit.keys.start), all.end.min(unit.keys.end));
        let row = problem.lse_index(s.batch, head, s.q_start + queries.start);
        let (is_first, is_last) = (all.start >= unit.keys.start, all.end <= unit.keys.end);
        let keys = (start < end).then(|| start - unit.keys.start..end - unit.keys.start)?;
        Some(Self { head, queries, row, keys, is_first, is_last })
    }
}

/// Computes a unit.
pub(super) fn run<E: Element>(call: &Call<'_>, unit: &Unit, worker: &mut Worker) {
    let (s, group) = (call.forward.sequence(unit.sequence), call.forward.group());
    let mut memory = Memory::<E>::take(call, worker);
    memory.load_keys(call, unit, &s);
    let turn = call.turns.begin(unit.index, unit.after);
    let tiles = tiles(&s);
    for n in 0..group * tiles {
        let head = unit.kv_head * group + n / tiles;
        if let Some(step) = Step::new(call, unit, &s, head, n % tiles) {
            memory.step(call, unit, &s, &step, || turn.wait(n));
        }
        turn.pass(n);
    }
    memory.finish(call, unit, &s);
}

impl<E: Element> Memory<'_, E> {
    /// Scores, their gradients, and what they add to dV, dK and, after `wait`, dQ.
    fn step(&mut self, call: &Call<'_>, unit: &Unit, s: &Sequence, step: &Step, wait: impl FnOnce()) {
        self.load_queries(call, s, step);
        let (rows, first) = (step.queries.len(), step.keys.start / call.lanes * call.lanes);
        let columns = (step.keys.end - first).next_multiple_of(call.lanes);
        self.scores(call, rows, first, columns);
        let masked = self.set_bounds(call, unit, s, step, first..first + columns);
        self.set_bias(call, unit, step, first..first + columns);
        self.set_words(call, unit, step);
        let [starts, ends] = &self.bounds;
        let facts = RowFacts {
            lse: &call.terms.lse[step.row..],
            sums: &call.terms.sums[step.row..],
            bounds: masked.then_some([&**starts, &**ends]),
            bias: call.forward.bias().map(|_| (&*self.bias, self.strides.keys)),
            dropout: self.words.block(call.forward.dropout(), unit.keys.start + first),
            scale: call.forward.scale(),
            softcap: call.forward.softcap(),
        };
        let size = TileSize { rows, keys: columns, stride: self.strides.keys };
        let factors = E::slopes(call.runner, &mut self.tile, facts, size, first);
        let keys = first..step.keys.end;
        add_keys(call, factors.weights, (&self.d_out, rows), keys.clone(), self.dv);
        add_keys(call, factors.grads, (&self.q, rows), keys.clone(), self.dk);
        wait();
        add_queries(call, s, step, factors.grad_rows, (&self.k, keys));
    }

    /// Fills in what is added to the scores of a tile; `columns` count keys of the unit and may go beyond them.
    fn set_bias(&mut self, call: &Call<'_>, unit: &Unit, step: &Step, columns: Range<usize>) {
        let Some(bias) = call.forward.bias_of(unit.sequence, step.head) else { return };
        for (query, row) in step.queries.clone().zip(self.bias.chunks_exact_mut(self.strides.keys)) {
            for (to, column) in row.iter_mut().zip(columns.clone()) {
                let key = unit.keys.start + column;
                *to = if key < unit.keys.end { bias.at(query, key) as f32 } else { 0.0 };
            }
        }
    }

    /// Fills in what hashes of the tile's rows begin with.
    fn set_words(&mut self, call: &Call<'_>, unit: &Unit, step: &Step) {
        let Some(dropout) = call.forward.dropout_of(unit.sequence, step.head) else { return };
        step.queries.clone().enumerate().for_each(|(n, query)| self.words.set(n, dropout.row(query)));
    }

    /// `Q·Kᵀ` and `dO·Vᵀ` for `columns` keys from key `first`.
    fn scores(&mut self, call: &Call<'_>, rows: usize, first: usize, columns: usize) {
        let stride = self.strides.keys;
        let products = [
            (&self.q, &*self.k_turned, &mut self.tile.scores),
            (&self.d_out, &*self.v_turned, &mut self.tile.grads),
        ];
        for (left, right, to) in products {
            let (a, a_stride) = left.rows();
            let size = Size { rows, columns, depth: left.dim().div_ceil(E::NUMBERS) };
            let (a, b) = (Left::Rows(a, a_stride), (&right[first..], stride));
            E::multiply(call.runner, Product { size, a, b, c: (&mut to[first..], stride), add: false });
        }
    }

    /// Fills in the visible keys of each query relative to `keys` of the unit; false if all see all of them.
    fn set_bounds(
        &mut self,
        call: &Call<'_>,
        unit: &Unit,
        s: &Sequence,
        step: &Step,
        keys: Range<usize>,
    ) -> bool {
        let seen = |query: usize| {
            let seen = call.forward.mask().keys(query, s.q_len, s.kv_len);
            let relative =
                |key: usize| key.saturating_sub(unit.keys.start).clamp(keys.start, keys.end) - keys.start;
            relative(seen.start)..relative(seen.end)
        };
        // Both ends of the band move with the query: the last query starts last, the first one ends first.
        let (first, last) = (seen(step.queries.start), seen(step.queries.end - 1));
        if last.start == 0 && first.end == keys.len() && keys.end <= unit.keys.len() {
            return false;
        }
        let [starts, ends] = &mut self.bounds;
        for (query, (start, end)) in step.queries.clone().zip(starts.iter_mut().zip(ends.iter_mut())) {
            let seen = seen(query);
            (*start, *end) = (seen.start as f32, seen.end as f32);
        }
        true
    }

    /// Writes dK and dV.
    fn finish(&self, call: &Call<'_>, unit: &Unit, s: &Sequence) {
        for (n, key) in unit.keys.clone().enumerate() {
            let place = [s.batch, unit.kv_head, s.kv_start + key];
            call.grads.dk.write(place, &self.dk[n * self.strides.qk..], call.runner);
            call.grads.dv.write(place, &self.dv[n * self.strides.v..], call.runner);
        }
    }
}

/// Adds what `rows` queries say to dV or dK: the left factor, by column, times their rows.
fn add_keys<E: Element>(
    call: &Call<'_>,
    (left, stride): (&[E], usize),
    (right, rows): (&Panel<'_, E>, usize),
    keys: Range<usize>,
    to: &mut [f32],
) {
    let (b, width) = right.stacked();
    let columns = right.dim().next_multiple_of(call.lanes);
    let size = Size { rows: keys.len(), columns, depth: rows.div_ceil(E::NUMBERS) };
    let (a, c) = (Left::Columns(left, stride), (&mut to[keys.start * width..], width));
    E::multiply(call.runner, Product { size, a, b: (b, width), c, add: true });
}

/// Adds what some keys say to a tile's dQ, and writes it if they are the last.
fn add_queries<E: Element>(
    call: &Call<'_>,
    s: &Sequence,
    step: &Step,
    (left, stride): (&[E], usize),
    (k, keys): (&Panel<'_, E>, Range<usize>),
) {
    let (width, rows) = (call.dq_width(), step.queries.len());
    // SAFETY: the unit waited for its turn, so that nobody else has this tile's sums before the step is over.
    let sums = unsafe { call.dq_sums.range(step.row * width, rows * width) };
    let (b, b_stride) = k.stacked();
    let size = Size { rows, columns: width, depth: keys.len().div_ceil(E::NUMBERS) };
    let b = (&b[keys.start / E::NUMBERS * b_stride..], b_stride);
    let (a, add) = (Left::Rows(left, stride), !step.is_first);
    E::multiply(call.runner, Product { size, a, b, c: (&mut *sums, width), add });
    if step.is_last {
        for (query, row) in step.queries.clone().zip(sums.chunks_exact(width)) {
            call.grads.dq.write([s.batch, step.head, s.q_start + query], row, call.runner);
        }
    }
}
