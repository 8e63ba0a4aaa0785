//! The two matrix products of a key tile, and the softmax between them.

use flashcore_tile::{Acc, Builder, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, U32};

use super::{
    Config, Layout,
    config::padded,
    narrow::{self, SpreadQueries},
};
use crate::parts::{
    scale::Scale,
    softmax::{Exponentials, RowTile, Softmax},
};

/// Sixteen rows of a warp: their output and softmax so far.
pub(super) struct Block {
    pub(super) output: Acc,
    pub(super) softmax: Softmax,
}

impl Block {
    /// Rows whose scores become powers of two by `scale`.
    pub(super) fn new(b: &mut Builder, cfg: &Config, scale: &Scale) -> Self {
        let output = Acc::zero(b, padded(cfg.dim_v) as usize);
        Self { output, softmax: Softmax::new(b, scale.log2, cfg.products()) }
    }

    /// Starts over, as if no key had been seen.
    pub(super) fn restart(&self, b: &mut Builder) {
        self.output.fill(b, 0.0);
        self.softmax.restart(b);
    }
}

/// Where the queries' fragments come from.
pub(super) enum Queries {
    /// They stay in registers: for each block, by depth.
    Registers(Vec<Vec<Quad>>),
    /// They are read again for every key tile.
    Shared(MatrixView),
    /// The same, in the order of keys of 8 bits.
    Spread(SpreadQueries),
}

impl Queries {
    /// The queries in shared memory, which have arrived.
    pub(super) fn new(b: &mut Builder, cfg: &Config, layout: &Layout) -> Self {
        let shared = match cfg.widens() {
            true => Self::Spread(SpreadQueries::new(b, &layout.q)),
            false => Self::Shared(layout.q.matrix_rows(b, MatrixOrder::RowsFirst).at(b, 0)),
        };
        if !cfg.shape.q_in_registers {
            return shared;
        }
        let block = |b: &mut Builder, n: u32| depths(cfg).map(|depth| shared.load(b, n, depth)).collect();
        Self::Registers((0..cfg.shape.blocks).map(|n| block(b, n)).collect())
    }

    /// The fragment of a block at feature `depth`.
    pub(super) fn load(&self, b: &mut Builder, block: u32, depth: u32) -> Quad {
        match self {
            Self::Registers(quads) => quads[block as usize][(depth / MMA_K) as usize],
            Self::Shared(view) => view.load(b, block * MMA_M, depth),
            Self::Spread(queries) => queries.load(b, block, depth),
        }
    }
}

/// Where instructions along the features start.
fn depths(cfg: &Config) -> impl Iterator<Item = u32> {
    (0..cfg.dim_qk).step_by(MMA_K as usize)
}

/// QKᵀ of every block over the keys that lie `skip` bytes into the rings.
pub(super) fn scores(
    b: &mut Builder,
    cfg: &Config,
    queries: &Queries,
    keys: &MatrixRows,
    skip: Reg<U32>,
) -> Vec<Acc> {
    let keys = keys.at(b, skip);
    let scores: Vec<_> = (0..cfg.shape.blocks).map(|_| Acc::zero(b, cfg.shape.tile_n as usize)).collect();
    if cfg.widens() {
        narrow::add_scores(b, cfg, &scores, queries, &keys);
        return scores;
    }
    for depth in depths(cfg) {
        let left: Vec<_> = (0..cfg.shape.blocks).map(|block| queries.load(b, block, depth)).collect();
        for n in 0..cfg.shape.tile_n / MMA_K {
            let right = keys.load(b, n * MMA_K, depth);
            for (scores, left) in scores.iter().zip(&left) {
                b.mma_pair(cfg.input, scores, n as usize, *left, right);
            }
        }
    }
    scores
}

/// Moves the references of rows whose scores grew much.
pub(super) fn raise(b: &mut Builder, blocks: &[Block], scores: &[Acc]) {
    let tiles: Vec<_> = blocks
        .iter()
        .zip(scores)
        .map(|(block, scores)| RowTile { softmax: &block.softmax, scores, output: &block.output })
        .collect();
    Softmax::raise(b, &tiles);
}

/// Turns scores into probabilities and adds PV of every block to its output; values lie `skip` bytes into the rings.
pub(super) fn outputs(
    b: &mut Builder,
    cfg: &Config,
    blocks: &[Block],
    scores: &[Acc],
    values: &MatrixRows,
    skip: Reg<U32>,
) {
    let values = values.at(b, skip);
    let mut exponentials: Vec<_> = blocks.iter().map(|block| Exponentials::new(&block.softmax)).collect();
    for key in (0..cfg.shape.tile_n).step_by(MMA_K as usize) {
        let taken = exponentials.iter_mut().zip(scores);
        let probs: Vec<Quad> =
            taken.map(|(taken, scores)| probabilities(b, cfg, taken, scores, key)).collect();
        if cfg.widens() {
            narrow::add_outputs(b, cfg, blocks, &probs, (&values, key));
            continue;
        }
        for n in 0..cfg.dim_v.div_ceil(MMA_K) {
            let right = values.load_transposed(b, key, n * MMA_K);
            for (block, probs) in blocks.iter().zip(&probs) {
                b.mma_pair(cfg.input, &block.output, n as usize, *probs, right);
            }
        }
    }
    exponentials.into_iter().for_each(|exponentials| exponentials.finish(b));
}

/// The probabilities of the 16 keys from `key` on, as a left operand.
fn probabilities(
    b: &mut Builder,
    cfg: &Config,
    exponentials: &mut Exponentials<'_>,
    scores: &Acc,
    key: u32,
) -> Quad {
    let values = &scores.regs()[key as usize / 2..][..MMA_K as usize / 2];
    exponentials.take(b, values);
    std::array::from_fn(|pair| b.pack(cfg.products(), values[2 * pair], values[2 * pair + 1]))
}
