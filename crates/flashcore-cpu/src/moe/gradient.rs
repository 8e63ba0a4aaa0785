//! Gradients of a mixture of experts: expert after expert, each on all threads, by products of whole matrices.
//!
//! Gate and up are recomputed. A token's gradient is summed in the order of its experts, and sums over tokens run in the
//! order of tokens: bits do not depend on the number of threads. Memory is a few rows of floats per pair of a token and an
//! expert. Called by `cpu`; calls `matmul`.

use flashcore_core::{Activation, DType, DataMut, ExpertLayout, MoeGradientCall, MoeProblem};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    Networks,
    route::{Buckets, Routes},
};
use crate::{
    crew::Crew,
    factors::Matrix,
    matmul::{Block, Extents, Task, multiply},
    output::{Emit, Shared},
    simd::{
        Lane,
        convert::{Accumulate, Narrow},
        panel::COLUMNS,
        runner::Runner,
    },
};

/// Computes on all threads of the current pool; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn gradients(call: &mut MoeGradientCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    match call.problem().dtype() {
        DType::F32 => compute::<f32>(call, with),
        DType::F16 => compute::<f16>(call, with),
        DType::BF16 => compute::<bf16>(call, with),
        _ => None,
    }
}

fn compute<T: Lane>(call: &mut MoeGradientCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    let (problem, inputs, d_out) = (call.problem(), *call.inputs(), call.d_out());
    let spec = problem.spec();
    let pass =
        Pass { problem, x: inputs.x.slice::<T>()?, d_out: d_out.slice::<T>()?, runner: with.0, crew: with.1 };
    let routes = Routes::new(problem, &inputs.routed, with.1);
    let tokens = 0..problem.tokens();
    let experts = Networks::new([spec.gate_up, spec.down], [inputs.gate_up, inputs.down], inputs.biases)?;
    let shared = inputs.shared.zip(spec.shared);
    let shared =
        shared.and_then(|(data, layouts)| Networks::new([layouts.gate_up, layouts.down], data, None));
    let grads = call.grads();
    let to = Gradients::new([&mut grads.gate_up, &mut grads.down], grads.biases.as_mut())?;
    let buckets = Buckets::new(&routes, tokens.clone(), problem.experts());
    let entries: Vec<_> = tokens.clone().flat_map(|token| routes.of(token)).collect();
    let mut factors = vec![0f32; buckets.tokens.len()];
    let rows = || buckets.rows.iter().zip(&entries);
    rows().for_each(|(row, entry)| row.iter().for_each(|&row| factors[row] = entry.1));
    let (d_rows, d_factors) = pass.all(&experts, (&buckets, &factors), &to);
    for (to, row) in grads.weights.iter_mut().zip(&buckets.rows) {
        *to = row.map_or(0.0, |row| d_factors[row]);
    }
    let of_shared = match (&shared, &mut grads.shared) {
        (Some(shared), Some([gate_up, down])) => {
            let (to, all) = (Gradients::new([gate_up, down], None)?, Buckets::all(tokens));
            Some(pass.all(shared, (&all, &vec![1.0; problem.tokens()]), &to).0)
        }
        _ => None,
    };
    pass.add_up(&buckets, (&d_rows, of_shared.as_deref()), grads.x.reborrow().into_slice::<T>()?);
    Some("moe_gradients")
}

/// Where gradients of some experts go.
struct Gradients<'a, T> {
    gate_up: Shared<'a, T>,
    down: Shared<'a, T>,
    biases: Option<[Shared<'a, T>; 2]>,
}

impl<'a, T: Lane> Gradients<'a, T> {
    fn new(
        [gate_up, down]: [&'a mut DataMut<'_>; 2],
        biases: Option<&'a mut [DataMut<'_>; 2]>,
    ) -> Option<Self> {
        let shared = |data: &'a mut DataMut<'_>| Some(Shared::new(data.reborrow().into_slice::<T>()?));
        let biases = match biases {
            Some([first, second]) => Some([shared(first)?, shared(second)?]),
            None => None,
        };
        Some(Self { gate_up: shared(gate_up)?, down: shared(down)?, biases })
    }
}

/// What all experts share.
struct Pass<'a, T> {
    problem: &'a MoeProblem,
    x: &'a [T],
    d_out: &'a [T],
    runner: Runner,
    crew: Crew,
}

/// The rows of one expert: where their tokens and the gradients of their results start, and what they count for.
struct Rows<'a> {
    x: Vec<usize>,
    d_out: Vec<usize>,
    factors: &'a [f32],
}

