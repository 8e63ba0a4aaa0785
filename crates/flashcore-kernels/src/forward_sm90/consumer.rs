//! A consumer warpgroup: QKᵀ, softmax and PV of 64 rows, overlapped.
//!
//! ```text
//! tensor cores   QK(0) |            | QK(1) PV(0) |            | QK(2) PV(1) | …  PV(last) QK(0 of the next tile)
//! this group           | softmax(0) |             | softmax(1) |             | …           epilogue
//! ```
//!
//! Others multiply while this group does its softmax. `step.rs` has the steady state, `tiles.rs` how tiles start and end
//! around it, `passing.rs` which tiles are skipped, `rows.rs` where this thread's rows are.

use flashcore_tile::{Builder, Major, MatrixOperand, Pred, Reg, U32, WARPGROUP, Warpgroup};

use super::{Arguments, Config, Layout, ROWS_PER_GROUP, blocks::Blocks, epilogue::Epilogue};
use crate::parts::{scale::Scale, softmax::Softmax, turns::Turn};

/// What a consumer keeps for the whole launch.
pub(super) struct Consumer<'a> {
    pub(super) cfg: Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
    /// Number of this thread among those of all consumers.
    pub(super) thread: Reg<U32>,
    /// Number of this warpgroup among the consumers.
    pub(super) group: Reg<U32>,
    /// Number of this warp in its warpgroup.
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
    /// The one lane of each warp that releases stages and issues stores.
    pub(super) leader: Pred,
    pub(super) q: MatrixOperand,
    pub(super) k: MatrixOperand,
    pub(super) v: MatrixOperand,
    /// Q tiles and K/V tiles passed.
    pub(super) q_count: Reg<U32>,
    pub(super) kv_count: Reg<U32>,
    pub(super) softmax: Softmax,
    /// What scores are multiplied by: that of the tile, where tiles have factors.
    pub(super) scale: Scale,
    /// Factors of the tile's blocks, where these have some.
    pub(super) blocks: Option<Blocks>,
    /// When this consumer may multiply, where consumers do so in turn.
    turn: Option<Turn>,
}

/// Works through the tiles that the producer posts.
pub(super) fn run(b: &mut Builder, cfg: Config, args: &Arguments, layout: &Layout, group: Reg<U32>) {
    let consumer = Consumer::new(b, cfg, args, layout, group);
    let epilogue = Epilogue::new(b, &consumer);
    let (first, there) = consumer.next_tile(b);
    let there = b.uniform::<Warpgroup>(there);
    b.if_uniform(there, |b| consumer.tiles(b, &epilogue, first));
    epilogue.drain(b);
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
        let thread = b.let_(group * WARPGROUP + thread % WARPGROUP);
        let lane = b.lane();
        let leader = b.let_(lane.eq(0));
        let scale = if cfg.scaled { args.scale.variable(b) } else { args.scale };
        let group_rows = b.let_(group * (ROWS_PER_GROUP * layout.q.tile().slab_width()));
        Self {
            cfg,
            args,
            layout,
            thread,
            group,
            warp,
            lane,
            leader,
            q: layout.q.tile().operand(b, Major::K, group_rows),
            k: layout.k.tile().operand(b, Major::K, 0),
            v: layout.v.tile().operand(b, if cfg.narrow() { Major::K } else { Major::Mn }, 0),
            q_count: b.var(0),
            kv_count: b.var(0),
            softmax: Softmax::new(b, scale.log2, cfg.input),
            scale,
            blocks: args.blocks.map(|blocks| Blocks::new(b, blocks)),
            turn: layout.turns.map(|turns| turns.of(b, group)),
        }
    }

    /// Waits until tensor cores are this consumer's, where consumers multiply in turn.
    pub(super) fn take_turn(&self, b: &mut Builder) {
        self.turn.iter().for_each(|turn| turn.take(b));
    }

    /// Leaves them to the next one.
    pub(super) fn pass_turn(&self, b: &mut Builder) {
        self.turn.iter().for_each(|turn| turn.pass(b, self.leader));
    }
}
