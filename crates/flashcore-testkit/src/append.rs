//! New rows of a cache: cases as data, the oracle in f64, and one check for every backend.
//!
//! Rows of the cache that are not appended to hold values that must stay unchanged, bit for bit.

use std::{fmt, ops::Range};

use flashcore_core::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendSpec, AppendValues, Backend, DType, Dims,
    E4M3, Element, Factors, Layout, PageTable, Pages, ProblemError, Rotary, Scales, Slots,
};
use half::{bf16, f16};

use crate::{
    bench::{Trouble, no_memory, run_caught},
    buffers::{Buffer, never_read, same_bits},
    merge::{Order, unit_in_last_place},
    rng::Rng,
    suite::{Outcome, Step, fail_if},
    values,
};

/// Where rows go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum To {
    /// After the contents of a padded cache of so many rows.
    Cache(usize),
    /// After the contents of pages of so many rows.
    Pages(usize),
    /// To slots in pages of so many rows.
    Slots(usize),
}

/// One append, whatever the element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Batch, heads, rows and features of the new keys.
    pub new: [usize; 4],
    /// Features of a value.
    pub dim_v: usize,
    /// Where rows go.
    pub to: To,
    /// Turned features, whether neighbours are pairs, whether queries stand together.
    pub rotary: Option<(usize, bool, bool)>,
    /// Heads and rows of queries to turn.
    pub queries: Option<[usize; 2]>,
    /// How tensors lie.
    pub order: Order,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { new, to, rotary, queries, order, .. } = self;
        write!(f, "append of {new:?} to {to:?}, rotary {rotary:?}, queries {queries:?}, {order:?}")
    }
}

/// Positions of the tables: some keys stand behind the last.
const POSITIONS: usize = 40;
/// Keys that sequences have already, in turn; −1 is no sequence.
const LENGTHS: [i32; 5] = [3, 17, -1, 0, 38];

impl Case {
    /// Pages of the cache and rows of each, or batch and rows where it is padded.
    fn cache(&self) -> [usize; 2] {
        match self.to {
            To::Cache(rows) => [self.new[0], rows],
            To::Pages(size) => [self.new[0] * 48usize.div_ceil(size) + 2, size],
            To::Slots(size) => [self.new[2].div_ceil(size) + 3, size],
        }
    }

    /// The factors of a cache of 8 bits: of every sequence and head, or of heads alone where sequences are not known.
    fn scales(&self) -> Scales {
        if matches!(self.to, To::Slots(_)) { Scales::Strided([0, 1]) } else { Scales::PerHead }
    }

    /// The case as a problem, with a cache of some type.
    pub fn problem(&self, dtype: DType, cache_dtype: DType) -> Result<AppendProblem, ProblemError> {
        let [batch, heads, rows, dim] = self.new;
        let layout = |batch, heads, rows, dim| self.order.layout(Dims::new(batch, heads, rows, dim));
        let new = [layout(batch, heads, rows, dim)?, layout(batch, heads, rows, self.dim_v)?];
        let [pages, size] = self.cache();
        let cache = [layout(pages, heads, size, dim)?, layout(pages, heads, size, self.dim_v)?];
        let rotary = self.rotary.map(|(dim, interleaved, together)| Rotary {
            dim,
            interleaved,
            positions: POSITIONS,
            together,
        });
        let q = self.queries.map(|[heads, rows]| layout(batch, heads, rows, dim)).transpose()?;
        let table = matches!(self.to, To::Pages(_)).then(|| Pages::new(48usize.div_ceil(size)));
        let slots = if matches!(self.to, To::Slots(_)) { Slots::Listed } else { Slots::Behind };
        let spec = AppendSpec {
            slots,
            pages: table,
            rotary,
            q: q.map(|q| [q; 2]),
            cache_dtype: Some(cache_dtype),
            scales: (cache_dtype == DType::E4M3).then(|| self.scales()),
            ..AppendSpec::new(dtype, new, cache)
        };
        spec.parse()
    }

    /// Lengths or slots, and the table; pages and slots are all different.
    fn values(&self, seed: u64, cache_dtype: DType) -> AppendValues {
        let factors = (cache_dtype == DType::E4M3).then(|| self.factors(seed));
        AppendValues { factors, ..self.places(seed) }
    }

    /// Factors from far too small, so that numbers saturate, to moderate.
    fn factors(&self, seed: u64) -> Factors {
        let (mut rng, [batch, heads, ..]) = (Rng::new(!seed), self.new);
        let count = self.scales().count(batch, heads);
        let mut tensor = || (0..count).map(|_| rng.pick(&[0.002, 0.01, 0.03, 0.3])).collect();
        Factors::of_cache(self.scales(), [tensor(), tensor()])
    }

