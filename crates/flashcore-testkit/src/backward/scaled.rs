//! Cases with a scaled loss, as used where f16 would round small gradients to zero: gradients of scores become too large
//! for f16.

use flashcore_core::Mask;

use super::{Case, Wish};
use crate::{
    cases::{self, Sinks, Tag},
    inputs::Inputs,
};

/// Gradients of the output end near f16's range.
const NEAR: f32 = 8192.0;
/// Together with values near its end, gradients of scores lie far beyond.
const FAR: f32 = 1024.0;

/// Sequences of queries and keys: more and fewer than a tile, odd and even starts.
const PAIRS: [(u32, u32); 4] = [(131, 70), (1, 1), (64, 140), (17, 200)];

/// The cases. Gradients that no f16 holds are asked for in f32.
pub(super) fn cases() -> Vec<Case> {
    let case = |name: &str, mask, shape, dim| cases::Case {
        mask,
        ..cases::Case::new(Tag::Extremes, format!("scaled loss, {name}"), shape, dim)
    };
    let packed = |name: &str, mask, dim| cases::Case {
        mask,
        ..cases::Case::ragged(Tag::Ragged, format!("scaled loss, packed {name}"), &PAIRS, [2, 1], dim)
    };
    let near = |forward, wish| Case { loss: NEAR, ..Case::new(forward, wish) };
    let far = |forward, wish| {
        let forward = cases::Case { inputs: Inputs::LargeValues, ..forward };
        Case { loss: FAR, ..Case::new(forward, wish) }
    };
    let window = Mask::window(40, 9);
    vec![
        near(case("causal", Mask::CAUSAL, [1, 2, 1, 135, 135], 64), Wish::Plain),
        near(case("window", window, [1, 1, 1, 130, 200], 128), Wish::GivenSums),
        near(
            cases::Case { sinks: Sinks::Normal, ..case("sinks", Mask::CAUSAL, [1, 2, 2, 66, 135], 64) },
            Wish::Accumulated,
        ),
        near(packed("causal", Mask::CAUSAL, 64), Wish::Plain),
        far(case("large values", Mask::NONE, [1, 2, 1, 200, 66], 128), Wish::Wide),
        far(case("large values causal", Mask::CAUSAL, [2, 2, 1, 66, 135], 64), Wish::Accumulated),
        far(packed("large values", window, 128), Wish::Wide),
    ]
}
