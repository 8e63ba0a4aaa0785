//! Mixtures of experts: cases as data, the oracle in f64, and one check for every backend.
//!
//! Weights of experts that no token goes to hold NaN, and so does everything between rows. The order of the checks is
//! that of [`crate::suite::Step`]; the error rule is that of [`crate::compare`], with an eager loop over tokens in the
//! tensors' type as its yardstick.

mod cases;
pub mod gradients;
mod inputs;
pub mod plain;
mod random;

use flashcore_core::{Backend, DType, Element, MoeCall, MoeProblem};
use half::{bf16, f16};

use crate::{
    answer::{Answer, Grid},
    bench::{Trouble, no_memory, run_caught},
    buffers::{Buffer, same_bits, unwritten},
    compare::Rule,
    suite::{self, Outcome, Step, fail_if},
    values,
};
pub use cases::{Case, Traffic, cases};
pub use gradients::{check_gradients, gradient_bits, gradient_cases, gradient_failures};
pub use inputs::Inputs;
use plain::{Rounding, compute, route};
pub use random::random;

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &Case, dtype: DType, seed: u64) -> Outcome {
    match case.problem(dtype) {
        Ok(problem) => check_problem(backend, &problem, case.traffic, seed),
        Err(error) => Outcome::failed(Step::Launch, format!("the case is refused: {error}")),
    }
}

/// Runs every case on a backend, each with every one of `dtypes`, and says what failed.
pub fn failures(backend: &dyn Backend, dtypes: &[DType], seed: u64) -> Vec<String> {
    suite::failures(&cases(), dtypes, |case, dtype| check(backend, case, dtype, seed))
}

/// Checks one problem on one backend.
pub fn check_problem(backend: &dyn Backend, problem: &MoeProblem, traffic: Traffic, seed: u64) -> Outcome {
    let checked = match problem.dtype() {
        DType::F16 => Inputs::<f16>::new(problem, traffic, seed).check(backend),
        DType::BF16 => Inputs::<bf16>::new(problem, traffic, seed).check(backend),
        DType::F32 => Inputs::<f32>::new(problem, traffic, seed).check(backend),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

impl<T: Element> Inputs<T> {
    fn check(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let first = self.run(backend)?;
        let unwritten = first.first_unwritten_row();
        fail_if(Step::Sanity, unwritten.map(|row| format!("row {row} was not written")))?;
        fail_if(Step::Correctness, self.first_wrong(&first))?;
        let again = self.run(backend)?;
        fail_if(Step::Determinism, difference(&first, &again, "in a second run"))?;
        if self.problem.spec().batch_invariant {
            let fewer = self.first_tokens(self.problem.tokens() / 3);
            let alone = fewer.run(backend)?;
            fail_if(Step::Determinism, difference(&alone, &first, "with more tokens"))?;
        }
        for run in [&first, &again] {
            let disturbed =
                run.first_disturbed().map(|at| format!("element {at} outside of all rows was written"));
            fail_if(Step::Isolation, disturbed)?;
        }
        Ok(())
    }

    /// Runs the problem into poisoned memory; a panic of the backend is a failure.
    fn run(&self, backend: &dyn Backend) -> Result<Buffer<T>, Trouble> {
        let mut out = Buffer::<T>::filled(*self.problem.out(), 0, unwritten()).ok_or_else(no_memory)?;
        let mut call = MoeCall::bind(&self.problem, self.bound(), T::erase_mut(out.slice_mut()))?;
        run_caught(|| backend.moe(&mut call))?;
        Ok(out)
    }

    /// What the error rule finds.
    fn first_wrong(&self, out: &Buffer<T>) -> Option<String> {
        let (problem, inputs) = (&self.problem, self.bound());
        let nothing = route(problem, &inputs.routed).into_iter();
        let nothing = nothing.map(|experts| experts.is_empty() && inputs.shared.is_none()).collect();
        let grid = Grid { batch: 1, heads: 1, rows: problem.tokens(), step: 1, dim: problem.hidden() };
        let answer = |out: Vec<f64>| Answer { out, ..Answer::empty(grid) };
        let exact = compute(problem, &inputs, Rounding::None);
        let yardstick = answer(compute(problem, &inputs, Rounding::Eager(problem.dtype())));
        let got = values::gather(T::erase(out.slice()), problem.out()).into_iter().map(f64::from).collect();
        let oracle = Answer { sees_nothing: nothing, ..answer(exact) };
        let verdict = Rule::new(problem.dtype(), 2.0).judge(&answer(got), &oracle, &yardstick);
        (!verdict.pass()).then(|| verdict.to_string())
    }
}

/// Whether the rows of `few` differ from those of `all` that they should be.
fn difference<T: Element>(few: &Buffer<T>, all: &Buffer<T>, when: &str) -> Option<String> {
    let mut found = None;
    let dim = few.layout().dims().dim;
    values::for_each_row(few.layout(), |[_, _, row], start| {
        let rows = [few, all].map(|buffer| &buffer.slice()[start..start + dim]);
        if found.is_none() && !rows[0].iter().zip(rows[1]).all(|(&a, &b)| same_bits(a, b)) {
            found = Some(format!("row {row} has other bits {when}"));
        }
    });
    found
}
