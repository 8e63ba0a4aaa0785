//! Sixteen query rows of a warp: their output, softmax and mask.

use flashcore_tile::{Acc, Builder, F32, MMA_M, ROWS_PER_THREAD, Reg, S32, U32, U64};

use super::{Arguments, Config};
use crate::parts::{
    row_end,
    scale::Scale,
    schedule::Tile,
    softmax::{Finished, RowTile, Softmax},
};

/// The registers of 16 query rows.
pub(super) struct Block {
    pub(super) output: Acc,
    pub(super) softmax: Softmax,
}

impl Block {
    /// Rows whose scores become powers of two by `scale`.
    pub(super) fn new(b: &mut Builder, cfg: &Config, scale: &Scale) -> Self {
        let output = Acc::zero(b, cfg.columns().each as usize);
        Self { output, softmax: Softmax::new(b, scale.log2, cfg.input) }
    }

    /// New scores of the rows.
    pub(super) const fn tile<'a>(&'a self, scores: &'a Acc) -> RowTile<'a> {
        RowTile { softmax: &self.softmax, scores, output: &self.output }
    }
}

/// Ends the rows of block `number`, with the head's sink and the factor of its values; rows beyond the queries count as rows without keys.
pub(super) fn row_end(
    b: &mut Builder,
    cfg: &Config,
    block: Block,
    (sink, factor): (Option<Reg<F32>>, Option<Reg<F32>>),
    row: Reg<S32>,
    queries: Reg<U32>,
    number: u32,
) -> (Acc, Finished) {
    let mut finished = block.softmax.finish(b, sink.map(|sink| [sink; ROWS_PER_THREAD]), None);
    if let Some(factor) = factor {
        finished.factor = finished.factor.map(|of_row| b.mul(of_row, factor));
    }
    if cfg.lengths.cuts_queries() {
        for half in [0, 1] {
            let row = row + (number * MMA_M + 8 * half as u32) as i32;
            let beyond = b.let_(row.ge(queries.signed()));
            finished.factor[half] = b.select(beyond, 0.0, finished.factor[half]);
            finished.lse[half] = row_end::lse_of_used(b, beyond, finished.lse[half]);
        }
    }
    (block.output, finished)
}

impl Arguments {
    /// Where the LSE of the tile's first row goes.
    pub(super) fn lse_of_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U64> {
        let [batch, head, heads, seq] =
            [tile.batch, tile.head, self.schedule.heads(), self.schedule.seq_q()].map(|x| b.let_(x.widen()));
        let row = (tile.q_start + tile.first_row).widen();
        let index = b.let_((batch * heads + head) * seq + row);
        let bytes = b.let_(index * 4);
        b.let_(self.lse + bytes)
    }
}
