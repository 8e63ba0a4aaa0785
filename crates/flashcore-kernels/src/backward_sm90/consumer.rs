//! What a consumer warpgroup keeps for the whole launch; `step.rs` has what it does with a streamed pair, `tiles.rs` what
//! it does with a held one.

use flashcore_tile::{Builder, Major, MatrixOperand, Pred, Reg, Stage, U32};

use super::{Arguments, Config, Layout, ROWS_PER_GROUP};

/// A consumer: 64 rows of the held tile.
pub(super) struct Consumer<'a> {
    pub(super) cfg: Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
    /// Number of this warpgroup among the consumers.
    pub(super) group: Reg<U32>,
    /// Number of this warp in its warpgroup.
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
    /// The one lane of each warp that releases stages and issues stores.
    pub(super) leader: Pred,
    /// This group's rows of the held tiles.
    pub(super) held: [MatrixOperand; 2],
    /// The streamed tiles, transposed: for scores and slopes.
    pub(super) across: [MatrixOperand; 2],
    /// The streamed tiles as they are: for gradients.
    pub(super) along: [MatrixOperand; 2],
    /// Held and streamed tiles passed.
    pub(super) held_count: Reg<U32>,
    pub(super) count: Reg<U32>,
}

impl<'a> Consumer<'a> {
    pub(super) fn new(
        b: &mut Builder,
        cfg: Config,
        args: &'a Arguments,
        layout: &'a Layout,
        group: Reg<U32>,
    ) -> Self {
        let thread = b.thread();
        let warp = b.let_((thread >> 5) & 3);
        let lane = b.lane();
        let leader = b.let_(lane.eq(0));
        let rows = layout.held[0].tile().slab_width() * ROWS_PER_GROUP;
        let skip = b.let_(group * rows);
        Self {
            cfg,
            args,
            layout,
            group,
            warp,
            lane,
            leader,
            held: layout.held.map(|pipeline| pipeline.tile().operand(b, Major::K, skip)),
            across: layout.streamed.map(|pipeline| pipeline.tile().operand(b, Major::K, 0)),
            along: layout.streamed.map(|pipeline| pipeline.tile().operand(b, Major::Mn, 0)),
            held_count: b.var(0),
            count: b.var(0),
        }
    }

    /// The current stage of a held tile.
    pub(super) fn held_stage(&self, b: &mut Builder, which: usize) -> Stage {
        self.layout.held[which].stage(b, self.held_count)
    }

    /// The stage of streamed tile number `count`.
    pub(super) fn streamed_stage(&self, b: &mut Builder, which: usize, count: Reg<U32>) -> Stage {
        self.layout.streamed[which].stage(b, count)
    }
}
