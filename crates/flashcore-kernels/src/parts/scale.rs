//! What scores are multiplied by, and how they are capped.

use flashcore_core::Problem;
use flashcore_tile::{Builder, F32, Params, Reg};

/// The factors of scores, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Turns scores (after the cap, if there is one) into powers of two.
    pub(crate) log2: Reg<F32>,
    /// Turns scores into the argument of the hyperbolic tangent.
    cap: Option<Reg<F32>>,
}

impl Scale {
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>, softcap: bool) -> Self {
        let log2 = |p: &Problem| p.softcap().unwrap_or(p.scale()) * std::f32::consts::LOG2_E;
        let cap = |p: &Problem| p.softcap().map_or(1.0, |cap| p.scale() / cap);
        Self {
            log2: params.f32(b, "scale_log2", log2),
            cap: softcap.then(|| params.f32(b, "cap_scale", cap)),
        }
    }

    /// Limits scores to ±1, where they are capped; `log2` then brings them to ± the cap.
    pub(crate) fn cap(&self, b: &mut Builder, scores: &[Reg<F32>]) {
        let Some(scale) = self.cap else { return };
        for &score in scores {
            b.mul_into(score, score, scale);
            b.tanh_into(score, score);
        }
    }
}
