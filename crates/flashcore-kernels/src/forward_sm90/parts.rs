//! Sums of 8-bit products, some features at a time: for heads so wide that not all fit beside output and scores.
//!
//! A key tile's scores become probabilities before its values are multiplied, and the sums of some features are added to the
//! output in f32 before the next are multiplied. Within one consumer nothing overlaps: the other multiplies meanwhile.
//!
//! If the output leaves no room, sums and scores take turns in the same registers. The assembler keeps them there only if
//! there are equally many, so as many features are multiplied as a tile has keys, the last ones together with some that were
//! already multiplied.

use flashcore_tile::{Acc, Builder, Start};

use super::{
    Config,
    consumer::Consumer,
    output::Place,
    step::{Run, Work},
};

/// Most features of values up to which sums have registers of their own.
const APART: u32 = 192;
/// Most features up to which all have registers at once.
const TOGETHER: u32 = 128;
/// Most columns of other sums.
const MOST_APART: u32 = 104;

/// Columns that are multiplied together.
struct Part {
    first: u32,
    cols: u32,
    /// Whether their sums lie in the registers of scores.
    over_scores: bool,
    /// The first of them that was not multiplied before.
    new: u32,
}

impl Config {
    /// The columns that are multiplied at a time, in order, those that count among them.
    fn parts(&self) -> Vec<Part> {
        let all = self.dim_v + self.counted_cols();
        if self.dim_v <= APART {
            let count = if self.dim_v <= TOGETHER { 1 } else { all.div_ceil(MOST_APART) };
            let most = all.div_ceil(count).next_multiple_of(8);
            let part = |first| Part { first, cols: most.min(all - first), over_scores: false, new: first };
            return (0..count).map(|n| part(n * most)).collect();
        }
        let cols = self.tile_n();
        let part = |new: u32| Part { first: new.min(self.dim_v - cols), cols, over_scores: true, new };
        let counted =
            Part { first: self.dim_v, cols: self.counted_cols(), over_scores: false, new: self.dim_v };
        (0..self.dim_v.div_ceil(cols)).map(|n| part(n * cols)).chain([counted]).collect()
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
        for part in self.cfg.parts() {
            let right = values.from_row(b, part.first);
            let sums = match part.over_scores {
                true => Acc::over(scores.regs().to_vec()),
                false => Acc::new(b, part.cols as usize),
            };
            let (sums, back) = b.wgmma_rs(sums, Start::Zero, probs, &right).wait(b);
            output.add_part(b, &sums.regs()[(part.new - part.first) as usize / 2..], part.new as usize);
            probs = back;
        }
        stage.release(b, self.leader);
        (scores, output, probs)
    }
}
