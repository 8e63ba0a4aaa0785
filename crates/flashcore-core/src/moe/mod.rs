//! A mixture of experts: every token goes through a few of many small networks, whose weighted results are summed.
//!
//! `out[t] = Σⱼ weight[t, j] · down[e] · act(gate[e] · x[t], up[e] · x[t])` with `e = id[t, j]`, over the experts `j` of
//! token `t`, in f32 and in that order; a shared expert, through which every token goes, is added last. Weights of an
//! expert that no token goes to are never read.
//!
//! [`MoeSpec::parse`] makes a [`MoeProblem`], which a backend computes over the memory of a [`MoeCall`]. The routing
//! itself (expert ids and their weights, or logits) is bound by a call and not part of a problem.

mod call;
mod error;
mod experts;
mod gradient;
mod routing;
#[cfg(test)]
mod tests;

use crate::{
    dtype::DType,
    error::{Operand, ProblemError},
    layout::{Dims, Layout},
    problem::MAX_EXTENT,
};

pub use call::{Ids, MoeCall, MoeInputs, Routed};
pub use error::MoeError;
pub use experts::{ExpertLayout, ExpertView};
pub use gradient::{MoeGradientCall, MoeGradientsMut};
pub use routing::{Groups, MAX_EXPERTS, MAX_TOP_K, Routing, Score, Sigmoid};

/// Which rows of `gate_up` are gates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum GateUp {
    /// The first half; the second half is up.
    #[default]
    Halves,
    /// Every second row, from the first; those between are up.
    Interleaved,
}

/// What joins the two halves of the first product.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Activation {
    /// `gate · sigmoid(gate) · up`.
    #[default]
    SwiGlu,
    /// `gelu(gate) · up`, GELU by its tanh form.
    GeGlu,
    /// `gate · sigmoid(alpha · gate) · (up + 1)` with `gate ≤ limit` and `|up| ≤ limit`, as gpt-oss has it.
    Clamped {
        /// Factor on the gate inside the sigmoid.
        alpha: f32,
        /// What gate and up are clamped to.
        limit: f32,
    },
}

impl Activation {
    /// That of gpt-oss.
    pub const OSS: Self = Self::Clamped { alpha: 1.702, limit: 7.0 };
}

/// Which experts of all those that ids name have their weights here: a shard of a larger layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shard {
    /// The first.
    pub first: usize,
    /// All experts of the layer.
    pub of: usize,
}

/// Matrices of the expert through which every token goes, with a weight of 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shared {
    /// 1 × 2·intermediate × hidden.
    pub gate_up: ExpertLayout,
    /// 1 × hidden × intermediate.
    pub down: ExpertLayout,
}

/// What a caller asks for, unchecked; [`MoeSpec::parse`] turns it into a [`MoeProblem`].
#[derive(Clone, PartialEq, Debug)]
pub struct MoeSpec {
    /// Element type of all tensors but the routing's.
    pub dtype: DType,
    /// Tokens × hidden, as a tensor of batch 1 and one head.
    pub x: Layout,
    /// Experts × 2·intermediate × hidden.
    pub gate_up: ExpertLayout,
    /// Experts × hidden × intermediate.
    pub down: ExpertLayout,
    /// Which rows of `gate_up` are gates; also those of the shared expert.
    pub order: GateUp,
    /// What joins gate and up.
    pub activation: Activation,
    /// Whether a call brings biases: experts × 2·intermediate, in the order of `gate_up`, and experts × hidden, dense.
    pub biases: bool,
    /// Where the routing comes from.
    pub routing: Routing,
    /// Which of all experts the weights are of; all where `None`.
    pub shard: Option<Shard>,
    /// The expert through which every token goes, without biases.
    pub shared: Option<Shared>,
    /// Layout of the result; dense where `None`.
    pub out: Option<Layout>,
    /// Keep the number of tokens out of the plan, so that a token's bits do not depend on the others.
    pub batch_invariant: bool,
}

