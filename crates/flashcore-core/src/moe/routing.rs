//! Which experts a token goes to, and the weight of each.

use super::MoeError;
use crate::{dtype::DType, error::ProblemError, lengths::Index};

/// Most experts that a token may go to.
pub const MAX_TOP_K: usize = 32;
/// Most experts among which a router chooses.
pub const MAX_EXPERTS: usize = 1024;

/// Where the routing of a call comes from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Routing {
    /// The call brings the experts of each token and their weights, tokens × `top_k`, dense.
    Given {
        /// What the experts' numbers are made of.
        ids: Index,
        /// Element type of the weights.
        weights: DType,
        /// Experts of a token.
        top_k: usize,
    },
    /// The call brings logits, tokens × experts, dense; the `top_k` best experts of each token are taken. Among equals, those
    /// with the lowest numbers.
    Computed {
        /// Element type of the logits.
        logits: DType,
        /// Experts of a token.
        top_k: usize,
        /// What the logits mean.
        score: Score,
    },
}

/// How logits become weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Score {
    /// Their softmax over all experts.
    Softmax,
    /// Their softmax over the experts that were chosen, which is also that over all experts, renormalised.
    SoftmaxOfChosen,
    /// Their sigmoid.
    Sigmoid(Sigmoid),
}

/// Options of sigmoid scores, as DeepSeek-V3 has them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sigmoid {
    /// Whether a call brings one f32 per expert that is added to its score for the choice, but not to its weight.
    pub bias: bool,
    /// Only experts of the best groups are chosen.
    pub groups: Option<Groups>,
    /// Whether the weights of a token are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

impl Sigmoid {
    /// Scores as they are.
    pub const PLAIN: Self = Self { bias: false, groups: None, renormalise: false, scale: 1.0 };
}

/// Neighbouring experts form groups of equal size; a group is as good as its two best experts together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// How many of them experts are chosen from.
    pub top: usize,
}

impl Routing {
    /// Experts of a token.
    pub const fn top_k(&self) -> usize {
        match *self {
            Self::Given { top_k, .. } | Self::Computed { top_k, .. } => top_k,
        }
    }

    /// Whether a call brings one number per expert to choose by.
    pub const fn has_bias(&self) -> bool {
        matches!(self, Self::Computed { score: Score::Sigmoid(Sigmoid { bias: true, .. }), .. })
    }

    /// Checks the routing against the number of experts among which it chooses.
    pub(super) fn check(&self, experts: usize) -> Result<(), ProblemError> {
        let top_k = self.top_k();
        let most = match self {
            Self::Given { .. } => MAX_TOP_K,
            Self::Computed { .. } => MAX_TOP_K.min(experts),
        };
        if top_k == 0 || top_k > most {
            return Err(ProblemError::Moe(MoeError::TopK { given: top_k, max: most }));
        }
        let Self::Computed { score: Score::Sigmoid(Sigmoid { groups, scale, .. }), .. } = *self else {
            return Ok(());
        };
        if !(scale.is_finite() && scale > 0.0) {
            return Err(ProblemError::Moe(MoeError::Scale(scale)));
        }
        groups.map_or(Ok(()), |groups| groups.check(experts, top_k))
    }
}

impl Groups {
    fn check(self, experts: usize, top_k: usize) -> Result<(), ProblemError> {
        let Self { count, top } = self;
        let divides = count > 0 && experts.is_multiple_of(count);
        if divides && top > 0 && top <= count && top * (experts / count) >= top_k {
            return Ok(());
        }
        Err(ProblemError::Moe(MoeError::Groups { count, top, experts, top_k }))
    }
}
