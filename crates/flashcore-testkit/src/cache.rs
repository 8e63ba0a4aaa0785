//! Queries of 16 bits over keys and values of E4M3, on any backend: the cases of attention with their keys quantised.
//!
//! The oracle is f64 on the quantised bytes and factors, so that a verdict is only about the backend; the yardstick and
//! the error rule are those of the queries' type. Factors differ from sequence to sequence, also if those share pages,
//! and unused elements are NaN.

use flashcore_core::{
    Backend, DType, Data, Dims, E4M3, Element, Factors, HostCall, Instance, Layout, Lengths, Mask, Problem,
    Scales, Spec, Values,
};
use half::{bf16, f16};

use crate::{
    answer::Rows,
    bench::{Run, Trouble, is_used, no_memory, run_caught},
    buffers::{Buffer, never_read, unwritten},
    cases::{self, Case, Cost, Sinks, Tag},
    compare::Rule,
    inputs::{Inputs, Place, Placement},
    kinds::Kind,
    pages::Paging,
    plain,
    properties::{expect_same_bits, pages as laws},
    random,
    rng::Rng,
    suite::{Outcome, Step},
    values,
};

/// A case over a cache of 8 bits.
#[derive(Clone, Debug)]
pub struct CacheCase {
    pub case: Case,
    pub scales: Option<Scales>,
    /// Whether the result is f32.
    pub wide: bool,
}

/// Kinds of factors, in turn.
const SCALES: [Option<Scales>; 5] = [
    Some(Scales::PerHead),
    Some(Scales::PerTensor),
    Some(Scales::Strided([0, 1])),
    None,
    Some(Scales::Strided([5, 2])),
];

/// What cases of attention a cache is tried with.
const TAGS: [Tag; 9] = [
    Tag::Pages,
    Tag::UsedLengths,
    Tag::EmptyRows,
    Tag::ZeroLength,
    Tag::Gqa,
    Tag::Ragged,
    Tag::Decode,
    Tag::Softcap,
    Tag::Sinks,
];

fn over_cache(n: usize, case: Case) -> CacheCase {
    let case = Case { name: format!("cache, {}", case.name), ..case };
    CacheCase { case, scales: SCALES[n % SCALES.len()], wide: n % 4 == 3 }
}

/// The cases of attention that a cache may have, up to a cost.
pub fn cases(cost: Cost) -> Vec<CacheCase> {
    let suits = |case: &Case| TAGS.contains(&case.tag) && case.cost() <= cost;
    cases::all()
        .into_iter()
        .filter(suits)
        .chain(own())
        .enumerate()
        .map(|(n, case)| over_cache(n, case))
        .collect()
}

/// A few small cases of every kernel, for a simulator.
pub fn tiny() -> Vec<CacheCase> {
    own().into_iter().enumerate().map(|(n, case)| over_cache(n, case)).collect()
}

