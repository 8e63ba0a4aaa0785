//! Gradients: the cases of forward with gradients of their own, the oracle in f64, and one check for every backend. The
//! order of the checks is that of [`crate::suite::Step`].
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`plain`] | oracle and yardstick |
//! | [`mod@bench`] | one case in guarded memory |
//! | [`laws`] | laws that hold whatever the numbers are |
//! | `scaled` | cases whose loss was scaled |

pub mod bench;
pub mod laws;
pub mod plain;
mod scaled;

use std::fmt;

use flashcore_core::{Backend, BackwardProblem, BackwardSpec, DType, Element, Layout, ProblemError, RowSums};
use half::{bf16, f16};

use crate::{
    answer::{Answer, Grid},
    buffers::Buffer,
    cases::{self, Cost},
    compare::Rule,
    inputs::Placement,
    random,
    suite::{Outcome, Step, fail_if},
};
use bench::{Bench, Run};
use laws::LAWS;

/// What is asked for beside gradients of the tensors' own type, with row sums from the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// Nothing.
    Plain,
    /// Gradients in f32.
    Wide,
    /// Gradients in f32, added to what is there.
    Accumulated,
    /// Row sums are given, the output is not.
    GivenSums,
}

impl Wish {
    /// Every wish.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Wide, Self::Accumulated, Self::GivenSums];
}

/// Gradients of one call of attention, but for element type and seed.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    /// The call.
    pub forward: cases::Case,
    /// What is requested.
    pub wish: Wish,
    /// What the loss was multiplied by, and with it the output's gradient.
    pub loss: f32,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gradients of {} ({:?})", self.forward, self.wish)?;
        if self.loss == 1.0 { Ok(()) } else { write!(f, ", loss times {}", self.loss) }
    }
}

impl Case {
    /// A case whose loss is as it is.
    pub const fn new(forward: cases::Case, wish: Wish) -> Self {
        Self { forward, wish, loss: 1.0 }
    }

    /// The case as a problem.
    pub fn problem(&self, dtype: DType) -> Result<BackwardProblem, ProblemError> {
        let forward = self.forward.problem(dtype)?;
        let own = |layout: &Layout| (!layout.may_overlap()).then_some(*layout);
        let wide = matches!(self.wish, Wish::Wide | Wish::Accumulated);
        BackwardSpec {
            d_out: Some(Layout::bshd(forward.out().dims())?),
            // A gradient lies as its tensor does, unless positions of that share memory.
            dq: own(forward.q()),
            dk: own(forward.k()),
            dv: own(forward.v()),
            grad_dtype: wide.then_some(DType::F32),
            accumulate: self.wish == Wish::Accumulated,
            row_sums: if self.wish == Wish::GivenSums { RowSums::Given } else { RowSums::Computed },
            ..BackwardSpec::new(forward.spec().clone())
        }
        .parse()
    }
}

/// The cases of forward that cost at most `cost`, with one wish after the other, and those whose loss was scaled.
///
/// Memory beyond 2³¹ elements is left to forward: gradients find their rows by the same arithmetic, at six times the cost.
pub fn cases(cost: Cost) -> Vec<Case> {
    let forward = cases::up_to(cost.min(Cost::Large)).into_iter();
    let with_wish = |(n, forward)| Case::new(forward, Wish::ALL[n % Wish::ALL.len()]);
    let has_gradients = |case: &cases::Case| case.placement != Placement::Sparse && case.table.is_none();
    forward.filter(has_gradients).enumerate().map(with_wish).chain(scaled::cases()).collect()
}