impl<T: Lane> Pass<'_, T> {
    /// The gradients of all experts' weights; those of tokens, row by row, and of factors come back.
    fn all(
        &self,
        networks: &Networks<'_, T>,
        (buckets, factors): (&Buckets, &[f32]),
        to: &Gradients<'_, T>,
    ) -> (Vec<f32>, Vec<f32>) {
        let hidden = self.problem.hidden();
        let mut d_rows = vec![0f32; buckets.tokens.len() * hidden];
        let mut d_factors = vec![0f32; buckets.tokens.len()];
        for (expert, ends) in buckets.starts.windows(2).enumerate() {
            let tokens = &buckets.tokens[ends[0]..ends[1]];
            let starts =
                |layout: &flashcore_core::Layout| tokens.iter().map(|&t| layout.row(0, 0, t)).collect();
            let factors = &factors[ends[0]..ends[1]];
            let rows = Rows { x: starts(self.problem.x()), d_out: starts(self.problem.out()), factors };
            let d_rows = &mut d_rows[ends[0] * hidden..ends[1] * hidden];
            self.expert(networks, expert, &rows, (d_rows, &mut d_factors[ends[0]..ends[1]]), to);
        }
        (d_rows, d_factors)
    }

    fn expert(
        &self,
        networks: &Networks<'_, T>,
        expert: usize,
        rows: &Rows<'_>,
        (d_rows, d_factors): (&mut [f32], &mut [f32]),
        to: &Gradients<'_, T>,
    ) {
        let (first, second) = (&networks.gate_up.layout, &networks.down.layout);
        let (count, hidden, width, half) = (rows.factors.len(), first.cols(), first.rows(), second.cols());
        let gate_up = Matrix::of_expert(networks.gate_up.data, first, expert);
        let down = Matrix::of_expert(networks.down.data, second, expert);
        let [x, d_out] =
            [(self.x, &rows.x), (self.d_out, &rows.d_out)].map(|(data, rows)| Matrix::listed(data, rows));
        let bias = |bias: Option<&[T]>, len: usize| bias.map(|bias| widened(&bias[expert * len..][..len]));
        let biases = [bias(networks.gate_up.bias, width), bias(networks.down.bias, hidden)];

        let mut joined = vec![0f32; count * width];
        self.product_as_floats(
            Extents { rows: count, columns: width, depth: hidden },
            (x, gate_up.turned()),
            &mut joined,
        );
        let mut between = vec![0f32; count * half];
        self.product_as_floats(
            Extents { rows: count, columns: half, depth: hidden },
            (d_out, down),
            &mut between,
        );
        self.slopes(rows, &biases, [&mut joined, &mut between], d_factors);

        let columns = |data, width| Matrix::new(data, [width, 1]);
        self.product_as_matrix((d_out.turned(), columns(&between, half)), count, (second, expert), &to.down);
        self.product_as_matrix((columns(&joined, width).turned(), x), count, (first, expert), &to.gate_up);
        self.product_as_floats(
            Extents { rows: count, columns: hidden, depth: width },
            (columns(&joined, width), gate_up),
            d_rows,
        );
        if let Some([of_first, of_second]) = &to.biases {
            self.bias_gradient(
                of_first,
                expert,
                width,
                joined.chunks_exact(width).map(|row| (row.to_vec(), 1.0)),
            );
            let d_out = rows.d_out.iter().map(|&start| widened(&self.d_out[start..][..hidden]));
            self.bias_gradient(of_second, expert, hidden, d_out.zip(rows.factors.iter().copied()));
        }
    }

    /// Gates and ups become their gradients, gradients between the products what is multiplied for those of `down`.
    fn slopes(
        &self,
        rows: &Rows<'_>,
        [of_first, of_second]: &[Option<Vec<f32>>; 2],
        [joined, between]: [&mut [f32]; 2],
        d_factors: &mut [f32],
    ) {
        let spec = self.problem.spec();
        if rows.factors.is_empty() {
            return;
        }
        let (hidden, half) = (self.problem.hidden(), between.len() / rows.factors.len());
        let each = joined.par_chunks_exact_mut(2 * half).zip(between.par_chunks_exact_mut(half));
        each.zip(d_factors).enumerate().for_each(|(row, ((joined, between), d_factor))| {
            of_first.iter().for_each(|bias| joined.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias));
            let (factor, mut sum) = (rows.factors[row], 0f64);
            for (n, between) in between.iter_mut().enumerate() {
                let [gate, up] = [false, true].map(|up| spec.order.row(n, half, up));
                let [h, by_gate, by_up] = slopes(spec.activation, joined[gate], joined[up]);
                sum += f64::from(h) * f64::from(*between);
                let d = factor * *between;
                (joined[gate], joined[up], *between) = (d * by_gate, d * by_up, factor * h);
            }
            if let Some(bias) = of_second {
                let d_out = &self.d_out[rows.d_out[row]..][..hidden];
                sum +=
                    bias.iter().zip(d_out).map(|(b, d)| f64::from(*b) * f64::from(d.to_f32())).sum::<f64>();
            }
            *d_factor = sum as f32;
        });
    }

    /// A product as floats, dense.
    fn product_as_floats<A: Lane, B: Lane>(
        &self,
        extents: Extents,
        factors: (Matrix<'_, A>, Matrix<'_, B>),
        to: &mut [f32],
    ) {
        self.product(extents, factors, (&Shared::new(to), 0));
    }

    /// A product as one of an expert's matrices, as `layout` has them without gaps.
    fn product_as_matrix<A: Lane, B: Lane>(
        &self,
        (a, b): (Matrix<'_, A>, Matrix<'_, B>),
        depth: usize,
        (layout, expert): (&ExpertLayout, usize),
        to: &Shared<'_, T>,
    ) {
        let (rows, columns, start) = (layout.rows(), layout.cols(), expert * layout.rows() * layout.cols());
        if layout.is_row_major() {
            return self.product(Extents { rows, columns, depth }, (a, b), (to, start));
        }
        let extents = Extents { rows: columns, columns: rows, depth };
        self.product(extents, (b.turned(), a.turned()), (to, start));
    }

    /// A product, written without gaps from a position on.
    fn product<A: Lane, B: Lane, C: Lane>(
        &self,
        extents: Extents,
        (a, b): (Matrix<'_, A>, Matrix<'_, B>),
        (to, first): (&Shared<'_, C>, usize),
    ) {
        let with = (self.runner, self.crew);
        multiply(&[Task { extents, a, b }], false, with, |Block { rows, columns, .. }, values| {
            // Blocks of a product are disjoint, and so are matrices.
            let start = |n: usize| first + (rows.start + n) * extents.columns + columns.start;
            self.runner.run(Emit { from: (&*values, COLUMNS), len: columns.len(), to, start });
        });
    }

    /// The sum of rows, times factors, in their order.
    fn bias_gradient(
        &self,
        to: &Shared<'_, T>,
        expert: usize,
        len: usize,
        rows: impl Iterator<Item = (Vec<f32>, f32)>,
    ) {
        let mut sum = vec![0f32; len];
        rows.for_each(|(row, factor)| {
            self.runner.run(Accumulate { from: &row, factor, to: &mut sum, kept: 1.0 });
        });
        // SAFETY: experts come one after another.
        let to = unsafe { to.range(expert * len, len) };
        self.runner.run(Narrow { from: &sum, factor: 1.0, to });
    }

    /// Gradients of tokens: the sums of their rows.
    fn add_up(&self, buckets: &Buckets, (d_rows, shared): (&[f32], Option<&[f32]>), to: &mut [T]) {
        let (hidden, top_k) = (self.problem.hidden(), self.problem.top_k());
        let to = &mut to[..self.problem.tokens() * hidden];
        self.crew.chunks(to, hidden, |token, to| {
            let mut sum = vec![0f32; hidden];
            let own = buckets.rows[token * top_k..][..top_k].iter().flatten();
            let rows = own.map(|row| &d_rows[row * hidden..][..hidden]);
            for from in rows.chain(shared.map(|rows| &rows[token * hidden..][..hidden])) {
                self.runner.run(Accumulate { from, factor: 1.0, to: &mut sum, kept: 1.0 });
            }
            self.runner.run(Narrow { from: &sum, factor: 1.0, to });
        });
    }
}

