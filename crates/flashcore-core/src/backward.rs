//! The gradients of attention: those of Q, K, V and the sinks, given the gradient of the output.
//!
//! With `P = exp(scale·QKᵀ − lse)` where the mask lets a query see a key, and 0 elsewhere:
//!
//! | gradient | value |
//! | --- | --- |
//! | dV | `Pᵀ·dO` |
//! | dS | `P ∘ (dO·Vᵀ − sums)`, with a softcap times its slope, `1 − tanh²` |
//! | dQ, dK | `scale·dS·K`, `scale·dSᵀ·Q` |
//! | d sinks | `−Σ exp(sink − lse)·sums` over the rows of a head |
//!
//! The row sums are those of `dO ∘ O`. A call provides the output for them, or the sums themselves: with the LSE and
//! the sums of attention over *all* keys, the gradients of parts of the keys add up to those of the whole.
//!
//! [`BackwardSpec::parse`] makes a [`BackwardProblem`], which a backend computes over the memory of a [`BackwardCall`].

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout},
    problem::{Problem, Spec, check_axes},
    values::{Instance, Values},
};

/// Where the sums of `dO ∘ O` over each row come from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum RowSums {
    /// From the output, which the call provides.
    #[default]
    Computed,
    /// From the call, which then provides no output.
    Given,
}

/// The gradients that a caller asks for, unchecked; [`BackwardSpec::parse`] makes a [`BackwardProblem`] of it.
#[derive(Clone, PartialEq, Debug)]
pub struct BackwardSpec {
    /// What was computed forward. The output and its gradient have the element type that forward gave the output; whether
    /// forward accumulated does not matter.
    pub forward: Spec,
    /// Layout of the output's gradient; dense batch × heads × sequence × dim where `None`.
    pub d_out: Option<Layout>,
    /// Layout of the queries' gradient; dense where `None`.
    pub dq: Option<Layout>,
    /// Layout of the keys' gradient; dense where `None`.
    pub dk: Option<Layout>,
    /// Layout of the values' gradient; dense where `None`.
    pub dv: Option<Layout>,
    /// Element type of the gradients, where it is not that of Q: f32.
    pub grad_dtype: Option<DType>,
    /// Add to what the gradients hold already, instead of overwriting them.
    pub accumulate: bool,
    /// Where the row sums come from.
    pub row_sums: RowSums,
}

impl BackwardSpec {
    /// Dense gradients of Q's type, row sums from the output.
    pub const fn new(forward: Spec) -> Self {
        Self {
            forward,
            d_out: None,
            dq: None,
            dk: None,
            dv: None,
            grad_dtype: None,
            accumulate: false,
            row_sums: RowSums::Computed,
        }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<BackwardProblem, ProblemError> {
        let dtypes = [self.forward.dtype, self.forward.kv_dtype.unwrap_or(self.forward.dtype)];
        dtypes.into_iter().try_for_each(|dtype| dtype.check_common("computing gradients"))?;
        if self.forward.pages.is_some() {
            return Err(ProblemError::PagedGradients);
        }
        let forward = Spec { accumulate: false, ..self.forward }.parse()?;
        let dense = |layout: Option<Layout>, dims| layout.map_or_else(|| Layout::bhsd(dims), Ok);
        let d_out = dense(self.d_out, forward.out().dims())?;
        check_axes((Operand::DOut, d_out.dims()), (Operand::Out, forward.out().dims()), &Axis::ALL)?;
        let grads = [
            gradient(Operand::DQ, self.dq, (Operand::Q, forward.q().dims()))?,
            gradient(Operand::DK, self.dk, (Operand::K, forward.k().dims()))?,
            gradient(Operand::DV, self.dv, (Operand::V, forward.v().dims()))?,
        ];
        let grad_dtype = self.grad_dtype.unwrap_or(forward.dtype());
        check_dtype(grad_dtype, forward.dtype(), self.accumulate)?;
        let (accumulate, row_sums) = (self.accumulate, self.row_sums);
        Ok(BackwardProblem { forward, d_out, grads, grad_dtype, accumulate, row_sums })
    }
}

/// The layout of a gradient, which must have the extents of its tensor and elements of its own for each of them.
fn gradient(operand: Operand, given: Option<Layout>, of: (Operand, Dims)) -> Result<Layout, ProblemError> {
    let layout = given.map_or_else(|| Layout::bhsd(of.1), Ok)?;
    check_axes((operand, layout.dims()), of, &Axis::ALL)?;
    layout.check_output()?;
    Ok(layout)
}

fn check_dtype(grad: DType, dtype: DType, accumulate: bool) -> Result<(), ProblemError> {
    match (grad == DType::F32, accumulate) {
        (false, true) => Err(ProblemError::AccumulateDType { out: grad }),
        (false, false) if grad != dtype => Err(ProblemError::GradDType { grad, dtype }),
        _ => Ok(()),
    }
}

/// Checked gradients to be computed.
#[derive(Clone, PartialEq, Debug)]
pub struct BackwardProblem {
    forward: Problem,
    d_out: Layout,
    grads: [Layout; 3],
    grad_dtype: DType,
    accumulate: bool,
    row_sums: RowSums,
}

impl AsRef<Problem> for BackwardProblem {
    fn as_ref(&self) -> &Problem {
        &self.forward
    }
}

impl BackwardProblem {
    /// What was computed forward.
    pub const fn forward(&self) -> &Problem {
        &self.forward
    }

    /// Layout of the output's gradient.
    pub const fn d_out(&self) -> &Layout {
        &self.d_out
    }

