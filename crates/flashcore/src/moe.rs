//! Mixtures of experts: tokens, weights and a routing in, a checked problem to a backend, the tokens' sums out.

use std::ops::Range;

use flashcore_core::{
    Activation, Backend, Data, DataMut, Element, ExpertView, GateUp, Ids, MoeCall, MoeError, MoeGradientCall,
    MoeGradientsMut, MoeInputs, MoeProblem, MoeSpec, ProblemError, Ran, Routed, Routing, Score, Shard,
    Shared, Tensor, TensorView, TensorViewMut,
};

use crate::{
    backend::{BackendKind, Choice},
    error::Error,
};

/// A mixture of experts: `out[t] = Σⱼ weight[t, j] · down[e] · act(gate[e] · x[t], up[e] · x[t])` with `e = id[t, j]`.
///
/// `x` is tokens × hidden ([`TensorView::matrix`]), `gate_up` experts × 2·intermediate × hidden and `down` experts × hidden ×
/// intermediate, as checkpoints hold them: see [`ExpertView`]. [`Moe::routed`] or [`Moe::route`] gives the routing.
/// Nothing is checked or computed before [`Moe::run`] or [`Moe::run_into`].
///
/// ```
/// use flashcore::{ExpertView, Ids, TensorView, moe};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// let (hidden, intermediate, experts) = (8, 16, 4);
/// let gate_up = vec![0.1_f32; experts * 2 * intermediate * hidden];
/// let down = vec![0.1_f32; experts * hidden * intermediate];
/// let x = vec![1.0_f32; 3 * hidden]; // three tokens
/// let result = moe(
///     TensorView::matrix(&x, 3, hidden)?,
///     ExpertView::dense(&gate_up, [experts, 2 * intermediate, hidden])?,
///     ExpertView::dense(&down, [experts, hidden, intermediate])?,
/// )
/// .routed(2, Ids::I32(&[0, 3, 1, 2, 3, 0]), &[0.5_f32; 6])
/// .run()?;
/// assert_eq!(result.out.data().len(), 3 * hidden);
/// # Ok(())
/// # }
/// ```
pub fn moe<'a, T: Element>(
    x: TensorView<'a, T>,
    gate_up: ExpertView<'a, T>,
    down: ExpertView<'a, T>,
) -> Moe<'a, T> {
    Moe {
        x,
        gate_up,
        down,
        routing: None,
        order: GateUp::Halves,
        activation: Activation::SwiGlu,
        biases: None,
        shared: None,
        shard: None,
        batch_invariant: false,
        choice: Choice::Kind(BackendKind::Auto),
    }
}