fn widened<T: Lane>(row: &[T]) -> Vec<f32> {
    row.iter().map(|x| x.to_f32()).collect()
}

/// What joins gate and up, and its slopes by gate and by up. At the limits of a clamp the slope is that within.
fn slopes(activation: Activation, gate: f32, up: f32) -> [f32; 3] {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu => {
            let s = sigmoid(gate);
            [gate * s * up, s * (1.0 + gate * (1.0 - s)) * up, gate * s]
        }
        Activation::GeGlu => {
            const ROOT: f32 = 0.797_884_6;
            const CUBIC: f32 = 0.044_715;
            let t = (ROOT * gate * (1.0 + CUBIC * gate * gate)).tanh();
            let inner = ROOT * (1.0 + 3.0 * CUBIC * gate * gate);
            let gelu = 0.5 * gate * (1.0 + t);
            [gelu * up, (0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * inner) * up, gelu]
        }
        Activation::Clamped { alpha, limit } => {
            let inside = |yes: bool| if yes { 1.0 } else { 0.0 };
            let (g, u) = (if gate > limit { limit } else { gate }, up.clamp(-limit, limit));
            let s = sigmoid(alpha * g);
            let by_gate = (s + alpha * g * s * (1.0 - s)) * (u + 1.0);
            [g * s * (u + 1.0), inside(gate <= limit) * by_gate, inside(up.abs() <= limit) * g * s]
        }
    }
}