    fn places(&self, seed: u64) -> AppendValues {
        let ([batch, _, rows, _], [pages, size]) = (self.new, self.cache());
        let mut rng = Rng::new(seed);
        let lengths: Vec<i32> = (0..batch).map(|n| LENGTHS[n % LENGTHS.len()]).collect();
        match self.to {
            To::Cache(_) => AppendValues { lengths: lengths.into(), ..AppendValues::default() },
            To::Pages(_) => {
                let columns = 48usize.div_ceil(size);
                let mut numbers: Vec<i32> =
                    rng.permutation(pages).into_iter().map(|page| page as i32).collect();
                numbers.truncate(batch * columns);
                numbers.iter_mut().skip(1).step_by(7).for_each(|page| *page = -1);
                let table = Some(PageTable::new(numbers, columns));
                AppendValues { lengths: lengths.into(), table, ..AppendValues::default() }
            }
            To::Slots(_) => {
                let all = rng.permutation(pages * size);
                let skip = |(n, slot): (usize, &usize)| if n % 5 == 2 { -1 } else { *slot as i64 };
                let slots: Vec<i64> = all.iter().take(rows).enumerate().map(skip).collect();
                AppendValues { slots: slots.into(), ..AppendValues::default() }
            }
        }
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    use {Order::*, To::*};
    let case =
        |new: [usize; 4], to, rotary, queries, order| Case { new, dim_v: new[3], to, rotary, queries, order };
    vec![
        case([5, 2, 1, 64], Cache(48), None, None, Tokens),
        case([3, 2, 7, 64], Cache(48), None, None, Dense),
        case([5, 2, 1, 128], Pages(16), None, None, Tokens),
        case([5, 1, 9, 64], Pages(1), None, None, Dense),
        case([5, 2, 4, 64], Pages(3), Some((64, true, false)), Some([4, 4]), Tokens),
        case([5, 2, 1, 128], Pages(16), Some((64, false, false)), Some([8, 1]), Tokens),
        case([2, 2, 3, 64], Cache(48), Some((32, true, true)), Some([2, 5]), Dense),
        case([5, 1, 6, 40], Cache(48), Some((16, false, true)), Some([3, 2]), Padded(3)),
        case([5, 2, 2, 63], Pages(8), Some((62, false, false)), None, Padded(1)),
        case([1, 2, 37, 64], Slots(16), None, None, Tokens),
        case([1, 3, 9, 96], Slots(1), None, None, Dense),
        case([1, 1, 20, 17], Slots(5), None, None, Padded(1)),
        Case { dim_v: 40, ..case([5, 2, 3, 72], Pages(16), Some((72, true, false)), None, Tokens) },
        case([0, 2, 3, 64], Cache(48), None, None, Dense),
        case([2, 2, 0, 64], Pages(16), Some((64, true, false)), Some([2, 3]), Dense),
    ]
}

/// Runs every case on a backend in every type and says what failed.
pub fn failures(backend: &dyn Backend, dtypes: &[DType], seed: u64) -> Vec<String> {
    let caches = |dtype: DType| [dtype, DType::E4M3].map(|cache| (dtype, cache));
    let pairs: Vec<_> = dtypes.iter().flat_map(|&dtype| caches(dtype)).collect();
    let all = cases().into_iter().flat_map(|case| pairs.iter().map(move |&pair| (case, pair)));
    let failed = all.filter_map(|(case, (dtype, cache))| {
        let outcome = check(backend, &case, (dtype, cache), seed);
        (outcome != Outcome::Passed).then(|| format!("{case} {dtype} to {cache}: {outcome}"))
    });
    failed.collect()
}

/// Checks one case on one backend, for new rows and a cache of these types.
pub fn check(backend: &dyn Backend, case: &Case, dtypes: (DType, DType), seed: u64) -> Outcome {
    let checked = match dtypes {
        (DType::F16, DType::F16) => check_as::<f16, f16>(backend, case, seed),
        (DType::BF16, DType::BF16) => check_as::<bf16, bf16>(backend, case, seed),
        (DType::F32, DType::F32) => check_as::<f32, f32>(backend, case, seed),
        (DType::F16, DType::E4M3) => check_as::<f16, E4M3>(backend, case, seed),
        (DType::BF16, DType::E4M3) => check_as::<bf16, E4M3>(backend, case, seed),
        (DType::F32, DType::E4M3) => check_as::<f32, E4M3>(backend, case, seed),
        (rows, cache) => Err(Outcome::Skipped(format!("the testkit does not know {rows} to {cache}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

/// The tensors of a case: new rows of `T`, a cache of `C`.
struct Bench<T, C> {
    problem: AppendProblem,
    values: AppendValues,
    /// New keys and values, queries.
    inputs: [Vec<T>; 3],
    tables: [Vec<T>; 2],
    before: Written<T, C>,
}

/// Caches of keys and values, and turned queries.
#[derive(Clone)]
struct Written<T, C> {
    caches: [Buffer<C>; 2],
    turned: Buffer<T>,
}

impl<T: Element, C: Element> Written<T, C> {
    /// The first element that another run wrote otherwise.
    fn first_difference(&self, other: &Self) -> Option<usize> {
        fn of<E: Element>(a: &Buffer<E>, b: &Buffer<E>) -> Option<usize> {
            a.slice().iter().zip(b.slice()).position(|(&a, &b)| !same_bits(a, b))
        }
        let caches = self.caches.iter().zip(&other.caches).find_map(|(a, b)| of(a, b));
        caches.or_else(|| of(&self.turned, &other.turned))
    }

    fn first_disturbed(&self) -> Option<isize> {
        self.caches.iter().find_map(Buffer::first_disturbed).or_else(|| self.turned.first_disturbed())
    }
}

fn draw<T: Element>(rng: &mut Rng, layout: &Layout) -> Vec<T> {
    let mut tensor = vec![never_read::<T>(); layout.span()];
    let dim = layout.dims().dim;
    values::for_each_row(layout, |_, start| {
        tensor[start..start + dim].fill_with(|| T::from_f32(rng.normal()))
    });
    tensor
}

/// A tensor of numbers amid guards.
fn held<T: Element>(rng: &mut Rng, layout: Layout) -> Result<Buffer<T>, Trouble> {
    let mut buffer = Buffer::filled(layout, 0, never_read()).ok_or_else(no_memory)?;
    let dim = layout.dims().dim;
    values::for_each_row(&layout, |_, start| {
        buffer.slice_mut()[start..start + dim].fill_with(|| T::from_f32(rng.normal()));
    });
    Ok(buffer)
}

fn check_as<T: Element, C: Element>(backend: &dyn Backend, case: &Case, seed: u64) -> Result<(), Outcome> {
    let bench = Bench::<T, C>::new(case, seed)?;
    let first = bench.run(backend)?;
    fail_if(Step::Correctness, bench.first_wrong(&first))?;
    let differs = first.first_difference(&bench.run(backend)?);
    fail_if(Step::Determinism, differs.map(|at| format!("element {at} has other bits in a second run")))?;
    let outside = first.first_disturbed();
    fail_if(Step::Isolation, outside.map(|at| format!("element {at} lies outside and was written")))
}

impl<T: Element, C: Element> Bench<T, C> {
    fn new(case: &Case, seed: u64) -> Result<Self, Trouble> {
        let (problem, values) = (case.problem(T::DTYPE, C::DTYPE)?, case.values(seed, C::DTYPE));
        let (spec, mut rng) = (problem.spec(), Rng::new(seed));
        let [q, turned] = spec.q.unwrap_or([Layout::bhsd(Dims::new(0, 1, 1, 1))?; 2]);
        let inputs = [draw(&mut rng, &spec.k), draw(&mut rng, &spec.v), draw(&mut rng, &q)];
        let angles = spec.rotary.map_or(0, |rotary| rotary.positions * rotary.dim / 2);
        let mut tables = [Vec::new(), Vec::new()];
        for _ in 0..angles {
            let angle = 6.3 * f64::from(rng.uniform());
            tables[0].push(T::from_f32(angle.cos() as f32));
            tables[1].push(T::from_f32(angle.sin() as f32));
        }
        let caches = [held(&mut rng, spec.cache_k)?, held(&mut rng, spec.cache_v)?];
        let before = Written { caches, turned: held(&mut rng, turned)? };
        Ok(Self { problem, values, inputs, tables, before })
    }

    /// Runs the problem on copies of what is there; a panic of the backend is a failure.
    fn run(&self, backend: &dyn Backend) -> Result<Written<T, C>, Trouble> {
        let mut after = self.before.clone();
        let spec = self.problem.spec();
        let [k, v, q] = self.inputs.each_ref().map(|input| T::erase(input));
        let rotary = spec.rotary.map(|_| self.tables.each_ref().map(|table| T::erase(table)));
        let inputs = AppendInputs { k, v, rotary, q: spec.q.map(|_| q) };
        let [cache_k, cache_v] = after.caches.each_mut().map(|buffer| C::erase_mut(buffer.slice_mut()));
        let turned = T::erase_mut(after.turned.slice_mut());
        let outputs = AppendOutputs { cache_k, cache_v, q: spec.q.map(|_| turned) };
        let mut call = AppendCall::bind(&self.problem, &self.values, inputs, outputs)?;
        run_caught(|| backend.append(&mut call))?;
        Ok(after)
    }

    /// What is first wrong after a run: a new row, or one that should not have been touched.
    fn first_wrong(&self, after: &Written<T, C>) -> Option<String> {
        let spec = self.problem.spec();
        let [k, v] = self.before.caches.each_ref().map(Expected::of);
        let mut expected = [k, v, Expected::of(&self.before.turned)];
        for (n, layout) in [spec.k, spec.v].iter().enumerate() {
            let cache = [spec.cache_k, spec.cache_v][n];
            values::for_each_row(layout, |[batch, head, row], start| {
                let Some((page, at)) = self.values.place(&self.problem, batch, row) else { return };
                let position = self.values.lengths.get(batch).map_or(0, |&len| len as usize) + row;
                let rotary = spec.rotary.filter(|_| n == 0);
                let values = &self.inputs[n][start..][..layout.dims().dim];
                let divisor = self.values.divisors(&self.problem, batch, head)[n];
                let to = cache.row(page, head, at);
                self.put(&mut expected[n], to, values, rotary, position);
                expected[n].divide(C::DTYPE, to..to + values.len(), divisor);
            });
        }
        if let Some([q, turned]) = spec.q {
            values::for_each_row(&q, |[batch, head, row], start| {
                let moved = if spec.rotary.is_some_and(|rotary| rotary.together) { 0 } else { row };
                let position = self.values.lengths[batch].max(0) as usize + moved;
                let values = &self.inputs[2][start..][..q.dims().dim];
                self.put(&mut expected[2], turned.row(batch, head, row), values, spec.rotary, position);
            });
        }
        let [k, v, q] = &expected;
        let caches = [(k, &after.caches[0], "keys"), (v, &after.caches[1], "values")];
        let wrong = caches.iter().find_map(|(expected, after, name)| {
            expected.first_wrong(after.slice()).map(|reason| format!("{reason} of the cache of {name}"))
        });
        let queries = || Some(format!("{} of the queries", q.first_wrong(after.turned.slice())?));
        wrong.or_else(queries)
    }

    /// What a row should be, rotated in f64.
    fn put(&self, to: &mut Expected, start: usize, row: &[T], rotary: Option<Rotary>, position: usize) {
        let exact: Vec<f64> = row.iter().map(|x| f64::from(x.to_f32())).collect();
        to.values[start..start + row.len()].copy_from_slice(&exact);
        let Some(Rotary { dim, interleaved, positions, .. }) = rotary else { return };
        let first = position.min(positions - 1) * (dim / 2);
        for n in 0..dim / 2 {
            let (a, b) = if interleaved { (2 * n, 2 * n + 1) } else { (n, n + dim / 2) };
            let [cos, sin] = self.tables.each_ref().map(|table| f64::from(table[first + n].to_f32()));
            for (at, x, y) in [(a, exact[a], -exact[b]), (b, exact[b], exact[a])] {
                let turned = x * cos + y * sin;
                // f32 rounds each product and their sum; the result is rounded once more.
                let noise = 2.0 * f64::from(f32::EPSILON) * ((x * cos).abs() + (y * sin).abs());
                to.values[start + at] = turned;
                to.noise[start + at] = noise + unit_in_last_place(T::DTYPE, turned);
            }
        }
    }
}

/// What a tensor should hold, and how far each element may be from it.
struct Expected {
    values: Vec<f64>,
    noise: Vec<f64>,
}

impl Expected {
    fn of<T: Element>(before: &Buffer<T>) -> Self {
        let values: Vec<f64> = before.slice().iter().map(|x| f64::from(x.to_f32())).collect();
        Self { noise: vec![0.0; values.len()], values }
    }

    /// What is left in a cache of 8 bits: divided, rounded once more, and no larger than its largest number.
    fn divide(&mut self, dtype: DType, range: Range<usize>, divisor: f32) {
        if dtype != DType::E4M3 {
            return;
        }
        for (value, noise) in self.values[range.clone()].iter_mut().zip(&mut self.noise[range]) {
            let [exact, most] = [*value / f64::from(divisor), E4M3::MAX.into()];
            // Half a unit in the last place, and what f32 made of the number before.
            let unit = exact.abs().log2().floor().max(-6.0).exp2() / 8.0;
            let carried = *noise / f64::from(divisor) + exact.abs() * f64::from(f32::EPSILON);
            (*value, *noise) =
                (exact.clamp(-most, most), if exact.abs() > most { 0.0 } else { unit / 2.0 + carried });
        }
    }

    fn first_wrong<T: Element>(&self, after: &[T]) -> Option<String> {
        let got = after.iter().map(|x| f64::from(x.to_f32()));
        let mut pairs = got.zip(self.values.iter().zip(&self.noise)).enumerate();
        pairs.find_map(|(at, (got, (&expected, &noise)))| {
            let near = (got - expected).abs() <= noise || (got.is_nan() && expected.is_nan());
            (!near).then(|| format!("{got} instead of {expected} at element {at}"))
        })
    }
}