/// The `index`-th random case of a seed.
pub fn random_case(seed: u64, index: u64) -> Case {
    let limits = random::Limits { work: 400_000, seq: 220, ..random::Limits::SMALL };
    Case::new(random::case(seed, index, limits), Wish::ALL[index as usize % Wish::ALL.len()])
}

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &Case, dtype: DType, seed: u64) -> Outcome {
    let checked = match dtype {
        DType::F16 => check_as::<f16>(backend, case, seed),
        DType::BF16 => check_as::<bf16>(backend, case, seed),
        DType::F32 => check_as::<f32>(backend, case, seed),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

/// Runs the cases, each with `per_case` of its types in turn, `randoms` random ones, and the laws; says what failed.
pub fn failures(backend: &dyn Backend, cases: &[Case], per_case: usize, randoms: u64) -> Vec<String> {
    let mut failures = Vec::new();
    let mut note = |what: String, outcome: Outcome| {
        failures.extend(outcome.is_failure().then(|| format!("{what}: {outcome}")));
    };
    for (n, case) in cases.iter().enumerate() {
        let dtypes = case.forward.dtypes;
        for &dtype in dtypes.iter().cycle().skip(n).take(per_case.min(dtypes.len())) {
            note(format!("{case} {dtype}"), check(backend, case, dtype, 1));
        }
    }
    for n in 0..randoms {
        let (case, dtype) = (random_case(5, n), DType::COMMON[n as usize % 3]);
        note(format!("{case} {dtype}"), check(backend, &case, dtype, n));
    }
    for (law, dtype) in LAWS.iter().flat_map(|law| DType::COMMON.map(|dtype| (law, dtype))) {
        note(format!("{} ({dtype})", law.name), law.check(backend, dtype, 1));
    }
    failures
}

fn check_as<T: Element>(backend: &dyn Backend, case: &Case, seed: u64) -> Result<(), Outcome> {
    let bench = Bench::<T>::new(case, seed)?;
    if bench.problem().grad_dtype() == DType::F32 {
        bench.check::<f32>(backend)
    } else {
        bench.check::<T>(backend)
    }
}

impl<T: Element> Bench<T> {
    fn check<G: Element>(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let first = self.run::<G>(backend)?;
        if !self.problem().accumulate() {
            all_written(&first)?;
        }
        self.judge(&first)?;
        let second = self.run::<G>(backend)?;
        fail_if(Step::Determinism, first.difference(&second))?;
        fail_if(Step::Isolation, first.overrun().or_else(|| self.disturbed()))
    }

    /// The error rule for each gradient.
    fn judge<G: Element>(&self, run: &Run<G>) -> Result<(), Outcome> {
        let (rule, exact) = (Rule::of_gradients(self.problem()), self.oracle());
        let yardstick = self.yardstick().map(|x| G::DTYPE.round(x));
        // A gradient beyond the type's range is infinite, and by the same sign.
        let oracle = exact.map(|x| if G::DTYPE.round(x).is_finite() { x } else { G::DTYPE.round(x) });
        let got = run.gradients(self.problem());
        for ((name, got), ((_, oracle), (_, yardstick))) in
            got.named().into_iter().zip(oracle.named().into_iter().zip(yardstick.named()))
        {
            if name == "d_sinks" && run.d_sinks.is_none() {
                continue;
            }
            let [got, oracle, yardstick] = run.without_old(name, [got, oracle, yardstick]);
            let verdict = rule.judge(&got, &oracle, &yardstick);
            if let Some(reason) = &verdict.reason {
                return Err(Outcome::failed(Step::Correctness, format!("{name}: {verdict} ({reason})")));
            }
        }
        Ok(())
    }
}

fn all_written<G: Element>(run: &Run<G>) -> Result<(), Outcome> {
    let unwritten = |(name, buffer): (&str, &Buffer<G>)| {
        buffer.first_unwritten_row().map(|row| format!("row {row} of {name} was not written"))
    };
    fail_if(Step::Sanity, run.named().into_iter().find_map(unwritten))?;
    let sinks = run.d_sinks.as_ref().and_then(Buffer::first_unwritten_row);
    fail_if(Step::Sanity, sinks.map(|_| "d_sinks was not written".to_owned()))
}

/// A result with nothing known about its rows.
pub(crate) fn bare(grid: Grid, out: Vec<f64>) -> Answer {
    Answer { out, ..Answer::empty(grid) }
}
