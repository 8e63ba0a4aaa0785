//! Whether a result is right: the testkit's error rule, within bounds on time and memory.

use flashcore_core::{BackwardProblem, Instance, Problem, ProblemError, Sequence};
use flashcore_lab::{buffer::Buffer, judge::gradients};
use flashcore_testkit::{Rows, Verdict, answer::Grid, judge};
use rayon::ThreadPoolBuilder;

use super::request::Tensors;
use crate::error::CliError;

/// Multiply-adds of the f64 computation: about a second of one core. Problems beyond it are checked on some rows.
const BUDGET: f64 = (1u64 << 30) as f64;
/// Memory that the f64 computation may take, unless one head alone needs more.
const MEMORY: usize = 48 << 20;

/// What was found.
#[derive(Debug)]
pub struct Check {
    pub verdict: Verdict,
    /// Rows that were compared, of [`Problem::rows`].
    pub checked_rows: usize,
    /// Whether all runs gave the same bits.
    pub repeatable: bool,
    pub pass: bool,
    /// Why not, where it does not pass.
    pub reason: Option<String>,
}

impl Check {
    /// Bytes that comparing takes: three results in f64 (got, oracle, yardstick) and keys and values per thread.
    pub fn bytes(problem: &Problem) -> u64 {
        let rows = Grid::of(problem, Rows::within(problem, BUDGET)).total_rows();
        let wide = size_of::<f64>() as u64;
        let results = (rows as u64).saturating_mul(3 * wide).saturating_mul(problem.dim_v() as u64 + 2);
        let sequences = (problem.sequences() * size_of::<Sequence>()) as u64;
        results.saturating_add(sequences).saturating_add((threads(problem) * head_bytes(problem)) as u64)
    }

    /// Compares the outputs in `tensors` with f64.
    pub fn of(problem: &Problem, tensors: &Tensors, repeatable: bool) -> Result<Self, ProblemError> {
        let rows = Rows::within(problem, BUDGET);
        let instance = Instance::new(problem, &tensors.values)?;
        let judged = || judge(instance, tensors.inputs(), tensors.out.data(), Some(&tensors.lse), rows);
        let verdict = match ThreadPoolBuilder::new().num_threads(threads(problem)).build() {
            Ok(pool) => pool.install(judged),
            Err(_) => judged(),
        };
        Ok(Self::new(verdict, Grid::of(problem, rows).total_rows(), repeatable))
    }

    /// Compares the gradients in `tensors` with f64; those of an output's gradient that was gone over for it.
    pub fn of_gradients(
        problem: &BackwardProblem,
        tensors: &Tensors,
        repeatable: bool,
    ) -> Result<Self, CliError> {
        let Some((d_out, [dq, dk, dv])) = &tensors.backward else {
            unreachable!("gradients have their memory")
        };
        let expected = gradients::Expected::new(problem, &tensors.values, tensors.inputs(), d_out.data())?;
        let verdict = expected.judge([dq, dk, dv].map(Buffer::data));
        // Without heads there is nothing to be wrong about.
        let verdict = match verdict {
            Some(verdict) => verdict,
            None => return Self::of(problem.forward(), tensors, repeatable).map_err(Into::into),
        };
        Ok(Self::new(verdict, gradients::judged_rows(problem), repeatable))
    }

    fn new(verdict: Verdict, checked_rows: usize, repeatable: bool) -> Self {
        let unsteady = (!repeatable).then(|| "two runs on the same input gave different bits".to_owned());
        let reason = verdict.reason.as_ref().map(ToString::to_string).or(unsteady);
        let pass = verdict.pass() && repeatable;
        Self { verdict, checked_rows, repeatable, pass, reason }
    }
}

/// Threads that stay within [`MEMORY`]: each holds the keys and values of one head in f64.
fn threads(problem: &Problem) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (MEMORY / head_bytes(problem).max(1)).clamp(1, cores)
}

fn head_bytes(problem: &Problem) -> usize {
    problem.seq_kv() * (problem.dim_qk() + problem.dim_v()) * size_of::<f64>()
}
