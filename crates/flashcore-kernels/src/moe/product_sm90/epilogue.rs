//! The epilogue: bias, gate and up joined, rounding; a warp's 16 rows go to shared memory and from there by tensor copy
//! to global memory, which clips features beyond the last.

use flashcore_ptx::layout::Swizzle;
use flashcore_tile::{
    Acc, Builder, F32, Params, Pred, Reg, Shared, SmemTile, TensorMap, U32, U64, Val, WARPGROUP,
};

use super::{
    super::{
        Layer,
        join::{Bias, Join},
        product::Kind,
    },
    Layout, TILE_M,
    config::{BYTES, Config, PLACES, ROWS, WARP_ROWS, WARPS},
    maps,
    place::{self, Arguments, Place},
};
use crate::slots::moe as slots;

/// Columns of 16-bit elements that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;

/// Where results go, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    /// Rows of tiles that are not transposed.
    map: Option<TensorMap>,
    /// Address and bytes between rows, for tiles that are.
    pub(super) rows: Option<[Reg<U64>; 2]>,
    pub(super) bias: Option<Bias>,
    pub(super) join: Option<Join>,
}

impl Output {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let cfg = *cfg;
        let slot = if cfg.kind == Kind::Down { slots::RESULTS } else { slots::JOINED };
        let swizzle = if cfg.staged() == 64 { Swizzle::B128 } else { Swizzle::B64 };
        let turned = cfg.shape.turned();
        let map = (!turned).then(|| {
            params.tensor_map(b, "to", move |layer| {
                let to = (slot, place::width(&cfg, layer));
                maps::rows(&cfg, layer, to, ([cfg.staged(), WARP_ROWS], swizzle))
            })
        });
        let rows = turned.then(|| {
            let row = move |layer: &Layer| u64::from(BYTES) * place::width(&cfg, layer) as u64;
            [params.buffer(b, "to", slot), params.u64(b, "to_stride", row)]
        });
        Self {
            map,
            rows,
            bias: cfg.biases.then(|| Bias::declare(b, params, cfg.kind)),
            join: Join::declare(b, params, cfg.kind),
        }
    }

    /// Writes the sums of a warp.
    pub(super) fn write(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (staging, place): (&Staging, Place),
        sums: &[Acc],
    ) {
        let parts = cfg.features() / cfg.staged();
        // Where a block ends out of turn, the next tile may begin with the place used last.
        let even = parts.is_multiple_of(PLACES);
        for (block, sums) in (0..).zip(sums) {
            let row = b.let_(place.tile * TILE_M + staging.row + block * ROWS);
            for part in 0..parts {
                let values = self.values(b, cfg, args, place, (sums, part));
                let col = b.let_(place.feature + part * cfg.staged());
                let number = block * parts + part;
                let pending = if number > 0 || even { PLACES - 1 } else { 0 };
                staging.gather(b, cfg, &values, (number % PLACES, pending));
                let map = self.map.expect("tiles that are not turned are stored by tensor copies");
                staging.store(b, number % PLACES, (map, col, row));
            }
        }
    }

    /// One part of a row's features, in the order of the registers of sums.
    fn values(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        place: Place,
        (sums, part): (&Acc, u32),
    ) -> Vec<Reg<F32>> {
        let (count, half) = (cfg.staged() as usize / 2, cfg.features() as usize / 2);
        let first = part as usize * count;
        // Both of a thread's rows have the same features.
        let of_row = (first..first + count).filter(|&n| Acc::row(n) == 0);
        let biases: Vec<_> = of_row.map(|n| self.biases(b, cfg, args, place, n)).collect();
        let values = (first..first + count).map(|n| {
            let bias = &biases[(n - first) / 4 * 2 + n % 2];
            let sum = |b: &mut Builder, n: usize, which: usize| {
                let sum = sums.regs()[n];
                bias.get(which).map_or(sum, |&bias| b.add(sum, bias))
            };
            let gate = sum(b, n, 0);
            match self.join {
                None => gate,
                Some(join) => {
                    let up = sum(b, n + half, 1);
                    join.apply(b, gate, up)
                }
            }
        });
        values.collect()
    }

    /// What is added to the feature of register `n`: to its gate, and to its up.
    fn biases(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        place: Place,
        n: usize,
    ) -> Vec<Reg<F32>> {
        let Some(bias) = &self.bias else { return Vec::new() };
        let (lane, last) = (b.lane(), b.let_(args.features - 1));
        let feature = b.let_((place.feature + (lane % 4) * 2 + Acc::col(n) as u32).min(last));
        let kinds: &[bool] = if cfg.kind == Kind::Down { &[false] } else { &[false, true] };
        kinds.iter().map(|&up| bias.at(b, cfg.half, place.expert, feature, up)).collect()
    }
}

/// Where a warp gathers its rows.
pub(super) struct Staging {
    tile: SmemTile,
    /// The warp's own places.
    at: Shared,
    /// This lane's address for each pair of matrices.
    lanes: Vec<Reg<U32>>,
    leader: Pred,
    /// The warp's first row of its consumer's first block.
    row: Reg<U32>,
}

impl Staging {
    pub(super) fn new(b: &mut Builder, cfg: &Config, layout: &Layout, group: Reg<U32>) -> Self {
        let tile = layout.staging.expect("tiles that are not turned are gathered for their stores");
        let (thread, lane) = (b.thread(), b.lane());
        let warp = b.let_(thread % WARPGROUP / 32);
        let skip = b.let_((group * WARPS + warp) * (PLACES * tile.bytes()));
        let start = tile.at(b).plus(b, skip).address(b);
        let (row, right) = (b.let_(lane & 15), b.let_(lane >> 4));
        let lanes = (0..tile.cols() / PAIR_COLS).map(|pair| tile.chunk(b, start, row, right + 2 * pair));
        let lanes = lanes.collect();
        let row = match cfg.shape.turns {
            true => b.let_(warp * WARP_ROWS),
            false => b.let_(group * ROWS + warp * WARP_ROWS),
        };
        Self { tile, at: start.into(), lanes, leader: b.let_(lane.eq(0)), row }
    }

    /// Rounds values and gathers them at a place, once all but the `pending` latest stores have read theirs.
    fn gather(&self, b: &mut Builder, cfg: &Config, values: &[Reg<F32>], (place, pending): (u32, u32)) {
        b.predicated(self.leader, |b| b.tma_wait_read(pending));
        b.sync_warp();
        for (values, &lane) in values.chunks(8).zip(&self.lanes) {
            let packed = std::array::from_fn(|n| b.pack(cfg.half, values[2 * n], values[2 * n + 1]));
            b.stmatrix(Shared::from(lane).at(place * self.tile.bytes()), packed);
        }
        b.fence_async();
        b.sync_warp();
    }

    /// Starts to store what was gathered at a place.
    fn store(&self, b: &mut Builder, place: u32, (map, col, row): (TensorMap, Reg<U32>, Reg<U32>)) {
        b.predicated(self.leader, |b| {
            b.tma_store(map, self.at.at(place * self.tile.bytes()), [Val::from(col), row.into()]);
            b.tma_commit();
        });
    }

    /// Waits until every store has been written; at the end of the kernel.
    pub(super) fn drain(&self, b: &mut Builder) {
        b.predicated(self.leader, |b| b.tma_wait(0));
    }
}
