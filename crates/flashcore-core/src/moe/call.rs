//! A mixture of experts bound to host memory: the input of backends.

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Operand, ProblemError},
    lengths::Index,
};

use super::{MoeError, MoeProblem, Routing};

/// Numbers of experts.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// 32-bit integers.
    I32(&'a [i32]),
    /// 64-bit integers.
    I64(&'a [i64]),
}

impl Ids<'_> {
    /// Their element type.
    pub const fn index(&self) -> Index {
        match self {
            Self::I32(_) => Index::I32,
            Self::I64(_) => Index::I64,
        }
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        match self {
            Self::I32(ids) => ids.len(),
            Self::I64(ids) => ids.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number `n`.
    pub const fn get(&self, n: usize) -> i64 {
        match self {
            Self::I32(ids) => ids[n] as i64,
            Self::I64(ids) => ids[n],
        }
    }

    /// Their bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::I32(ids) => bytemuck::cast_slice(ids),
            Self::I64(ids) => bytemuck::cast_slice(ids),
        }
    }
}

/// The routing of one call.
#[derive(Clone, Copy, Debug)]
pub enum Routed<'a> {
    /// Experts of each token, and what each counts for.
    Given {
        /// Numbers of experts, tokens × top-k; one that is not here adds nothing.
        ids: Ids<'a>,
        /// Weights, likewise.
        weights: Data<'a>,
    },
    /// What each token's experts are computed from.
    Computed {
        /// Tokens × experts of the layer.
        logits: Data<'a>,
        /// One per expert of the layer, added for the choice.
        bias: Option<&'a [f32]>,
    },
}

/// The tensors that a mixture of experts reads.
#[derive(Clone, Copy, Debug)]
pub struct MoeInputs<'a> {
    /// Tokens.
    pub x: Data<'a>,
    /// Matrices of the first product.
    pub gate_up: Data<'a>,
    /// Matrices of the second product.
    pub down: Data<'a>,
    /// Biases of both, where the problem has them.
    pub biases: Option<[Data<'a>; 2]>,
    /// Both matrices of the shared expert, where the problem has one.
    pub shared: Option<[Data<'a>; 2]>,
    /// The routing.
    pub routed: Routed<'a>,
}

/// A mixture of experts with the host memory it works on.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, so that a
/// backend indexes without checking again. Numbers of experts may be anything.
#[derive(Debug)]
pub struct MoeCall<'a> {
    problem: &'a MoeProblem,
    inputs: MoeInputs<'a>,
    out: DataMut<'a>,
}

impl<'a> MoeCall<'a> {
    /// Binds `problem` to memory.
    pub fn bind(
        problem: &'a MoeProblem,
        inputs: MoeInputs<'a>,
        out: DataMut<'a>,
    ) -> Result<Self, ProblemError> {
        check_inputs(problem, &inputs)?;
        holds(Operand::Out, out.as_data(), problem.dtype(), problem.out().span())?;
        Ok(Self { problem, inputs, out })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a MoeProblem {
        self.problem
    }

    /// What is read.
    pub const fn inputs(&self) -> &MoeInputs<'a> {
        &self.inputs
    }

    /// The result.
    pub fn out(&mut self) -> DataMut<'_> {
        self.out.reborrow()
    }
}

/// Every input is what the problem says, and holds what its layout reaches.
pub(super) fn check_inputs(problem: &MoeProblem, inputs: &MoeInputs<'_>) -> Result<(), ProblemError> {
    let (spec, dtype) = (problem.spec(), problem.dtype());
    holds(Operand::X, inputs.x, dtype, spec.x.span())?;
    holds(Operand::GateUp, inputs.gate_up, dtype, spec.gate_up.span())?;
    holds(Operand::Down, inputs.down, dtype, spec.down.span())?;
    same(Operand::Biases, inputs.biases.is_some(), spec.biases)?;
    if let Some([first, second]) = inputs.biases {
        let experts = problem.experts();
        holds(Operand::Biases, first, dtype, experts * spec.gate_up.rows())?;
        holds(Operand::Biases, second, dtype, experts * problem.hidden())?;
    }
    same(Operand::Shared, inputs.shared.is_some(), spec.shared.is_some())?;
    if let Some(([gate_up, down], shared)) = inputs.shared.zip(spec.shared) {
        holds(Operand::SharedGateUp, gate_up, dtype, shared.gate_up.span())?;
        holds(Operand::SharedDown, down, dtype, shared.down.span())?;
    }
    check_routed(problem, &inputs.routed)
}

fn check_routed(problem: &MoeProblem, routed: &Routed<'_>) -> Result<(), ProblemError> {
    match (*routed, *problem.routing()) {
        (Routed::Given { ids, weights }, Routing::Given { ids: index, weights: dtype, .. }) => {
            if ids.index() != index {
                return Err(ProblemError::Moe(MoeError::IdType { given: ids.index(), expected: index }));
            }
            exactly(Operand::Ids, ids.len(), problem.entries())?;
            holds(Operand::RoutingWeights, weights, dtype, 0)?;
            exactly(Operand::RoutingWeights, weights.len(), problem.entries())
        }
        (Routed::Computed { logits, bias }, Routing::Computed { logits: dtype, .. }) => {
            let experts = problem.shard().of;
            holds(Operand::Logits, logits, dtype, 0)?;
            exactly(Operand::Logits, logits.len(), problem.tokens() * experts)?;
            same(Operand::RoutingBias, bias.is_some(), problem.routing().has_bias())?;
            bias.map_or(Ok(()), |bias| exactly(Operand::RoutingBias, bias.len(), experts))
        }
        (Routed::Given { .. }, _) => Err(ProblemError::Moe(MoeError::OtherRouting { given: true })),
        (Routed::Computed { .. }, _) => Err(ProblemError::Moe(MoeError::OtherRouting { given: false })),
    }
}

pub(super) fn holds(
    operand: Operand,
    data: Data<'_>,
    expected: DType,
    needed: usize,
) -> Result<(), ProblemError> {
    if data.dtype() != expected {
        return Err(ProblemError::OtherDType { operand, got: data.dtype(), expected });
    }
    if data.len() < needed {
        return Err(ProblemError::BufferTooSmall { operand, needed, len: data.len() });
    }
    Ok(())
}

pub(super) fn exactly(operand: Operand, len: usize, needed: usize) -> Result<(), ProblemError> {
    if len == needed {
        Ok(())
    } else {
        Err(ProblemError::Moe(MoeError::RoutingLength { operand, len, needed }))
    }
}

pub(super) fn same(operand: Operand, given: bool, asked: bool) -> Result<(), ProblemError> {
    if given == asked { Ok(()) } else { Err(ProblemError::Moe(MoeError::OtherOperands { operand, given })) }
}
