//! One CTA's work: a tile of query rows against its key tiles.

use flashcore_tile::{
    Acc, Builder, Cmp, Cta, F32, Fragment, MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad, Reg, S32,
    U32,
};

use super::{Arguments, Config, Layout, config::padded};
use crate::shared::{
    epilogue::{LseOutput, Output},
    load::TileLoad,
    mask::{KeyTiles, ThreadVisibility},
    schedule::{LengthsKind, Tile},
    softmax::{Finished, Softmax},
};

/// The registers of 16 query rows.
struct Block {
    output: Acc,
    softmax: Softmax,
    visible: ThreadVisibility,
}

/// Where the queries' fragments come from.
enum Queries {
    /// They stay in registers, by block and by depth.
    Registers(Vec<Vec<Quad>>),
    /// They are read again for every key tile, by block.
    Shared(Vec<MatrixView>),
}

/// What the loop over key tiles keeps.
struct Loop<'a> {
    cfg: &'a Config,
    args: &'a Arguments,
    blocks: Vec<Block>,
    queries: Queries,
    keys: MatrixRows,
    values: MatrixRows,
    load_k: TileLoad,
    load_v: TileLoad,
    k_bytes: u32,
    v_bytes: u32,
    tiles: KeyTiles,
    /// The key tile of this turn.
    tile: Reg<S32>,
    /// The key tile that is loaded next.
    ahead: Reg<S32>,
    /// The stage that is read in this turn, and the one that is free.
    read: Reg<U32>,
    free: Reg<U32>,
    /// First column of this thread in a key tile.
    column: Reg<U32>,
}

/// Computes this CTA's row tile.
pub(super) fn row_tile(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout) {
    let tile = args.schedule.tile(b, cfg.shape.tile_m());
    let there = b.test(Cmp::Ge, tile.first_row, tile.rows);
    let beyond = b.uniform::<Cta>(there);
    b.if_uniform(beyond, Builder::exit);

    let warp = b.warp();
    let warp_row = b.mul(warp, cfg.shape.blocks * MMA_M);
    let rows_left = |b: &mut Builder, rows: Reg<U32>| {
        let left = b.sub(rows, tile.first_row);
        b.signed(left)
    };
    let queries_there = rows_left(b, tile.q_len);
    let lp = Loop::start(b, cfg, args, layout, &tile, warp_row, queries_there);
    lp.run(b);
    let finished = lp.finish(b, &tile, warp_row, queries_there);

    let rows = rows_left(b, tile.rows);
    let lse = lse_output(b, args, &tile, warp_row, rows);
    lse.write(b, &finished);
    // Other warps may still read what the output is gathered over.
    b.sync_cta();
    let first_row = b.add(tile.q_start, tile.first_row);
    let to = tile.row_address(b, &args.out, tile.head, first_row);
    let (stride, staging) = (args.out.row, layout.staging);
    Output { half: cfg.half, access: cfg.access, dim: cfg.dim_v, staging, to, stride, warp_row, rows }
        .write(b, &finished);
}

impl<'a> Loop<'a> {
    /// Starts the loads of Q and of the first stages, and prepares everything that does not change.
    fn start(
        b: &mut Builder,
        cfg: &'a Config,
        args: &'a Arguments,
        layout: &Layout,
        tile: &Tile,
        warp_row: Reg<U32>,
        queries_there: Reg<S32>,
    ) -> Self {
        load_q(b, cfg, args, layout, tile, queries_there);
        let visible = args.mask.over(b, tile.q_len, tile.kv_len);
        let tiles = key_tiles(b, cfg, tile, &visible);
        let last = b.sub(tiles.end, 1);
        let [load_k, load_v] = load_kv(b, cfg, args, layout, tile, last);
        let last = b.sub(tiles.end, 1);
        let (column, row) = thread_place(b, tile, warp_row);
        let mut lp = Self {
            cfg,
            args,
            blocks: (0..cfg.shape.blocks).map(|n| Block::new(b, cfg, args, &visible, row, n)).collect(),
            queries: Queries::Shared(Vec::new()),
            keys: layout.k.matrix_rows(b, MatrixOrder::ColumnsFirst),
            values: layout.v.matrix_rows(b, MatrixOrder::RowsFirst),
            load_k,
            load_v,
            k_bytes: layout.k.bytes(),
            v_bytes: layout.v.bytes(),
            tiles,
            tile: b.var(last),
            ahead: b.var(last),
            read: b.var(0),
            free: b.var(cfg.shape.stages - 1),
            column,
        };
        lp.fill(b, tile);
        lp.queries = Queries::new(b, cfg, layout, warp_row);
        lp
    }

    /// Starts the loads of all stages but one; the first key tile may end beyond the sequence.
    fn fill(&self, b: &mut Builder, tile: &Tile) {
        for stage in 0..self.cfg.shape.stages - 1 {
            let more = self.more_ahead(b);
            b.if_uniform(more, |b| {
                let there = (stage == 0).then(|| {
                    let first = b.mul(self.ahead, self.cfg.shape.tile_n as i32);
                    let keys = b.signed(tile.kv_len);
                    b.sub(keys, first)
                });
                self.load(b, stage.into(), there);
            });
            b.commit_copies();
        }
    }
}
