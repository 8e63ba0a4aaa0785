//! Cases about biases of scores.

use flashcore_core::{Bias, DType, Dims, Layout, Lengths, Mask, ProblemError};

use super::{Case, Sinks, Tag};
use crate::{inputs::Placement, rng::Rng};

/// The bias of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Biases {
    /// None.
    None,
    /// N(0, 2) for each query and key, with one of ten keys and one of twenty queries hidden. A flag for each of batch,
    /// heads and queries says whether they have numbers of their own.
    Pairs([bool; 3]),
    /// A slope for each query head, or for each sequence and head.
    Slopes {
        /// The latter.
        per_sequence: bool,
    },
}

impl Biases {
    /// What a problem knows of it.
    pub(super) fn kind(self, case: &Case) -> Result<Option<Bias>, ProblemError> {
        Ok(match self {
            Self::None => None,
            Self::Pairs(own) => {
                Some(Bias::Pairs { dtype: DType::F32, layout: Layout::bhsd(extents(case, own))? })
            }
            Self::Slopes { per_sequence } => Some(Bias::Slopes { per_sequence }),
        })
    }

    /// The numbers.
    pub(super) fn numbers(self, case: &Case, seed: u64) -> Option<Vec<f32>> {
        let mut rng = Rng::new(seed ^ 0xb1a5);
        match self {
            Self::None => None,
            Self::Pairs(own) => {
                let dims = extents(case, own);
                let rows = dims.batch * dims.heads * dims.seq;
                let numbers = (0..rows).flat_map(|_| row(&mut rng, dims.dim));
                Some(numbers.collect())
            }
            Self::Slopes { per_sequence } => {
                let sequences = match &case.lengths {
                    Lengths::Ragged { q, .. } => q.len() - 1,
                    _ => case.q.batch,
                };
                let all = case.q.heads * if per_sequence { sequences } else { 1 };
                Some((0..all).map(|_| 0.3 * rng.normal().abs()).collect())
            }
        }
    }
}

fn extents(case: &Case, [batch, heads, queries]: [bool; 3]) -> Dims {
    let own = |yes: bool, all: usize| if yes { all } else { 1 };
    Dims::new(own(batch, case.q.batch), own(heads, case.q.heads), own(queries, case.q.seq), case.k.seq)
}

fn row(rng: &mut Rng, keys: usize) -> Vec<f32> {
    let hidden = rng.one_in(20);
    let mut number = || if hidden || rng.one_in(10) { f32::NEG_INFINITY } else { 2.0 * rng.normal() };
    (0..keys).map(|_| number()).collect()
}

/// Every case.
pub(super) fn cases() -> Vec<Case> {
    let case = |name: &str, bias, mask, shape| Case {
        bias,
        mask,
        ..Case::new(Tag::Biases, format!("bias {name}"), shape, 64)
    };
    let (all, slopes) = (Biases::Pairs([true; 3]), Biases::Slopes { per_sequence: false });
    let each = Biases::Slopes { per_sequence: true };
    let pairs = [(1, 9), (17, 30), (0, 4), (25, 25)];
    let ragged =
        Case { mask: Mask::CAUSAL, ..Case::ragged(Tag::Biases, "bias slopes ragged", &pairs, [2, 1], 64) };
    let used = Lengths::used(vec![70, 33], vec![65, 130]);
    vec![
        case("pairs", all, Mask::NONE, [2, 2, 1, 70, 130]),
        case("pairs causal", all, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        case("of heads", Biases::Pairs([false, true, true]), Mask::NONE, [2, 2, 2, 40, 70]),
        case("of keys", Biases::Pairs([true, false, false]), Mask::window(20, 5), [2, 2, 1, 40, 70]),
        case("one query", all, Mask::NONE, [2, 4, 1, 1, 130]),
        Case { sinks: Sinks::Normal, ..case("sinks", all, Mask::NONE, [1, 2, 1, 20, 70]) },
        Case { lengths: used, ..case("used", all, Mask::CAUSAL, [2, 2, 1, 70, 130]) },
        Case { placement: Placement::Unaligned, ..case("unaligned", all, Mask::NONE, [1, 2, 1, 20, 70]) },
        case("slopes", slopes, Mask::NONE, [2, 2, 1, 70, 130]),
        case("slopes causal", slopes, Mask::CAUSAL, [1, 4, 2, 70, 130]),
        case("slopes window, fewer keys", each, Mask::window(16, 3), [2, 2, 2, 70, 40]),
        Case { bias: each, ..ragged },
        Case { softcap: Some(20.0), ..case("pairs, capped", all, Mask::NONE, [1, 2, 1, 40, 70]) },
        Case { softcap: Some(20.0), ..case("slopes, capped", slopes, Mask::CAUSAL, [1, 2, 1, 20, 70]) },
    ]
}
