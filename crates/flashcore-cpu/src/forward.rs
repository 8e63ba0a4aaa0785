//! From a call to its units, on all threads. Called by `cpu`; calls `plan`, `prefill`, `decode`.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use flashcore_core::{Dropout, Instance, Keys, Layout, Operand, Problem, Sequence};

use crate::{
    SimdLevel, Tiles,
    crew::Crew,
    decode,
    level::Shape,
    matrices,
    output::{Memory, Output, OutputRow, Target, partial_len},
    panels::Form,
    plan::{Merge, Plan, Unit, Work, visible},
    prefill,
    scratch::{Scratch, Worker},
    simd::{
        Lane,
        convert::{Accumulate, Narrow},
        dropout::RowWords,
        runner::Runner,
        tile::{Logits, NO_MAX},
    },
};

/// Whether a problem is so small that the calling thread alone is fastest: less than so many nanoseconds of work.
///
/// A core does some 100 operations and reads some 16 bytes per nanosecond; masks are not looked at.
pub(crate) fn is_serial(problem: &Problem, nanoseconds: f64) -> bool {
    let features = (problem.dim_qk() + problem.dim_v()) as f64;
    let keys = problem.batch() as f64 * problem.heads_kv() as f64 * problem.seq_kv() as f64;
    let operations = 2.0 * problem.rows() as f64 * problem.seq_kv() as f64 * features;
    operations / 100.0 + keys * features * problem.dtype().bytes() as f64 / 16.0 < nanoseconds
}

/// Queries: of the keys' type, or widened, as they are beside a cache of 8 bits.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a, T> {
    Same(&'a [T]),
    Wide(&'a [f32]),
}

/// A call with its element type known: what units need.
pub(crate) struct Call<'a, T> {
    pub(crate) problem: Instance<'a>,
    pub(crate) runner: Runner,
    pub(crate) shape: Shape,
    pub(crate) q: Queries<'a, T>,
    pub(crate) k: &'a [T],
    pub(crate) v: &'a [T],
    pub(crate) logits: Logits,
    /// What prefill multiplies.
    pub(crate) form: Form,
    pub(crate) output: &'a Output<'a, T>,
}

/// What a row has seen: the largest score and the sum of `2^(factor·(score − max))`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

/// A row with its sink, in base 2: the largest logit, what the sums count for beside it, and the sum of all weights.
#[derive(Clone, Copy)]
struct Norm {
    top: f64,
    share: f64,
    total: f64,
}

impl Norm {
    fn new(seen: Seen, factor: f32, sink: Option<f32>) -> Self {
        let (max, sum) = (f64::from(seen.max) * f64::from(factor), f64::from(seen.sum));
        let Some(sink) = sink.filter(|&sink| sink > f32::NEG_INFINITY) else {
            return Self { top: max, share: 1.0, total: sum };
        };
        let sink = f64::from(sink) * std::f64::consts::LOG2_E;
        let top = if sum == 0.0 { sink } else { max.max(sink) };
        let share = if sum == 0.0 { 0.0 } else { (max - top).exp2() };
        Self { top, share, total: sum * share + (sink - top).exp2() }
    }

    /// Natural-log LSE; −∞ for a row that saw nothing.
    fn lse(self) -> f32 {
        if self.total == 0.0 {
            return f32::NEG_INFINITY;
        }
        ((self.top + self.total.log2()) * std::f64::consts::LN_2) as f32
    }

    /// Factor that turns sums into averages; a row that saw nothing is zero.
    fn factor(self) -> f32 {
        if self.total == 0.0 { 0.0 } else { (self.share / self.total) as f32 }
    }
}

