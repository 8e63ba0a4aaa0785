//! What can be wrong with the arguments of a mixture of experts, besides what can be wrong with any tensor.

use crate::{error::Operand, layout::Dims, lengths::Index};

/// Arguments that do not describe a mixture of experts.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// No routing was given.
    #[error("there is no routing; call `routed` or `route`")]
    NoRouting,
    /// Tokens that are not a matrix.
    #[error("{operand} is {dims} but must have batch 1 and one head; view it as tokens x hidden")]
    NotMatrix {
        /// The tensor.
        operand: Operand,
        /// Its extents.
        dims: Dims,
    },
    /// Matrices of experts that neither rows nor columns are contiguous in.
    #[error("strides {strides:?} of matrices: rows or columns must have a stride of 1; make them contiguous")]
    Strides {
        /// Elements from one expert, row and column to the next.
        strides: [usize; 3],
    },
    /// No experts, or a first product that cannot be gates and ups.
    #[error("{operand} is {}x{}x{}: it needs at least one expert and an even number of rows, half gate and half up", .dims.batch, .dims.seq, .dims.dim)]
    GateUpRows {
        /// The tensor.
        operand: Operand,
        /// Experts, 1, rows and columns.
        dims: Dims,
    },
    /// Matrices of experts that do not fit each other.
    #[error(
        "{operand} has {got} {what} but {expected} are needed to match {because}; gate_up is experts x 2*intermediate x hidden, down experts x hidden x intermediate"
    )]
    Mismatch {
        /// The tensor that does not fit.
        operand: Operand,
        /// What it has too many or too few of.
        what: &'static str,
        /// How many it has.
        got: usize,
        /// How many it needs.
        expected: usize,
        /// Which tensor decides.
        because: Operand,
    },
    /// A clamp that leaves nothing.
    #[error("alpha {alpha} must be finite and limit {limit} above 0")]
    Clamp {
        /// Factor on the gate.
        alpha: f32,
        /// What gate and up are clamped to.
        limit: f32,
    },
    /// Experts that are not among those of the layer.
    #[error("experts {first}.. ({here} of them) exceed the layer's {of}, which may be {max} at most")]
    Range {
        /// The first expert here.
        first: usize,
        /// Experts here.
        here: usize,
        /// Experts of the layer.
        of: usize,
        /// Most experts of a layer.
        max: usize,
    },
    /// Too few or too many experts for a token.
    #[error("a token cannot go to {given} experts; give 1 to {max}")]
    TopK {
        /// Requested experts.
        given: usize,
        /// Most experts.
        max: usize,
    },
    /// The factor on routing weights is not a positive number.
    #[error("the routing scale {0} must be finite and positive; use 1 for none")]
    Scale(f32),
    /// Groups that experts cannot be chosen from.
    #[error(
        "{top} of {count} groups of {experts} experts in all cannot supply {top_k} experts; make groups equal in size and choose enough of them"
    )]
    Groups {
        /// Groups.
        count: usize,
        /// Groups that are chosen.
        top: usize,
        /// Experts of the layer.
        experts: usize,
        /// Experts of a token.
        top_k: usize,
    },
    /// Numbers of experts of another type than the problem says.
    #[error("expert ids are {given:?} but the problem expects {expected:?}; bind ids of that type")]
    IdType {
        /// Their element type.
        given: Index,
        /// What the problem says.
        expected: Index,
    },
    /// Routing of another length than the tokens demand.
    #[error(
        "{operand}: {len} values where {needed} are needed; ids and weights are tokens x top-k, logits tokens x experts"
    )]
    RoutingLength {
        /// The tensor.
        operand: Operand,
        /// Values there.
        len: usize,
        /// Values needed.
        needed: usize,
    },
    /// Ids where the problem computes the routing, or the other way round.
    #[error("the problem expects {} but the call passes {}; bind what it was planned for",
        if *given { "logits" } else { "ids and weights" }, if *given { "ids and weights" } else { "logits" })]
    OtherRouting {
        /// Whether the call has ids and weights.
        given: bool,
    },
    /// Gradients of experts that the call itself chooses.
    #[error("routing by logits has no gradients; choose experts first and pass their ids and weights")]
    ComputedRouting,
    /// Tensors where the problem has none, or none where it has.
    #[error("the call {} {operand} but the problem {}; bind what it was planned for",
        if *given { "passes" } else { "lacks" }, if *given { "has none" } else { "expects it" })]
    OtherOperands {
        /// The tensors.
        operand: Operand,
        /// Whether the call brings them.
        given: bool,
    },
}
