//! The epilogue: rounds a tile and stores its valid rows and columns directly to global memory.

use flashcore_tile::{Builder, F32, MMA_M, Params, Pred, Reg, U32, U64};

use super::{
    Work,
    product::{Config, Place, Sums, warp_place},
};
use crate::slots::grouped as slots;

/// Bytes of an element.
const BYTES: u64 = 2;

/// Where results go, as registers.
pub(super) struct Output {
    pub(super) base: Reg<U64>,
    /// Bytes from one matrix, row and column to the next.
    pub(super) strides: [Reg<U64>; 3],
}

impl Output {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Work>) -> Self {
        let names = ["out_matrix", "out_row", "out_column"];
        Self {
            base: params.buffer(b, "out", slots::OUT),
            strides: [0, 1, 2].map(|n: usize| params.u64(b, names[n], move |work| BYTES * work.out[n])),
        }
    }

    /// Writes all sums of a warp: a thread has two rows of each block of 16 and two neighbours of each 8 columns.
    pub(super) fn write(&self, b: &mut Builder, cfg: &Config, place: Place, sums: &Sums) {
        let ([along, across], lane) = (warp_place(b, cfg), b.lane());
        let [rows, columns] = [cfg.shape.tile_m / cfg.shape.warps[0], cfg.shape.tile_n / cfg.shape.warps[1]];
        let row = b.let_(place.rows[0] + along * rows + lane / 4);
        let column = b.let_(place.columns[0] + across * columns + lane % 4 * 2);
        let [matrix, down, _] = self.strides;
        let start = b.let_(place.out.widen() * matrix + self.base);
        for (block, sums) in (0..).zip(sums) {
            for half in 0..2 {
                let row = b.let_(row + (block * MMA_M + 8 * half));
                let start = b.let_(row.widen() * down + start);
                b.if_(row.lt(place.rows[1]), |b| {
                    for group in 0..columns / 8 {
                        let at = (4 * group + 2 * half) as usize;
                        let column = b.let_(column + group * 8);
                        let values = [sums.regs()[at], sums.regs()[at + 1]];
                        match cfg.turned {
                            false => self.write_pair(b, cfg, place, (start, column), values),
                            true => self.write_each(b, cfg, place, (start, column), values),
                        }
                    }
                });
            }
        }
    }

    /// Neighbours in memory; where one is there, so is the other.
    fn write_pair(
        &self,
        b: &mut Builder,
        cfg: &Config,
        place: Place,
        (start, column): (Reg<U64>, Reg<U32>),
        [low, high]: [Reg<F32>; 2],
    ) {
        let to = b.let_(start + column.mul_wide(BYTES as u32));
        let pair = b.pack(cfg.half, low, high);
        let there: Pred = b.let_(column.lt(place.columns[1]));
        b.predicated(there, |b| b.store_global(to, &[pair.into()]));
    }

    /// One after the other.
    fn write_each(
        &self,
        b: &mut Builder,
        cfg: &Config,
        place: Place,
        (start, column): (Reg<U64>, Reg<U32>),
        values: [Reg<F32>; 2],
    ) {
        for (n, value) in (0..).zip(values) {
            let column = b.let_(column + n);
            let to = b.let_(column.widen() * self.strides[2] + start);
            let word = b.pack(cfg.half, value, value);
            let there: Pred = b.let_(column.lt(place.columns[1]));
            b.predicated(there, |b| b.store_global_16(to, word));
        }
    }
}
