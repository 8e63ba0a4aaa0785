//! The end of a row tile: normalised rows go through shared memory to global memory, LSE directly.
//!
//! Each warp writes its own rows to shared memory and reads them back in whole chunks, so that global stores are wide
//! and only the warp has to wait for itself.

use flashcore_tile::{
    Acc, B32, Builder, Cmp, F32, Global, Half, MMA_M, Pred, Reg, S32, Shared, SmemTile, U32, U64, Val,
};

use super::{
    load::{Access, CHUNK},
    softmax::Finished,
};

const WARP: u32 = 32;

/// What a warp must know to write its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) half: Half,
    pub(crate) access: Access,
    /// Features of the output.
    pub(crate) dim: u32,
    /// Where rows are gathered; nobody else uses it any more.
    pub(crate) staging: SmemTile,
    /// Address of the tile's first row, and bytes between rows.
    pub(crate) to: Reg<U64>,
    pub(crate) stride: Reg<U64>,
    /// First row of the warp in the tile.
    pub(crate) warp_row: Reg<U32>,
    /// Rows of the tile that the output has.
    pub(crate) rows: Reg<S32>,
}

impl Output {
    /// Writes 16 rows of the warp for each accumulator.
    #[track_caller]
    pub(crate) fn write(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        self.gather(b, tiles);
        b.sync_warp();
        self.scatter(b, tiles.len() as u32 * MMA_M);
    }

    /// Normalises, rounds and puts the rows into shared memory.
    #[track_caller]
    fn gather(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let quad = b.shr(lane, 2);
        let row = b.add(self.warp_row, quad);
        let within = b.and(lane, 3);
        let within = b.shl(within, 2);
        let start = self.staging.at(b).address(b);
        let start = b.add(start, within);
        let chunks: Vec<_> = (0..self.staging.slab_cols() / CHUNK)
            .map(|chunk| self.staging.chunk(b, start, row, chunk))
            .collect();
        for (m, (acc, finished)) in (0..).zip(tiles) {
            let empty = finished.factor.map(|factor| b.test(Cmp::Eq, factor, 0.0));
            for (pair, values) in acc.regs().chunks_exact(2).enumerate() {
                let (row, chunk) = (Acc::row(2 * pair), (pair / 2) as u32);
                let word = self.normalised(b, values, finished.factor[row], empty[row]);
                let (slab, chunk) = (chunk as usize / chunks.len(), chunk as usize % chunks.len());
                let rows = m * MMA_M + 8 * row as u32;
                let offset = slab as u32 * self.staging.slab_bytes() + rows * self.staging.slab_width();
                b.store_shared(Shared { base: chunks[chunk], offset }, &[word.into()]);
            }
        }
    }

    /// Two values of a row; zeros, whatever the accumulator holds, for a row without keys.
    #[track_caller]
    fn normalised(&self, b: &mut Builder, values: &[Reg<F32>], factor: Reg<F32>, empty: Pred) -> Reg<B32> {
        let [low, high] = [values[0], values[1]].map(|value| b.mul(value, factor));
        let word = b.pack(self.half, low, high);
        b.select(empty, flashcore_tile::Packed(0), word)
    }

    /// Moves the warp's rows from shared to global memory, chunk by chunk.
    #[track_caller]
    fn scatter(&self, b: &mut Builder, rows: u32) {
        let lanes = (self.staging.cols() / CHUNK).next_power_of_two();
        let rows_per_pass = WARP / lanes;
        let lane = b.lane();
        let (first, chunk) = (b.shr(lane, lanes.trailing_zeros()), b.and(lane, lanes - 1));
        let feature = b.test(Cmp::Lt, chunk, self.dim / CHUNK);
        let column = b.mul_wide(chunk, 2 * CHUNK);
        let start = b.add(self.to, column);
        for pass in 0..rows / rows_per_pass {
            let row = b.add(self.warp_row, pass * rows_per_pass);
            let row = b.add(row, first);
            let signed = row.signed();
            let there = b.test(Cmp::Lt, signed, self.rows);
            let there = b.both(there, feature);
            let from = self.staged_chunk(b, row, chunk);
            let wide_row = b.widen(row);
            let to = b.mad(wide_row, self.stride, start);
            b.if_(there, |b| self.store_chunk(b, from, to));
        }
    }

    #[track_caller]
    fn staged_chunk(&self, b: &mut Builder, row: Reg<U32>, chunk: Reg<U32>) -> Reg<U32> {
        let per_slab = self.staging.slab_cols() / CHUNK;
        let slab = b.shr(chunk, per_slab.trailing_zeros());
        let in_slab = b.and(chunk, per_slab - 1);
        let start = self.staging.at(b).address(b);
        let start = b.mad(slab, self.staging.slab_bytes(), start);
        self.staging.chunk(b, start, row, in_slab)
    }

    #[track_caller]
    fn store_chunk(&self, b: &mut Builder, from: Reg<U32>, to: Reg<U64>) {
        let words = b.load_shared::<U32, 4>(from);
        let at = |bytes: usize| Global::from(to).at(bytes as i32);
        if self.access == Access::B2 {
            for (n, word) in words.into_iter().enumerate() {
                b.store_global_16(at(4 * n), word);
                let high = b.shr(word, 16);
                b.store_global_16(at(4 * n + 2), high);
            }
            return;
        }
        let per_store = self.access.bytes() as usize / 4;
        for (n, group) in words.chunks_exact(per_store).enumerate() {
            let group: Vec<Val<U32>> = group.iter().map(|&word| word.into()).collect();
            b.store_global(at(n * per_store * 4), &group);
        }
    }
}

/// Where LSE values go; nowhere if the address is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LseOutput {
    pub(crate) base: Reg<U64>,
    /// Address of the tile's first value.
    pub(crate) to: Reg<U64>,
    /// First row of the warp in the tile.
    pub(crate) warp_row: Reg<U32>,
    /// Rows of the tile that the output has.
    pub(crate) rows: Reg<S32>,
}

impl LseOutput {
    /// Writes the values of the warp's rows; one lane of each quad has them.
    #[track_caller]
    pub(crate) fn write(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let within = b.and(lane, 3);
        let first = b.test(Cmp::Eq, within, 0);
        let wanted = b.test(Cmp::Ne, self.base, 0);
        let writes = b.both(first, wanted);
        let quad = b.shr(lane, 2);
        let row = b.add(self.warp_row, quad);
        for (m, (_, finished)) in (0..).zip(tiles) {
            for (half, &lse) in (0..).zip(&finished.lse) {
                let row = b.add(row, m * MMA_M + 8 * half);
                let signed = row.signed();
                let there = b.test(Cmp::Lt, signed, self.rows);
                let there = b.both(there, writes);
                let bytes = b.mul_wide(row, 4);
                let at = b.add(self.to, bytes);
                b.predicated(there, |b| b.store_global(at, &[lse.into()]));
            }
        }
    }
}
