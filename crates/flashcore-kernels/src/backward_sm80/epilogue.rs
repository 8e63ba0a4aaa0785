//! The end of a row tile: gradients go through shared memory to global memory, those in f32 from registers.

use flashcore_tile::{Acc, Builder, F32, MMA_M, Reg, SmemTile, U32};

use super::{Config, work::Rows};
use crate::parts::{
    columns::Columns,
    portion::Access,
    row_end::thread_rows,
    schedule::Tile,
    softmax,
    staged::Output,
    tensor::TensorArgument,
    wide::{self, Ended, VECTOR, Vector, WideRows},
};

/// One gradient of a row tile.
pub(super) struct Gradient<'a> {
    pub(super) tensor: &'a TensorArgument,
    /// Head of the gradient.
    pub(super) head: Reg<U32>,
    /// First row of the sequence in the tensor.
    pub(super) start: Reg<U32>,
    /// Features.
    pub(super) dim: u32,
    pub(super) columns: Columns,
    /// What sums are multiplied by.
    pub(super) factor: Reg<F32>,
    /// Where rows are gathered, unless they are f32; nobody uses it any more.
    pub(super) staging: Option<SmemTile>,
}

impl Gradient<'_> {
    /// Writes the sums of every block of the warp.
    pub(super) fn write(&self, b: &mut Builder, cfg: &Config, tile: &Tile, rows: &Rows, sums: Vec<Acc>) {
        let row = b.let_(self.start + tile.first_row);
        let to = self.tensor.at(b, tile.batch, self.head, row);
        let factors: Vec<_> = (0..cfg.shape.blocks).map(|block| self.factors(b, cfg, rows, block)).collect();
        let tiles: Vec<_> = sums.into_iter().zip(factors).collect();
        let Some(staging) = self.staging else {
            return self.write_wide(b, cfg, rows, to, &tiles);
        };
        Output {
            element: cfg.output,
            access: cfg.access,
            dim: self.dim,
            columns: self.columns.each,
            share: rows.share,
            staging,
            to,
            stride: self.tensor.row,
            warp_row: rows.warp,
            rows: rows.written,
        }
        .write(b, &tiles);
    }

    /// The factors of a thread's rows: 0 for those that are not used.
    fn factors(&self, b: &mut Builder, cfg: &Config, rows: &Rows, block: u32) -> softmax::Rows<F32> {
        let lane = b.lane();
        let first = b.let_(rows.warp + block * MMA_M);
        thread_rows(b, first, lane).map(|row| match cfg.cuts_rows() {
            true => b.let_(row.signed().lt(rows.there).select(self.factor, 0.0)),
            false => self.factor,
        })
    }

    fn write_wide(
        &self,
        b: &mut Builder,
        cfg: &Config,
        rows: &Rows,
        to: Reg<flashcore_tile::U64>,
        tiles: &[(Acc, softmax::Rows<F32>)],
    ) {
        // Rows that are not used are left alone where others are added to.
        let end = if cfg.accumulate { rows.there } else { rows.written };
        let lane = b.lane();
        let before = rows.share.map(|share| b.let_(share * (self.columns.each / VECTOR)));
        let column = wide::first_column(b, lane, before);
        let start = b.let_(to + column);
        for (block, (acc, factors)) in (0..).zip(tiles) {
            let first = b.let_(rows.warp + block * MMA_M);
            let places = thread_rows(b, first, lane);
            let there = places.map(|row| b.let_(row.signed().lt(end)));
            let to = places.map(|row| b.let_(row.widen() * self.tensor.row + start));
            let vectors: Vec<Vector> = acc.regs().chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]).collect();
            let vectors = &vectors[..vectors.len().min(self.dim.div_ceil(VECTOR) as usize)];
            let exist = |b: &mut Builder, n: u32| wide::exist(b, self.dim, self.columns, before, n);
            let ended = Ended::added(b, *factors, cfg.accumulate);
            WideRows { to, there, pairs: cfg.access >= Access::B8 }.write(b, &ended, vectors, exist);
        }
    }
}