fn own() -> Vec<Case> {
    const PAIRS: [(u32, u32); 4] = [(1, 90), (1, 17), (1, 0), (1, 64)];
    const MIXED: [(u32, u32); 5] = [(1, 70), (20, 45), (0, 9), (2, 2), (3, 0)];
    let decode = |name: &str, size, dim| Case {
        mask: Mask::CAUSAL,
        ..Case::paged(name, Paging::of(size), &PAIRS, [4, 2], dim)
    };
    let mixed = |name: &str, size, dim| {
        let paging = Paging { packed: true, shared: 1, ..Paging::of(size) };
        Case { mask: Mask::CAUSAL, ..Case::paged(name, paging, &MIXED, [4, 2], dim) }
    };
    let new = |name: &str, shape, dim| Case::new(Tag::Decode, name, shape, dim);
    let used = Lengths::keys([90, 1, 0]);
    vec![
        decode("pages of 1", 1, 64),
        decode("pages of 16", 16, 128),
        Case { placement: Placement::Padded, ..decode("pages apart", 3, 64) },
        Case { dim_v: 64, ..decode("other dim of values", 16, 96) },
        decode("dim 256", 16, 256),
        mixed("mixed", 16, 64),
        Case { softcap: Some(20.0), ..mixed("mixed, softcap", 3, 128) },
        Case { sinks: Sinks::Normal, mask: Mask::window(20, 0), ..mixed("mixed, sinks, window", 16, 32) },
        Case { batch_invariant: true, ..mixed("mixed, batch invariant", 8, 64) },
        Case { lengths: used, ..new("padded", [3, 4, 2, 1, 100], 64) },
        Case { mask: Mask::CAUSAL, ..new("two blocks of rows", [1, 20, 1, 1, 130], 64) },
        Case { mask: Mask::CAUSAL, ..new("many queries", [2, 2, 1, 70, 100], 128) },
        Case { placement: Placement::Interleaved, ..new("heads inside rows", [2, 2, 2, 40, 70], 80) },
        new("narrow head", [1, 2, 1, 3, 50], 16),
        new("odd pairs", [1, 2, 1, 3, 50], 22),
        Case { inputs: Inputs::Of(Kind::Outliers), ..new("outliers", [1, 4, 1, 2, 200], 64) },
        Case { inputs: Inputs::Of(Kind::Sharp), ..new("sharp", [1, 4, 1, 2, 200], 64) },
        Case { inputs: Inputs::Rising, ..new("rising", [1, 4, 1, 2, 200], 64) },
        Case::ragged(Tag::Ragged, "packed", &[(1, 40), (5, 20), (0, 3), (30, 30)], [4, 2], 64),
        Case { dim_v: 512, ..Case::paged("latent", Paging::of(16), &[(1, 17), (2, 9)], [4, 1], 576) },
    ]
}

/// The `index`-th random case of a seed.
pub fn random(seed: u64, index: u64, limits: random::Limits) -> CacheCase {
    // Nobody trains with a cache.
    let case = Case { dropout: None, ..random::any(seed, index, limits) };
    over_cache(index as usize, case)
}

/// Laws of pages over a cache: bits depend neither on the order of pages nor on what else is in a batch.
pub fn broken_laws(backend: &dyn Backend, seed: u64) -> Vec<String> {
    let scales = Some(Scales::PerTensor);
    let run = |case: &Case, numbers: &[Vec<f32>; 3]| {
        let case = CacheCase { case: case.clone(), scales, wide: false };
        let bench = Bench::<bf16>::with(&case, numbers, seed)?;
        Ok::<_, Outcome>(bench.run::<bf16>(backend)?.answer(&bench.problem))
    };
    let order = || {
        let [before, after] = laws::in_two_orders(seed).map(|(case, numbers)| run(&case, &numbers));
        expect_same_bits(&before?, &after?)
    };
    let laws = [("the order of pages", order()), ("the batch", laws::others_do_not_matter_to(run, seed))];
    laws.into_iter().filter_map(|(what, law)| Some(format!("{what} matters: {}", law.err()?))).collect()
}