/// Runs a whole problem on the threads of `crew`.
pub(crate) fn forward<T: Lane>(
    problem: Instance<'_>,
    (runner, tiles): (Runner, Tiles),
    (q, [k, v]): (Queries<'_, T>, [&[T]; 2]),
    (out, lse): Memory<'_, T>,
    (scratch, crew): (&mut Scratch, Crew),
) -> &'static str {
    let threads = crew.threads();
    let logits = Logits::of(&problem);
    let form = Form::of::<T>(runner, &problem, logits);
    let many = if form == Form::Matrix { matrices::worthwhile::<T>() } else { 0 };
    let shape = Shape { many, ..runner.level().shape(tiles) };
    let Scratch { workers, plan, partials } = scratch;
    plan.build(problem, shape, threads);
    let partials = partials.get(plan.partial_rows * partial_len(&problem));
    let output = &Output::new(problem, out, lse, partials);
    let call = |form| Call { problem, runner, shape, q, k, v, logits, form, output };
    let (many, few) = (call(form), call(Form::Single));
    let Plan { units, merges, .. } = plan;
    let threads = threads.min(units.len()).max(1);
    if workers.len() < threads {
        workers.resize_with(threads, Worker::default);
    }
    let workers = &mut workers[..threads];
    let of = |unit: &Unit| if unit.work == Work::Tiles { &few } else { &many };
    let needs = units.iter().map(|unit| of(unit).needs(unit));
    let most = |(a, b): (usize, usize), (c, d)| (a.max(c), b.max(d));
    let (floats, rows) = needs.fold((problem.dim_v(), 0), most);
    // Every worker fits every unit, so that later calls find enough whoever does what.
    workers.iter_mut().for_each(|worker| worker.reserve(floats, rows));
    drain(units, (workers, crew), |unit, worker| of(unit).run(unit, worker));
    drain(merges, (workers, crew), |merge, worker| many.merge(merge, worker));
    let any = |work| units.iter().any(|unit| unit.work == work);
    let tiles = any(Work::Tiles).then_some(Form::Single);
    kernel_name(runner.level(), if any(Work::Prefill) { Some(form) } else { tiles })
}

/// What to call the kernel that ran: prefill in some form, or decode.
fn kernel_name(level: SimdLevel, prefill: Option<Form>) -> &'static str {
    match (level, prefill) {
        (SimdLevel::Portable, Some(_)) => "prefill-portable",
        (SimdLevel::Portable, None) => "decode-portable",
        (SimdLevel::Neon, Some(_)) => "prefill-neon",
        (SimdLevel::Neon, None) => "decode-neon",
        (SimdLevel::Avx2, Some(_)) => "prefill-avx2",
        (SimdLevel::Avx2, None) => "decode-avx2",
        (_, Some(Form::Matrix)) => "prefill-amx",
        (_, Some(Form::Pairs)) => "prefill-avx512bf16",
        (_, Some(Form::Single)) => "prefill-avx512",
        (_, None) => "decode-avx512",
    }
}

/// The LSE of two parts together, and what each part's rows count for; a part that saw nothing counts for nothing.
pub(crate) fn merge_weights(parts: [f32; 2]) -> (f32, [f32; 2]) {
    let top = parts[0].max(parts[1]);
    if top == f32::NEG_INFINITY {
        return (top, [0.0; 2]);
    }
    let weights = parts.map(|lse| f64::from(lse - top).exp());
    let sum: f64 = weights.iter().sum();
    ((f64::from(top) + sum.ln()) as f32, weights.map(|weight| (weight / sum) as f32))
}

/// Gives every item to one worker, in order.
pub(crate) fn drain<I: Send>(
    items: &mut [I],
    (workers, crew): (&mut [Worker], Crew),
    run: impl Fn(&mut I, &mut Worker) + Sync,
) {
    let queue = Mutex::new(items.iter_mut());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    crew.work(workers, |worker| {
        while let Some(item) = next() {
            run(item, worker);
        }
    });
}

/// Where the keys of a unit's sequence lie, for one key head.
#[derive(Clone, Copy)]
pub(crate) struct UnitKeys<'a> {
    keys: Keys<'a>,
    head: usize,
}

