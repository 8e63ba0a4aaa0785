//! The covering set of mixtures of experts: small problems whose kernels together contain every pair of options.

use flashcore_core::{
    Activation, DType, ExpertLayout, GateUp, Groups, Index, Layout, MoeProblem, MoeSpec, ProblemError,
    Routing, Score, Sigmoid,
};

use crate::covering::rows;

/// Tokens, for two of four experts each: one, and so many that tiles of every height are chosen.
const TOKENS: [usize; 5] = [1, 9, 40, 100, 300];
/// Features of a token and of an expert: whole tiles, and others.
const EXTENTS: [[usize; 2]; 2] = [[128, 128], [72, 40]];

const GROUPED: Sigmoid =
    Sigmoid { bias: true, groups: Some(Groups { count: 2, top: 1 }), renormalise: true, scale: 2.5 };

const ROUTINGS: [Routing; 6] = [
    Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 2 },
    Routing::Given { ids: Index::I64, weights: DType::BF16, top_k: 2 },
    Routing::Computed { logits: DType::F32, top_k: 2, score: Score::Softmax },
    Routing::Computed { logits: DType::BF16, top_k: 2, score: Score::SoftmaxOfChosen },
    Routing::Computed { logits: DType::F16, top_k: 2, score: Score::Sigmoid(Sigmoid::PLAIN) },
    Routing::Computed { logits: DType::F32, top_k: 2, score: Score::Sigmoid(GROUPED) },
];

const ACTIVATIONS: [Activation; 3] = [Activation::SwiGlu, Activation::GeGlu, Activation::OSS];

/// How weights lie: transposed or not, and gates among ups or before them.
const ORDERS: [(bool, GateUp); 4] = [
    (false, GateUp::Halves),
    (true, GateUp::Halves),
    (false, GateUp::Interleaved),
    (true, GateUp::Interleaved),
];

/// The set; addresses of its tensors are multiples of 16 bytes.
pub fn covering_experts() -> Result<Vec<MoeProblem>, ProblemError> {
    let extents = [TOKENS.len(), ROUTINGS.len(), ACTIVATIONS.len(), 2 * ORDERS.len(), 2 * EXTENTS.len()];
    rows(&extents).into_iter().map(member).collect()
}

fn member([tokens, routing, activation, order, extents]: [usize; 5]) -> Result<MoeProblem, ProblemError> {
    let ([hidden, intermediate], (transposed, gate_up)) = (EXTENTS[extents / 2], ORDERS[order / 2]);
    let dtype = [DType::F16, DType::BF16][extents % 2];
    let layout =
        |shape| if transposed { ExpertLayout::transposed(shape) } else { ExpertLayout::dense(shape) };
    let x = Layout::matrix(TOKENS[tokens], hidden)?;
    let weights = [layout([4, 2 * intermediate, hidden])?, layout([4, hidden, intermediate])?];
    MoeSpec {
        order: gate_up,
        activation: ACTIVATIONS[activation],
        biases: order % 2 == 1,
        ..MoeSpec::new(dtype, x, weights[0], weights[1], ROUTINGS[routing])
    }
    .parse()
}
