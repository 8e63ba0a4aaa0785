//! The two matrix products of a step. The assembler moves loads ahead of products as far as registers allow, so that
//! the text need not.
//!
//! 16-bit operands are multiplied as they are. f32 operands are split into TF32 numbers, see [`super::factor`].

use std::{iter::StepBy, ops::Range};

use flashcore_tile::{
    Acc, Builder, Element, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, SmemTile, U32,
    WordRows, WordView,
};

use super::{
    Config, Layout,
    block::Block,
    config::padded,
    factor::{Factor, add_products, steps_per_sum},
};
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
        b.wait_copies(cfg.shape.stages - 1);
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
    /// The fragment of a block at feature `depth`.
    fn load(&self, b: &mut Builder, element: Element, block: u32, depth: u32) -> Quad {
        match self {
            Self::Registers(quads) => quads[block as usize][(depth / element.depth()) as usize],
            Self::Shared(view) => view.load(b, block * MMA_M, depth),
        }
    }
}

/// The ring's values, as right operands.
pub(super) enum Values {
    /// 16-bit elements, transposed on their way to registers.
    Matrices(MatrixRows),
    /// f32, which nothing transposes.
    Words(WordRows),
}

impl Values {
    pub(super) fn new(b: &mut Builder, tile: &SmemTile) -> Self {
        match tile.element() {
            Element::F32 => Self::Words(tile.word_rows(b)),
            _ => Self::Matrices(tile.matrix_rows(b, MatrixOrder::RowsFirst)),
        }
    }

    /// Prepares the addresses of a step whose values lie `skip` bytes on.
    pub(super) fn at(&self, b: &mut Builder, skip: Reg<U32>) -> StepValues {
        match self {
            Self::Matrices(rows) => StepValues::Matrices(rows.at(b, skip)),
            Self::Words(rows) => StepValues::Words(rows.at(b, skip)),
        }
    }
}

/// The values of one step.
pub(super) enum StepValues {
    Matrices(MatrixView),
    Words(WordView),
}

impl StepValues {
    /// 16 columns from `col` on, as deep as one instruction goes from row `row` on.
    fn load(&self, b: &mut Builder, row: u32, col: u32) -> Quad {
        match self {
            Self::Matrices(view) => view.load_transposed(b, row, col),
            Self::Words(view) => view.load(b, row, col),
        }
    }
}

/// Where instructions over `depth` elements start; padding beyond the last takes no part.
fn starts(element: Element, depth: u32) -> StepBy<Range<u32>> {
    (0..depth).step_by(element.depth() as usize)
}

/// Where instructions along the features start.
fn depths(cfg: &Config) -> StepBy<Range<u32>> {
    starts(cfg.input, cfg.dim_qk)
}

/// QKᵀ of every block over the keys of one step.
pub(super) fn scores(b: &mut Builder, cfg: &Config, queries: &Queries, keys: &MatrixView) -> Vec<Acc> {
    let (input, blocks, step_n) = (cfg.input, cfg.shape.blocks, cfg.shape.step_n);
    let scores: Vec<_> = (0..blocks).map(|_| Acc::zero(b, step_n as usize)).collect();
    let queries = queries.at_step(b);
    let depths: Vec<_> = depths(cfg).collect();
    for depths in depths.chunks(steps_per_sum(input)) {
        let left: Vec<_> = (0..blocks)
            .map(|block| Factor::each(b, input, depths, |b, depth| queries.load(b, input, block, depth)))
            .collect();
        for n in 0..step_n / MMA_K {
            let right = Factor::each(b, input, depths, |b, depth| keys.load(b, n * MMA_K, depth));
            for (scores, left) in scores.iter().zip(&left) {
                add_products(b, input, scores, n as usize, left, &right);
            }
        }
    }
    scores
}

/// Turns scores into probabilities and adds PV of every block to its output, a few keys after a few keys, so that
/// exponentials can be taken while the products of the keys before them run.
pub(super) fn outputs(b: &mut Builder, cfg: &Config, blocks: &[Block], scores: &[Acc], values: &StepValues) {
    let input = cfg.input;
    let mut exponentials: Vec<_> = blocks.iter().map(|block| Exponentials::new(&block.softmax)).collect();
    let keys: Vec<_> = starts(input, cfg.shape.step_n).collect();
    for keys in keys.chunks(steps_per_sum(input)) {
        let taken = exponentials.iter_mut().zip(scores);
        let probs: Vec<Vec<_>> = taken
            .map(|(taken, scores)| {
                keys.iter().map(|&key| probabilities(b, input, taken, scores, key)).collect()
            })
            .collect();
        for n in 0..padded(cfg.dim_v) / MMA_K {
            let right = Factor::each(b, input, keys, |b, key| values.load(b, key, n * MMA_K));
            for (block, probs) in blocks.iter().zip(&probs) {
                add_products(b, input, &block.output, n as usize, probs, &right);
            }
        }
    }
    exponentials.into_iter().for_each(|exponentials| exponentials.finish(b));
}

/// The probabilities of the keys of one instruction, from `key` on, as a left operand.
fn probabilities(
    b: &mut Builder,
    input: Element,
    exponentials: &mut Exponentials<'_>,
    scores: &Acc,
    key: u32,
) -> Factor {
    let values = &scores.regs()[key as usize / 2..][..input.depth() as usize / 2];
    exponentials.take(b, values);
    Factor::of_values(b, input, values)
}
