//! Products of matrices of any layout, many at a time, on all threads. Called by `grouped` and `moe`; calls `factors`.
//!
//! Left factors are packed once, a chunk of them at a time. Then threads take panels of the right factors: each is packed
//! into memory that stays in cache and is multiplied with every row of its product there. With few rows, which are memory
//! bound anyway, dot products read the right factor's columns in place, if these are contiguous.
//!
//! The bits of a result depend only on its row, its column, the depth, and whether there are few rows.

use std::{
    marker::PhantomData,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use half::bf16;

use crate::{
    crew::Crew,
    factors::Matrix,
    output::Shared,
    scratch::Buffer,
    simd::{
        Lane,
        dots::{Dots, depth_padded},
        pack::Terms,
        panel::{Ahead, COLUMNS, DEPTH, PANEL, PanelProduct, STRIDE},
        product::Pair,
        runner::Runner,
    },
};

/// Rows multiplied with a panel while it is in cache.
const ROWS: usize = 256;
/// Terms of left factors that are packed at a time.
const CHUNK: usize = 1 << 22;
/// Terms of left factors that one thread packs before others could help.
const ALONE: usize = 1 << 12;
/// Rows below this number are few.
const FEW: usize = 13;
/// Panels whose columns lie side by side are packed together, up to this number: memory is read in longer pieces.
const WIDE: usize = 8;
/// Units that each thread gets at least, where there is work for them.
const UNITS: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Extents of a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extents {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

/// A product: rows × depth times depth × columns.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a, A, B> {
    pub(crate) extents: Extents,
    pub(crate) a: Matrix<'a, A>,
    pub(crate) b: Matrix<'a, B>,
}

impl<'a, A: Lane, B: Lane> Task<'a, A, B> {
    /// The same where it is bf16.
    fn as_bf16(&self) -> Option<Task<'a, bf16, bf16>> {
        Some(Task { extents: self.extents, a: self.a.as_bf16()?, b: self.b.as_bf16()? })
    }
}

/// Some results of a task: up to [`COLUMNS`] columns, those of a panel.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) task: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

/// How elements of both factors are multiplied: as terms of one type.
trait Path<A: Lane, B: Lane>: Terms<A> + Terms<B> + Send + Sync {
    /// Elements of a term.
    const PAIRED: usize = <Self as Terms<A>>::EACH;
    fn panel(runner: Runner, product: PanelProduct<'_, Self>);
    fn dots(runner: Runner, dots: Dots<'_, Self, B>);
}

impl<A: Lane, B: Lane> Path<A, B> for f32 {
    fn panel(runner: Runner, product: PanelProduct<'_, f32>) {
        runner.run(product);
    }

    fn dots(runner: Runner, dots: Dots<'_, f32, B>) {
        runner.run(dots);
    }
}

/// Where bf16 is multiplied pair by pair.
impl Path<bf16, bf16> for Pair {
    fn panel(runner: Runner, mut product: PanelProduct<'_, Pair>) {
        runner.run_pair_panel(&mut product);
    }

    fn dots(runner: Runner, Dots { x, starts, w, rows, depth, to }: Dots<'_, Pair, bf16>) {
        runner.run_pair_dots(&mut Dots { x: bytemuck::cast_slice(x), starts, w, rows, depth, to });
    }
}

/// Computes all products and hands out the results: rows of [`COLUMNS`] values, of which those beyond the block's columns
/// mean nothing. Where `alike`, few rows are multiplied as many are, so that bits do not depend on how many there are.
pub(crate) fn multiply<A: Lane, B: Lane>(
    tasks: &[Task<'_, A, B>],
    alike: bool,
    with: (Runner, Crew),
    write: impl Fn(&Block, &mut [f32]) + Sync + Send,
) {
    match tasks.iter().map(Task::as_bf16).collect::<Option<Vec<_>>>().filter(|_| with.0.has_pairs()) {
        Some(tasks) => Products::<_, _, Pair>::new(&tasks, alike, with).compute(write),
        None => Products::<_, _, f32>::new(tasks, alike, with).compute(write),
    }
}

/// Rows of a task whose packed form is in memory together.
#[derive(Clone, Debug)]
struct Span {
    task: usize,
    rows: Range<usize>,
    /// Whether dot products are taken.
    few: bool,
    /// Panels that are packed together.
    wide: usize,
    /// Where their terms start, and how many a row has.
    at: usize,
    line: usize,
    /// One past the number of the last unit of work.
    end: usize,
}

impl Span {
    /// Rows that meet a panel together.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let end = self.rows.end;
        self.rows.clone().step_by(ROWS).map(move |first| first..end.min(first + ROWS))
    }

    /// Where the terms of a block start, those of part `part` of the depth.
    fn start(&self, block: &Range<usize>, part: usize) -> usize {
        self.at + (block.start - self.rows.start) * self.line + part * block.len() * STRIDE
    }
}

/// A unit of work: rows that meet a panel.
struct Unit<'a> {
    span: &'a Span,
    block: Block,
}

/// What a thread works with.
#[derive(Default)]
struct Worker {
    panel: Buffer,
    results: Buffer,
    /// Addresses of the next panel.
    ahead: Vec<usize>,
}

/// The columns of each panel.
fn panels(columns: &Range<usize>) -> impl ExactSizeIterator<Item = Range<usize>> + Clone + use<> {
    let end = columns.end;
    columns.clone().step_by(COLUMNS).map(move |first| first..end.min(first + COLUMNS))
}

/// Tasks, and how they are multiplied.
struct Products<'a, A, B, E> {
    tasks: &'a [Task<'a, A, B>],
    alike: bool,
    runner: Runner,
    crew: Crew,
    terms: PhantomData<fn() -> E>,
}