/// Runs cases on a backend and says what failed; what it does not take counts as failed where `all` must be taken.
pub fn failures(backend: &dyn Backend, cases: &[CacheCase], seed: u64, all: bool) -> Vec<String> {
    let failed = cases.iter().enumerate().filter_map(|(n, case)| {
        let dtype = [DType::BF16, DType::F16][n % 2];
        let outcome = check(backend, case, dtype, seed);
        let bad = outcome.is_failure() || (all && outcome != Outcome::Passed);
        bad.then(|| format!("{} {dtype} {:?}: {outcome}", case.case, case.scales))
    });
    failed.collect()
}

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &CacheCase, dtype: DType, seed: u64) -> Outcome {
    let checked = match (dtype, case.wide) {
        (DType::F16, false) => judged::<f16, f16>(backend, case, seed),
        (DType::F16, true) => judged::<f16, f32>(backend, case, seed),
        (DType::BF16, false) => judged::<bf16, bf16>(backend, case, seed),
        (DType::BF16, true) => judged::<bf16, f32>(backend, case, seed),
        (other, _) => Err(Outcome::Skipped(format!("{other} queries have no cache of 8 bits"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

/// Checks a problem over a cache with the lengths, table and factors of a call, holding random numbers.
pub fn check_problem(backend: &dyn Backend, problem: &Problem, values: &Values, seed: u64) -> Outcome {
    let checked = match (problem.dtype(), problem.out_dtype()) {
        (DType::F16, DType::F16) => drawn::<f16, f16>(backend, problem, values, seed),
        (DType::F16, _) => drawn::<f16, f32>(backend, problem, values, seed),
        (_, DType::BF16) => drawn::<bf16, bf16>(backend, problem, values, seed),
        _ => drawn::<bf16, f32>(backend, problem, values, seed),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

fn drawn<T: Element, O: Element>(
    backend: &dyn Backend,
    problem: &Problem,
    values: &Values,
    seed: u64,
) -> Result<(), Outcome> {
    let dims = [problem.q(), problem.k(), problem.v()].map(|layout| layout.dims());
    let numbers = Inputs::Normal.values(dims, &mut Rng::new(seed));
    Bench::<T>::holding(problem.clone(), values.clone(), &numbers, [0; 4])?.judged::<O>(backend)
}

fn judged<T: Element, O: Element>(backend: &dyn Backend, case: &CacheCase, seed: u64) -> Result<(), Outcome> {
    Bench::<T>::new(case, seed)?.judged::<O>(backend)
}

/// A case in memory.
struct Bench<T> {
    problem: Problem,
    values: Values,
    q: Buffer<T>,
    kv: [Buffer<E4M3>; 2],
    out_shift: usize,
}

impl<T: Element> Bench<T> {
    fn new(case: &CacheCase, seed: u64) -> Result<Self, Trouble> {
        let plain = &case.case;
        let numbers = plain.inputs.values([plain.q, plain.k, plain.v()], &mut Rng::new(seed));
        Self::with(case, &numbers, seed)
    }

    /// The case with these numbers.
    fn with(case: &CacheCase, numbers: &[Vec<f32>; 3], seed: u64) -> Result<Self, Trouble> {
        let CacheCase { case, scales, wide } = case;
        let plain = case.problem(T::DTYPE)?;
        let bases = [1, 2].map(|n: usize| base(&numbers[n]));
        let entries = [plain.sequences(), plain.heads_kv()];
        let factors = scales.map(|scales| factors(scales, entries, bases, seed));
        let values = Values { factors, ..case.values(seed) };
        let spec = Spec { out_dtype: wide.then_some(DType::F32), ..plain.spec().clone() };
        let problem = spec.with(&values).over(DType::E4M3).parse()?;
        let shifts = case.places()?.map(|(_, shift)| shift);
        Self::holding(problem, values, numbers, shifts)
    }

    /// Tensors that hold these numbers, dense in logical order, first elements so far from aligned addresses.
    fn holding(
        problem: Problem,
        values: Values,
        numbers: &[Vec<f32>; 3],
        shifts: [usize; 4],
    ) -> Result<Self, Trouble> {
        let instance = Instance::new(&problem, &values)?;
        // The first sequence's factors; those of others are about as large.
        let divisors = if problem.scaled_entries() > 0 { instance.factors(0, 0) } else { [1.0; 3] };
        let quantised = |n: usize, layout: &Layout| {
            quantised(instance, n, (*layout, shifts[n]), (&numbers[n], divisors[n]))
        };
        let kv = [quantised(1, problem.k())?, quantised(2, problem.v())?];
        let layout = *problem.q();
        let mut q = Buffer::filled(layout, shifts[0], never_read()).ok_or_else(no_memory)?;
        values::scatter(&numbers[0], q.slice_mut(), &layout, |batch, seq| is_used(instance, 0, batch, seq));
        Ok(Self { problem, values, q, kv, out_shift: shifts[3] })
    }

    /// Runs the problem twice and looks at everything.
    fn judged<O: Element>(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let first = self.run::<O>(backend)?;
        if let Some(row) = first.unwritten_row() {
            return Err(Outcome::failed(Step::Sanity, format!("row {row} was not written")));
        }
        let (instance, data) = (self.instance(), self.data());
        let [oracle, yardstick] =
            [plain::reference, plain::yardstick].map(|plain| plain(instance, data, Rows::ALL));
        let verdict = Rule::of(&self.problem).judge(&first.answer(&self.problem), &oracle, &yardstick);
        if let Some(reason) = verdict.reason {
            return Err(Outcome::failed(Step::Correctness, reason));
        }
        if let Some(row) = first.first_difference(&self.run::<O>(backend)?) {
            return Err(Outcome::failed(Step::Determinism, format!("row {row} differs between two runs")));
        }
        first.overrun().map_or(Ok(()), |reason| Err(Outcome::failed(Step::Isolation, reason)))
    }

    fn instance(&self) -> Instance<'_> {
        Instance::new(&self.problem, &self.values).expect("checked when the bench was made")
    }

    fn data(&self) -> [Data<'_>; 3] {
        let [k, v] = self.kv.each_ref().map(|buffer| Data::E4M3(buffer.slice()));
        [T::erase(self.q.slice()), k, v]
    }

    /// Runs the problem into fresh, poisoned outputs; a panic of the backend is a failure.
    fn run<O: Element>(&self, backend: &dyn Backend) -> Result<Run<O>, Trouble> {
        let rows = Layout::bhsd(Dims { dim: 1, ..self.problem.q().dims() })?;
        let mut out =
            Buffer::filled(*self.problem.out(), self.out_shift, unwritten()).ok_or_else(no_memory)?;
        let mut lse = Buffer::filled(rows, 0, unwritten()).ok_or_else(no_memory)?;
        let wanted = Some(&mut lse.slice_mut()[..self.problem.rows()]);
        let into = O::erase_mut(out.slice_mut());
        let mut call = HostCall::bind_erased(&self.problem, &self.values, self.data(), into, wanted)?;
        let ran = run_caught(|| backend.forward(&mut call))?;
        Ok(Run { out, lse: Some(lse), kernel: ran.kernel })
    }
}

/// What brings the largest number of a tensor to the largest of E4M3.
fn base(numbers: &[f32]) -> f32 {
    let largest = numbers.iter().filter(|x| x.is_finite()).fold(1e-6f32, |max, x| max.max(x.abs()));
    largest / E4M3::MAX
}

/// A factor between those of heads, which must not be used.
const NOBODYS: f32 = 1e30;

/// Factors about as large as `bases`.
fn factors(scales: Scales, [entries, heads]: [usize; 2], bases: [f32; 2], seed: u64) -> Factors {
    let mut rng = Rng::new(seed ^ 0xfac7);
    // One factor for all must not depend on how many sequences there are.
    let [entries, heads] = if scales == Scales::PerTensor { [1; 2] } else { [entries, heads] };
    let strides = scales.strides(heads);
    let tensors = bases.map(|base| {
        let mut all = vec![NOBODYS; scales.count(entries, heads)];
        for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
            all[entry * strides[0] + head * strides[1]] = base * (0.5 + rng.uniform());
        }
        all.into()
    });
    Factors::of_cache(scales, tensors)
}

/// A tensor divided and rounded; NaN beyond what is used.
fn quantised(
    problem: Instance<'_>,
    operand: usize,
    (layout, shift): Place,
    (numbers, divisor): (&[f32], f32),
) -> Result<Buffer<E4M3>, Trouble> {
    let mut buffer = Buffer::filled(layout, shift, never_read()).ok_or_else(no_memory)?;
    let divided: Vec<f32> = numbers.iter().map(|x| x / divisor).collect();
    let nan = vec![f32::NAN; numbers.len()];
    let used = |batch, seq| is_used(problem, operand, batch, seq);
    // Rows in use come last: where strides of 0 make both share memory, they win.
    values::scatter(&nan, buffer.slice_mut(), &layout, |batch, seq| !used(batch, seq));
    values::scatter(&divided, buffer.slice_mut(), &layout, used);
    Ok(buffer)
}
