//! Mixtures of experts as data: small layers with everything that can go wrong in routing.

use std::fmt;

use flashcore_core::{
    Activation, DType, Dims, ExpertLayout, GateUp, Groups, Index, Layout, MoeProblem, MoeSpec, ProblemError,
    Routing, Score, Shard, Shared, Sigmoid,
};

/// Who goes where.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Traffic {
    /// Different experts, drawn at random.
    Random,
    /// All tokens to one expert first.
    OneExpert,
    /// The same expert several times.
    Repeated,
    /// Numbers of experts that are elsewhere or nowhere, among others.
    Outside,
    /// Numbers of experts that are all elsewhere.
    AllOutside,
    /// By logits, some of them equal.
    Logits(Score),
}

/// One layer, whatever the element type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Case {
    pub name: &'static str,
    pub tokens: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
    pub top_k: usize,
    pub traffic: Traffic,
    pub ids: Index,
    /// Element type of routing weights or logits.
    pub routing: DType,
    pub order: GateUp,
    /// Whether weights lie experts × columns × rows.
    pub transposed: bool,
    pub activation: Activation,
    pub biases: bool,
    pub shard: Option<Shard>,
    /// Features between the products of a shared expert.
    pub shared: Option<usize>,
    /// Elements by which rows, and matrices of experts, are longer than what they hold.
    pub padding: usize,
    pub batch_invariant: bool,
}

/// Six tokens of 64 features to two of eight experts of 48.
pub(super) const USUAL: Case = Case {
    name: "usual",
    tokens: 6,
    hidden: 64,
    intermediate: 48,
    experts: 8,
    top_k: 2,
    traffic: Traffic::Random,
    ids: Index::I32,
    routing: DType::F32,
    order: GateUp::Halves,
    transposed: false,
    activation: Activation::SwiGlu,
    biases: false,
    shard: None,
    shared: None,
    padding: 0,
    batch_invariant: false,
};

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, tokens, hidden, intermediate, experts, top_k, .. } = self;
        write!(f, "moe {name}: {tokens} tokens of {hidden} to {top_k} of {experts} experts of {intermediate}")
    }
}

impl Case {
    /// The case as a problem.
    pub fn problem(&self, dtype: DType) -> Result<MoeProblem, ProblemError> {
        let Self { tokens, hidden, intermediate, experts, top_k, .. } = *self;
        let row = hidden + self.padding;
        let x = Layout::strided(Dims::new(1, 1, tokens, hidden), [0, 0, row, 1])?;
        let gate_up = self.weights([experts, 2 * intermediate, hidden])?;
        let down = self.weights([experts, hidden, intermediate])?;
        let shared = |half: usize| {
            let gate_up = self.weights([1, 2 * half, hidden])?;
            Ok::<_, ProblemError>(Shared { gate_up, down: self.weights([1, hidden, half])? })
        };
        let routing = match self.traffic {
            Traffic::Logits(score) => Routing::Computed { logits: self.routing, top_k, score },
            _ => Routing::Given { ids: self.ids, weights: self.routing, top_k },
        };
        MoeSpec {
            order: self.order,
            activation: self.activation,
            biases: self.biases,
            shard: self.shard,
            shared: self.shared.map(shared).transpose()?,
            out: Some(x),
            batch_invariant: self.batch_invariant,
            ..MoeSpec::new(dtype, x, gate_up, down, routing)
        }
        .parse()
    }

