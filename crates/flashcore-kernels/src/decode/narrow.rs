//! Products with keys and values of 8 bits, widened in registers just before: half the bytes in memory and shared memory.
//!
//! `ldmatrix` moves 16 bits as a unit, here two neighbouring features. The resulting operand layouts are not undone
//! but carried along, so that lanes need no shuffles:
//!
//! * A lane gets features 4t to 4t + 3 of a key, where a product over 16 features expects 2t, 2t + 1, 2t + 8 and 2t + 9.
//!   Queries are read in the same order ([`SpreadQueries`]), and a sum over features does not mind.
//! * Transposed, a lane gets features 2g and 2g + 1 of two keys. Two products take even features and odd ones, so that a
//!   thread has columns 4t to 4t + 3 of the output ([`row_columns`]).

use flashcore_tile::{Acc, B32, Builder, F32, MMA_K, MMA_M, MatrixView, Quad, Reg, Shared, SmemTile, U32};

use super::{
    Config,
    products::{Block, Queries},
};

/// Features that one `ldmatrix` of 8-bit elements brings: two products deep, or two wide.
const FEATURES: u32 = 2 * MMA_K;
/// Bytes of 16 queries' features.
const DEPTH_BYTES: u32 = 32;
/// Brings bytes of the same feature together: of two keys, which `ldmatrix` has left one after the other.
const BY_FEATURE: u32 = 0x3120;

/// Queries in shared memory, read in the order in which lanes have the features of 8-bit keys.
pub(super) struct SpreadQueries {
    tile: SmemTile,
    /// Where this lane's features of the first row start, one address for each depth of a slab.
    starts: Vec<Reg<U32>>,
}

impl SpreadQueries {
    pub(super) fn new(b: &mut Builder, tile: &SmemTile) -> Self {
        let (lane, base) = (b.lane(), b.shared_base());
        let (row, quarter) = (b.let_(lane >> 2), b.let_(lane & 3));
        let chunk = tile.chunk(b, base, row, quarter >> 1);
        let start = b.let_(((quarter & 1) << 3) + chunk);
        // Swizzling flips bits of the chunk number, so that further chunks of a row are one XOR away.
        let further = 1..tile.slab_width() / DEPTH_BYTES;
        let starts =
            std::iter::once(start).chain(further.map(|n| b.let_(start ^ (n * DEPTH_BYTES)))).collect();
        Self { tile: *tile, starts }
    }

    /// The fragment of a block at feature `depth`.
    pub(super) fn load(&self, b: &mut Builder, block: u32, depth: u32) -> Quad {
        let (byte, width) = (2 * depth, self.tile.slab_width());
        let skip = byte / width * self.tile.slab_bytes() + block * MMA_M * width;
        let base = self.starts[(byte % width / DEPTH_BYTES) as usize];
        let at = Shared { base, offset: self.tile.offset() + skip };
        // Rows eight apart lie alike.
        let [low, next] = b.load_shared::<B32, 2>(at);
        let [high, last] = b.load_shared::<B32, 2>(at.at(8 * width));
        [low, high, next, last]
    }
}

/// Adds QKᵀ of every block over a tile of keys.
pub(super) fn add_scores(
    b: &mut Builder,
    cfg: &Config,
    scores: &[Acc],
    queries: &Queries,
    keys: &MatrixView,
) {
    for first in (0..cfg.dim_qk).step_by(FEATURES as usize) {
        let depths: Vec<u32> =
            [first, first + MMA_K].into_iter().filter(|&depth| depth < cfg.dim_qk).collect();
        let left: Vec<Vec<Quad>> = depths
            .iter()
            .map(|&depth| (0..cfg.shape.blocks).map(|block| queries.load(b, block, depth)).collect())
            .collect();
        for n in 0..cfg.shape.tile_n / MMA_K {
            // Eight keys and their next 16 features, then eight more keys.
            let words = keys.load(b, n * MMA_K, first / 2);
            for (half, left) in left.iter().enumerate() {
                let [near, far] = [words[half], words[half + 2]].map(|word| b.widen_four(cfg.input, word));
                let right = [near[0], near[1], far[0], far[1]];
                for (scores, left) in scores.iter().zip(left) {
                    b.mma_pair(cfg.input, scores, n as usize, *left, right);
                }
            }
        }
    }
}

/// Adds PV of every block over the 16 values from row `key` on.
pub(super) fn add_outputs(
    b: &mut Builder,
    cfg: &Config,
    blocks: &[Block],
    probs: &[Quad],
    (values, key): (&MatrixView, u32),
) {
    for first in (0..cfg.dim_v).step_by(FEATURES as usize) {
        let words = values.load_transposed(b, key, first / 2);
        for (half, words) in (0..).zip(words.chunks_exact(2)) {
            let column = first + half * MMA_K;
            if column >= cfg.dim_v {
                continue;
            }
            let [near, far] = [words[0], words[1]].map(|word| {
                let sorted = b.bytes_of(word, word, BY_FEATURE);
                b.widen_four(cfg.products(), sorted)
            });
            let right = [near[0], far[0], near[1], far[1]];
            for (block, probs) in blocks.iter().zip(probs) {
                b.mma_pair(cfg.products(), &block.output, (column / MMA_K) as usize, *probs, right);
            }
        }
    }
}

/// Four neighbouring columns of one of a thread's rows, for each 16 columns of the output.
pub(super) fn row_columns(output: &Acc, half: usize) -> impl Iterator<Item = [Reg<F32>; 4]> + '_ {
    output.regs().chunks_exact(8).map(move |both| {
        let (even, odd) = (&both[2 * half..], &both[4 + 2 * half..]);
        [even[0], odd[0], even[1], odd[1]]
    })
}
