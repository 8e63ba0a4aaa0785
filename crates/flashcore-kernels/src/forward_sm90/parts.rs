//! Sums of 8-bit products in the registers of scores: for heads so wide that both do not fit beside the output.
//!
//! A key tile's scores become probabilities before its values are multiplied, some features at a time, into the registers
//! that held the scores; from there they are added to the output in f32. In one consumer nothing overlaps: the other one
//! multiplies meanwhile.

use flashcore_tile::{Acc, Builder, Start};

use super::{
    Config,
    consumer::Consumer,
    output::{Output, Place},
    step::{Run, Work},
};

impl Config {
    /// The columns that are multiplied at a time, in order: those of features, and at last those that count.
    fn parts(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let all = self.dim_v + self.counted_cols();
        // The last columns have registers of their own.
        let count = all.div_ceil(self.tile_n() + self.counted_cols());
        let most = all.div_ceil(count).next_multiple_of(8);
        (0..count).map(move |n| (n * most, (all - n * most).min(most)))
    }
}

impl Consumer<'_> {
    /// One key tile from its scores to its part of the output.
    pub(super) fn step_in_parts(&self, b: &mut Builder, run: &Run, (scores, output, probs): Work) -> Work {
        let k = self.layout.k.stage(b, self.kv_count);
        let factor = self.block_factor(b, run.block);
        k.wait_full(b);
        let scores = self.qk(b, scores, &run.q, &k).wait(b);
        k.release(b, self.leader);
        self.finish_scores(b, run, &scores, factor);
        self.weigh(b, run, &scores, &probs, &output.lasting(Place::Only));
        b.add_to(self.kv_count, 1);
        b.set(run.block, run.block - 1);
        self.multiply_parts(b, (scores, output, probs))
    }

    /// Multiplies the values of the key tile that was counted last, and adds what they come to.
    pub(super) fn multiply_parts(&self, b: &mut Builder, (scores, output, mut probs): Work) -> Work {
        let stage = self.values_before(b);
        stage.wait_full(b);
        let values = self.v.plus(b, stage.bytes);
        for (first, cols) in self.cfg.parts() {
            let right = values.from_row(b, first);
            let part = output.over_scores(&scores, cols as usize);
            let (part, back) = b.wgmma_rs(part, Start::Zero, probs, &right).wait(b);
            output.add_part(b, &part, first as usize);
            probs = back;
        }
        stage.release(b, self.leader);
        (scores, output, probs)
    }
}

impl Output {
    /// A tile of `cols` columns in the registers of scores, and of a few that are its own.
    fn over_scores(&self, scores: &Acc, cols: usize) -> Acc {
        Acc::over(scores.regs().iter().chain(self.recent.regs()).copied().take(cols / 2).collect())
    }
}
