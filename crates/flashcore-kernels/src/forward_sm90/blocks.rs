//! Factors of blocks: those of a consumer's queries, of each key tile, and of the features of values.
//!
//! A consumer's rows lie in one block of queries and a key tile in one block of keys, so all scores of a step have one
//! factor, which is folded into the multiplication before the exponential. Factors of features are applied at the end.

use flashcore_tile::{Acc, Builder, F32, Global, Reg, S32, Scope, U64};

use super::{ROWS_PER_GROUP, consumer::Consumer, schedule::Tile};
use crate::parts::factors::BlockArguments;

/// Columns from one of a thread's pairs to its next.
const STEP: u32 = 8;
/// Bytes of a factor.
const BYTES: u32 = size_of::<f32>() as u32;

/// The factors of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    args: BlockArguments,
    /// That of this consumer's queries.
    query: Reg<F32>,
    /// Where those of the keys begin.
    keys: Reg<U64>,
}

impl Blocks {
    /// Of no tile yet.
    pub(super) fn new(b: &mut Builder, args: BlockArguments) -> Self {
        Self { args, query: b.var_in(Scope::Warpgroup, 0.0), keys: b.var_in(Scope::Warpgroup, 0) }
    }
}

impl Consumer<'_> {
    /// Looks the factors of a tile up.
    pub(super) fn find_blocks(&self, b: &mut Builder, tile: &Tile) {
        // Packed sequences, which have no entry, have no blocks with factors.
        let (Some(Blocks { args, query, keys }), Some(entry)) = (self.blocks, tile.entry()) else { return };
        let first = tile.first_row(b, self.cfg);
        let row = b.let_(self.group * ROWS_PER_GROUP + first);
        let of_query = args.of_query(b, [entry, tile.head], row);
        b.set(query, of_query);
        let head = b.let_(tile.head / self.args.group);
        let of_keys = args.keys(b, entry, head);
        b.set(keys, of_keys);
    }

    /// What the scores of a key tile are multiplied by, if blocks have factors: asked for early, since memory answers late.
    pub(super) fn block_factor(&self, b: &mut Builder, block: Reg<S32>) -> Option<Reg<F32>> {
        let Blocks { args, query, keys } = self.blocks?;
        let of_keys = args.of_tile(b, keys, block.unsigned());
        Some(b.let_(of_keys * query))
    }

    /// Multiplies the scores of this step by that.
    pub(super) fn take_block(&self, b: &mut Builder, factor: Option<Reg<F32>>) {
        let Some(factor) = factor else { return };
        self.scale.set(b, &self.args.scale, factor);
        self.softmax.follow_scale(b);
    }

    /// Multiplies the features of a tile's output by their factors, if these have some.
    pub(super) fn scale_features(&self, b: &mut Builder, tile: &Tile, output: &Acc) {
        let (Some(Blocks { args, .. }), Some(entry)) = (self.blocks, tile.entry()) else { return };
        let head = b.let_(tile.head / self.args.group);
        let first = args.features(b, entry, head);
        let own = b.let_(first + ((self.lane & 3) * (2 * BYTES)).widen());
        for (n, four) in (0..).zip(output.regs().chunks_exact(4)) {
            let at = Global::from(own).at((n * STEP * BYTES) as i32);
            let [low] = b.load_global::<F32, 1>(at);
            let [high] = b.load_global::<F32, 1>(at.at(BYTES as i32));
            // Two columns of one row, then of the other.
            four.iter().zip([low, high, low, high]).for_each(|(&x, factor)| b.mul_into(x, x, factor));
        }
    }
}
