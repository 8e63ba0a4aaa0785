//! The end of a row tile: rows of an f32 output from registers to global memory, and LSE values.

use flashcore_tile::{Acc, Builder, MMA_M, Pred, Reg, S32, U32, U64};

use super::Config;
use crate::parts::{
    row_end::{LseOutput, thread_rows},
    softmax::Finished,
    wide::{self, Ended, VECTOR, Vector, WideRows},
};

/// Where a warp's rows of an f32 output go, from registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct WideOutput {
    /// Address of the tile's first row, and bytes between rows.
    pub(super) to: Reg<U64>,
    pub(super) stride: Reg<U64>,
    /// First row of the warp in the tile.
    pub(super) warp_row: Reg<U32>,
    /// Which share of the columns the warp has, where it does not have all.
    pub(super) share: Option<Reg<U32>>,
    /// Rows of the tile that are written.
    pub(super) rows: Reg<S32>,
    /// Whether rows start at multiples of 8 bytes.
    pub(super) pairs: bool,
}

impl WideOutput {
    /// Writes 16 rows of the warp for each accumulator, and their LSE.
    #[track_caller]
    pub(super) fn write(&self, b: &mut Builder, cfg: &Config, lse: &Lse, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let writes_lse = lse.writer(b, lane);
        let vectors_before = self.share.map(|share| b.let_(share * (cfg.columns().each / VECTOR)));
        let column = wide::first_column(b, lane, vectors_before);
        let start = b.let_(self.to + column);
        for (m, (acc, finished)) in (0..).zip(tiles) {
            let first = b.let_(self.warp_row + m * MMA_M);
            let rows = thread_rows(b, first, lane);
            let there = rows.map(|row| b.let_(row.signed().lt(self.rows)));
            let lse_at = rows.map(|row| b.let_(lse.to + row.mul_wide(4)));
            let to = rows.map(|row| b.let_(row.widen() * self.stride + start));
            let mut ended = Ended::from(*finished);
            if cfg.accumulate {
                let old = wide::old_lse(b, lse_at, there);
                ended = Ended::merged(b, *finished, old);
                self.sync_readers(b);
            }
            for row in 0..there.len() {
                let who = b.let_(there[row] & writes_lse);
                LseOutput::write(b, who, lse_at[row], ended.lse[row]);
            }
            let vectors: Vec<Vector> = acc.regs().chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]).collect();
            let vectors = &vectors[..vectors.len().min(cfg.dim_v.div_ceil(VECTOR) as usize)];
            let exist = |b: &mut Builder, n: u32| wide::exist(b, cfg.dim_v, cfg.columns(), vectors_before, n);
            WideRows { to, there, pairs: self.pairs }.write(b, &ended, vectors, exist);
        }
    }

    /// Waits until everybody who shares rows has read what one of them writes: a quad, or a quad of each share.
    #[track_caller]
    fn sync_readers(&self, b: &mut Builder) {
        match self.share {
            Some(_) => b.sync_cta(),
            None => b.sync_warp(),
        }
    }
}

/// Where the LSE values of a warp go; nowhere if the address is 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lse {
    pub(super) base: Reg<U64>,
    /// Address of the tile's first value.
    pub(super) to: Reg<U64>,
    /// First row of the warp in the tile.
    pub(super) warp_row: Reg<U32>,
    /// Which share of the columns the warp has, where others have the same rows: the first writes.
    pub(super) share: Option<Reg<U32>>,
    /// Rows of the tile that the output has.
    pub(super) rows: Reg<S32>,
}

impl Lse {
    /// Whether this thread writes: one lane of each quad, in the first share of the columns.
    #[track_caller]
    fn writer(&self, b: &mut Builder, lane: Reg<U32>) -> Pred {
        let writes = LseOutput::new(b, self.base, lane).writes;
        self.share.map_or(writes, |share| b.let_(writes & share.eq(0)))
    }

    /// Writes the values of the warp's rows.
    #[track_caller]
    pub(super) fn write(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let writes = self.writer(b, lane);
        let row = b.let_(self.warp_row + (lane >> 2));
        for (m, (_, finished)) in (0..).zip(tiles) {
            for (half, &lse) in (0..).zip(&finished.lse) {
                let row = b.let_(row + (m * MMA_M + 8 * half));
                let there = b.let_(row.signed().lt(self.rows) & writes);
                let to = b.let_(self.to + row.mul_wide(4));
                LseOutput::write(b, there, to, lse);
            }
        }
    }
}
