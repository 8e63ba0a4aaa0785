//! The two matrix products of a step. The assembler moves loads ahead of products as far as registers allow, so that
//! the text need not.
//!
//! 16-bit operands are multiplied as they are. f32 operands are split into TF32 numbers, see [`super::factor`].

use std::{iter::StepBy, ops::Range};

use flashcore_tile::{
    Acc, Builder, Cta, Element, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, Scope,
    SmemTile, U32, Uniform, Warp, WordRows, WordView,
};

use super::{
    Config, Layout,
    block::Block,
    factor::{Factor, add_products, steps_per_sum},
};
use crate::parts::{dropout::StepDropout, load, softmax::Exponentials};

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

/// The keys of one step, some bytes into the ring.
#[derive(Clone, Copy)]
pub(super) struct StepKeys<'a> {
    pub(super) rows: &'a MatrixRows,
    pub(super) skip: Reg<U32>,
}

impl StepKeys<'_> {
    /// Some slabs further on.
    fn at_slab(&self, b: &mut Builder, slab: Reg<U32>) -> MatrixView {
        self.rows.at(b, slab * self.rows.tile().slab_bytes() + self.skip)
    }
}

/// Features that are left to a loop, in whole slabs. Three products each, with operands in two parts, are so much text that
/// the assembler, which moves loads to the front, would run out of registers over all of it. 16-bit features never are.
fn looped(cfg: &Config) -> u32 {
    let slab = cfg.input.slab_cols();
    let loops = cfg.input == Element::F32 && !cfg.shape.q_in_registers && cfg.dim_qk >= 2 * slab;
    if loops { cfg.dim_qk / slab * slab } else { 0 }
}

/// QKᵀ of every block over the keys of one step.
pub(super) fn scores(b: &mut Builder, cfg: &Config, queries: &Queries, keys: StepKeys<'_>) -> Vec<Acc> {
    let view = keys.rows.at(b, keys.skip);
    let scores: Vec<_> = (0..cfg.shape.blocks).map(|_| Acc::zero(b, cfg.shape.step_n as usize)).collect();
    let looped = looped(cfg);
    if looped > 0 {
        let slab = b.var_in(Scope::Warp, 0);
        b.do_while(|b| {
            let (queries, keys) = (queries.at_slab(b, slab), keys.at_slab(b, slab));
            add_scores(b, cfg, &scores, &queries, &keys, starts(cfg.input, cfg.input.slab_cols()));
            b.add_to(slab, 1);
            b.uniform::<Warp>(slab.lt(looped / cfg.input.slab_cols()))
        });
    }
    let queries = queries.at_step(b);
    add_scores(b, cfg, &scores, &queries, &view, depths(cfg).filter(|&depth| depth >= looped));
    scores
}

/// Adds QKᵀ over the features of the instructions that start at `depths`.
fn add_scores(
    b: &mut Builder,
    cfg: &Config,
    scores: &[Acc],
    queries: &StepQueries<'_>,
    keys: &MatrixView,
    depths: impl Iterator<Item = u32>,
) {
    let (input, depths) = (cfg.input, Vec::from_iter(depths));
    for depths in depths.chunks(steps_per_sum(input)) {
        let left: Vec<_> = (0..cfg.shape.blocks)
            .map(|block| Factor::each(b, input, depths, |b, depth| queries.load(b, input, block, depth)))
            .collect();
        for n in 0..cfg.shape.step_n / MMA_K {
            let right = Factor::each(b, input, depths, |b, depth| keys.load(b, n * MMA_K, depth));
            for (scores, left) in scores.iter().zip(&left) {
                add_products(b, input, scores, n as usize, left, &right);
            }
        }
    }
}

/// Turns scores into probabilities and adds PV of every block to its output, a few keys after a few keys, so that
/// exponentials can be taken while the products of the keys before them run. Sums of probabilities know nothing of dropout.
///
/// `apart`, a condition that holds, keeps the text of some columns from that of others, where [`needs_branches`] says so.
pub(super) fn outputs(
    b: &mut Builder,
    cfg: &Config,
    blocks: &[Block],
    scores: &[Acc],
    values: &StepValues,
    apart: Option<Uniform<Cta>>,
    dropout: Option<&StepDropout<'_>>,
) {
    let (input, pairs) = (cfg.input, Vec::from_iter(0..cfg.columns().each / MMA_K));
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
        match apart {
            None => pairs.iter().for_each(|&n| multiply(b, n)),
            Some(holds) => pairs.chunks(PAIRS_APART).for_each(|pairs| {
                b.if_uniform(holds, |b| pairs.iter().for_each(|&n| multiply(b, n)));
            }),
        }
    }
    exponentials.into_iter().for_each(|exponentials| exponentials.finish(b));
}

/// Pairs of instructions across the columns of an output whose text stays together where it is kept apart.
const PAIRS_APART: usize = 2;

/// Whether an output leaves so few registers that the assembler must not move the loads of all columns to the front. It moves
/// nothing across a branch.
pub(super) const fn needs_branches(cfg: &Config) -> bool {
    matches!(cfg.input, Element::F32) && cfg.dim_v >= 128
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
