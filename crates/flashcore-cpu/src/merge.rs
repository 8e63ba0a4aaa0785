//! Merges partial results, rows split over threads. Called by `cpu`; calls `simd`.

use flashcore_core::{DType, DataMut, Layout, MergeCall, MergeProblem, Parts};

use crate::{
    crew::Crew,
    output::Shared,
    simd::{
        Lane,
        convert::{AddTo, Narrow},
        runner::Runner,
    },
};
use half::{bf16, f16};

/// Rows that a thread takes at a time.
const BLOCK: usize = 64;
/// Elements of all parts below which waking other threads costs more than it saves.
const SERIAL: usize = 1 << 16;

/// Merges on all threads; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn merge(call: &mut MergeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    match call.problem().dtype() {
        DType::F32 => merge_from::<f32>(call, with),
        DType::F16 => merge_from::<f16>(call, with),
        DType::BF16 => merge_from::<bf16>(call, with),
        _ => None,
    }
}

fn merge_from<T: Lane>(call: &mut MergeCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    let (problem, lses) = (call.problem(), call.lses());
    let parts: Option<Vec<&[T]>> = call.parts().iter().map(|part| part.slice()).collect();
    let (runner, crew) = with;
    let inputs = Inputs { problem, runner, crew, parts: parts?, lses };
    let (out, lse) = call.outputs();
    match problem.out_dtype() {
        DType::F32 => inputs.merge_to::<f32>(out, lse),
        DType::F16 => inputs.merge_to::<f16>(out, lse),
        DType::BF16 => inputs.merge_to::<bf16>(out, lse),
        _ => None,
    }
}

/// The parts of a call, their element type known.
struct Inputs<'a, T> {
    problem: &'a MergeProblem,
    runner: Runner,
    crew: Crew,
    parts: Vec<&'a [T]>,
    lses: &'a [&'a [f32]],
}

impl<T: Lane> Inputs<'_, T> {
    fn merge_to<O: Lane>(&self, out: DataMut<'_>, lse: Option<&mut [f32]>) -> Option<&'static str> {
        let rows = self.problem.rows();
        let (out, lse) = (Shared::new(out.into_slice::<O>()?), lse.map(Shared::new));
        let block = |first: usize| self.merge_rows(first..rows.min(first + BLOCK), &out, lse.as_ref());
        let small = rows * self.problem.dims().dim * self.problem.parts().count() < SERIAL;
        let crew = if small { Crew::Caller } else { self.crew };
        crew.each(rows.div_ceil(BLOCK), |n| block(n * BLOCK));
        Some("merge")
    }

    fn merge_rows<O: Lane>(
        &self,
        rows: std::ops::Range<usize>,
        out: &Shared<'_, O>,
        lse: Option<&Shared<'_, f32>>,
    ) {
        let dim = self.problem.dims().dim;
        let (mut sums, mut weights) = (vec![0f32; dim], Vec::new());
        for row in rows {
            let total = self.weights(row, &mut weights);
            self.sum(row, &weights, &mut sums);
            // SAFETY: blocks of rows are disjoint, and so are the rows of an output (`MergeSpec::parse`).
            let to = unsafe { out.range(start(self.problem.out(), row), dim) };
            self.runner.run(Narrow { from: &sums, factor: 1.0, to });
            if let Some(lse) = lse {
                // SAFETY: as above.
                unsafe { lse.range(row, 1)[0] = total };
            }
        }
    }

    /// The weight of every part's row; returns their common LSE.
    fn weights(&self, row: usize, weights: &mut Vec<f64>) -> f32 {
        let lses = (0..self.problem.parts().count()).map(|part| f64::from(self.lse(part, row)));
        let top = lses.clone().fold(f64::NEG_INFINITY, f64::max);
        weights.clear();
        if top == f64::NEG_INFINITY && lses.clone().all(|lse| lse == top) {
            weights.resize(self.problem.parts().count(), 0.0);
            return f32::NEG_INFINITY;
        }
        weights.extend(lses.map(|lse| (lse - top).exp()));
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        (top + sum.ln()) as f32
    }

    /// Adds up the parts of a row in their order, leaving out those without weight: they may hold anything.
    fn sum(&self, row: usize, weights: &[f64], sums: &mut [f32]) {
        sums.fill(0.0);
        let start = start(self.problem.part(), row);
        for (part, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let (tensor, skipped) = self.place(part);
            let from = &self.parts[tensor][skipped * self.problem.stride() + start..][..sums.len()];
            self.runner.run(AddTo { from, factor: weight as f32, to: sums });
        }
    }

    fn lse(&self, part: usize, row: usize) -> f32 {
        let (tensor, skipped) = self.place(part);
        self.lses[tensor][skipped * self.problem.rows() + row]
    }

    /// The tensor in which a part lies, and how many parts lie before it there.
    const fn place(&self, part: usize) -> (usize, usize) {
        match self.problem.parts() {
            Parts::Stacked { .. } => (0, part),
            Parts::Listed(_) => (part, 0),
        }
    }
}

/// First element of row `row`, counted in the order batch, heads, sequence.
fn start(layout: &Layout, row: usize) -> usize {
    let dims = layout.dims();
    let plane = row / dims.seq;
    layout.row(plane / dims.heads, plane % dims.heads, row % dims.seq)
}
