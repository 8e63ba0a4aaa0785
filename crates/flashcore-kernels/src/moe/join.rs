//! Joins gate and up of a feature, after adding the biases: in registers, for every kernel of the products.

use std::f32::consts::LOG2_E;

use flashcore_core::{Activation, GateUp};
use flashcore_tile::{Builder, F32, Half, Params, Pred, Reg, U32, U64};

use super::{
    Layer,
    product::{Glu, Kind},
};
use crate::slots::moe as slots;

/// Bytes of an element.
const BYTES: u32 = 2;
/// 2·√(2/π), by which GELU's tanh becomes a sigmoid, and its cubic coefficient.
const GELU: [f32; 2] = [1.595_769_2, 0.044_715];

/// What is added to each feature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bias {
    base: Reg<U64>,
    /// Bytes from one expert to the next, from one gate to the next, and from gate to up.
    expert: Reg<U64>,
    step: Reg<U32>,
    up: Reg<U64>,
}

impl Bias {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, kind: Kind) -> Self {
        let bytes = u64::from(BYTES);
        let slot = if kind == Kind::Down { slots::DOWN_BIAS } else { slots::GATE_UP_BIAS };
        let steps = move |layer: &Layer| if kind == Kind::Down { [1, 0] } else { gate_steps(layer) };
        Self {
            base: params.buffer(b, "bias", slot),
            expert: params.u64(b, "bias_stride", move |layer| match kind {
                Kind::Up(_) => bytes * layer.problem.gate_up().rows() as u64,
                Kind::Down => bytes * layer.problem.hidden() as u64,
            }),
            step: params.u32(b, "bias_step", move |layer| BYTES * steps(layer)[0] as u32),
            up: params.u64(b, "bias_up", move |layer| bytes * steps(layer)[1]),
        }
    }

    /// The bias of a feature: of its gate, or of its up.
    pub(super) fn at(
        &self,
        b: &mut Builder,
        half: Half,
        expert: Reg<U32>,
        feature: Reg<U32>,
        up: bool,
    ) -> Reg<F32> {
        let at = b.let_(expert.widen() * self.expert + self.base);
        let at = b.let_(at + feature.mul_wide(self.step));
        let at = if up { b.let_(at + self.up) } else { at };
        let word = b.load_global_16(at);
        b.unpack(half, word)[0]
    }
}

/// What joins gate and up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Join {
    glu: Glu,
    /// Alpha and limit of a clamped activation.
    clamp: Option<[Reg<F32>; 2]>,
}

impl Join {
    /// That of a product, where it has one.
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, kind: Kind) -> Option<Self> {
        let Kind::Up(glu) = kind else { return None };
        let clamp = (glu == Glu::Clamped).then(|| {
            [("alpha", 0), ("limit", 1)].map(|(name, n)| params.f32(b, name, move |layer| clamp(layer)[n]))
        });
        Some(Self { glu, clamp })
    }

    /// One feature of the result.
    pub(super) fn apply(&self, b: &mut Builder, gate: Reg<F32>, up: Reg<F32>) -> Reg<F32> {
        match self.glu {
            Glu::Swi => {
                let swish = swish(b, gate, gate);
                b.mul(swish, up)
            }
            Glu::Ge => {
                let cubic = b.let_(gate * gate);
                let inner = b.fma(cubic, GELU[1], 1.0);
                let inner = b.let_(inner * gate);
                let inner = b.mul(inner, GELU[0]);
                let gelu = swish(b, gate, inner);
                b.mul(gelu, up)
            }
            Glu::Clamped => {
                let [alpha, limit] = self.clamp.expect("a clamped activation has its numbers");
                // Comparisons that NaN fails: it stays what it is.
                let (over, high) = (b.let_(gate.gt(limit)), b.let_(up.gt(limit)));
                let gate = b.select(over, limit, gate);
                let lowest = b.neg(limit);
                let low: Pred = b.let_(up.lt(lowest));
                let up = b.select(high, limit, up);
                let up = b.select(low, lowest, up);
                let inner = b.let_(gate * alpha);
                let swish = swish(b, gate, inner);
                let up = b.let_(up + 1.0);
                b.mul(swish, up)
            }
        }
    }
}

/// `x · sigmoid(inner)`.
fn swish(b: &mut Builder, x: Reg<F32>, inner: Reg<F32>) -> Reg<F32> {
    let exponent = b.mul(inner, -LOG2_E);
    let e = b.exp2(exponent);
    let sum = b.let_(e + 1.0);
    let sigmoid = b.rcp(sum);
    b.mul(x, sigmoid)
}

/// Factors of a layer's activation: alpha and limit, where it has them.
fn clamp(layer: &Layer) -> [f32; 2] {
    match layer.problem.spec().activation {
        Activation::Clamped { alpha, limit } => [alpha, limit],
        _ => [1.0, f32::INFINITY],
    }
}

/// Elements between gates of neighbouring features, and from a gate to its up, in units of rows of `gate_up`.
pub(super) fn gate_steps(layer: &Layer) -> [u64; 2] {
    let (order, half): (GateUp, usize) = (layer.problem.spec().order, layer.problem.intermediate());
    let row = |n: usize, up: bool| order.row(n, half, up) as u64;
    [row(1, false) - row(0, false), row(0, true) - row(0, false)]
}
