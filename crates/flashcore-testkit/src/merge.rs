//! Merging partial results: cases as data, the oracle in f64, and one check for every backend.
//!
//! Rows of parts that contribute nothing hold NaN and Inf, and so does everything between rows. The order of the checks
//! is that of [`crate::suite::Step`].

use std::fmt;

use flashcore_core::{
    Backend, DType, Data, Dims, Element, Layout, MAX_LISTED, MergeCall, MergeProblem, MergeSpec, Parts,
    ProblemError,
};
use half::{bf16, f16};

use crate::{
    bench::{Trouble, no_memory, run_caught},
    buffers::{Buffer, never_read, same_bits, unwritten},
    rng::Rng,
    suite::{Outcome, Step, fail_if},
    values,
};

/// What the parts weigh.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weights {
    /// LSE as of attention over some keys.
    Usual,
    /// A third of all LSE is −∞.
    SomeNothing,
    /// Every LSE is −∞.
    AllNothing,
    /// LSE so far apart that most weights vanish, or so large that their exponentials overflow.
    FarApart,
}

/// How parts and output lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Batch × heads × sequence × dim.
    Dense,
    /// Batch × sequence × heads × dim.
    Tokens,
    /// Rows so many elements longer than their features: unaligned if odd.
    Padded(usize),
}

impl Order {
    pub(crate) fn layout(self, dims: Dims) -> Result<Layout, ProblemError> {
        match self {
            Self::Dense => Layout::bhsd(dims),
            Self::Tokens => Layout::bshd(dims),
            Self::Padded(more) => {
                let row = dims.dim + more;
                Layout::strided(dims, [dims.heads * dims.seq * row, dims.seq * row, row, 1])
            }
        }
    }
}

/// One merge, whatever the element types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Number of parts.
    pub parts: usize,
    /// Batch, heads, sequence, dim.
    pub dims: [usize; 4],
    /// How parts and output lie.
    pub order: Order,
    /// Whether parts lie in one tensor.
    pub stacked: bool,
    /// What they weigh.
    pub weights: Weights,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parts, dims: [batch, heads, seq, dim], order, stacked, weights } = self;
        let how = if *stacked { "stacked" } else { "listed" };
        write!(f, "merge of {parts} {how} parts {batch}x{heads}x{seq}x{dim} {order:?} {weights:?}")
    }
}

impl Case {
    /// The case as a problem.
    pub fn problem(&self, dtype: DType, out: DType) -> Result<MergeProblem, ProblemError> {
        let [batch, heads, seq, dim] = self.dims;
        let layout = self.order.layout(Dims::new(batch, heads, seq, dim))?;
        let parts = match self.stacked {
            // An odd gap between parts, where rows are not aligned either.
            true => Parts::Stacked {
                count: self.parts,
                stride: layout.span() + if let Order::Padded(more) = self.order { more } else { 0 },
            },
            false => Parts::Listed(self.parts),
        };
        MergeSpec { out_dtype: out, out: Some(layout), ..MergeSpec::new(dtype, layout, parts) }.parse()
    }
}

/// All cases: few rows each, but for one of a large batch.
pub fn cases() -> Vec<Case> {
    use {Order::*, Weights::*};
    let case = |parts, dims, order, stacked, weights| Case { parts, dims, order, stacked, weights };
    let mut cases = vec![
        case(1, [1, 2, 3, 64], Dense, false, Usual),
        case(2, [2, 3, 70, 128], Tokens, false, SomeNothing),
        case(3, [1, 1, 5, 256], Padded(8), false, FarApart),
        case(8, [2, 2, 9, 64], Dense, true, SomeNothing),
        case(16, [1, 3, 7, 96], Padded(1), false, Usual),
        case(33, [2, 4, 1, 128], Dense, true, SomeNothing),
        case(33, [1, 2, 3, 40], Padded(3), true, FarApart),
        case(3, [2, 2, 5, 128], Dense, true, AllNothing),
        case(8, [300, 1, 7, 16], Dense, true, Usual),
        case(2, [0, 2, 3, 8], Dense, false, Usual),
        case(2, [2, 2, 0, 8], Dense, true, Usual),
    ];
    let dims = [1, 2, 3, 4, 5, 7, 8, 12, 17, 32, 63, 100, 127, 160, 192, 250, 256, 257, 512];
    for (n, dim) in dims.into_iter().enumerate() {
        let (order, weights) = ([Dense, Padded(2), Tokens, Padded(1)][n % 4], [Usual, SomeNothing][n % 2]);
        cases.push(case(1 + n % 5, [1, 2, 3, dim], order, n % 3 != 0, weights));
    }
    cases
}

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &Case, [dtype, out]: [DType; 2], seed: u64) -> Outcome {
    match case.problem(dtype, out) {
        Ok(problem) => check_problem(backend, &problem, case.weights, seed),
        Err(error) => Outcome::failed(Step::Launch, format!("the case is refused: {error}")),
    }
}