impl UnitKeys<'_> {
    /// Index of the first element of a key's row in K or V.
    pub(crate) fn row(&self, layout: &Layout, key: usize) -> usize {
        let (batch, row) = self.keys.place(key);
        layout.row(batch, self.head, row)
    }

    /// The same for each of `keys`, from the first of which on so many follow each other at equal distances.
    pub(crate) fn rows(
        &self,
        layout: &Layout,
        keys: Range<usize>,
        together: Option<usize>,
        to: &mut [usize],
    ) {
        let (mut key, step) = (keys.start, layout.strides()[2]);
        while key < keys.end {
            let end = together.map_or(keys.end, |size| keys.end.min((key / size + 1) * size));
            let first = self.row(layout, key);
            let run = to[key - keys.start..end - keys.start].iter_mut().enumerate();
            run.for_each(|(n, to)| *to = first + n * step);
            key = end;
        }
    }
}

impl<'a, T> Call<'a, T> {
    /// Where the keys of a unit lie.
    pub(crate) fn keys(&self, unit: &Unit) -> UnitKeys<'a> {
        UnitKeys { keys: self.problem.keys(unit.sequence), head: unit.kv_head }
    }

    /// What the queries of a unit are multiplied by: factors of Q and K among it, so that keys are read as they are.
    pub(crate) fn query_factor(&self, unit: &Unit, s: &Sequence) -> f32 {
        let factor = |operand, head| self.problem.factor(operand, [s.batch, head], 0);
        let of_q = factor(Operand::Q, unit.kv_head * self.problem.group());
        self.logits.query * (of_q * factor(Operand::K, unit.kv_head))
    }

    /// `rows` where weights are dropped at random, 0 elsewhere: how many have words of their own.
    pub(crate) fn dropout_rows(&self, rows: usize) -> usize {
        if self.problem.dropout().is_some() { rows } else { 0 }
    }

    /// Fills in what hashes of some rows of a unit begin with.
    pub(crate) fn set_words(&self, unit: &Unit, rows: Range<usize>, words: &mut RowWords<'_>) {
        let group = self.problem.group();
        for (n, row) in rows.enumerate() {
            let head = unit.kv_head * group + row % group;
            let Some(dropout) = self.problem.dropout_of(unit.sequence, head) else { return };
            words.set(n, dropout.row(row / group));
        }
    }

    /// Whether rows of every block of keys, which starts at a multiple of `block`, follow each other at equal distances.
    pub(crate) fn blocks_together(&self, block: usize) -> bool {
        self.problem.page_size().is_none_or(|size| size.is_multiple_of(block))
    }
}

