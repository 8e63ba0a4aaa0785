//! Where this thread's rows are, what they may see, and their sinks.

use flashcore_tile::{Acc, Builder, F32, Pred, ROWS_PER_THREAD, Reg, S32, U32};

use super::{
    ROWS_PER_GROUP, ROWS_PER_WARP,
    consumer::Consumer,
    schedule::{Tile, position},
};
use crate::parts::{mask::thread_column, row_end::thread_rows, softmax::Rows};

impl Consumer<'_> {
    /// First row of this warp in its sequence.
    pub(super) fn warp_row(&self, b: &mut Builder, tile: &Tile) -> Reg<U32> {
        let first = tile.first_row(b, self.cfg);
        b.let_(self.warp * ROWS_PER_WARP + (self.group * ROWS_PER_GROUP + first))
    }

    /// This thread's two rows.
    pub(super) fn thread_rows(&self, b: &mut Builder, tile: &Tile) -> Rows<U32> {
        let first = self.warp_row(b, tile);
        thread_rows(b, first, self.lane)
    }

    /// Where this thread's rows are in their sequence.
    pub(super) fn thread_positions(&self, b: &mut Builder, tile: &Tile) -> Rows<U32> {
        self.thread_rows(b, tile).map(|row| position(b, self.cfg, row))
    }

    /// Which of this thread's rows lie beyond the used queries.
    pub(super) fn beyond_use(&self, b: &mut Builder, tile: &Tile) -> [Pred; ROWS_PER_THREAD] {
        self.thread_positions(b, tile).map(|position| b.let_(position.ge(tile.q_len)))
    }

    /// Masks what the rows of this thread must not see of a key tile.
    pub(super) fn hide(&self, b: &mut Builder, scores: &Acc, tile: &Tile, block: Reg<S32>) {
        let rows = self.thread_positions(b, tile).map(Reg::signed);
        let column = thread_column(b, self.lane);
        let key = b.let_(block * self.cfg.tile_n() as i32 + column);
        tile.visibility(b, self.args).of_thread(b, rows).hide(b, scores, key);
    }

    /// Multiplies scores from now on by what those of a tile are multiplied by, or finds what those of its blocks are.
    pub(super) fn take_factors(&self, b: &mut Builder, tile: &Tile) {
        self.find_blocks(b, tile);
        let Some([scores, _]) = tile.factors(b) else { return };
        self.scale.set(b, &self.args.scale, scores);
        self.softmax.follow_scale(b);
    }

    /// The extra logits of this thread's rows, if the problem has sinks.
    pub(super) fn sinks(&self, b: &mut Builder, tile: &Tile) -> Option<Rows<F32>> {
        let sinks = self.args.sinks?;
        let rows = self.thread_rows(b, tile);
        Some(rows.map(|row| {
            let head = tile.head_of(b, self.cfg, row);
            sinks.of_head(b, head)
        }))
    }
}
