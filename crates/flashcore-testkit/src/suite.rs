//! The conformance suite: one case on one backend, step by step, so that the first failure names the cause.
//!
//! Tests of every backend and `flashcore verify` call [`check_case`].

use std::fmt;

use flashcore_core::{Backend, DType, Element};
use half::{bf16, f16};

use crate::{
    bench::{Bench, Run, Trouble},
    cases::Case,
    compare::{Reason, Rule, Verdict},
};

/// What is checked, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Step {
    /// The backend takes the problem and returns.
    Launch,
    /// Every row is written; nothing is NaN or Inf that should be a number.
    Sanity,
    /// The error rule, and the bar of a named case.
    Correctness,
    /// A second run gives the same bits.
    Determinism,
    /// Nothing but the outputs' rows was written.
    Isolation,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Launch => "launch",
            Self::Sanity => "sanity",
            Self::Correctness => "correctness",
            Self::Determinism => "determinism",
            Self::Isolation => "isolation",
        })
    }
}

/// How a check ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All steps passed.
    Passed,
    /// The backend or the machine does not take the case.
    Skipped(String),
    /// A step failed.
    Failed {
        /// The first step that did.
        step: Step,
        /// What was found.
        reason: String,
    },
}

impl Outcome {
    /// A failure of `step`.
    pub fn failed(step: Step, reason: impl fmt::Display) -> Self {
        Self::Failed { step, reason: reason.to_string() }
    }

    /// Whether a step failed.
    pub const fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}

impl From<Trouble> for Outcome {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Skipped(reason) => Self::Skipped(reason),
            Trouble::Failed(reason) => Self::failed(Step::Launch, reason),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Skipped(reason) => write!(f, "skipped: {reason}"),
            Self::Failed { step, reason } => write!(f, "{step} failed: {reason}"),
        }
    }
}

/// The failure of a step, where something was found.
pub(crate) fn fail_if(step: Step, found: Option<String>) -> Result<(), Outcome> {
    found.map_or(Ok(()), |reason| Err(Outcome::failed(step, reason)))
}

/// Checks every case with every one of `dtypes`, and says what failed.
pub(crate) fn failures<C: fmt::Display>(
    cases: &[C],
    dtypes: &[DType],
    check: impl Fn(&C, DType) -> Outcome,
) -> Vec<String> {
    let all = cases.iter().flat_map(|case| dtypes.iter().map(move |&dtype| (case, dtype)));
    let failed = all.filter_map(|(case, dtype)| {
        let outcome = check(case, dtype);
        outcome.is_failure().then(|| format!("{case} in {dtype}: {outcome}"))
    });
    failed.collect()
}

/// What a check found.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct CaseReport {
    /// The case's name.
    pub case: String,
    /// Element type.
    pub dtype: DType,
    /// Seed of the inputs.
    pub seed: u64,
    /// The kernel that ran, once one did.
    pub kernel: Option<String>,
    /// What the error rule said, once it was asked.
    pub verdict: Option<Verdict>,
    /// How it ended.
    pub outcome: Outcome,
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} seed {}: {}", self.case, self.dtype, self.seed, self.outcome)?;
        self.verdict.as_ref().map_or(Ok(()), |verdict| write!(f, " ({verdict})"))
    }
}

/// Runs one case on one backend, twice.
pub fn check_case(backend: &dyn Backend, case: &Case, dtype: DType, seed: u64) -> CaseReport {
    check_case_runs(backend, case, dtype, seed, 2)
}

/// Runs one case on one backend `runs` times, all of which must give the same bits.
pub fn check_case_runs(
    backend: &dyn Backend,
    case: &Case,
    dtype: DType,
    seed: u64,
    runs: usize,
) -> CaseReport {
    let mut report = CaseReport {
        case: case.to_string(),
        dtype,
        seed,
        kernel: None,
        verdict: None,
        outcome: Outcome::Passed,
    };
    let checked = match dtype {
        DType::F16 => check::<f16>(backend, case, runs, &mut report),
        DType::BF16 => check::<bf16>(backend, case, runs, &mut report),
        DType::F32 => check::<f32>(backend, case, runs, &mut report),
        _ => Err(Outcome::Skipped(format!("the testkit does not know {dtype}"))),
    };
    report.outcome = checked.err().unwrap_or(Outcome::Passed);
    report
}

fn check<T: Element>(
    backend: &dyn Backend,
    case: &Case,
    runs: usize,
    report: &mut CaseReport,
) -> Result<(), Outcome> {
    let bench = Bench::<T>::new(case, report.seed)?;
    let first = bench.run(backend, true)?;
    report.kernel = Some(first.kernel.clone());
    all_written(&first)?;
    let got = first.answer(bench.problem());
    let verdict = Rule::of(bench.problem()).judge(&got, &bench.oracle(), &bench.yardstick());
    report.verdict = Some(verdict.clone());
    within_tolerance(&verdict, case, T::DTYPE)?;
    for _ in 1..runs {
        let again = bench.run(backend, true)?;
        repeats(&first, &again)?;
        isolated(&bench, &again)?;
    }
    isolated(&bench, &first)
}

fn all_written<T: Element>(run: &Run<T>) -> Result<(), Outcome> {
    let unwritten = |row| Outcome::failed(Step::Sanity, format!("row {row} was not written"));
    run.unwritten_row().map_or(Ok(()), |row| Err(unwritten(row)))
}

fn within_tolerance(verdict: &Verdict, case: &Case, dtype: DType) -> Result<(), Outcome> {
    match &verdict.reason {
        Some(reason @ Reason::NotFinite { .. }) => Err(Outcome::failed(Step::Sanity, reason)),
        Some(reason) => Err(Outcome::failed(Step::Correctness, reason)),
        None => match case.f16_bar.filter(|&bar| dtype == DType::F16 && verdict.max_error >= bar) {
            Some(bar) => Err(Outcome::failed(Step::Correctness, format!("the bar for this shape is {bar}"))),
            None => Ok(()),
        },
    }
}

fn repeats<T: Element>(first: &Run<T>, second: &Run<T>) -> Result<(), Outcome> {
    let differs = |row| Outcome::failed(Step::Determinism, format!("row {row} differs between two runs"));
    first.first_difference(second).map_or(Ok(()), |row| Err(differs(row)))
}

fn isolated<T: Element>(bench: &Bench<T>, run: &Run<T>) -> Result<(), Outcome> {
    let found = run.overrun().or_else(|| bench.disturbed());
    found.map_or(Ok(()), |reason| Err(Outcome::failed(Step::Isolation, reason)))
}