    fn weights(&self, [experts, rows, cols]: [usize; 3]) -> Result<ExpertLayout, ProblemError> {
        let inner = if self.transposed { rows } else { cols } + self.padding;
        let outer = if self.transposed { cols } else { rows };
        let each = inner * outer + self.padding;
        let strides = if self.transposed { [each, 1, inner] } else { [each, inner, 1] };
        ExpertLayout::strided([experts, rows, cols], strides)
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut cases = routings();
    cases.extend(shapes());
    cases.extend(layers());
    cases
}

/// Who goes where.
#[rustfmt::skip] // a table: one case per line
fn routings() -> Vec<Case> {
    use Traffic::*;
    let grouped = Sigmoid { bias: true, groups: Some(Groups { count: 4, top: 2 }), renormalise: true, scale: 2.5 };
    vec![
        USUAL,
        Case { name: "no token", tokens: 0, ..USUAL },
        Case { name: "one token", tokens: 1, ..USUAL },
        Case { name: "one expert for all", traffic: OneExpert, tokens: 70, ..USUAL },
        Case { name: "the same expert twice", traffic: Repeated, top_k: 4, ids: Index::I64, ..USUAL },
        Case { name: "experts elsewhere", traffic: Outside, tokens: 20, shard: Some(Shard { first: 5, of: 17 }), ..USUAL },
        Case { name: "64-bit ids elsewhere", traffic: Outside, ids: Index::I64, routing: DType::F16, ..USUAL },
        Case { name: "nobody here", traffic: AllOutside, shard: Some(Shard { first: 2, of: 12 }), ..USUAL },
        Case { name: "odd experts", experts: 7, top_k: 3, tokens: 19, routing: DType::BF16, ..USUAL },
        Case { name: "one expert", experts: 1, top_k: 1, tokens: 9, ..USUAL },
        Case { name: "all experts", experts: 4, top_k: 4, tokens: 5, ..USUAL },
        Case { name: "softmax", traffic: Logits(Score::Softmax), tokens: 12, ..USUAL },
        Case { name: "softmax of the chosen", traffic: Logits(Score::SoftmaxOfChosen), experts: 40, top_k: 8, routing: DType::BF16, ..USUAL },
        Case { name: "sigmoid", traffic: Logits(Score::Sigmoid(Sigmoid::PLAIN)), routing: DType::F16, ..USUAL },
        Case { name: "groups", traffic: Logits(Score::Sigmoid(grouped)), experts: 16, top_k: 3, tokens: 12, ..USUAL },
        Case { name: "a shard chosen by logits", traffic: Logits(Score::Softmax), shard: Some(Shard { first: 8, of: 32 }), tokens: 16, top_k: 4, ..USUAL },
    ]
}

/// Extents and layouts.
#[rustfmt::skip] // a table: one case per line
fn shapes() -> Vec<Case> {
    vec![
        Case { name: "padded", padding: 8, tokens: 11, ..USUAL },
        Case { name: "unaligned", padding: 3, hidden: 61, intermediate: 27, ..USUAL },
        Case { name: "odd extents", hidden: 37, intermediate: 19, experts: 5, ..USUAL },
        Case { name: "ragged tiles", hidden: 72, intermediate: 88, tokens: 21, experts: 3, ..USUAL },
        Case { name: "transposed", transposed: true, ..USUAL },
        Case { name: "transposed and padded", transposed: true, padding: 8, hidden: 40, intermediate: 24, ..USUAL },
        Case { name: "interleaved", order: GateUp::Interleaved, ..USUAL },
        Case { name: "many tokens", tokens: 300, hidden: 64, intermediate: 40, experts: 3, ..USUAL },
        Case { name: "many tokens per expert", tokens: 210, hidden: 136, intermediate: 200, experts: 3, ..USUAL },
        Case { name: "many tokens per expert, padded", tokens: 130, hidden: 128, intermediate: 128, experts: 2, top_k: 1, padding: 8, order: GateUp::Interleaved, biases: true, ..USUAL },
        Case { name: "many entries", tokens: 260, hidden: 8, intermediate: 8, experts: 9, top_k: 8, ..USUAL },
        Case { name: "many experts", tokens: 16, hidden: 32, intermediate: 16, experts: 128, top_k: 8, ..USUAL },
        Case { name: "deep", tokens: 3, hidden: 320, intermediate: 264, experts: 3, top_k: 1, ..USUAL },
        Case { name: "batch-invariant", batch_invariant: true, tokens: 40, experts: 2, top_k: 1, ..USUAL },
    ]
}

/// Options as models have them.
#[rustfmt::skip] // a table: one case per line
fn layers() -> Vec<Case> {
    let oss = Case {
        order: GateUp::Interleaved, activation: Activation::OSS, biases: true, routing: DType::BF16,
        traffic: Traffic::Logits(Score::SoftmaxOfChosen), ..USUAL
    };
    vec![
        Case { name: "GeGLU", activation: Activation::GeGlu, ..USUAL },
        Case { name: "biases", biases: true, tokens: 17, ..USUAL },
        Case { name: "gpt-oss", top_k: 4, ..oss },
        Case { name: "gpt-oss transposed", transposed: true, tokens: 33, activation: Activation::Clamped { alpha: 1.5, limit: 0.75 }, ..oss },
        Case { name: "a shared expert", shared: Some(32), ..USUAL },
        Case { name: "only the shared expert", shared: Some(80), traffic: Traffic::AllOutside, shard: Some(Shard { first: 1, of: 9 }), ..USUAL },
    ]
}
