//! The end of a tile: bias, gate and up joined, rounded, and straight to global memory.

use std::f32::consts::LOG2_E;

use flashcore_tile::{Acc, Builder, F32, MMA_M, Params, Pred, Reg, U32, U64};

use super::{Arguments, Config, Glu, Kind, Layer, Place, Sums, WeightOrder, clamp, gate_steps, warp_place};
use crate::slots::moe as slots;

/// Bytes of an element.
const BYTES: u32 = 2;
/// 2·√(2/π), by which GELU's tanh becomes a sigmoid, and its cubic coefficient.
const GELU: [f32; 2] = [1.595_769_1, 0.044_715];

/// Where results go, as registers.
pub(super) struct Output {
    base: Reg<U64>,
    stride: Reg<U64>,
    bias: Option<Bias>,
    /// Alpha and limit of a clamped activation.
    clamp: Option<[Reg<F32>; 2]>,
}

/// What is added to each feature.
struct Bias {
    base: Reg<U64>,
    /// Bytes from one expert to the next, from one gate to the next, and from gate to up.
    expert: Reg<U64>,
    step: Reg<U32>,
    up: Reg<U64>,
}

impl Bias {
    fn declare(b: &mut Builder, params: &mut Params<Layer>, kind: Kind) -> Self {
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
    fn at(&self, b: &mut Builder, cfg: &Config, place: Place, feature: Reg<U32>, up: bool) -> Reg<F32> {
        let at = b.let_(place.expert.widen() * self.expert + self.base);
        let at = b.let_(at + feature.mul_wide(self.step));
        let at = if up { b.let_(at + self.up) } else { at };
        let word = b.load_global_16(at);
        b.unpack(cfg.half, word)[0]
    }
}

impl Output {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let kind = cfg.kind;
        let slot = if kind == Kind::Down { slots::RESULTS } else { slots::JOINED };
        Self {
            base: params.buffer(b, "to", slot),
            stride: params
                .u64(b, "to_stride", move |layer| u64::from(BYTES) * u64::from(super::width(kind, layer))),
            bias: cfg.biases.then(|| Bias::declare(b, params, kind)),
            clamp: (kind == Kind::Up(Glu::Clamped)).then(|| {
                [("alpha", 0), ("limit", 1)]
                    .map(|(name, n)| params.f32(b, name, move |layer| clamp(layer)[n]))
            }),
        }
    }

    /// Writes all sums of a warp.
    pub(super) fn write(&self, b: &mut Builder, cfg: &Config, args: &Arguments, place: Place, sums: &Sums) {
        let ([along, across], lane) = (warp_place(b, cfg), b.lane());
        let rows = cfg.shape.tile_m / cfg.shape.warps[0];
        let features = cfg.features() / cfg.shape.warps[1];
        let row = b.let_(place.tile * cfg.shape.tile_m + along * rows + lane / 4);
        let start = b.let_(row.widen() * self.stride + self.base);
        // Two neighbouring columns of sums are two features, or gate and up of one.
        let own = if paired(cfg) { 1 } else { 2 };
        let first = b.let_(place.feature + across * features + lane % 4 * own);
        for group in 0..features / (4 * own) {
            let feature = b.let_(first + group * 4 * own);
            let there = (!cfg.whole).then(|| b.let_(feature.lt(args.features)));
            let write = |b: &mut Builder| self.write_group(b, cfg, place, feature, (start, group), sums);
            match there {
                Some(there) => b.if_(there, write),
                None => write(b),
            }
        }
    }

    /// The features of a thread in eight columns, of all its rows.
    fn write_group(
        &self,
        b: &mut Builder,
        cfg: &Config,
        place: Place,
        feature: Reg<U32>,
        (start, group): (Reg<U64>, u32),
        sums: &Sums,
    ) {
        let start = b.let_(start + feature.mul_wide(BYTES));
        let own = if paired(cfg) { 1 } else { 2 };
        let biases: Vec<Vec<Reg<F32>>> = match &self.bias {
            None => Vec::new(),
            Some(bias) => (0..own)
                .map(|n| {
                    let feature = b.let_(feature + n);
                    let kinds: &[bool] = if cfg.kind == Kind::Down { &[false] } else { &[false, true] };
                    kinds.iter().map(|&up| bias.at(b, cfg, place, feature, up)).collect()
                })
                .collect(),
        };
        for (block, sums) in (0..).zip(sums) {
            for row in 0..2 {
                let joined: Vec<_> = (0..own as usize)
                    .map(|n| {
                        let values = values(cfg, sums, group, row, n);
                        let values = match biases.get(n) {
                            None => values,
                            Some(biases) => {
                                values.iter().zip(biases).map(|(&value, &bias)| b.add(value, bias)).collect()
                            }
                        };
                        self.join(b, cfg, &values)
                    })
                    .collect();
                let down = u64::from(block * MMA_M + 8 * row as u32);
                let to = b.let_(self.stride * down + start);
                let word = b.pack(cfg.half, joined[0], joined.get(1).copied().unwrap_or(joined[0]));
                if own == 2 {
                    b.store_global(to, &[word.into()]);
                } else {
                    b.store_global_16(to, word);
                }
            }
        }
    }

    /// One feature of the result.
    fn join(&self, b: &mut Builder, cfg: &Config, values: &[Reg<F32>]) -> Reg<F32> {
        let Kind::Up(glu) = cfg.kind else { return values[0] };
        let (gate, up) = (values[0], values[1]);
        match glu {
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

/// Whether gate and up are neighbouring columns.
fn paired(cfg: &Config) -> bool {
    cfg.weights == WeightOrder::PairedColumns
}

/// The sums of feature `n` of a thread in eight columns, of one of its rows: gate and up, or one.
fn values(cfg: &Config, sums: &[Acc], group: u32, row: usize, n: usize) -> Vec<Reg<F32>> {
    let at = 4 * group as usize + 2 * row;
    if paired(cfg) {
        return sums[0].regs()[at..at + 2].to_vec();
    }
    sums.iter().map(|sums| sums.regs()[at + n]).collect()
}
