//! What a consumer warpgroup keeps for the whole launch; `step.rs` has what it does with a streamed pair, `tiles.rs` what
//! it does with a held one.

use flashcore_tile::{Builder, Major, MatrixOperand, Pipeline, Pred, Reg, Stage, U32};

use super::{Arguments, Config, Layout, ROWS_PER_GROUP};

/// Of a count: whether the number of held tiles is odd.
const ODD: u32 = 1 << 31;

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
    /// Held tiles passed, but in a fused kernel.
    held_count: Option<Reg<U32>>,
    /// Streamed tiles passed. In a fused kernel, which has no register for a second counter, the highest bit says whether the
    /// number of held ones is odd.
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
        let skip = if cfg.shape.paired { b.var(0) } else { b.let_(group * rows) };
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
            held_count: (!cfg.fused()).then(|| b.var(0)),
            count: b.var(0),
        }
    }

    /// How many held tiles were passed, or whether that is odd.
    pub(super) fn held_number(&self, b: &mut Builder) -> Reg<U32> {
        self.held_count.unwrap_or_else(|| b.let_(self.count >> ODD.trailing_zeros()))
    }

    /// Moves on to the next held tile.
    pub(super) fn pass_held(&self, b: &mut Builder) {
        match self.held_count {
            Some(count) => b.add_to(count, 1),
            None => b.set(self.count, self.count ^ ODD),
        }
    }

    /// The current stage of a held tile.
    pub(super) fn held_stage(&self, b: &mut Builder, which: usize) -> Stage {
        let number = self.held_number(b);
        self.layout.held[which].stage(b, number)
    }

    /// The current stage between consumers and mover.
    pub(super) fn handed_stage(&self, b: &mut Builder, handed: &Pipeline) -> Stage {
        let number = self.streamed_number(b, self.count);
        handed.stage(b, number)
    }

    /// A count of streamed tiles without what else it holds.
    pub(super) fn streamed_number(&self, b: &mut Builder, count: Reg<U32>) -> Reg<U32> {
        match self.held_count {
            Some(_) => count,
            None => b.let_(count & !ODD),
        }
    }

    /// The stage of streamed tile number `count`.
    pub(super) fn streamed_stage(&self, b: &mut Builder, which: usize, count: Reg<U32>) -> Stage {
        let number = self.streamed_number(b, count);
        self.layout.streamed[which].stage(b, number)
    }
}
