//! Which sequences a kernel computes if a batch mixes prompts and single queries: two kernels split it, each made for one
//! kind, and each finds its own at run time.

use flashcore_core::Problem;
use flashcore_tile::MMA_M;

/// Which sequences a kernel computes, where queries are packed and another kernel computes the rest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Share {
    /// All of them.
    All,
    /// Those of few queries.
    Short,
    /// Those of more.
    Long,
}

/// Rows of a block, which one tile of the tensor cores has.
const BLOCK: usize = MMA_M as usize;

/// Queries of a sequence up to which it is short: as many as fit in a block of rows, all heads of a group together, or, where
/// bits must not depend on the batch, as a batch of short sequences alone could have.
pub(crate) fn short_queries(problem: &Problem) -> usize {
    let group = problem.group();
    let most =
        if problem.batch_invariant() { most_short_rows(problem) } else { group.next_multiple_of(BLOCK) };
    most / group
}

/// Most rows (queries times heads of a group) of a short sequence: two blocks, where both outputs fit in registers.
pub(crate) fn most_short_rows(problem: &Problem) -> usize {
    if problem.dim_v() <= 128 { 2 * BLOCK } else { BLOCK }
}
