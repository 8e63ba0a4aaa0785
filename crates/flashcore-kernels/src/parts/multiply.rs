//! The products of a consumer warpgroup over the stages of a ring, issuing the next while one is in flight: for products
//! of experts and grouped products on Hopper.

use flashcore_tile::{
    Acc, Builder, Carried, MatrixOperand, Pending, Pipeline, Pred, Reg, Stage, Start, U32, Warpgroup,
};

use super::{lines::DEPTH, turns::Turn};

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

/// What a consumer keeps of the ring for the whole launch.
pub(crate) struct Multiplier {
    /// Stages, each with a tile of either factor.
    pub(crate) ring: Pipeline,
    /// Rows of each of the sums in the first stage.
    pub(crate) rows: Vec<MatrixOperand>,
    /// Columns of all sums, likewise, and how many there are.
    pub(crate) columns: MatrixOperand,
    pub(crate) tile_n: u32,
    /// Stages passed.
    pub(crate) count: Reg<U32>,
    /// The lane of each warp that releases stages.
    pub(crate) leader: Pred,
    /// The other CTA of a pair, which copies into this one's stages too.
    pub(crate) peer: Option<Reg<U32>>,
    /// When this consumer may multiply, where consumers do so in turn.
    pub(crate) turn: Option<Turn>,
}

impl Multiplier {
    /// The sums of the first blocks of 64 rows of a tile, which has two stages at least.
    pub(crate) fn multiply(&self, b: &mut Builder, steps: Reg<U32>, blocks: usize) -> Vec<Acc> {
        if blocks == 0 {
            self.pass(b, steps);
            return Vec::new();
        }
        // Stages of the other's tile are full by then: a stage is told apart from the one before it alone.
        self.turn.iter().for_each(|turn| turn.take(b));
        let stage = self.next(b);
        let empty: Vec<_> = (0..blocks).map(|_| Acc::new(b, self.tile_n as usize)).collect();
        let products = self.operands(b, &stage).into_iter().zip(empty);
        let start = |([rows, columns], sums): ([MatrixOperand; 2], Acc)| {
            b.wgmma_ss(sums, Start::Zero, [&rows, &columns], DEPTH)
        };
        let opening = Sums(products.map(start).collect());
        let end = b.let_(self.count + steps - 1);
        let closing = b.do_while_carrying(opening, |b, sums| {
            let before = self.ring.stage(b, self.count);
            b.add_to(self.count, 1);
            let stage = self.next(b);
            let products = self.operands(b, &stage).into_iter().zip(sums.0);
            let sums: Vec<_> = products
                .map(|([rows, columns], sums)| b.wgmma_ss_onto(sums, [&rows, &columns], DEPTH))
                .collect();
            sums[0].wait_for_older(b);
            self.release(b, &before);
            (b.uniform::<Warpgroup>(self.count.lt(end)), Sums(sums))
        });
        self.turn.iter().for_each(|turn| turn.pass(b, self.leader));
        // The youngest first, and with it all: what is read between two waits would keep products from overlapping.
        let mut sums: Vec<_> = closing.0.into_iter().rev().map(|sums| sums.wait(b)).collect();
        sums.reverse();
        let last = self.ring.stage(b, self.count);
        self.release(b, &last);
        b.add_to(self.count, 1);
        sums
    }

    /// Releases all stages of a tile as they come.
    fn pass(&self, b: &mut Builder, steps: Reg<U32>) {
        let end = b.let_(self.count + steps);
        b.do_while(|b| {
            let stage = self.next(b);
            // No product has brought the lanes together: the stage may not be filled again while some of them still wait.
            b.sync_warp();
            self.release(b, &stage);
            b.add_to(self.count, 1);
            b.uniform::<Warpgroup>(self.count.lt(end))
        });
    }

    /// Releases a stage, to both that copy into it.
    fn release(&self, b: &mut Builder, stage: &Stage) {
        match self.peer {
            None => stage.release(b, self.leader),
            Some(peer) => stage.release_to_pair(b, self.leader, peer),
        }
    }

    /// The next stage, once it is full.
    fn next(&self, b: &mut Builder) -> Stage {
        let stage = self.ring.stage(b, self.count);
        stage.wait_full(b);
        stage
    }

    /// Rows and columns of a stage, for each of the sums.
    fn operands(&self, b: &mut Builder, stage: &Stage) -> Vec<[MatrixOperand; 2]> {
        let columns = self.columns.plus(b, stage.bytes);
        self.rows.iter().map(|rows| [rows.plus(b, stage.bytes), columns]).collect()
    }
}