/// A mixture of experts, with its options so far.
#[must_use = "nothing is computed before `run` or `run_into`"]
pub struct Moe<'a, T> {
    x: TensorView<'a, T>,
    gate_up: ExpertView<'a, T>,
    down: ExpertView<'a, T>,
    routing: Option<(Routing, Routed<'a>)>,
    order: GateUp,
    activation: Activation,
    biases: Option<[&'a [T]; 2]>,
    shared: Option<[ExpertView<'a, T>; 2]>,
    shard: Option<Shard>,
    batch_invariant: bool,
    choice: Choice<'a>,
}

/// What [`Moe::run`] returns.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct MoeOutput<T> {
    /// Tokens × hidden, dense.
    pub out: Tensor<T>,
    /// What computed it.
    pub ran: Ran,
}

impl<'a, T: Element> Moe<'a, T> {
    /// Routes each token to `top_k` experts: their ids and weights, tokens × `top_k`, dense. An id that is
    /// not an expert's adds nothing.
    pub fn routed<W: Element>(mut self, top_k: usize, ids: Ids<'a>, weights: &'a [W]) -> Self {
        let routing = Routing::Given { ids: ids.index(), weights: W::DTYPE, top_k };
        self.routing = Some((routing, Routed::Given { ids, weights: W::erase(weights) }));
        self
    }

    /// Routes each token to its `top_k` best experts by logits, tokens × experts, dense.
    pub fn route<L: Element>(mut self, logits: &'a [L], top_k: usize, score: Score) -> Self {
        let routing = Routing::Computed { logits: L::DTYPE, top_k, score };
        self.routing = Some((routing, Routed::Computed { logits: L::erase(logits), bias: None }));
        self
    }

    /// The routing bias: what [`route`](Self::route) adds to each expert's sigmoid when choosing, if its scoring says so.
    pub fn routing_bias(mut self, values: &'a [f32]) -> Self {
        if let Some((_, Routed::Computed { bias, .. })) = &mut self.routing {
            *bias = Some(values);
        }
        self
    }

    /// Which rows of `gate_up` are gates; the first half by default.
    pub const fn gate_up_order(mut self, order: GateUp) -> Self {
        self.order = order;
        self
    }

    /// The activation that combines gate and up; SwiGLU by default.
    pub const fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// The biases of both products: experts × 2·intermediate in the order of `gate_up`, and experts × hidden, dense.
    pub const fn biases(mut self, gate_up: &'a [T], down: &'a [T]) -> Self {
        self.biases = Some([gate_up, down]);
        self
    }

    /// A shard of the layer: the weights are those of these experts among `of`; ids of others add nothing.
    pub const fn experts(mut self, here: Range<usize>, of: usize) -> Self {
        self.shard = Some(Shard { first: here.start, of });
        self
    }

    /// A shared expert that every token passes through, with a weight of 1: matrices of one expert each.
    pub const fn shared_expert(mut self, gate_up: ExpertView<'a, T>, down: ExpertView<'a, T>) -> Self {
        self.shared = Some([gate_up, down]);
        self
    }

    /// Makes a token's bits independent of the other tokens.
    pub const fn batch_invariant(mut self, on: bool) -> Self {
        self.batch_invariant = on;
        self
    }

    /// The backend to compute on; by default the best one found.
    pub fn backend(mut self, kind: BackendKind) -> Self {
        self.choice = Choice::Kind(kind);
        self
    }

    /// Computes on the caller's own backend.
    pub fn on(mut self, backend: &'a dyn Backend) -> Self {
        self.choice = Choice::This(backend);
        self
    }

    /// Computes into new memory.
    pub fn run(self) -> Result<MoeOutput<T>, Error> {
        let (spec, routed) = self.spec()?;
        let problem = spec.parse()?;
        let mut out = Tensor::zeros(*problem.out())?;
        let view = out.view_mut()?;
        let ran = self.compute(&problem, routed, T::erase_mut(view.into_data()))?;
        Ok(MoeOutput { out, ran })
    }

    /// Computes into the caller's memory.
    pub fn run_into(self, out: TensorViewMut<'_, T>) -> Result<Ran, Error> {
        let (spec, routed) = self.spec()?;
        let problem = MoeSpec { out: Some(out.layout()), ..spec }.parse()?;
        self.compute(&problem, routed, T::erase_mut(out.into_data()))
    }

    /// The gradients of all inputs of the layer, from the gradient of its result; experts must be given by
    /// [`routed`](Self::routed). Nothing is kept from a forward pass: intermediate results are recomputed.
    ///
    /// They are computed on the CPU backend, with [`BackendKind::Auto`] too.
    pub fn gradients(self, d_out: TensorView<'_, T>) -> Result<MoeGradients<T>, Error> {
        let (spec, routed) = self.spec()?;
        let problem = MoeSpec { out: Some(d_out.layout()), ..spec }.parse()?;
        let spec = problem.spec();
        let mut grads = MoeGradients::zeros(&problem)?;
        let [gate_up_bias, down_bias] = &mut grads.biases;
        let [shared_gate_up, shared_down] = &mut grads.shared;
        let into = MoeGradientsMut {
            x: T::erase_mut(&mut grads.x),
            gate_up: T::erase_mut(&mut grads.gate_up),
            down: T::erase_mut(&mut grads.down),
            biases: spec.biases.then(|| [gate_up_bias, down_bias].map(|bias| T::erase_mut(bias))),
            shared: spec.shared.map(|_| [shared_gate_up, shared_down].map(|matrix| T::erase_mut(matrix))),
            weights: &mut grads.weights,
        };
        let (inputs, d_out) = (self.inputs(routed), T::erase(d_out.data()));
        let mut call = MoeGradientCall::bind(&problem, inputs, d_out, into)?;
        grads.ran = self.choice.run(|backend| backend.moe_gradients(&mut call))?;
        Ok(grads)
    }

    fn spec(&self) -> Result<(MoeSpec, Routed<'a>), ProblemError> {
        let (routing, routed) = self.routing.ok_or(ProblemError::Moe(MoeError::NoRouting))?;
        let layouts = (self.x.layout(), self.gate_up.layout(), self.down.layout());
        let shared = |[gate_up, down]: [ExpertView<'_, T>; 2]| {
            let (gate_up, down) = (gate_up.layout(), down.layout());
            Shared { gate_up, down }
        };
        let spec = MoeSpec {
            order: self.order,
            activation: self.activation,
            biases: self.biases.is_some(),
            shard: self.shard,
            shared: self.shared.map(shared),
            batch_invariant: self.batch_invariant,
            ..MoeSpec::new(T::DTYPE, layouts.0, layouts.1, layouts.2, routing)
        };
        Ok((spec, routed))
    }

    fn compute(&self, problem: &MoeProblem, routed: Routed<'_>, out: DataMut<'_>) -> Result<Ran, Error> {
        let mut call = MoeCall::bind(problem, self.inputs(routed), out)?;
        Ok(self.choice.run(|backend| backend.moe(&mut call))?)
    }

    fn inputs<'b>(&self, routed: Routed<'b>) -> MoeInputs<'b>
    where
        'a: 'b,
    {
        let weights = |view: &ExpertView<'a, T>| -> Data<'b> { T::erase(view.data()) };
        MoeInputs {
            x: T::erase(self.x.data()),
            gate_up: weights(&self.gate_up),
            down: weights(&self.down),
            biases: self.biases.map(|biases| biases.map(T::erase)),
            shared: self.shared.as_ref().map(|shared| shared.each_ref().map(weights)),
            routed,
        }
    }
}

