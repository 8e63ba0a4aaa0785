//! Cases with weights dropped at random.

use flashcore_core::{DType, Lengths, Mask};

use super::{Biases, Case, Sinks, Tag};
use crate::inputs::Placement;

/// Every case.
pub(super) fn cases() -> Vec<Case> {
    let case = |name: &str, probability, mask, shape, dim| Case {
        dropout: Some(probability),
        mask,
        ..Case::new(Tag::Dropout, format!("dropout {name}"), shape, dim)
    };
    let small = |name: &str, mask| case(name, 0.17, mask, [2, 2, 1, 70, 130], 64);
    let pairs = [(1, 9), (17, 30), (0, 4), (25, 25)];
    let ragged = Case::ragged(Tag::Dropout, "dropout ragged", &pairs, [2, 1], 64);
    vec![
        small("full", Mask::NONE),
        small("causal", Mask::CAUSAL),
        small("window", Mask::window(20, 5)),
        case("half", 0.5, Mask::NONE, [1, 4, 2, 40, 70], 32),
        case("nearly all", 0.96, Mask::NONE, [1, 2, 2, 40, 70], 64),
        case("one query", 0.17, Mask::NONE, [2, 4, 1, 1, 130], 64),
        case("128 features", 0.1, Mask::CAUSAL, [1, 2, 1, 130, 200], 128),
        case("many", 0.17, Mask::CAUSAL, [1, 2, 1, 700, 700], 64),
        Case { dim_v: 80, ..case("other values", 0.17, Mask::NONE, [1, 2, 1, 33, 70], 48) },
        Case { dropout: Some(0.17), mask: Mask::CAUSAL, ..ragged },
        Case { lengths: Lengths::used(vec![70, 33], vec![65, 130]), ..small("used", Mask::CAUSAL) },
        Case { sinks: Sinks::Normal, softcap: Some(20.0), ..small("sinks, capped", Mask::CAUSAL) },
        Case { bias: Biases::Slopes { per_sequence: false }, ..small("slopes", Mask::CAUSAL) },
        Case { placement: Placement::Unaligned, dtypes: &DType::COMMON, ..small("unaligned", Mask::NONE) },
    ]
}