impl<T: Lane> Call<'_, T> {
    /// Floats and rows that a unit needs.
    fn needs(&self, unit: &Unit) -> (usize, usize) {
        match unit.work {
            Work::Prefill | Work::Tiles => (prefill::memory(self, unit.rows.len()), 0),
            Work::Decode => (decode::memory(self, unit.rows.len()), unit.rows.len()),
            Work::Clear => (0, 0),
        }
    }

    fn run(&self, unit: &mut Unit, worker: &mut Worker) {
        let s = self.problem.sequence(unit.sequence);
        worker.redo.clear();
        self.pass(unit, &s, worker);
        // A hidden value that is NaN or infinite may have reached a row as 0·NaN. Alone, it meets visible keys only.
        let mut redo = std::mem::take(&mut worker.redo);
        for row in redo.drain(..) {
            let keys = visible(&self.problem, &s, &(row..row + 1));
            let keys = keys.start.max(unit.keys.start)..keys.end.min(unit.keys.end);
            let partial = unit.partial.map(|first| first + row - unit.rows.start);
            self.pass(&mut Unit { rows: row..row + 1, keys, partial, ..*unit }, &s, worker);
        }
        worker.redo = redo;
    }

    fn pass(&self, unit: &mut Unit, s: &Sequence, worker: &mut Worker) {
        match unit.work {
            Work::Prefill | Work::Tiles => prefill::run(self, unit, s, worker),
            Work::Decode => decode::run(self, unit, s, worker),
            Work::Clear => self.clear(unit),
        }
    }

    fn clear(&self, unit: &mut Unit) {
        // Nothing is added to rows that are not used.
        if self.problem.accumulate() {
            return;
        }
        let s = self.problem.sequence(unit.sequence);
        for row in unit.rows.clone() {
            let to = self.output.row(unit, &s, row);
            match to.values {
                Target::Same(values) => values.fill(T::from_f32(0.0)),
                Target::Wide(values) => values.fill(0.0),
            }
            to.lse.into_iter().for_each(|lse| *lse = f32::NEG_INFINITY);
        }
    }

    fn sink(&self, unit: &Unit, row: usize) -> Option<f32> {
        let group = self.problem.group();
        self.problem.sink_logits().map(|sinks| sinks[unit.kv_head * group + row % group])
    }

    /// Writes a row of a unit and notes it if it must be computed again.
    pub(crate) fn finish_or_redo(
        &self,
        unit: &mut Unit,
        s: &Sequence,
        row: usize,
        (sums, seen): (&[f32], Seen),
        redo: &mut Vec<usize>,
    ) {
        self.finish(unit, s, row, sums, seen);
        let meets_hidden = unit.rows.len() > 1 && !self.problem.mask().is_none();
        if meets_hidden && !sums.iter().all(|x| x.is_finite()) {
            redo.push(row);
        }
    }

    /// Writes a finished row, or its part; `sums` are not divided yet.
    fn finish(&self, unit: &mut Unit, s: &Sequence, row: usize, sums: &[f32], seen: Seen) {
        if let Some(first) = unit.partial {
            let to = self.output.partial(unit, first, row);
            let (values, state) = to.split_at_mut(sums.len());
            values.copy_from_slice(sums);
            state.copy_from_slice(&[seen.max, seen.sum]);
            return;
        }
        let norm = Norm::new(seen, self.logits.factor, self.sink(unit, row));
        self.write(sums, norm, self.output.row(unit, s, row));
    }

    /// Writes a row, or merges it into what is there.
    fn write(&self, from: &[f32], norm: Norm, to: OutputRow<'_, T>) {
        let factor = norm.factor() * self.problem.dropout().map_or(1.0, Dropout::factor);
        match (to.values, to.lse) {
            (Target::Wide(to), Some(lse)) if self.problem.accumulate() => {
                self.accumulate(from, norm, to, lse);
            }
            (Target::Same(to), Some(lse)) if self.problem.accumulate() => {
                if let Some(to) = T::as_f32_mut(to) {
                    self.accumulate(from, norm, to, lse);
                }
            }
            (to, lse) => {
                match to {
                    Target::Same(to) => self.runner.run(Narrow { from, factor, to }),
                    Target::Wide(to) => self.runner.run(Narrow { from, factor, to }),
                }
                lse.into_iter().for_each(|lse| *lse = norm.lse());
            }
        }
    }

    /// Both parts of a row weigh what their sums of exponentials say.
    fn accumulate(&self, from: &[f32], norm: Norm, to: &mut [f32], lse: &mut f32) {
        let (total, [old, new]) = merge_weights([*lse, norm.lse()]);
        *lse = total;
        self.runner.run(Accumulate { from, factor: norm.factor() * new, to, kept: old });
    }

    /// Puts the parts of rows together, in order.
    fn merge(&self, merge: &mut Merge, worker: &mut Worker) {
        let s = self.problem.sequence(merge.unit.sequence);
        let dim = self.problem.dim_v();
        let sums = worker.buffer.get(dim);
        for row in merge.unit.rows.clone() {
            let max = self.output.parts(merge, row).fold(NO_MAX, |max, part| max.max(part[dim]));
            let mut sum = 0.0;
            sums.fill(0.0);
            for part in self.output.parts(merge, row) {
                let weight = (self.logits.factor * (part[dim] - max)).exp2();
                sum += weight * part[dim + 1];
                sums.iter_mut().zip(part).for_each(|(to, x)| *to += weight * x);
            }
            self.finish(&mut merge.unit, &s, row, sums, Seen { max, sum });
        }
    }
}
