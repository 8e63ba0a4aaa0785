//! The end of a row tile: normalised rows go through shared memory to global memory, LSE directly.
//!
//! Each warp writes its own rows to shared memory and reads them back in whole chunks, so that global stores are wide
//! and only the warp has to wait for itself.

use flashcore_tile::{
    Acc, B32, Builder, CHUNK_BYTES, Element, F32, MMA_M, Pred, Reg, S32, Shared, SmemTile, U32, U64,
};

use super::{
    Config,
    portion::{self, Access, Cut, Features},
    work::columns_at,
};
use crate::parts::{
    row_end::{LseOutput, thread_rows},
    softmax::Finished,
    wide::{self, Ended, Exist, VECTOR, Vector, WideRows},
};

const WARP: u32 = 32;

/// What a warp must know to write its rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub(super) element: Element,
    pub(super) access: Access,
    /// Features of the output.
    pub(super) dim: u32,
    /// Columns of the warp, and which share of all they are, where there are more.
    pub(super) columns: u32,
    pub(super) share: Option<Reg<U32>>,
    /// Where rows are gathered; nobody else uses it any more.
    pub(super) staging: SmemTile,
    /// Address of the tile's first row, and bytes between rows.
    pub(super) to: Reg<U64>,
    pub(super) stride: Reg<U64>,
    /// First row of the warp in the tile.
    pub(super) warp_row: Reg<U32>,
    /// Rows of the tile that the output has.
    pub(super) rows: Reg<S32>,
}

impl Output {
    /// Writes 16 rows of the warp for each accumulator.
    #[track_caller]
    pub(super) fn write(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        self.gather(b, tiles);
        b.sync_warp();
        self.scatter(b, tiles.len() as u32 * MMA_M);
    }

    /// Normalises, rounds and puts the rows into shared memory.
    #[track_caller]
    fn gather(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
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
        for (m, (acc, finished)) in (0..).zip(tiles) {
            let empty = finished.factor.map(|factor| b.let_(factor.eq(0.0)));
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
        let word = b.pack(self.element, low, high);
        b.select(empty, flashcore_tile::Packed(0), word)
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

/// Where a warp's rows of an f32 output go, from registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct WideOutput {
    /// Address of the tile's first row, and bytes between rows.
    pub(super) to: Reg<U64>,
    pub(super) stride: Reg<U64>,
    /// First row of the warp in the tile.
    pub(super) warp_row: Reg<U32>,
    /// Which share of the columns the warp has, where it does not have all.
    pub(super) share: Option<Reg<U32>>,
    /// Rows of the tile that are written.
    pub(super) rows: Reg<S32>,
}

impl WideOutput {
    /// Writes 16 rows of the warp for each accumulator, and their LSE.
    #[track_caller]
    pub(super) fn write(&self, b: &mut Builder, cfg: &Config, lse: &Lse, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let writes_lse = lse.writer(b, lane);
        let vectors_before = self.share.map(|share| b.let_(share * (cfg.columns().each / VECTOR)));
        let column = wide::first_column(b, lane, vectors_before);
        let start = b.let_(self.to + column);
        for (m, (acc, finished)) in (0..).zip(tiles) {
            let first = b.let_(self.warp_row + m * MMA_M);
            let rows = thread_rows(b, first, lane);
            let there = rows.map(|row| b.let_(row.signed().lt(self.rows)));
            let lse_at = rows.map(|row| b.let_(lse.to + row.mul_wide(4)));
            let to = rows.map(|row| b.let_(row.widen() * self.stride + start));
            let mut ended = Ended::from(*finished);
            if cfg.accumulate {
                let old = wide::old_lse(b, lse_at, there);
                ended = Ended::merged(b, *finished, old);
                self.sync_readers(b);
            }
            for row in 0..there.len() {
                let who = b.let_(there[row] & writes_lse);
                LseOutput::write(b, who, lse_at[row], ended.lse[row]);
            }
            let vectors: Vec<Vector> = acc.regs().chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]).collect();
            let pairs = cfg.access >= Access::B8;
            let vectors = &vectors[..vectors.len().min(cfg.dim_v.div_ceil(VECTOR) as usize)];
            let exist = |b: &mut Builder, n: u32| self.exist(b, cfg, vectors_before, n);
            WideRows { to, there, pairs }.write(b, &ended, vectors, exist);
        }
    }

    /// Waits until everybody who shares rows has read what one of them writes: a quad, or a quad of each share.
    #[track_caller]
    fn sync_readers(&self, b: &mut Builder) {
        match self.share {
            Some(_) => b.sync_cta(),
            None => b.sync_warp(),
        }
    }

    /// Which columns of vector `n` of this thread exist.
    #[track_caller]
    fn exist(&self, b: &mut Builder, cfg: &Config, before: Option<Reg<U32>>, n: u32) -> Exist {
        let (dim, columns) = (cfg.dim_v, cfg.columns());
        let mut starts = (0..columns.groups).map(|share| share * columns.each + n * VECTOR);
        if starts.clone().all(|start| start + VECTOR <= dim) {
            return Exist::All;
        }
        let lane = b.lane();
        let column = b.let_(((lane & 3) << 1) + n * VECTOR);
        let column = before.map_or(column, |before| b.let_(before * VECTOR + column));
        let low = b.let_(column.lt(dim));
        let parts_a_pair = dim % 2 == 1 && starts.any(|start| (start..start + VECTOR).contains(&dim));
        if parts_a_pair { Exist::Each([low, b.let_(column.lt(dim - 1))]) } else { Exist::Pair(low) }
    }
}

/// Where the LSE values of a warp go; nowhere if the address is 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lse {
    pub(super) base: Reg<U64>,
    /// Address of the tile's first value.
    pub(super) to: Reg<U64>,
    /// First row of the warp in the tile.
    pub(super) warp_row: Reg<U32>,
    /// Which share of the columns the warp has, where others have the same rows: the first writes.
    pub(super) share: Option<Reg<U32>>,
    /// Rows of the tile that the output has.
    pub(super) rows: Reg<S32>,
}

impl Lse {
    /// Whether this thread writes: one lane of each quad, in the first share of the columns.
    #[track_caller]
    fn writer(&self, b: &mut Builder, lane: Reg<U32>) -> Pred {
        let writes = LseOutput::new(b, self.base, lane).writes;
        self.share.map_or(writes, |share| b.let_(writes & share.eq(0)))
    }

    /// Writes the values of the warp's rows.
    #[track_caller]
    pub(super) fn write(&self, b: &mut Builder, tiles: &[(Acc, Finished)]) {
        let lane = b.lane();
        let writes = self.writer(b, lane);
        let row = b.let_(self.warp_row + (lane >> 2));
        for (m, (_, finished)) in (0..).zip(tiles) {
            for (half, &lse) in (0..).zip(&finished.lse) {
                let row = b.let_(row + (m * MMA_M + 8 * half));
                let there = b.let_(row.signed().lt(self.rows) & writes);
                let to = b.let_(self.to + row.mul_wide(4));
                LseOutput::write(b, there, to, lse);
            }
        }
    }
}
