//! What is computed before the products: the LSE and sum of every row, the gradients of the sinks, and zeros for rows
//! of gradients that nothing uses.

use flashcore_core::{BackwardInputs, BackwardProblem, Instance, RowTerms, Sequence, Sequences};

use super::{
    grads::Grads,
    panels::widen,
    plan::{self, tiles},
};
use crate::{
    crew::Crew,
    output::Shared,
    simd::{convert::Dot, runner::Runner},
};

/// The LSE and the sum of `dO ∘ O` of every row, dense batch × heads × sequence.
pub(super) struct Terms<'a> {
    /// +∞ where a row has no gradients.
    pub(super) lse: &'a [f32],
    pub(super) sums: &'a [f32],
}

impl<'a> Terms<'a> {
    /// Of what [`compute`] wrote.
    pub(super) fn new(terms: &'a [f32]) -> Self {
        let (lse, sums) = terms.split_at(terms.len() / 2);
        Self { lse, sums }
    }
}

/// What terms are computed from.
pub(super) struct Task<'a> {
    pub(super) problem: &'a BackwardProblem,
    pub(super) forward: Instance<'a>,
    pub(super) runner: Runner,
    pub(super) inputs: BackwardInputs<'a>,
    pub(super) grads: &'a Grads<'a>,
}

/// Fills in the terms of all rows, head by head, and clears the gradients of what is not used.
pub(super) fn compute(task: &Task<'_>, terms: &mut [f32], crew: Crew) {
    let (heads, sequences) = (task.forward.heads_q(), task.forward.sequences());
    let used = matches!(task.forward.sequences_kind(), Sequences::Used { .. });
    let rows = terms.len() / 2;
    let terms = Shared::new(terms);
    let head = |n: usize| {
        let (s, head) = (task.forward.sequence(n / heads), n % heads);
        let first = task.forward.lse_index(s.batch, head, s.q_start);
        // In packed tensors the rows after a sequence belong to the next one.
        let len = if used { task.forward.seq_q() } else { s.q_len };
        // SAFETY: heads of sequences have rows of their own.
        let (lse, sums) = unsafe { (terms.range(first, len), terms.range(rows + first, len)) };
        task.rows(&s, head, first, (lse, sums));
        task.clear_queries(&s, head, len);
        if used && head < task.forward.heads_kv() {
            task.clear_keys(&s, head);
        }
    };
    crew.each(sequences * heads, head);
}

impl Task<'_> {
    /// The terms of one head of a sequence, whose first row is `first`.
    fn rows(&self, s: &Sequence, head: usize, first: usize, (lse, sums): (&mut [f32], &mut [f32])) {
        let mut rows = vec![0.0; 2 * self.forward.dim_v()];
        for (n, (lse, sum)) in lse.iter_mut().zip(sums).enumerate() {
            let given = self.inputs.lse[first + n];
            // What such a row and rows beyond the used ones hold is not looked at.
            (*lse, *sum) = match given == f32::NEG_INFINITY || n >= s.q_len {
                true => (f32::INFINITY, 0.0),
                false => (given, self.sum([s.batch, head, s.q_start + n], first + n, &mut rows)),
            };
        }
    }

    fn sum(&self, [batch, head, seq]: [usize; 3], row: usize, rows: &mut [f32]) -> f32 {
        let out = match self.inputs.terms {
            RowTerms::Sums(sums) => return sums[row],
            RowTerms::Out(out) => out,
        };
        let (a, b) = rows.split_at_mut(rows.len() / 2);
        widen(self.runner, out, self.forward.out().row(batch, head, seq), a);
        widen(self.runner, self.inputs.d_out, self.problem.d_out().row(batch, head, seq), b);
        self.runner.run(Dot { a, b })
    }

    /// Queries whose whole tile sees no key, and those beyond the used ones; no unit adds to them.
    fn clear_queries(&self, s: &Sequence, head: usize, len: usize) {
        let clear = |query: usize| self.grads.dq.clear([s.batch, head, s.q_start + query]);
        for tile in (0..tiles(s)).map(|n| plan::tile(s, n)) {
            if plan::visible(&self.forward, s, &tile).is_empty() {
                tile.for_each(clear);
            }
        }
        (s.q_len..len).for_each(clear);
    }

    /// Keys beyond the used ones.
    fn clear_keys(&self, s: &Sequence, head: usize) {
        for key in s.kv_len..self.forward.seq_kv() {
            self.grads.dk.clear([s.batch, head, key]);
            self.grads.dv.clear([s.batch, head, key]);
        }
    }
}

/// The gradient of each head's sink: what it took from the rows.
pub(super) fn sink_gradients(
    problem: &BackwardProblem,
    forward: Instance<'_>,
    terms: &Terms<'_>,
    d_sinks: &mut [f32],
) {
    let sinks = forward.sink_logits().unwrap_or(&[]);
    for (head, (to, &sink)) in d_sinks.iter_mut().zip(sinks).enumerate() {
        let mut taken = 0.0;
        for batch in 0..forward.batch() {
            let first = forward.lse_index(batch, head, 0);
            for row in first..first + forward.seq_q() {
                let share = (f64::from(sink) - f64::from(terms.lse[row])).exp();
                taken += share * f64::from(terms.sums[row]);
            }
        }
        *to = if problem.accumulate() { *to - taken as f32 } else { -taken as f32 };
    }
}
