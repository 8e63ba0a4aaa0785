//! The activation that joins gate and up between the two products of an expert.

use flashcore_core::Activation;

use super::{
    Kernel, Simd,
    exp2::{Exp2, tanh},
    panel::COLUMNS,
};

/// √(2/π) and the cubic coefficient of GELU's tanh form.
const GELU: [f32; 2] = [0.797_884_6, 0.044_715];
/// Gates below its negative are 0 by a sigmoid that does not overflow.
const STEEPEST: f32 = 87.0;

/// Turns rows of gates and ups into activations.
pub(crate) struct Glu<'a> {
    pub(crate) activation: Activation,
    /// Rows of [`COLUMNS`]: gates in the first half, ups in the second, or by turns. Activations take the first half.
    pub(crate) values: &'a mut [f32],
    pub(crate) by_turns: bool,
    /// What is added to each row first.
    pub(crate) bias: Option<&'a [f32; COLUMNS]>,
}

impl Kernel for Glu<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const HALF: usize = COLUMNS / 2;
        for row in self.values.chunks_exact_mut(COLUMNS) {
            if let Some(bias) = self.bias {
                row.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
            }
            if self.by_turns {
                let mut dealt = [0.0; COLUMNS];
                for n in 0..HALF {
                    (dealt[n], dealt[HALF + n]) = (row[2 * n], row[2 * n + 1]);
                }
                row.copy_from_slice(&dealt);
            }
            let (gate, up) = row.split_at_mut(HALF);
            for n in (0..HALF).step_by(S::LANES) {
                // SAFETY: the caller's promise; both have as many elements as some vectors.
                unsafe {
                    let (gate, up) = (gate.as_mut_ptr().add(n), up.as_ptr().add(n));
                    S::store(gate, join::<S>(self.activation, S::load(gate), S::load(up)));
                }
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