    /// Layout of the queries' gradient.
    pub const fn dq(&self) -> &Layout {
        &self.grads[0]
    }

    /// Layout of the keys' gradient.
    pub const fn dk(&self) -> &Layout {
        &self.grads[1]
    }

    /// Layout of the values' gradient.
    pub const fn dv(&self) -> &Layout {
        &self.grads[2]
    }

    /// Element type of the gradients.
    pub const fn grad_dtype(&self) -> DType {
        self.grad_dtype
    }

    /// Whether gradients are added to what is there.
    pub const fn accumulate(&self) -> bool {
        self.accumulate
    }

    /// Where the row sums come from.
    pub const fn row_sums(&self) -> RowSums {
        self.row_sums
    }

    /// Floating-point operations of the five matrix products over visible pairs, were every sequence as long as it may be.
    pub fn flops(&self) -> f64 {
        let (qk, v) = (self.forward.dim_qk() as f64, self.forward.dim_v() as f64);
        self.forward.flops() * (3.0 * qk + 2.0 * v) / (qk + v)
    }
}

/// What row sums are made from, or the sums.
#[derive(Clone, Copy, Debug)]
pub enum RowTerms<'a> {
    /// The output of forward.
    Out(Data<'a>),
    /// One sum for each row, dense batch × heads × sequence.
    Sums(&'a [f32]),
}

/// What gradients are computed from, element types erased.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a> {
    /// Q, K and V.
    pub qkv: [Data<'a>; 3],
    /// The LSE of each row, dense batch × heads × sequence. Rows where it is −∞ have no gradients.
    pub lse: &'a [f32],
    /// The output or the row sums.
    pub terms: RowTerms<'a>,
    /// The output's gradient.
    pub d_out: Data<'a>,
}

/// Where gradients go, element types erased.
#[derive(Debug)]
pub struct GradientsMut<'a> {
    /// The gradients of Q, K and V.
    pub qkv: [DataMut<'a>; 3],
    /// The gradient of each head's sink, where it is wanted.
    pub sinks: Option<&'a mut [f32]>,
}

/// Gradients to be computed, with the host memory that everything lies in.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, so that a
/// backend indexes without checking again.
#[derive(Debug)]
pub struct BackwardCall<'a> {
    problem: &'a BackwardProblem,
    instance: Instance<'a>,
    inputs: BackwardInputs<'a>,
    grads: GradientsMut<'a>,
}

impl<'a> BackwardCall<'a> {
    /// Binds `problem` to memory.
    pub fn bind(
        problem: &'a BackwardProblem,
        values: &'a Values,
        inputs: BackwardInputs<'a>,
        grads: GradientsMut<'a>,
    ) -> Result<Self, ProblemError> {
        let instance = Instance::new(problem.forward(), values)?;
        check_inputs(problem, &inputs)?;
        let operands = [Operand::DQ, Operand::DK, Operand::DV];
        for ((operand, layout), data) in operands.into_iter().zip(&problem.grads).zip(&grads.qkv) {
            check(operand, data.as_data(), problem.grad_dtype, layout)?;
        }
        if let Some(given) = grads.sinks.as_ref().map(|sinks| sinks.len()) {
            let expected = problem.forward.sinks().map_or(0, |_| problem.forward.heads_q());
            if given != expected || expected == 0 {
                return Err(ProblemError::SinkGradients { given, expected });
            }
        }
        Ok(Self { problem, instance, inputs, grads })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a BackwardProblem {
        self.problem
    }

    /// What was computed forward, with the call's lengths and sinks.
    pub const fn instance(&self) -> Instance<'a> {
        self.instance
    }

    /// What gradients are computed from.
    pub const fn inputs(&self) -> BackwardInputs<'a> {
        self.inputs
    }

    /// Where gradients go.
    pub fn gradients(&mut self) -> GradientsMut<'_> {
        let [dq, dk, dv] = &mut self.grads.qkv;
        GradientsMut {
            qkv: [dq.reborrow(), dk.reborrow(), dv.reborrow()],
            sinks: self.grads.sinks.as_deref_mut(),
        }
    }
}

fn check_inputs(problem: &BackwardProblem, inputs: &BackwardInputs<'_>) -> Result<(), ProblemError> {
    let forward = problem.forward();
    let ([q, k, v], dtype, out_dtype) = (inputs.qkv, forward.dtype(), forward.out_dtype());
    check(Operand::Q, q, dtype, forward.q())?;
    check(Operand::K, k, dtype, forward.k())?;
    check(Operand::V, v, dtype, forward.v())?;
    check(Operand::DOut, inputs.d_out, out_dtype, problem.d_out())?;
    let rows = forward.rows();
    if inputs.lse.len() != rows {
        return Err(ProblemError::LseLength { needed: rows, len: inputs.lse.len() });
    }
    match (inputs.terms, problem.row_sums()) {
        (RowTerms::Out(out), RowSums::Computed) => check(Operand::Out, out, out_dtype, forward.out()),
        (RowTerms::Sums(sums), RowSums::Given) if sums.len() == rows => Ok(()),
        (RowTerms::Sums(sums), RowSums::Given) => {
            Err(ProblemError::RowSumsLength { needed: rows, len: sums.len() })
        }
        (terms, _) => Err(ProblemError::OtherRowTerms { given: matches!(terms, RowTerms::Sums(_)) }),
    }
}

fn check(operand: Operand, data: Data<'_>, expected: DType, layout: &Layout) -> Result<(), ProblemError> {
    if data.dtype() != expected {
        return Err(ProblemError::OtherDType { operand, got: data.dtype(), expected });
    }
    layout.check_len(operand, data.len())
}
