//! A block of rows with one factor, read once: it is copied to shared memory, scanned for its largest magnitude, and
//! rounded. Registers could hold it too, but the compiler then keeps the values unpacked by the scan, twice the size.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{Builder, F32, Params, Reg, Scope, Shared};

use super::{
    Arguments, BYTES, Config, THREADS, floats,
    gather::{Care, counted, is_broken, over_cta},
    round::{rounded, store},
    slice::{Line, Slice},
    slots,
};
use crate::parts::tensor::TensorArgument;

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let out = TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.spec().to));
    let factors = params.buffer(b, "factors", slots::FACTORS);
    let means = cfg.centred.then(|| params.buffer(b, "means", slots::MEANS));
    let memory = b.shared(THREADS / 32 * BYTES, 16);
    let memory = b.shared_at(memory);
    let places = Places::reserve(b, cfg);
    let slice = Slice::of_cta(b, cfg, args);
    // Lanes behind the last column have nothing.
    let inside = b.let_(slice.column.lt(args.dim));
    let end = b.select(inside, slice.end.min(slice.used), 0);
    let from = slice.start(b, cfg, &x, slice.column, cfg.from.bytes());
    let lines = Line::ask(b, cfg, from, (slice.first, end), cfg.held);
    let means = means.map(|means| {
        let column = b.select(inside, slice.column, 0);
        let first = b.let_(slice.plane * args.dim + column);
        floats(b, means, first, cfg.shape.width)
    });
    let means = means.as_deref();
    let top = largest(b, cfg, &lines, &places, means);
    let all = over_cta(b, memory, top);
    let factor = args.factor(b, all);
    let (thread, at) = (b.thread(), b.let_(factors + slice.index.mul_wide(BYTES)));
    b.predicated(thread.eq(0), |b| b.store_global(at, &[factor.into()]));
    let inverses = vec![b.rcp(factor); cfg.shape.width as usize];
    let end = b.select(inside, slice.end, 0);
    let to = slice.start(b, cfg, &out, slice.column, 1).next(b, cfg.held);
    for (n, (line, at)) in (0..).zip(lines.iter().zip(to)) {
        let line = line.taken_up(b, places.of(n));
        let values = line.values(b, means);
        let words = rounded(b, cfg, &line, &values, &inverses);
        let there = b.let_((slice.first + n * cfg.shape.groups()).lt(end));
        b.predicated(there, |b| store(b, cfg, at, &words));
    }
}

/// Where a thread puts its rows.
struct Places {
    first: Shared,
    /// Bytes to the next.
    step: u32,
}

impl Places {
    fn reserve(b: &mut Builder, cfg: &Config) -> Self {
        let bytes = (cfg.shape.width * cfg.from.bytes() as u32).max(BYTES);
        let (step, thread) = (THREADS * bytes, b.thread());
        let memory = b.shared(cfg.held * step, 16);
        let (memory, own) = (b.shared_at(memory), b.let_(thread * bytes));
        Self { first: memory.plus(b, own), step }
    }

    const fn of(&self, row: u32) -> Shared {
        self.first.at(row * self.step)
    }
}

/// The largest magnitude of a thread's rows, which it puts down.
fn largest(
    b: &mut Builder,
    cfg: &Config,
    lines: &[Line],
    places: &Places,
    means: Option<&[Reg<F32>]>,
) -> Reg<F32> {
    for (n, line) in (0..).zip(lines) {
        line.put_down(b, places.of(n));
    }
    let top = b.var_in::<F32>(Scope::Lane, 0.0);
    let look = |b: &mut Builder, care| {
        for (n, line) in (0..).zip(lines) {
            let line = line.taken_up(b, places.of(n));
            let row = of_row(b, cfg, &line, means, care);
            b.set(top, top.max(row));
        }
    };
    look(b, Care::None);
    let broken = is_broken(b, &[top]);
    b.if_(broken, |b| {
        b.set(top, 0.0);
        look(b, Care::Finite);
    });
    top
}

/// The largest magnitude of a row.
fn of_row(b: &mut Builder, cfg: &Config, line: &Line, means: Option<&[Reg<F32>]>, care: Care) -> Reg<F32> {
    let values = line.values(b, means);
    let sizes: Vec<_> = values.into_iter().map(|value| counted(b, cfg.stage, value, care)).collect();
    let row = sizes.into_iter().reduce(|x, y| b.max(x, y)).expect("a row has columns");
    // What was not read is zero as it is, but for a mean.
    if cfg.centred { b.select(line.there, row, 0.0) } else { row }
}
