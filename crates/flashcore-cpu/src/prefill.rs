//! Many rows: tiles that share one pass over keys and values. Called by `forward`; calls the tile kernel.

use std::ops::Range;

use flashcore_core::Sequence;

use crate::{
    forward::{Call, Queries, Seen},
    matrices::{self, Space},
    panels::{self, Form, Target, TileLens},
    plan::{Unit, visible},
    scratch::{Worker, padded, take},
    simd::{
        Lane,
        dropout::RowWords,
        tile::{NO_MAX, TileState},
    },
};

/// A tile's memory.
struct Tile<'a> {
    /// Its rows among those of the key head.
    rows: Range<usize>,
    /// Rows with padding.
    height: usize,
    q: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
    /// What hashes of its rows begin with, where weights are dropped.
    words: RowWords<'a>,
}

/// Memory that the tiles of a unit share.
struct Common<'a> {
    scores: &'a mut [f32],
    /// Weights, where they lie apart from the scores.
    weights: &'a mut [f32],
    bounds: [&'a mut [f32]; 2],
    k: &'a mut [f32],
    v: &'a mut [f32],
    /// Rows being converted.
    stage: &'a mut [f32],
}

/// Memory of one tile.
fn tile_len(call: &Call<'_, impl Lane>) -> usize {
    let TileLens { height, q, out } = panels::tile_lens(call, call.shape.tile_rows);
    padded(q) + padded(out) + 2 * padded(height) + 2 * padded(call.dropout_rows(height))
}

fn common_len<T: Lane>(call: &Call<'_, T>) -> usize {
    let height = call.shape.tile_rows;
    let blocks = panels::space(call).into_iter().sum::<usize>();
    padded(call.shape.tiles.keys() * height) + 2 * padded(height) + blocks
}

impl<'a> Common<'a> {
    fn take<T: Lane>(call: &Call<'_, T>, rest: &mut &'a mut [f32]) -> Self {
        let height = call.shape.tile_rows;
        let [k, v, stage, weights] = panels::space(call);
        Self {
            scores: take(rest, call.shape.tiles.keys() * height),
            weights: take(rest, weights),
            bounds: [take(rest, height), take(rest, height)],
            k: take(rest, k),
            v: take(rest, v),
            stage: take(rest, stage),
        }
    }
}

/// Floats that a unit of `rows` rows needs.
pub(crate) fn memory<T: Lane>(call: &Call<'_, T>, rows: usize) -> usize {
    common_len(call) + rows.div_ceil(call.shape.tile_rows) * tile_len(call)
}

/// Computes a unit.
pub(crate) fn run<T: Lane>(call: &Call<'_, T>, unit: &mut Unit, s: &Sequence, worker: &mut Worker) {
    let full = call.shape.tile_rows;
    let tiles = unit.rows.len().div_ceil(full);
    let mut rest = worker.buffer.get(memory(call, unit.rows.len()));
    let mut common = Common::take(call, &mut rest);
    for memory in rest.chunks_mut(tile_len(call)).zip(0..tiles) {
        let (memory, t) = memory;
        Tile::new(call, unit, t, memory).load(call, unit, s, common.stage);
    }
    let (align, size) = (call.form.alignment(), call.shape.tiles.keys());
    let mut start = unit.keys.start / align * align;
    while start < unit.keys.end {
        let end = unit.keys.end.min((start / size + 1) * size);
        block(call, unit, s, start..end, &mut common, rest);
        start = end;
    }
    for (memory, t) in rest.chunks_mut(tile_len(call)).zip(0..tiles) {
        Tile::new(call, unit, t, memory).finish(call, unit, s, common.stage, &mut worker.redo);
    }
}

/// Folds a block of keys into every tile that sees some of them.
fn block<T: Lane>(
    call: &Call<'_, T>,
    unit: &Unit,
    s: &Sequence,
    keys: Range<usize>,
    common: &mut Common<'_>,
    tiles: &mut [f32],
) {
    let align = call.form.alignment();
    let space = Space { k: common.k, v: common.v, stage: common.stage };
    let block = panels::prepare(call, unit, &keys, space);
    let [starts, ends] = &mut common.bounds;
    for (t, memory) in tiles.chunks_mut(tile_len(call)).enumerate() {
        if unit.rows.start + t * call.shape.tile_rows >= unit.rows.end {
            break;
        }
        let tile = Tile::new(call, unit, t, memory);
        let seen = visible(&call.problem, s, &tile.rows);
        let clip = keys.start.max(seen.start / align * align)..keys.end.min(seen.end);
        if clip.is_empty() {
            continue;
        }
        let bounds = tile.bounds(call, s, &clip, starts, ends).then_some([&**starts, &**ends]);
        let state = TileState { max: tile.max, sum: tile.sum, out: tile.out };
        let (scores, weights) = (&mut *common.scores, &mut *common.weights);
        let dropout = tile.words.block(call.problem.dropout(), clip.start);
        let target = Target { rows: tile.height, q: tile.q, bounds, dropout, scores, weights, state };
        block.attend(call, clip.start - keys.start..clip.end - keys.start, target);
    }
}

