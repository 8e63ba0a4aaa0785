//! Whether a result is right: the testkit's error rule, within bounds on time and memory.

use flashcore_core::Problem;
use flashcore_testkit::{Rows, Verdict, answer::Grid, judge};
use rayon::ThreadPoolBuilder;

use super::tensors::Tensors;

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
}

impl Check {
    /// Compares the outputs in `tensors` with f64.
    pub fn of(problem: &Problem, tensors: &Tensors, repeatable: bool) -> Self {
        let rows = Rows::within(problem, BUDGET);
        let judged = || judge(problem, tensors.inputs(), tensors.out(), Some(tensors.lse()), rows);
        let verdict = match ThreadPoolBuilder::new().num_threads(threads(problem)).build() {
            Ok(pool) => pool.install(judged),
            Err(_) => judged(),
        };
        let pass = verdict.pass() && repeatable;
        Self { verdict, checked_rows: Grid::of(problem, rows).total_rows(), repeatable, pass }
    }
}

/// Threads that stay within [`MEMORY`]: each holds the keys and values of one head in f64.
fn threads(problem: &Problem) -> usize {
    let head = problem.seq_kv() * (problem.dim_qk() + problem.dim_v()) * size_of::<f64>();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (MEMORY / head.max(1)).clamp(1, cores)
}