impl<'a, A: Lane, B: Lane, E: Path<A, B>> Products<'a, A, B, E> {
    fn new(tasks: &'a [Task<'a, A, B>], alike: bool, (runner, crew): (Runner, Crew)) -> Self {
        Self { tasks, alike, runner, crew, terms: PhantomData }
    }

    fn compute(&self, write: impl Fn(&Block, &mut [f32]) + Sync + Send) {
        let mut packed = Buffer::default();
        let mut workers: Vec<Worker> = (0..self.crew.threads()).map(|_| Worker::default()).collect();
        for spans in self.chunks() {
            let len = spans.last().map_or(0, |span| span.at + span.rows.len() * span.line);
            let packed: &mut [E] = bytemuck::cast_slice_mut(packed.get(len));
            self.pack(&spans, packed);
            let (next, packed) = (AtomicUsize::new(0), &*packed);
            let take = || self.unit(&spans, next.fetch_add(1, Ordering::Relaxed));
            self.crew.work(&mut workers, |worker| {
                let mut unit = take();
                while let Some(current) = unit {
                    unit = take();
                    self.multiply(&current, unit.as_ref(), packed, worker);
                    let (rows, panels) = (current.block.rows.len(), panels(&current.block.columns));
                    let values = worker.results.get(panels.len() * rows * COLUMNS);
                    for (columns, values) in panels.zip(values.chunks_mut(rows * COLUMNS)) {
                        write(&Block { columns, ..current.block.clone() }, values);
                    }
                }
            });
        }
    }

    /// All rows, as many at a time as [`CHUNK`] allows.
    fn chunks(&self) -> Vec<Vec<Span>> {
        let (mut chunks, mut chunk, mut len) = (Vec::new(), Vec::<Span>::new(), 0);
        let all =
            |task: &Task<'_, A, B>| task.extents.columns.div_ceil(COLUMNS) * task.extents.rows.div_ceil(ROWS);
        let most = self.tasks.iter().map(all).sum::<usize>() / (UNITS * self.crew.threads());
        for (n, task) in self.tasks.iter().enumerate() {
            let Extents { rows: all, columns, depth } = task.extents;
            let few = !self.alike && all < FEW && depth > 0 && task.b.streams();
            let line = if few { depth_padded(depth) / E::PAIRED } else { self.parts(depth) * STRIDE };
            let wide = if task.b.is_wide() { most.clamp(1, WIDE) } else { 1 };
            let step = (CHUNK / line.max(1) / ROWS).max(1) * ROWS;
            for first in (0..all).step_by(step).filter(|_| columns > 0) {
                let rows = first..all.min(first + step);
                if len + rows.len() * line > CHUNK && !chunk.is_empty() {
                    chunks.push(std::mem::take(&mut chunk));
                    len = 0;
                }
                let units =
                    columns.div_ceil(wide * COLUMNS) * if few { 1 } else { rows.len().div_ceil(ROWS) };
                let end = chunk.last().map_or(0, |span| span.end) + units;
                chunk.push(Span { task: n, rows: rows.clone(), few, wide, at: len, line, end });
                len += rows.len() * line;
            }
        }
        chunks.push(chunk);
        chunks
    }

    /// Parts of the depth that are packed one after another.
    fn parts(&self, depth: usize) -> usize {
        depth.div_ceil(DEPTH * E::PAIRED)
    }

    fn part(&self, depth: usize, n: usize) -> Range<usize> {
        let len = DEPTH * E::PAIRED;
        n * len..depth.min((n + 1) * len)
    }

    /// Packs the left factors.
    fn pack(&self, spans: &[Span], packed: &mut [E]) {
        let parts = |span: &Span| if span.few { 1 } else { self.parts(self.tasks[span.task].extents.depth) };
        let jobs =
            |span| (0..parts(span)).flat_map(move |part| span.blocks().map(move |rows| (span, rows, part)));
        let jobs: Vec<(&Span, Range<usize>, usize)> = spans.iter().flat_map(jobs).collect();
        let crew = if packed.len() <= ALONE { Crew::Caller } else { self.crew };
        let to = Shared::new(packed);
        crew.each_with(jobs.len(), |stage: &mut Buffer, n| {
            let (span, rows, part) = &jobs[n];
            let Task { extents, a, .. } = &self.tasks[span.task];
            let stage = bytemuck::cast_slice_mut(stage.get(PANEL));
            // SAFETY: rows are disjoint, and so are parts of the depth.
            unsafe {
                if span.few {
                    let to = to.range(span.at, rows.len() * span.line);
                    to.fill(E::zeroed());
                    a.pack_rows((rows.clone(), 0..extents.depth), (to, span.line), stage, self.runner);
                } else {
                    let to = to.range(span.start(rows, *part), rows.len() * STRIDE);
                    let depth = self.part(extents.depth, *part);
                    a.pack_rows((rows.clone(), depth), (to, STRIDE), stage, self.runner);
                }
            }
        });
    }

    /// Unit number `n`; blocks of rows that meet the same panel follow each other.
    fn unit<'s>(&self, spans: &'s [Span], n: usize) -> Option<Unit<'s>> {
        let at = spans.partition_point(|span| span.end <= n);
        let (span, before) = (spans.get(at)?, at.checked_sub(1).map_or(0, |before| spans[before].end));
        let blocks = if span.few { 1 } else { span.rows.len().div_ceil(ROWS) };
        let (panel, block) = ((n - before) / blocks, (n - before) % blocks);
        let (columns, first) = (self.tasks[span.task].extents.columns, span.rows.start + block * ROWS);
        let width = span.wide * COLUMNS;
        let columns = panel * width..columns.min((panel + 1) * width);
        let rows = first..span.rows.end.min(first + ROWS);
        Some(Unit { span, block: Block { task: span.task, rows, columns } })
    }

    /// The results of a unit, panel after panel; fetches what the next one begins with.
    fn multiply(&self, unit: &Unit<'_>, next: Option<&Unit<'_>>, packed: &[E], worker: &mut Worker) {
        let (Task { extents, b, .. }, block) = (&self.tasks[unit.span.task], &unit.block);
        let (rows, depth, panels) = (block.rows.len(), extents.depth, panels(&block.columns));
        let Worker { panel, results, ahead } = worker;
        let results = results.get(panels.len() * rows * COLUMNS);
        if unit.span.few {
            return self.take_dots(unit, packed, results);
        }
        if depth == 0 {
            results.fill(0.0);
        }
        for part in 0..self.parts(depth) {
            let some = self.part(depth, part);
            let packed_b: &mut [E] = bytemuck::cast_slice_mut(panel.get(panels.len() * PANEL));
            b.pack_panels((some.clone(), block.columns.clone()), packed_b, self.runner);
            let later = (part + 1 < self.parts(depth)).then_some((unit, part + 1));
            let lines = self.look_ahead(later.or(next.map(|next| (next, 0))), ahead);
            let mut starts = ahead.chunks(ahead.len().div_ceil(panels.len()).max(1));
            let of_panels = results.chunks_mut(rows * COLUMNS).zip(packed_b.chunks(PANEL));
            for (columns, (c, b)) in panels.clone().zip(of_panels) {
                let product = PanelProduct {
                    rows,
                    columns: columns.len(),
                    depth: some.len().div_ceil(E::PAIRED),
                    a: &packed[unit.span.start(&block.rows, part)..],
                    b,
                    c,
                    add: part > 0,
                    ahead: Ahead { starts: starts.next().unwrap_or_default(), lines },
                };
                E::panel(self.runner, product);
            }
        }
    }

    /// Lists what a part of a unit reads of its right factor; returns how many cache lines follow each other.
    fn look_ahead(&self, later: Option<(&Unit<'_>, usize)>, to: &mut Vec<usize>) -> usize {
        to.clear();
        let Some((unit, part)) = later.filter(|(unit, _)| !unit.span.few) else { return 0 };
        let Task { extents, b, .. } = &self.tasks[unit.span.task];
        b.addresses((self.part(extents.depth, part), unit.block.columns.clone()), to).div_ceil(LINE)
    }

    /// The results of few rows.
    fn take_dots(&self, unit: &Unit<'_>, packed: &[E], results: &mut [f32]) {
        let (Task { extents, b, .. }, span) = (&self.tasks[unit.span.task], unit.span);
        let starts: [usize; FEW] = std::array::from_fn(|row| row * span.line * E::PAIRED);
        let (starts, x) = (&starts[..span.rows.len()], &packed[span.at..]);
        for run in b.columns.runs(&unit.block.columns) {
            let (w, to) = ((&b.data[run.start..], run.step), (&mut results[run.at..], COLUMNS));
            E::dots(self.runner, Dots { x, starts, w, rows: run.count, depth: extents.depth, to });
        }
    }
}