/// Every pair of element types that parts and output may have.
pub fn dtypes() -> impl Iterator<Item = [DType; 2]> {
    DType::COMMON.into_iter().flat_map(|dtype| DType::COMMON.map(|out| [dtype, out]))
}

/// Runs every case on a backend, each with `per_case` of the pairs of types in turn, and says what failed.
pub fn failures(backend: &dyn Backend, per_case: usize, seed: u64) -> Vec<String> {
    let pairs: Vec<_> = dtypes().collect();
    let mut failures = Vec::new();
    for (n, case) in cases().iter().enumerate() {
        for pair in (0..per_case).map(|k| pairs[(n + 2 * k) % pairs.len()]) {
            let outcome = check(backend, case, pair, seed);
            if outcome != Outcome::Passed {
                failures.push(format!("{case} {} to {}: {outcome}", pair[0], pair[1]));
            }
        }
    }
    failures
}

/// Checks one problem on one backend.
pub fn check_problem(backend: &dyn Backend, problem: &MergeProblem, weights: Weights, seed: u64) -> Outcome {
    let checked = match problem.dtype() {
        DType::F16 => check_from::<f16>(backend, problem, weights, seed),
        DType::BF16 => check_from::<bf16>(backend, problem, weights, seed),
        DType::F32 => check_from::<f32>(backend, problem, weights, seed),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

fn check_from<T: Element>(
    backend: &dyn Backend,
    problem: &MergeProblem,
    weights: Weights,
    seed: u64,
) -> Result<(), Outcome> {
    let inputs = Inputs::<T>::new(problem, weights, seed);
    match problem.out_dtype() {
        DType::F16 => inputs.check::<f16>(backend),
        DType::BF16 => inputs.check::<bf16>(backend),
        DType::F32 => inputs.check::<f32>(backend),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    }
}

/// Parts in memory.
struct Inputs<'a, T> {
    problem: &'a MergeProblem,
    tensors: Vec<Vec<T>>,
    lses: Vec<Vec<f32>>,
}

/// A backend's result.
struct Run<O> {
    out: Buffer<O>,
    lse: Option<Buffer<f32>>,
}

/// What a row should be, and how far f32 arithmetic may take each of its features.
struct Expected {
    values: Vec<f64>,
    noise: Vec<f64>,
    lse: f64,
}

impl<'a, T: Element> Inputs<'a, T> {
    fn new(problem: &'a MergeProblem, weights: Weights, seed: u64) -> Self {
        let (parts, layout) = (problem.parts(), problem.part());
        let each = parts.count() / parts.tensors();
        let len = layout.span() + (each - 1) * problem.stride();
        let mut rng = Rng::new(seed);
        let mut inputs = Self { problem, tensors: Vec::new(), lses: Vec::new() };
        for _ in 0..parts.tensors() {
            let lses: Vec<f32> = (0..each * problem.rows()).map(|_| weights.draw(&mut rng)).collect();
            let mut tensor = vec![never_read::<T>(); len];
            for part in 0..each {
                let mut row_lse = lses[part * problem.rows()..].iter();
                values::for_each_row(layout, |_, start| {
                    let nothing = row_lse.next() == Some(&f32::NEG_INFINITY);
                    let row = &mut tensor[part * problem.stride() + start..][..layout.dims().dim];
                    row.fill_with(|| {
                        let hostile = if rng.one_in(2) { f32::NAN } else { f32::INFINITY };
                        T::from_f32(if nothing { hostile } else { rng.normal() })
                    });
                });
            }
            inputs.tensors.push(tensor);
            inputs.lses.push(lses);
        }
        inputs
    }

    /// What row `row` should be.
    fn expected(&self, row: usize, [batch, head, seq]: [usize; 3]) -> Expected {
        let (parts, dim) = (self.problem.parts(), self.problem.dims().dim);
        let place = |part: usize| match parts {
            Parts::Stacked { .. } => (0, part),
            Parts::Listed(_) => (part, 0),
        };
        let lse = |part: usize| {
            let (tensor, skipped) = place(part);
            f64::from(self.lses[tensor][skipped * self.problem.rows() + row])
        };
        let top = (0..parts.count()).map(lse).fold(f64::NEG_INFINITY, f64::max);
        let mut expected = Expected { values: vec![0.0; dim], noise: vec![0.0; dim], lse: top };
        if top == f64::NEG_INFINITY {
            return expected;
        }
        let total: f64 = (0..parts.count()).map(|part| (lse(part) - top).exp()).sum();
        expected.lse = top + total.ln();
        for part in (0..parts.count()).filter(|&part| lse(part) > f64::NEG_INFINITY) {
            let ((tensor, skipped), below) = (place(part), lse(part) - top);
            let start = skipped * self.problem.stride() + self.problem.part().row(batch, head, seq);
            let weight = below.exp() / total;
            // Sums round once for each part, weights by what their exponents round by.
            let roundings = 16.0 + parts.count() as f64 + 3.0 * below.abs();
            for (n, x) in self.tensors[tensor][start..start + dim].iter().enumerate() {
                let product = weight * f64::from(x.to_f32());
                expected.values[n] += product;
                expected.noise[n] += product.abs() * roundings * f64::from(f32::EPSILON) / 2.0;
            }
        }
        expected
    }

    fn check<O: Element>(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let first = self.run::<O>(backend, self.problem, true)?;
        let unwritten = first.out.first_unwritten_row();
        let unwritten = unwritten.or_else(|| first.lse.as_ref().and_then(Buffer::first_unwritten_row));
        fail_if(Step::Sanity, unwritten.map(|row| format!("row {row} was not written")))?;
        fail_if(Step::Correctness, self.first_wrong(&first))?;
        let again = self.run::<O>(backend, self.problem, true)?;
        fail_if(Step::Determinism, first.difference(&again, "in a second run"))?;
        let alone = self.run::<O>(backend, self.problem, false)?;
        fail_if(Step::Determinism, first.difference(&alone, "without LSE"))?;
        if let Some(listed) = self.listed() {
            let listed = self.run::<O>(backend, &listed, true)?;
            fail_if(Step::Determinism, first.difference(&listed, "with parts at addresses of their own"))?;
        }
        for run in [&first, &again, &alone] {
            fail_if(Step::Isolation, run.overrun())?;
        }
        Ok(())
    }

    /// The same problem with parts at addresses of their own, where they are stacked and few.
    fn listed(&self) -> Option<MergeProblem> {
        let problem = self.problem;
        let few = problem.parts().tensors() == 1 && problem.parts().count() <= MAX_LISTED;
        let parts = few.then(|| Parts::Listed(problem.parts().count()))?;
        let spec = MergeSpec::new(problem.dtype(), *problem.part(), parts);
        MergeSpec { out_dtype: problem.out_dtype(), out: Some(*problem.out()), ..spec }.parse().ok()
    }

    /// Runs a problem over these parts into poisoned memory; a panic of the backend is a failure.
    fn run<O: Element>(
        &self,
        backend: &dyn Backend,
        problem: &MergeProblem,
        want_lse: bool,
    ) -> Result<Run<O>, Trouble> {
        let rows = Layout::bhsd(Dims { dim: 1, ..problem.dims() })?;
        let mut out = Buffer::<O>::filled(*problem.out(), 0, unwritten()).ok_or_else(no_memory)?;
        let mut lse = Buffer::filled(rows, 0, unwritten()).ok_or_else(no_memory)?;
        let (parts, lses) = self.tensors_of(problem);
        let wanted = want_lse.then(|| &mut lse.slice_mut()[..problem.rows()]);
        let mut call = MergeCall::bind(problem, &parts, &lses, O::erase_mut(out.slice_mut()), wanted)?;
        run_caught(|| backend.merge(&mut call))?;
        Ok(Run { out, lse: want_lse.then_some(lse) })
    }

    /// The memory that `problem`, this one or its listed twin, is bound to.
    fn tensors_of(&self, problem: &MergeProblem) -> (Vec<Data<'_>>, Vec<&[f32]>) {
        if self.tensors.len() == problem.parts().tensors() {
            let lses = self.lses.iter().map(Vec::as_slice).collect();
            return (self.tensors.iter().map(|tensor| T::erase(tensor)).collect(), lses);
        }
        let count = 0..problem.parts().count();
        let skip = |n: usize| (n * self.problem.stride()).min(self.tensors[0].len());
        let parts = count.clone().map(|n| T::erase(&self.tensors[0][skip(n)..])).collect();
        let rows = problem.rows();
        (parts, count.map(|n| &self.lses[0][n * rows..(n + 1) * rows]).collect())
    }

    /// What is first wrong in a run.
    fn first_wrong<O: Element>(&self, run: &Run<O>) -> Option<String> {
        let (mut row, mut wrong) = (0, None);
        let dim = self.problem.dims().dim;
        values::for_each_row(self.problem.out(), |place, start| {
            let got = &run.out.slice()[start..start + dim];
            let lse = run.lse.as_ref().map(|lse| f64::from(lse.slice()[row]));
            if wrong.is_none() {
                let expected = self.expected(row, place);
                wrong = expected.refuse(got, lse).map(|reason| format!("{reason} in row {row}"));
            }
            row += 1;
        });
        wrong
    }
}

impl Weights {
    fn draw(self, rng: &mut Rng) -> f32 {
        match self {
            Self::Usual => 3.0 * rng.normal(),
            Self::SomeNothing if rng.one_in(3) => f32::NEG_INFINITY,
            Self::SomeNothing => 3.0 * rng.normal(),
            Self::AllNothing => f32::NEG_INFINITY,
            Self::FarApart => 300.0 * rng.normal(),
        }
    }
}

impl Expected {
    fn refuse<O: Element>(&self, got: &[O], lse: Option<f64>) -> Option<String> {
        let off = |lse: &f64| {
            let magnitude = (self.lse as f32).abs();
            let allowed = 1e-6 + 4.0 * f64::from(magnitude.next_up() - magnitude);
            let near = *lse == self.lse || (lse - self.lse).abs() <= allowed;
            !near // NaN is near nothing
        };
        if let Some(lse) = lse.filter(off) {
            return Some(format!("LSE {lse} instead of {}", self.lse));
        }
        let exact = self.lse == f64::NEG_INFINITY;
        got.iter().zip(self.values.iter().zip(&self.noise)).find_map(|(got, (&expected, &noise))| {
            let got = f64::from(got.to_f32());
            let rounded = O::DTYPE.round(expected);
            // Half a unit in the last place, and once more where noise moves a value over the middle.
            let unit = 2.0 * (rounded - expected).abs().max(unit_in_last_place(O::DTYPE, expected) / 2.0);
            let near = (got - expected).abs() <= noise + if noise == 0.0 { unit / 2.0 } else { unit };
            let wrong = if exact { got != 0.0 } else { !near };
            wrong.then(|| format!("{got} instead of {expected}"))
        })
    }
}

/// The distance between neighbouring numbers of `dtype` about `x`.
pub(crate) fn unit_in_last_place(dtype: DType, x: f64) -> f64 {
    let (digits, smallest) = match dtype {
        DType::F16 => (10, -14.0),
        DType::BF16 => (7, -126.0),
        _ => (23, -126.0),
    };
    x.abs().log2().floor().max(smallest).exp2() * 0.5f64.powi(digits)
}

impl<O: Element> Run<O> {
    fn overrun(&self) -> Option<String> {
        let lse = || self.lse.as_ref().and_then(Buffer::first_disturbed);
        let at = self.out.first_disturbed().or_else(lse)?;
        Some(format!("element {at} lies outside the rows and was written"))
    }

    /// Where another run's bits differ.
    fn difference(&self, other: &Self, when: &str) -> Option<String> {
        let [a, b] = [self, other].map(|run| run.out.slice());
        let lse = |(a, b): (&Buffer<f32>, &Buffer<f32>)| {
            a.slice().iter().zip(b.slice()).position(|(&a, &b)| !same_bits(a, b))
        };
        let lse = self.lse.as_ref().zip(other.lse.as_ref()).and_then(lse);
        let at = a.iter().zip(b).position(|(&a, &b)| !same_bits(a, b)).or(lse)?;
        Some(format!("element {at} has other bits {when}"))
    }
}
