//! Rows of sums from registers through shared memory to global memory, rounded to 16 bits.
//!
//! Each warp writes its own rows to shared memory and reads them back in whole chunks, so that global stores are wide
//! and a warp only waits for itself.

use flashcore_tile::{
    Acc, B32, Builder, CHUNK_BYTES, Element, F32, MMA_M, Packed, Pred, Reg, S32, Shared, SmemTile, U32, U64,
};

use super::{
    portion::{self, Access, Cut, Features},
    softmax::Rows,
};

const WARP: u32 = 32;

/// What a warp must know to write its rows of sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) element: Element,
    pub(crate) access: Access,
    /// Features of the output.
    pub(crate) dim: u32,
    /// Columns of the warp, and which share of all they are, where there are more.
    pub(crate) columns: u32,
    pub(crate) share: Option<Reg<U32>>,
    /// Where rows are gathered; no longer used by anything else.
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
    /// Writes 16 rows of the warp for each accumulator, each row times its factor; zeros, whatever the accumulator holds,
    /// where that is 0.
    #[track_caller]
    pub(crate) fn write(&self, b: &mut Builder, tiles: &[(Acc, Rows<F32>)]) {
        self.gather(b, tiles);
        b.sync_warp();
        self.scatter(b, tiles.len() as u32 * MMA_M);
    }

    /// Normalises, rounds and puts the rows into shared memory.
    #[track_caller]
    fn gather(&self, b: &mut Builder, tiles: &[(Acc, Rows<F32>)]) {
        let lane = b.lane();
        let row = b.let_(self.warp_row + (lane >> 2));
        let within = b.let_((lane & 3) << 2);
        let start = self.staging.at(b).address(b);
        let start = b.let_(start + within);
        let skipped = self.share.map(|share| columns_at(b, &self.staging, share, self.columns));
        let start = skipped.map_or(start, |skipped| b.let_(start + skipped));
        let chunks: Vec<_> = (0..self.staging.slab_width() / CHUNK_BYTES)
            .map(|chunk| self.staging.chunk(b, start, row, chunk))
            .collect();
        for (m, (acc, factors)) in (0..).zip(tiles) {
            let empty = factors.map(|factor| b.let_(factor.eq(0.0)));
            for (pair, values) in acc.regs().chunks_exact(2).enumerate() {
                let (row, chunk) = (Acc::row(2 * pair), (pair / 2) as u32);
                let word = self.normalised(b, values, factors[row], empty[row]);
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
        let word = b.pack(self.element, low, high);
        b.select(empty, Packed(0), word)
    }

    /// Moves the warp's rows from shared to global memory, chunk by chunk.
    #[track_caller]
    fn scatter(&self, b: &mut Builder, rows: u32) {
        let chunks = self.columns / self.element.per_chunk();
        let lanes = chunks.next_power_of_two();
        let rows_per_pass = WARP / lanes;
        let lane = b.lane();
        let (first, chunk) = (b.let_(lane / lanes), b.let_(lane % lanes));
        // A lane beyond the warp's columns would meet those of the next.
        let own = (self.share.is_some() && lanes > chunks).then(|| b.let_(chunk.lt(chunks)));
        let chunk = self.share.map_or(chunk, |share| b.let_(share * chunks + chunk));
        let cut = Cut { element: self.element, dim: self.dim, bytes: CHUNK_BYTES };
        let features = Features::new(b, cut, chunk, None);
        let feature = portion::both(b, features.some, own);
        let start = b.let_(self.to + chunk.mul_wide(CHUNK_BYTES));
        for pass in 0..rows / rows_per_pass {
            let row = b.let_(self.warp_row + pass * rows_per_pass + first);
            let there = row.signed().lt(self.rows);
            let there = match feature {
                Some(feature) => b.let_(there & feature),
                None => b.let_(there),
            };
            let from = self.staged_chunk(b, row, chunk);
            let to = b.let_(row.widen() * self.stride + start);
            b.if_(there, |b| {
                let words = b.load_shared::<U32, 4>(from);
                portion::write(b, self.access, &features, &words, to.into());
            });
        }
    }

    #[track_caller]
    fn staged_chunk(&self, b: &mut Builder, row: Reg<U32>, chunk: Reg<U32>) -> Reg<U32> {
        let per_slab = self.staging.slab_width() / CHUNK_BYTES;
        let (slab, in_slab) = (b.let_(chunk / per_slab), b.let_(chunk % per_slab));
        let start = self.staging.at(b).address(b);
        let start = b.let_(slab * self.staging.slab_bytes() + start);
        self.staging.chunk(b, start, row, in_slab)
    }
}

/// Where share number `share` of a tile's columns starts, in bytes; each has `columns`, which are whole slabs.
pub(crate) fn columns_at(b: &mut Builder, tile: &SmemTile, share: Reg<U32>, columns: u32) -> Reg<U32> {
    b.let_(share * (columns / tile.slab_cols() * tile.slab_bytes()))
}
