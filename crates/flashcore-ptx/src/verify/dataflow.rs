//! The solver behind the analyses: facts flow forward through the blocks until nothing changes.

use super::flow::{EXIT, Flow, Step};

/// A forward analysis.
pub(super) trait Analysis {
    /// What is known at a point of the program.
    type Facts: Clone + PartialEq;

    /// What is known when the kernel starts.
    fn at_entry(&self) -> Self::Facts;

    /// Weakens `into` to what also holds for `other`, where two ways meet.
    fn join(&self, into: &mut Self::Facts, other: &Self::Facts);

    /// What one instruction does to the facts.
    fn step(&self, facts: &mut Self::Facts, step: &Step<'_>, block: usize);
}

/// The facts at the start of every block; `None` where nothing reaches.
pub(super) fn solve<A: Analysis>(flow: &Flow<'_>, analysis: &A) -> Vec<Option<A::Facts>> {
    let mut at_start: Vec<Option<A::Facts>> = vec![None; flow.blocks.len()];
    if flow.blocks.is_empty() {
        return at_start;
    }
    at_start[0] = Some(analysis.at_entry());
    let mut todo = std::collections::BTreeSet::from([0]);
    while let Some(block) = todo.pop_first() {
        let Some(mut facts) = at_start[block].clone() else { continue };
        flow.steps(block).for_each(|step| analysis.step(&mut facts, &step, block));
        for &next in flow.blocks[block].next.iter().filter(|&&n| n != EXIT) {
            if merge(analysis, &mut at_start[next], &facts) {
                todo.insert(next);
            }
        }
    }
    at_start
}

fn merge<A: Analysis>(analysis: &A, into: &mut Option<A::Facts>, facts: &A::Facts) -> bool {
    let Some(old) = into else {
        *into = Some(facts.clone());
        return true;
    };
    let before = old.clone();
    analysis.join(old, facts);
    *old != before
}

/// Solves the analysis, then calls `look` with each reachable instruction and the facts before it.
pub(super) fn visit<A: Analysis>(
    flow: &Flow<'_>,
    analysis: &A,
    mut look: impl FnMut(&A::Facts, &Step<'_>, usize),
) -> Vec<Option<A::Facts>> {
    let at_start = solve(flow, analysis);
    for (block, facts) in at_start.iter().enumerate() {
        let Some(mut facts) = facts.clone() else { continue };
        for step in flow.steps(block) {
            look(&facts, &step, block);
            analysis.step(&mut facts, &step, block);
        }
    }
    at_start
}
