//! The epilogue: bias, gate and up joined, rounding, and a direct store to global memory.

use flashcore_tile::{Acc, Builder, F32, MMA_M, Params, Reg, U32, U64};

use super::{
    super::join::{Bias, Join},
    Arguments, Config, Kind, Layer, Place, Source, Sums, WeightOrder, warp_place,
};
use crate::slots::moe as slots;

/// Bytes of an element.
const BYTES: u32 = 2;

/// Where results go, as registers.
pub(super) struct Output {
    base: Reg<U64>,
    stride: Reg<U64>,
    bias: Option<Bias>,
    join: Option<Join>,
}

impl Output {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let kind = cfg.kind;
        let slot = match (kind, cfg.source) {
            (Kind::Down, Source::All) => slots::SHARED_RESULTS,
            (Kind::Down, _) => slots::RESULTS,
            (Kind::Up(_), Source::All) => slots::SHARED_JOINED,
            (Kind::Up(_), _) => slots::JOINED,
        };
        Self {
            base: params.buffer(b, "to", slot),
            stride: params
                .u64(b, "to_stride", move |layer| u64::from(BYTES) * u64::from(super::width(kind, layer))),
            bias: cfg.biases.then(|| Bias::declare(b, params, kind)),
            join: Join::declare(b, params, kind),
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
                    kinds.iter().map(|&up| bias.at(b, cfg.half, place.expert, feature, up)).collect()
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
                        self.join.map_or(values[0], |join| join.apply(b, values[0], values[1]))
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
