//! The two matrix products of a step. The assembler moves loads ahead of products as far as registers allow, so that
//! the text need not.

use std::{iter::StepBy, ops::Range};

use flashcore_tile::{Acc, Builder, Half, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, U32};

use super::{Config, Layout, block::Block, load};
use crate::parts::softmax::Exponentials;

/// Where the queries' fragments come from.
pub(super) enum Queries {
    /// They stay in registers: for each block, by depth.
    Registers(Vec<Vec<Quad>>),
    /// They are read again for every step; the warp's rows lie some bytes into the tile.
    Shared(MatrixRows, Reg<U32>),
}

impl Queries {
    /// The queries of the warp whose first row is `warp_row`; waits for them if they go to registers.
    pub(super) fn new(b: &mut Builder, cfg: &Config, layout: &Layout, warp_row: Reg<U32>) -> Self {
        let skip = b.let_(warp_row * layout.q.slab_width());
        let rows = layout.q.matrix_rows(b, MatrixOrder::RowsFirst);
        if !cfg.shape.q_in_registers {
            return Self::Shared(rows, skip);
        }
        let view = rows.at(b, skip);
        load::wait(b, cfg.shape.stages - 1);
        b.sync_cta();
        let block = |b: &mut Builder, n: u32| depths(cfg).map(|k| view.load(b, n * MMA_M, k)).collect();
        Self::Registers((0..cfg.shape.blocks).map(|n| block(b, n)).collect())
    }

    /// Prepares the addresses of a step.
    fn at_step(&self, b: &mut Builder) -> StepQueries<'_> {
        match self {
            Self::Registers(quads) => StepQueries::Registers(quads),
            Self::Shared(rows, skip) => StepQueries::Shared(rows.at(b, *skip)),
        }
    }
}

/// Where the queries' fragments come from in one step.
enum StepQueries<'a> {
    Registers(&'a [Vec<Quad>]),
    Shared(MatrixView),
}

impl StepQueries<'_> {
    /// The fragments of every block at step number `step`, which starts at feature `depth`.
    fn load(&self, b: &mut Builder, blocks: u32, (step, depth): (usize, u32)) -> Vec<Quad> {
        match self {
            Self::Registers(quads) => quads.iter().map(|block| block[step]).collect(),
            Self::Shared(view) => (0..blocks).map(|n| view.load(b, n * MMA_M, depth)).collect(),
        }
    }
}

/// Where steps along the features start; padding beyond the last step takes no part.
fn depths(cfg: &Config) -> StepBy<Range<u32>> {
    (0..cfg.dim_qk).step_by(cfg.input.element().depth() as usize)
}

/// QKᵀ of every block over the keys of one step.
pub(super) fn scores(b: &mut Builder, cfg: &Config, queries: &Queries, keys: &MatrixView) -> Vec<Acc> {
    let (blocks, step_n) = (cfg.shape.blocks, cfg.shape.step_n);
    let scores: Vec<_> = (0..blocks).map(|_| Acc::zero(b, step_n as usize)).collect();
    let queries = queries.at_step(b);
    for (step, depth) in depths(cfg).enumerate() {
        let left = queries.load(b, blocks, (step, depth));
        for n in 0..step_n / MMA_K {
            let right = keys.load(b, n * MMA_K, depth);
            for (scores, &left) in scores.iter().zip(&left) {
                b.mma_pair(cfg.input, scores, n as usize, left, right);
            }
        }
    }
    scores
}

/// Turns scores into probabilities and adds PV of every block to its output, 16 keys after 16 keys, so that
/// exponentials can be taken while the products of the keys before them run.
pub(super) fn outputs(b: &mut Builder, cfg: &Config, blocks: &[Block], scores: &[Acc], values: &MatrixView) {
    let mut exponentials: Vec<_> = blocks.iter().map(|block| Exponentials::new(&block.softmax)).collect();
    for step in 0..cfg.shape.step_n / MMA_K {
        let taken = exponentials.iter_mut().zip(scores);
        let probs: Vec<_> =
            taken.map(|(taken, scores)| probabilities(b, cfg.input, taken, scores, step)).collect();
        for n in 0..cfg.columns().each / MMA_K {
            let right = values.load_transposed(b, step * MMA_K, n * MMA_K);
            for (block, &probs) in blocks.iter().zip(&probs) {
                b.mma_pair(cfg.input, &block.output, n as usize, probs, right);
            }
        }
    }
    exponentials.into_iter().for_each(|exponentials| exponentials.finish(b));
}

/// The probabilities of the 16 keys of a step, as a left operand.
fn probabilities(
    b: &mut Builder,
    half: Half,
    exponentials: &mut Exponentials<'_>,
    scores: &Acc,
    step: u32,
) -> Quad {
    let values = &scores.regs()[8 * step as usize..][..8];
    exponentials.take(b, values);
    std::array::from_fn(|pair| b.pack(half, values[2 * pair], values[2 * pair + 1]))
}
