//! The scale of scores, and the softcap.

use std::f32::consts::{LN_2, LOG2_E};

use flashcore_core::Problem;
use flashcore_tile::{Builder, Element, F32, Params, Reg};

/// The factors of scores, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Turns scores (after the cap, if there is one) into powers of two.
    pub(crate) log2: Reg<F32>,
    /// Turns scores into the argument of the hyperbolic tangent; in f16 into powers of two, twice that large.
    cap: Option<Reg<F32>>,
    /// Element type of scores.
    element: Element,
}

impl Scale {
    pub(crate) fn declare<A: AsRef<Problem>>(
        b: &mut Builder,
        params: &mut Params<A>,
        softcap: bool,
        element: impl Into<Element>,
    ) -> Self {
        let log2 = |p: &Problem| p.softcap().unwrap_or(p.scale()) * LOG2_E;
        let element = element.into();
        let unit = if element == Element::F16 { 2.0 * LOG2_E } else { 1.0 };
        let cap = move |p: &Problem| p.softcap().map_or(1.0, |cap| p.scale() / cap * unit);
        Self {
            log2: params.f32(b, "scale_log2", move |p| log2(p.as_ref())),
            cap: softcap.then(|| params.f32(b, "cap_scale", move |p| cap(p.as_ref()))),
            element,
        }
    }

    /// The same in registers that [`set`](Self::set) may change.
    pub(crate) fn variable(&self, b: &mut Builder) -> Self {
        let mut var = |of| b.var(of);
        Self { log2: var(self.log2), cap: self.cap.map(var), element: self.element }
    }

    /// Becomes `other` for scores that are multiplied by one more factor.
    pub(crate) fn set(&self, b: &mut Builder, other: &Self, factor: Reg<F32>) {
        match (self.cap, other.cap) {
            (Some(cap), Some(other)) => b.set(cap, other * factor),
            _ => b.set(self.log2, other.log2 * factor),
        }
    }

    /// The same for scores that are multiplied by one more factor.
    pub(crate) fn times(&self, b: &mut Builder, factor: Reg<F32>) -> Self {
        match self.cap {
            Some(cap) => Self { cap: Some(b.mul(cap, factor)), ..*self },
            None => Self { log2: b.mul(self.log2, factor), ..*self },
        }
    }

    /// Limits scores to ±1, if they are softcapped; `log2` then scales them to ± the cap.
    pub(crate) fn cap(&self, b: &mut Builder, scores: &[Reg<F32>]) {
        let Some(scale) = self.cap else { return };
        for &score in scores {
            b.mul_into(score, score, scale);
            match self.element {
                Element::F32 => exact_tanh(b, score),
                Element::F16 => tanh_of_power(b, score),
                // As exact as scores of tensors that keep eight bits of a number or fewer.
                _ => b.tanh_into(score, score),
            }
        }
    }
}

/// Half of log 2: `tanh (x / (2 · log₂ e))` is about this times `x` near zero.
const HALF_LN_2: f32 = LN_2 / 2.0;
/// Sizes up to which that is nearer than a difference to 1, which loses digits of scores that are small beside the cap, and all
/// of them where it is huge.
const LINEAR_END: f32 = HALF_LN_2 / 64.0;

/// `x = tanh (x / (2 · log₂ e))`, some units in the last place of 1 off, and 2⁻¹⁴ of itself at most: what the instruction for
/// tangents is off changes weights and slopes as much as an unfused computation in f16 does, and slopes of scores near the cap
/// have few bits left.
fn tanh_of_power(b: &mut Builder, x: Reg<F32>) {
    let near = b.let_(x * HALF_LN_2);
    b.exp2_into(x, x);
    b.add_to(x, 1.0);
    let inverse = b.rcp(x);
    b.fma_into(x, inverse, -2.0, 1.0);
    // Not before: there are more registers for numbers than for conditions.
    let size = b.abs(near);
    b.select_into(x, size.lt(LINEAR_END), near, x);
}

/// Squares of arguments up to which a series is more exact than exponentials.
const SERIES_END: f32 = 0.25;
/// tanh x = x + x³ · (these times powers of x², the lowest first), relative error below 2⁻²⁵.
const SERIES: [f32; 4] = [-0.333_331_44, 0.133_258_79, -0.053_045_478, 0.017_241_456];

/// `x = tanh x`, some units in the last place off.
fn exact_tanh(b: &mut Builder, x: Reg<F32>) {
    let square = b.let_(x * x);
    let [first, second, third, last] = SERIES;
    let series = [third, second, first].into_iter().fold(b.var(last), |sum, next| b.fma(sum, square, next));
    let cube = b.let_(square * x);
    let near = b.fma(series, cube, x);
    // tanh x = 1 − 2 / (exp 2x + 1), where exp 2x may be as large as infinity.
    let exponential = b.exp2(x * (2.0 * LOG2_E));
    let inverse = b.rcp(exponential + 1.0);
    let far = b.fma(inverse, -2.0, 1.0);
    b.select_into(x, square.lt(SERIES_END), near, far);
}