impl MoeSpec {
    /// SwiGLU over all experts, gates in the first half.
    pub fn new(dtype: DType, x: Layout, gate_up: ExpertLayout, down: ExpertLayout, routing: Routing) -> Self {
        Self {
            dtype,
            x,
            gate_up,
            down,
            order: GateUp::Halves,
            activation: Activation::SwiGlu,
            biases: false,
            routing,
            shard: None,
            shared: None,
            out: None,
            batch_invariant: false,
        }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<MoeProblem, ProblemError> {
        let dims = self.x.dims();
        self.dtype.check_common("a mixture of experts")?;
        check_tokens(Operand::X, dims)?;
        check_weights([Operand::GateUp, Operand::Down], self.gate_up, self.down, dims)?;
        if let Some(Shared { gate_up, down }) = self.shared {
            check_weights([Operand::SharedGateUp, Operand::SharedDown], gate_up, down, dims)?;
            needs((Operand::SharedGateUp, "experts", gate_up.experts()), (1, Operand::Shared))?;
        }
        self.check_activation()?;
        let here = self.gate_up.experts();
        let shard = self.shard.unwrap_or(Shard { first: 0, of: here });
        if shard.of > MAX_EXPERTS || shard.first.checked_add(here).is_none_or(|end| end > shard.of) {
            return Err(ProblemError::Moe(MoeError::Range {
                first: shard.first,
                here,
                of: shard.of,
                max: MAX_EXPERTS,
            }));
        }
        self.routing.check(shard.of)?;
        let entries = dims.seq.checked_mul(self.routing.top_k()).filter(|&entries| entries <= MAX_EXTENT);
        entries.ok_or(ProblemError::Extent { operand: Operand::X, dims, max: MAX_EXTENT })?;
        let out = self.out.map_or_else(|| Layout::bhsd(dims), Ok)?;
        crate::problem::check_axes((Operand::Out, out.dims()), (Operand::X, dims), &crate::Axis::ALL)?;
        out.check_output()?;
        Ok(MoeProblem { spec: Self { out: Some(out), shard: Some(shard), ..self }, out, shard })
    }

    fn check_activation(&self) -> Result<(), ProblemError> {
        match self.activation {
            Activation::Clamped { alpha, limit } if !(alpha.is_finite() && limit > 0.0) => {
                Err(ProblemError::Moe(MoeError::Clamp { alpha, limit }))
            }
            _ => Ok(()),
        }
    }
}

fn check_tokens(operand: Operand, dims: Dims) -> Result<(), ProblemError> {
    if dims.batch != 1 || dims.heads != 1 {
        return Err(ProblemError::Moe(MoeError::NotMatrix { operand, dims }));
    }
    if dims.dim == 0 {
        return Err(ProblemError::Empty { operand, dims });
    }
    if dims.array().into_iter().any(|extent| extent > MAX_EXTENT) {
        return Err(ProblemError::Extent { operand, dims, max: MAX_EXTENT });
    }
    Ok(())
}

/// Both matrices of some experts fit each other and the tokens.
fn check_weights(
    [first, second]: [Operand; 2],
    gate_up: ExpertLayout,
    down: ExpertLayout,
    x: Dims,
) -> Result<(), ProblemError> {
    if gate_up.experts() == 0 || gate_up.rows() == 0 || !gate_up.rows().is_multiple_of(2) {
        return Err(ProblemError::Moe(MoeError::GateUpRows { operand: first, dims: gate_up.dims() }));
    }
    needs((first, "columns", gate_up.cols()), (x.dim, Operand::X))?;
    needs((second, "experts", down.experts()), (gate_up.experts(), first))?;
    needs((second, "rows", down.rows()), (x.dim, Operand::X))?;
    needs((second, "columns", down.cols()), (gate_up.rows() / 2, first))
}

/// A tensor has as many of something as another demands.
fn needs(
    (operand, what, got): (Operand, &'static str, usize),
    (expected, because): (usize, Operand),
) -> Result<(), ProblemError> {
    if got == expected {
        return Ok(());
    }
    Err(ProblemError::Moe(MoeError::Mismatch { operand, what, got, expected, because }))
}

/// A checked mixture of experts.
#[derive(Clone, PartialEq, Debug)]
pub struct MoeProblem {
    spec: MoeSpec,
    out: Layout,
    shard: Shard,
}

impl MoeProblem {
    /// The specification it was parsed from, with defaults filled in.
    pub const fn spec(&self) -> &MoeSpec {
        &self.spec
    }

    /// Element type of all tensors but the routing's.
    pub const fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Number of tokens.
    pub const fn tokens(&self) -> usize {
        self.spec.x.dims().seq
    }

    /// Features of a token.
    pub const fn hidden(&self) -> usize {
        self.spec.x.dims().dim
    }

    /// Features between the two products.
    pub const fn intermediate(&self) -> usize {
        self.spec.down.cols()
    }

    /// Experts whose weights are here.
    pub const fn experts(&self) -> usize {
        self.spec.gate_up.experts()
    }

    /// Which of all experts they are.
    pub const fn shard(&self) -> Shard {
        self.shard
    }

    /// Experts of a token.
    pub const fn top_k(&self) -> usize {
        self.spec.routing.top_k()
    }

    /// Pairs of a token and one of its experts.
    pub const fn entries(&self) -> usize {
        self.tokens() * self.top_k()
    }

    /// Where the routing comes from.
    pub const fn routing(&self) -> &Routing {
        &self.spec.routing
    }

    /// Layout of the tokens.
    pub const fn x(&self) -> &Layout {
        &self.spec.x
    }

    /// Matrices of the first product.
    pub const fn gate_up(&self) -> &ExpertLayout {
        &self.spec.gate_up
    }

    /// Matrices of the second product.
    pub const fn down(&self) -> &ExpertLayout {
        &self.spec.down
    }

    /// Layout of the result.
    pub const fn out(&self) -> &Layout {
        &self.out
    }

    /// The number, among the experts that are here, of the one that `id` names; `None` where its weights are elsewhere.
    pub fn local(&self, id: i64) -> Option<usize> {
        let first = self.shard.first as i64;
        (id >= first && id < first + self.experts() as i64).then(|| (id - first) as usize)
    }

    /// Floating-point operations of both products, for tokens whose experts are all here.
    pub fn flops(&self) -> f64 {
        let each = |intermediate: usize| 6.0 * self.hidden() as f64 * intermediate as f64;
        let shared = self.spec.shared.map_or(0.0, |shared| each(shared.down.cols()));
        self.entries() as f64 * each(self.intermediate()) + self.tokens() as f64 * shared
    }
}

impl GateUp {
    /// The row of `gate_up` that holds gate `n` of `intermediate`, or its up.
    pub const fn row(self, n: usize, intermediate: usize, up: bool) -> usize {
        match (self, up) {
            (Self::Halves, false) => n,
            (Self::Halves, true) => intermediate + n,
            (Self::Interleaved, up) => 2 * n + up as usize,
        }
    }
}
