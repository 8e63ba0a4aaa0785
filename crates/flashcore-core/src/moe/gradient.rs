//! Gradients of a mixture of experts, bound to host memory.
//!
//! With `h = act(gate, up)` of token `t` at expert `e`, `w` its weight and `dy` the gradient of the token's result:
//! `d down[e] += w · dy ⊗ h`, `dw = dy · (down[e] · h + bias)`, `dh = w · downᵀ[e] · dy`, from which the activation's slopes
//! give the gradients of gate and up; these give `d gate_up[e] += d(gate, up) ⊗ x[t]` and
//! `dx[t] += gate_upᵀ[e] · d(gate, up)`. Gate and up are recomputed: the forward pass saves nothing.

use super::{ExpertLayout, MoeError, MoeInputs, MoeProblem, Routing, call::holds};
use crate::{
    call::{Data, DataMut},
    error::{Operand, ProblemError},
};

/// What gradients are written into, completely. Each lies as its tensor does, without the gaps: see
/// [`ExpertLayout::without_gaps`]; tokens and biases are dense.
#[derive(Debug)]
pub struct MoeGradientsMut<'a> {
    /// Of the tokens.
    pub x: DataMut<'a>,
    /// Of the matrices of the first product.
    pub gate_up: DataMut<'a>,
    /// Of the matrices of the second product.
    pub down: DataMut<'a>,
    /// Of the biases, where the problem has them.
    pub biases: Option<[DataMut<'a>; 2]>,
    /// Of both matrices of the shared expert, where the problem has one.
    pub shared: Option<[DataMut<'a>; 2]>,
    /// Of the routing weights, tokens × top-k; 0 for experts that are elsewhere.
    pub weights: &'a mut [f32],
}

/// The gradients of a mixture of experts with the host memory they work on.
///
/// **Invariant:** as of [`super::MoeCall`]; the routing is given.
#[derive(Debug)]
pub struct MoeGradientCall<'a> {
    problem: &'a MoeProblem,
    inputs: MoeInputs<'a>,
    d_out: Data<'a>,
    grads: MoeGradientsMut<'a>,
}

impl<'a> MoeGradientCall<'a> {
    /// Binds `problem` to memory; `d_out` lies as the problem's result.
    pub fn bind(
        problem: &'a MoeProblem,
        inputs: MoeInputs<'a>,
        d_out: Data<'a>,
        grads: MoeGradientsMut<'a>,
    ) -> Result<Self, ProblemError> {
        if let Routing::Computed { .. } = problem.routing() {
            return Err(ProblemError::Moe(MoeError::ComputedRouting));
        }
        super::call::check_inputs(problem, &inputs)?;
        let (spec, dtype) = (problem.spec(), problem.dtype());
        holds(Operand::DOut, d_out, dtype, problem.out().span())?;
        let mut written = vec![
            (Operand::X, grads.x.as_data(), problem.tokens() * problem.hidden()),
            (Operand::GateUp, grads.gate_up.as_data(), spec.gate_up.elements()),
            (Operand::Down, grads.down.as_data(), spec.down.elements()),
        ];
        super::call::same(Operand::Biases, grads.biases.is_some(), spec.biases)?;
        if let Some([first, second]) = &grads.biases {
            let experts = problem.experts();
            written.push((Operand::Biases, first.as_data(), experts * spec.gate_up.rows()));
            written.push((Operand::Biases, second.as_data(), experts * problem.hidden()));
        }
        super::call::same(Operand::Shared, grads.shared.is_some(), spec.shared.is_some())?;
        if let Some(([gate_up, down], shared)) = grads.shared.as_ref().zip(spec.shared) {
            written.push((Operand::SharedGateUp, gate_up.as_data(), shared.gate_up.elements()));
            written.push((Operand::SharedDown, down.as_data(), shared.down.elements()));
        }
        for (operand, data, needed) in written {
            holds(operand, data, dtype, needed)?;
        }
        super::call::exactly(Operand::RoutingWeights, grads.weights.len(), problem.entries())?;
        Ok(Self { problem, inputs, d_out, grads })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a MoeProblem {
        self.problem
    }

    /// What the forward pass read.
    pub const fn inputs(&self) -> &MoeInputs<'a> {
        &self.inputs
    }

    /// The gradient of the result.
    pub const fn d_out(&self) -> Data<'a> {
        self.d_out
    }

    /// Where gradients go.
    pub const fn grads(&mut self) -> &mut MoeGradientsMut<'a> {
        &mut self.grads
    }
}

impl ExpertLayout {
    /// The same extents and order of rows and columns, dense: how a gradient of such matrices lies.
    pub fn without_gaps(&self) -> Self {
        let [experts, rows, cols] = [self.experts(), self.rows(), self.cols()];
        let dense = if self.is_row_major() { Self::dense } else { Self::transposed };
        dense([experts, rows, cols]).unwrap_or(*self)
    }

    /// Elements of all matrices.
    pub fn elements(&self) -> usize {
        self.without_gaps().span()
    }
}