impl<'a> Tile<'a> {
    fn new<T: Lane>(call: &Call<'_, T>, unit: &Unit, t: usize, memory: &'a mut [f32]) -> Self {
        let start = unit.rows.start + t * call.shape.tile_rows;
        let rows = start..unit.rows.end.min(start + call.shape.tile_rows);
        let TileLens { height, q, out } = panels::tile_lens(call, rows.len());
        let (mut rest, words) = (memory, call.dropout_rows(height));
        Self {
            rows,
            height,
            q: take(&mut rest, q),
            max: take(&mut rest, height),
            sum: take(&mut rest, height),
            out: take(&mut rest, out),
            words: RowWords::new([take(&mut rest, words), take(&mut rest, words)]),
        }
    }

    /// Fills in the queries and what the rows have seen so far.
    fn load<T: Lane>(mut self, call: &Call<'_, T>, unit: &Unit, s: &Sequence, stage: &mut [f32]) {
        let (layout, group) = (call.problem.q(), call.problem.group());
        let dim = call.problem.dim_qk();
        self.out.fill(0.0);
        self.max.fill(NO_MAX);
        self.sum.fill(0.0);
        call.set_words(unit, self.rows.clone(), &mut self.words);
        let place = |r: usize| {
            let at = layout.row(s.batch, unit.kv_head * group + r % group, s.q_start + r / group);
            at..at + dim
        };
        if let (Form::Matrix, Queries::Same(q)) = (call.form, call.q) {
            let (first, rows) = (self.rows.start, self.rows.len());
            return matrices::load_queries(call, rows, |n| &q[place(first + n)], stage, self.q);
        }
        if self.rows.len() < self.height {
            self.q.fill(0.0);
        }
        let factor = call.query_factor(unit, s);
        for (lane, r) in self.rows.enumerate() {
            let to = ([lane, self.height], &mut *self.q);
            match call.q {
                Queries::Same(q) => panels::place(call, (&q[place(r)], factor), stage, to),
                Queries::Wide(q) => panels::spread((&q[place(r)], factor), to),
            }
        }
    }

    /// Fills in the visible keys of each row relative to `keys`; false if every row sees all of them.
    fn bounds<T: Lane>(
        &self,
        call: &Call<'_, T>,
        s: &Sequence,
        keys: &Range<usize>,
        starts: &mut [f32],
        ends: &mut [f32],
    ) -> bool {
        let visible = |row: usize| call.problem.mask().keys(row / call.problem.group(), s.q_len, s.kv_len);
        // Both ends of the band move with the query: the last row starts last, the first row ends first.
        if visible(self.rows.end - 1).start <= keys.start && visible(self.rows.start).end >= keys.end {
            return false;
        }
        starts.fill(0.0);
        ends.fill(keys.len() as f32);
        for (lane, row) in self.rows.clone().enumerate() {
            let seen = visible(row);
            let relative = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
            (starts[lane], ends[lane]) = (relative(seen.start) as f32, relative(seen.end) as f32);
        }
        true
    }

    /// Writes the rows.
    fn finish<T: Lane>(
        self,
        call: &Call<'_, T>,
        unit: &mut Unit,
        s: &Sequence,
        stage: &mut [f32],
        redo: &mut Vec<usize>,
    ) {
        let dim = call.problem.dim_v();
        if call.form == Form::Matrix {
            let stride = matrices::turn_result(call, self.out, stage);
            for ((lane, r), sums) in self.rows.enumerate().zip(stage.chunks_exact(stride)) {
                let seen = Seen { max: self.max[lane], sum: self.sum[lane] };
                call.finish_or_redo(unit, s, r, (&sums[..dim], seen), redo);
            }
            return;
        }
        let sums = &mut stage[..dim];
        for (lane, r) in self.rows.enumerate() {
            for (to, x) in sums.iter_mut().zip(self.out.chunks_exact(self.height)) {
                *to = x[lane];
            }
            let seen = Seen { max: self.max[lane], sum: self.sum[lane] };
            call.finish_or_redo(unit, s, r, (sums, seen), redo);
        }
    }
}