/// What [`Moe::gradients`] returns. Each gradient has its tensor's layout, without gaps: see
/// [`ExpertLayout::without_gaps`](flashcore_core::ExpertLayout::without_gaps).
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct MoeGradients<T> {
    /// Of the tokens.
    pub x: Vec<T>,
    /// Of the matrices of the first product.
    pub gate_up: Vec<T>,
    /// Of the matrices of the second product.
    pub down: Vec<T>,
    /// Of the routing weights, tokens × top-k; 0 for experts that are elsewhere.
    pub weights: Vec<f32>,
    /// Of both biases; empty where there are none.
    pub biases: [Vec<T>; 2],
    /// Of both matrices of the shared expert; empty where there is none.
    pub shared: [Vec<T>; 2],
    /// What computed them.
    pub ran: Ran,
}

impl<T: Element> MoeGradients<T> {
    fn zeros(problem: &MoeProblem) -> Result<Self, ProblemError> {
        let spec = problem.spec();
        let zeros = |rows: usize, cols: usize| -> Result<Vec<T>, ProblemError> {
            Ok(Tensor::zeros(flashcore_core::Layout::matrix(rows, cols)?)?.into_data())
        };
        let bias = |rows: usize| zeros(usize::from(spec.biases) * problem.experts(), rows);
        let shared =
            spec.shared.map_or([0; 2], |Shared { gate_up, down }| [gate_up.elements(), down.elements()]);
        Ok(Self {
            x: zeros(problem.tokens(), problem.hidden())?,
            gate_up: zeros(1, spec.gate_up.elements())?,
            down: zeros(1, spec.down.elements())?,
            weights: vec![0.0; problem.entries()],
            biases: [bias(spec.gate_up.rows())?, bias(problem.hidden())?],
            shared: [zeros(1, shared[0])?, zeros(1, shared[1])?],
            ran: Ran { kernel: String::new() },
        })
    }
}
