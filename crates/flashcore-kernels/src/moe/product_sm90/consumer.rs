//! A consumer warpgroup: multiplies the stages of its tiles, the next product behind the one in flight.

use flashcore_tile::{
    Acc, Builder, Carried, Major, MatrixOperand, Pending, Pred, Reg, Stage, Start, U32, Uniform, Warpgroup,
};

use super::{
    super::{NONE, product::DEPTH},
    Layout, TILE_M,
    config::{CONSUMERS, Config, ROWS},
    epilogue::{Output, Staging},
    place::Arguments,
};
use crate::parts::turns::Turn;

/// Sums of a consumer: one for each 64 rows.
struct Sums(Vec<Pending<Acc>>);

impl Carried for Sums {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        self.0.iter().flat_map(|sums| sums.identity(b)).collect()
    }

    fn twin(&self) -> Self {
        Self(self.0.iter().map(Carried::twin).collect())
    }
}

/// What a consumer keeps for the whole launch.
struct Consumer {
    cfg: Config,
    layout: Layout,
    /// Rows of each of its sums, and weights, in the first stage.
    rows: Vec<MatrixOperand>,
    weights: MatrixOperand,
    /// Stages passed.
    count: Reg<U32>,
    /// The lane of each warp that releases stages.
    leader: Pred,
    /// The other CTA of a pair.
    peer: Option<Reg<U32>>,
    /// When this consumer may multiply, where consumers do so in turn.
    turn: Option<Turn>,
}

/// Works through the tiles of this CTA: all of them, or every second.
pub(super) fn run(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    output: &Output,
    layout: &Layout,
    group: Reg<U32>,
) {
    let steps = args.steps(b);
    let peer = args.peer(b);
    let consumer = Consumer::new(b, cfg, layout, (group, steps), peer);
    let staging = Staging::new(b, cfg, layout, group);
    let [tiles, all] = args.count(b);
    let [cta, ctas] = args.walkers(b);
    let (first, stride) = match cfg.shape.turns {
        true => (b.let_(group * ctas + cta), b.let_(ctas * CONSUMERS)),
        false => (cta, ctas),
    };
    let index = b.var(first);
    // What decides about a tile is asked for while the one before it is multiplied.
    let half = args.second_half(b, index, [tiles, all]);
    b.while_(
        |_| index.lt(all),
        |b| {
            let whole = consumer.is_whole(b, half, group);
            let following = b.let_(index + stride);
            let next = args.second_half(b, following, [tiles, all]);
            let tile = |b: &mut Builder, blocks: usize| {
                let sums = consumer.multiply(b, steps, blocks);
                let place = args.place(b, index, tiles);
                output.write(b, cfg, args, (&staging, place), &sums);
            };
            let blocks = consumer.rows.len();
            b.if_else(whole, |b| tile(b, blocks), |b| tile(b, blocks - 1));
            if cfg.shape.turns {
                b.add_to(consumer.count, steps);
            }
            b.set(half, next);
            b.set(index, following);
        },
    );
    staging.drain(b);
}

impl Consumer {
    fn new(
        b: &mut Builder,
        cfg: &Config,
        layout: &Layout,
        (group, steps): (Reg<U32>, Reg<U32>),
        peer: Option<Reg<U32>>,
    ) -> Self {
        let (tile, lane) = (layout.ring.tile(), b.lane());
        let block = ROWS * tile.slab_width();
        let own = if cfg.shape.turns { b.var(0u32) } else { b.let_(group * block) };
        let rows = (0..cfg.shape.blocks()).map(|n| tile.operand(b, Major::K, own + n * block));
        Self {
            cfg: *cfg,
            layout: *layout,
            rows: rows.collect(),
            weights: tile.operand(b, Major::K, TILE_M * tile.slab_width()),
            count: if cfg.shape.turns { b.var(group * steps) } else { b.var(0u32) },
            leader: b.let_(lane.eq(0)),
            peer,
            turn: layout.turns.map(|turns| turns.of(b, group)),
        }
    }

    /// Whether the last 64 rows of this consumer are not all padding, by the entry of a tile's 65th row.
    fn is_whole(&self, b: &mut Builder, half: Reg<U32>, group: Reg<U32>) -> Uniform<Warpgroup> {
        match self.cfg.shape.turns {
            true => b.uniform::<Warpgroup>(half.ne(NONE)),
            false => b.uniform::<Warpgroup>(half.ne(NONE) | group.eq(0)),
        }
    }

    /// The sums of the first blocks of 64 rows of a tile, which has two stages at least.
    fn multiply(&self, b: &mut Builder, steps: Reg<U32>, blocks: usize) -> Vec<Acc> {
        if blocks == 0 {
            self.pass(b, steps);
            return Vec::new();
        }
        // Stages of the other's tile are full by then: a stage is told apart from the one before it alone.
        self.turn.iter().for_each(|turn| turn.take(b));
        let cols = self.cfg.shape.tile_n as usize;
        let stage = self.next(b);
        let empty: Vec<_> = (0..blocks).map(|_| Acc::new(b, cols)).collect();
        let products = self.operands(b, &stage).into_iter().zip(empty);
        let start = |([rows, weights], sums): ([MatrixOperand; 2], Acc)| {
            b.wgmma_ss(sums, Start::Zero, [&rows, &weights], DEPTH)
        };
        let opening = Sums(products.map(start).collect());
        let end = b.let_(self.count + steps - 1);
        let closing = b.do_while_carrying(opening, |b, sums| {
            let before = self.layout.ring.stage(b, self.count);
            b.add_to(self.count, 1);
            let stage = self.next(b);
            let products = self.operands(b, &stage).into_iter().zip(sums.0);
            let sums: Vec<_> = products
                .map(|([rows, weights], sums)| b.wgmma_ss_onto(sums, [&rows, &weights], DEPTH))
                .collect();
            sums[0].wait_for_older(b);
            self.release(b, &before);
            (b.uniform::<Warpgroup>(self.count.lt(end)), Sums(sums))
        });
        self.turn.iter().for_each(|turn| turn.pass(b, self.leader));
        let sums = closing.0.into_iter().map(|sums| sums.wait(b)).collect();
        let last = self.layout.ring.stage(b, self.count);
        self.release(b, &last);
        b.add_to(self.count, 1);
        sums
    }

    /// Gives all stages of a tile back as they come.
    fn pass(&self, b: &mut Builder, steps: Reg<U32>) {
        let end = b.let_(self.count + steps);
        b.do_while(|b| {
            let stage = self.next(b);
            self.release(b, &stage);
            b.add_to(self.count, 1);
            b.uniform::<Warpgroup>(self.count.lt(end))
        });
    }

    /// Gives a stage back, to both that copy into it.
    fn release(&self, b: &mut Builder, stage: &Stage) {
        match self.peer {
            None => stage.release(b, self.leader),
            Some(peer) => stage.release_to_pair(b, self.leader, peer),
        }
    }

    /// The next stage, once it is full.
    fn next(&self, b: &mut Builder) -> Stage {
        let stage = self.layout.ring.stage(b, self.count);
        stage.wait_full(b);
        stage
    }

    /// Rows and weights of a stage, for each of the sums.
    fn operands(&self, b: &mut Builder, stage: &Stage) -> Vec<[MatrixOperand; 2]> {
        let weights = self.weights.plus(b, stage.bytes);
        self.rows.iter().map(|rows| [rows.plus(b, stage.bytes), weights]).collect()
    }
}
