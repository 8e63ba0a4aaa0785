//! The epilogue: rounds a tile and stores its valid rows and columns through shared memory in rows of 128 bytes. Transposes,
//! whose rows are neighbours, are written element by element.

use flashcore_tile::{
    Acc, Builder, CHUNK_BYTES, F32, Global, Params, Pred, Reg, Scope, Shared, SmemTile, U32, U64, Val,
    WARPGROUP,
};

use super::{
    super::{Work, epilogue},
    Config, Layout,
    place::{Arguments, Place},
};
use crate::{
    moe::product_sm90::{PLACES, ROWS, WARP_ROWS, WARPS},
    parts::lines::DEPTH,
};

/// Bytes of an element.
const BYTES: u32 = 2;
/// Columns of 16-bit elements that one stmatrix writes: two matrices side by side.
const PAIR_COLS: u32 = 16;
/// Threads that share a row, and rows that a warp writes at once.
const LANES: u32 = DEPTH * BYTES / CHUNK_BYTES;
const ROWS_AT_ONCE: u32 = 32 / LANES;

/// Where results go, as registers.
pub(super) struct Output(epilogue::Output);

/// What a warp writes with.
pub(super) struct Writer {
    staging: Option<Staging>,
    /// The warp's first row of a tile.
    row: Reg<U32>,
}

/// Where a warp gathers its rows.
struct Staging {
    tile: SmemTile,
    /// This lane's address for each pair of matrices that it writes, and for each row that it reads.
    lanes: Vec<Reg<U32>>,
    rows: Vec<Reg<U32>>,
}

impl Writer {
    pub(super) fn new(b: &mut Builder, layout: &Layout, group: Reg<U32>) -> Self {
        let (thread, lane) = (b.thread(), b.lane());
        let warp = b.let_(thread % WARPGROUP / 32);
        let staging = layout.staging.map(|tile| {
            let skip = b.let_((group * WARPS + warp) * (PLACES * tile.bytes()));
            let start = tile.at(b).plus(b, skip).address(b);
            let (row, right) = (b.let_(lane & 15), b.let_(lane >> 4));
            let pairs = 0..DEPTH / PAIR_COLS;
            let lanes = pairs.map(|pair| tile.chunk(b, start, row, right + 2 * pair)).collect();
            let (line, chunk) = (b.let_(lane / LANES), b.let_(lane % LANES));
            let rows = (0..WARP_ROWS / ROWS_AT_ONCE).map(|n| {
                let row = b.let_(line + n * ROWS_AT_ONCE);
                tile.chunk(b, start, row, chunk)
            });
            Staging { tile, lanes, rows: rows.collect() }
        });
        Self { staging, row: b.let_(group * ROWS + warp * WARP_ROWS) }
    }
}

impl Output {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Work>) -> Self {
        Self(epilogue::Output::declare(b, params))
    }

    /// Writes the sums of a warp.
    pub(super) fn write(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (writer, place): (&Writer, Place),
        sums: &Acc,
    ) {
        let row = b.let_(place.rows[0] + writer.row);
        let start = b.let_(place.out.widen() * self.0.strides[0] + self.0.base);
        let Some(staging) = &writer.staging else {
            return self.write_each(b, cfg, args, (place, row, start), sums);
        };
        for part in 0..cfg.shape.tile_n / DEPTH {
            let values = &sums.regs()[(part * DEPTH / 2) as usize..((part + 1) * DEPTH / 2) as usize];
            staging.gather(b, cfg, values, part % PLACES);
            let column = b.let_(place.column + part * DEPTH);
            self.store(b, args, (staging, part % PLACES), (row, place.rows[1], column), start);
        }
    }

    /// Writes what a warp has gathered at a place.
    fn store(
        &self,
        b: &mut Builder,
        args: &Arguments,
        (staging, place): (&Staging, u32),
        (row, end, column): (Reg<U32>, Reg<U32>, Reg<U32>),
        start: Reg<U64>,
    ) {
        let lane = b.lane();
        let column = b.let_(column + lane % LANES * (CHUNK_BYTES / BYTES));
        let start = b.let_(start + column.mul_wide(BYTES));
        let inside: Pred = b.let_(column.lt(args.columns));
        for (n, &from) in (0..).zip(&staging.rows) {
            let words = b.load_shared::<U32, 4>(Shared::from(from).at(place * staging.tile.bytes()));
            let row = b.let_(row + lane / LANES + n * ROWS_AT_ONCE);
            let to = b.let_(row.widen() * self.0.strides[1] + start);
            let there = b.let_(inside & row.lt(end));
            b.predicated(there, |b| b.store_global(to, &words.map(Val::from)));
        }
    }

    /// Writes sums one after the other.
    fn write_each(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (place, row, start): (Place, Reg<U32>, Reg<U64>),
        sums: &Acc,
    ) {
        let (lane, [_, _, step]) = (b.lane(), self.0.strides);
        let row = b.let_(row + lane / 4);
        let column = b.let_(place.column + lane % 4 * 2);
        // Both of a thread's rows, eight apart.
        let here = [0, 8].map(|down| -> Pred { b.let_((row + down).lt(place.rows[1])) });
        let first = b.let_(column.widen() * step + start);
        // One address that moves on: an address for each column would be more than there are registers.
        let to = b.var_in(Scope::Lane, first + row.mul_wide(BYTES));
        for n in (0..sums.regs().len()).filter(|&n| Acc::row(n) == 0) {
            let column = b.let_(column + Acc::col(n) as u32);
            let inside: Pred = b.let_(column.lt(args.columns));
            for (half, &here) in here.iter().enumerate() {
                let value = sums.regs()[n + 2 * half];
                let word = b.pack(cfg.half, value, value);
                let there = b.let_(inside & here);
                b.predicated(there, |b| b.store_global_16(Global::from(to).at(16 * half as i32), word));
            }
            b.add_to(to, step * if n % 2 == 0 { 1u64 } else { 7 });
        }
    }
}

impl Staging {
    /// Rounds 64 columns and gathers them at a place, which was read before the last synchronisation of the warp.
    fn gather(&self, b: &mut Builder, cfg: &Config, values: &[Reg<F32>], place: u32) {
        for (values, &lane) in values.chunks(8).zip(&self.lanes) {
            let packed = std::array::from_fn(|n| b.pack(cfg.half, values[2 * n], values[2 * n + 1]));
            b.stmatrix(Shared::from(lane).at(place * self.tile.bytes()), packed);
        }
        b.sync_warp();
    }
}
