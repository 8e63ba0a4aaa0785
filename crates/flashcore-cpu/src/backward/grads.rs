//! Storing gradients: rows of the caller's tensors, written from many threads.

use flashcore_core::{BackwardProblem, DataMut, GradientsMut, Layout};
use half::{bf16, f16};

use crate::{
    output::Shared,
    simd::{
        convert::{Accumulate, Narrow},
        runner::Runner,
    },
};

/// The caller's gradients.
pub(super) struct Grads<'a> {
    pub(super) dq: Gradient<'a>,
    pub(super) dk: Gradient<'a>,
    pub(super) dv: Gradient<'a>,
}

impl<'a> Grads<'a> {
    /// The gradients of Q, K and V, and apart from them those of the sinks, where they are wanted.
    pub(super) fn new(
        problem: &'a BackwardProblem,
        grads: GradientsMut<'a>,
    ) -> (Self, Option<&'a mut [f32]>) {
        let [dq, dk, dv] = grads.qkv;
        let gradient = |layout, data, factor| Gradient {
            layout,
            rows: Rows::new(data),
            factor,
            add: problem.accumulate(),
        };
        let scale = problem.forward().scale();
        let (dq, dk) = (gradient(problem.dq(), dq, scale), gradient(problem.dk(), dk, scale));
        (Self { dq, dk, dv: gradient(problem.dv(), dv, 1.0) }, grads.sinks)
    }
}

/// One gradient.
///
/// **Invariant:** a row is written by one thread, once: rows of dK and dV by the unit that has the key, rows of dQ by the
/// last unit that adds to their tile, all others by `terms` before there are units.
pub(super) struct Gradient<'a> {
    layout: &'a Layout,
    rows: Rows<'a>,
    /// From sums to gradients: those of scores are summed without the scale.
    factor: f32,
    /// Whether it is added to what is there.
    add: bool,
}

enum Rows<'a> {
    F16(Shared<'a, f16>),
    BF16(Shared<'a, bf16>),
    F32(Shared<'a, f32>),
}

impl<'a> Rows<'a> {
    fn new(data: DataMut<'a>) -> Self {
        match data {
            DataMut::F16(data) => Self::F16(Shared::new(data)),
            DataMut::BF16(data) => Self::BF16(Shared::new(data)),
            DataMut::F32(data) => Self::F32(Shared::new(data)),
            _ => unreachable!("`cpu` takes these types only"),
        }
    }
}

impl Gradient<'_> {
    /// Writes one row of sums, or adds it to what is there.
    pub(super) fn write(&self, [batch, head, seq]: [usize; 3], from: &[f32], runner: Runner) {
        let (start, len, factor) = (self.layout.row(batch, head, seq), self.layout.dims().dim, self.factor);
        let from = &from[..len];
        // SAFETY: nobody else has this row (invariant), and rows of a gradient share no memory (`BackwardSpec::parse`).
        unsafe {
            match &self.rows {
                Rows::F16(rows) => runner.run(Narrow { from, factor, to: rows.range(start, len) }),
                Rows::BF16(rows) => runner.run(Narrow { from, factor, to: rows.range(start, len) }),
                Rows::F32(rows) if self.add => {
                    runner.run(Accumulate { from, factor, to: rows.range(start, len), kept: 1.0 });
                }
                Rows::F32(rows) => runner.run(Narrow { from, factor, to: rows.range(start, len) }),
            }
        }
    }

    /// Makes one row zero, unless rows are added to.
    pub(super) fn clear(&self, [batch, head, seq]: [usize; 3]) {
        if self.add {
            return;
        }
        let (start, len) = (self.layout.row(batch, head, seq), self.layout.dims().dim);
        // SAFETY: as above.
        unsafe {
            match &self.rows {
                Rows::F16(rows) => rows.range(start, len).fill(f16::ZERO),
                Rows::BF16(rows) => rows.range(start, len).fill(bf16::ZERO),
                Rows::F32(rows) => rows.range(start, len).fill(0.0),
            }
        }
    }
}
