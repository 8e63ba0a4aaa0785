//! What joins gate and up between the two products of an expert.

use flashcore_core::Activation;

use super::{
    Kernel, Simd,
    exp2::{Exp2, tanh},
};

/// √(2/π) and the cubic coefficient of GELU's tanh form.
const GELU: [f32; 2] = [0.797_884_6, 0.044_715];
/// Gates below its negative are 0 by a sigmoid that does not overflow.
const STEEPEST: f32 = 87.0;

/// Replaces gates by activations.
pub(crate) struct Glu<'a> {
    pub(crate) activation: Activation,
    /// Gates, then activations: a multiple of the lanes; 0 stays 0 where up is 0.
    pub(crate) gate: &'a mut [f32],
    /// As many.
    pub(crate) up: &'a [f32],
}

impl Kernel for Glu<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        assert!(self.gate.len() == self.up.len() && self.gate.len().is_multiple_of(S::LANES));
        let chunks = self.gate.chunks_exact_mut(S::LANES).zip(self.up.chunks_exact(S::LANES));
        for (gate, up) in chunks {
            // SAFETY: the caller's promise; both have as many elements as a vector.
            unsafe {
                let joined = join::<S>(self.activation, S::load(gate.as_ptr()), S::load(up.as_ptr()));
                S::store(gate.as_mut_ptr(), joined);
            }
        }
    }
}

#[inline(always)]
unsafe fn join<S: Simd>(activation: Activation, gate: S::V, up: S::V) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        match activation {
            Activation::SwiGlu => S::mul(swish::<S>(gate, 1.0), up),
            Activation::GeGlu => {
                let cube = S::mul(S::mul(gate, gate), gate);
                let inner = S::mul(S::fma(cube, S::splat(GELU[1]), gate), S::splat(GELU[0]));
                let half = S::mul(S::mul(gate, S::splat(0.5)), up);
                S::fma(half, tanh::<S>(inner), half)
            }
            Activation::Clamped { alpha, limit } => {
                let gate = S::min(S::splat(limit), gate);
                let up = S::max(S::splat(-limit), S::min(S::splat(limit), up));
                S::mul(swish::<S>(gate, alpha), S::add(up, S::splat(1.0)))
            }
        }
    }
}

/// `x · sigmoid(alpha · x)`.
#[inline(always)]
unsafe fn swish<S: Simd>(x: S::V, alpha: f32) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let exponent = S::min(S::splat(STEEPEST), S::mul(x, S::splat(-alpha)));
        let e = Exp2::<S>::new(std::f32::consts::LOG2_E).of(exponent);
        S::div(x, S::add(e, S::splat(1.0)))
    }
}
