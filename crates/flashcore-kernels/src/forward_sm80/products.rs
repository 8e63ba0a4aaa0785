//! The two matrix products of a step. The assembler moves loads ahead of products as far as registers allow, so that
//! the text need not.
//!
//! 16-bit operands are multiplied as they are. f32 operands are split into TF32 numbers, see [`crate::parts::factor`].

use flashcore_tile::{
    Acc, Builder, Cta, Element, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, U32, Uniform,
};

use super::{Config, Layout, block::Block};
use crate::parts::{
    dropout::StepDropout,
    factor::{Factor, add_across, add_products, each_pair, each_slab, looped, starts, steps_per_sum},
    load,
    operand::{Across, AlongView},
    softmax::Exponentials,
};

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
        let block = |b: &mut Builder, n: u32| {
            starts(cfg.input, cfg.dim_qk).map(|k| view.load(b, n * MMA_M, k)).collect()
        };
        Self::Registers((0..cfg.shape.blocks).map(|n| block(b, n)).collect())
    }

    /// Prepares the addresses of a step.
    fn at_step(&self, b: &mut Builder) -> StepQueries<'_> {
        match self {
            Self::Registers(quads) => StepQueries::Registers(quads),
            Self::Shared(rows, skip) => StepQueries::Shared(rows.at(b, *skip)),
        }
    }

    /// The same, some slabs further on.
    fn at_slab(&self, b: &mut Builder, slab: Reg<U32>) -> StepQueries<'_> {
        match self {
            Self::Registers(quads) => StepQueries::Registers(quads),
            Self::Shared(rows, skip) => {
                StepQueries::Shared(rows.at(b, slab * rows.tile().slab_bytes() + *skip))
            }
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

/// QKᵀ of every block over the keys of one step.
pub(super) fn scores(b: &mut Builder, cfg: &Config, queries: &Queries, keys: &Across) -> Vec<Acc> {
    let scores: Vec<_> = (0..cfg.shape.blocks).map(|_| Acc::zero(b, cfg.shape.step_n as usize)).collect();
    let (input, dim) = (cfg.input, cfg.dim_qk);
    // Registers hold all features at once.
    let looped = if cfg.shape.q_in_registers { 0 } else { looped(input, dim) };
    each_slab(b, input, (dim, looped), |b, slab, depths| {
        let queries = match slab {
            Some(slab) => queries.at_slab(b, slab),
            None => queries.at_step(b),
        };
        let keys = keys.at_slab(b, slab);
        let left = |b: &mut Builder, block, depth| queries.load(b, input, block, depth);
        add_across(b, input, &scores, left, &keys, depths);
    });
    scores
}

/// Turns scores into probabilities and adds PV of every block to its output, a few keys after a few keys, so that
/// exponentials can be taken while the products of the keys before them run. Sums of probabilities know nothing of dropout.
///
/// `apart`, a condition that holds, keeps the text of some columns from that of others, where `needs_branches` says so.
pub(super) fn outputs(
    b: &mut Builder,
    cfg: &Config,
    blocks: &[Block],
    scores: &[Acc],
    values: &AlongView,
    apart: Option<Uniform<Cta>>,
    dropout: Option<&StepDropout<'_>>,
) {
    let input = cfg.input;
    let mut exponentials: Vec<_> = blocks.iter().map(|block| Exponentials::new(&block.softmax)).collect();
    let keys: Vec<_> = starts(input, cfg.shape.step_n).collect();
    for keys in keys.chunks(steps_per_sum(input)) {
        let taken = exponentials.iter_mut().zip(scores).enumerate();
        let probs: Vec<Vec<_>> = taken
            .map(|(block, (taken, scores))| {
                let dropout = dropout.map(|dropout| (dropout, block));
                keys.iter().map(|&key| probabilities(b, input, taken, scores, key, dropout)).collect()
            })
            .collect();
        let multiply = |b: &mut Builder, n: u32| {
            let right = Factor::each(b, input, keys, |b, key| values.load(b, key, n * MMA_K));
            for (block, probs) in blocks.iter().zip(&probs) {
                add_products(b, input, &block.output, n as usize, probs, &right);
            }
        };
        each_pair(b, cfg.columns().each, apart, multiply);
    }
    exponentials.into_iter().for_each(|exponentials| exponentials.finish(b));
}

/// The probabilities of the keys of one instruction, from `key` on, as a left operand; what a block's dropout leaves out
/// is 0 there.
fn probabilities(
    b: &mut Builder,
    input: Element,
    exponentials: &mut Exponentials<'_>,
    scores: &Acc,
    key: u32,
    dropout: Option<(&StepDropout<'_>, usize)>,
) -> Factor {
    let first = key as usize / 2;
    let values = &scores.regs()[first..][..input.depth() as usize / 2];
    exponentials.take(b, values);
    let Some((dropout, block)) = dropout else { return Factor::of_values(b, input, values) };
    let kept = dropout.values(b, first, values.len()).kept(b, block, values);
    Factor::of_values(b, input, &kept)
}
