//! Where a warp's tiles of keys or values come from, and how they get into its ring.
//!
//! Lanes copy 16 bytes each (`cp.async`), wherever rows lie; tensor copies, on Hopper and later, move a tile by one
//! instruction of one lane, and tell a barrier when it is there.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Mbarrier, Pred, Reg, S32, Shared, SmemTile, TensorMap, U32, U64, Val,
};

use super::{Config, load::Chunks, unit::Unit};
use crate::parts::tensor::TensorArgument;

const WARP: u32 = 32;

/// K or V in global memory, as a kernel sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tensor {
    /// By address.
    Rows(TensorArgument),
    /// By tensor map.
    Map(TensorMap),
}

/// One warp's copies of its tiles.
#[derive(Debug)]
pub(super) enum Source {
    Lanes(LaneCopies),
    Tensor(TensorCopies),
}

/// What a copy brings: which tile of the sequence, and how many of its rows are keys.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// First row in the tensor.
    pub(super) row: Reg<U32>,
    pub(super) there: Reg<S32>,
}

impl Source {
    /// Copies of the tiles from row `row` of a tensor on, whose first `dim` columns are features, into a ring of copies of
    /// `tile` at `ring`; `barriers` are those of its stages.
    pub(super) fn new(
        b: &mut Builder,
        cfg: &Config,
        unit: &Unit,
        (tensor, dim): (Tensor, u32),
        (tile, ring): (&SmemTile, Shared),
        row: Reg<U32>,
        barriers: Option<Mbarrier>,
    ) -> Self {
        match (tensor, barriers) {
            (Tensor::Map(map), Some(barriers)) => {
                let lane = b.lane();
                let leads = b.let_(lane.eq(0));
                let [head, batch] = [unit.head_kv, unit.batch];
                Self::Tensor(TensorCopies { map, tile: *tile, ring, leads, head, batch, barriers })
            }
            (Tensor::Rows(rows), _) => Self::Lanes(LaneCopies::new(b, cfg, unit, (&rows, dim), (tile, ring), row)),
            (Tensor::Map(_), None) => unreachable!("tensor copies have barriers"),
        }
    }

    /// Starts the copies of the warp's next tile into stage `stage`.
    pub(super) fn issue(&self, b: &mut Builder, stage: Reg<U32>, wanted: Wanted) {
        match self {
            Self::Lanes(lanes) => lanes.issue(b, stage, wanted.there),
            Self::Tensor(tensor) => tensor.issue(b, stage, wanted.row),
        }
    }
}

/// Copies of 16 bytes by every lane.
#[derive(Debug)]
pub(super) struct LaneCopies {
    tile: SmemTile,
    chunks: Chunks,
    places: Vec<Reg<U32>>,
    /// Where this lane's first row of the next tile lies.
    from: Reg<U64>,
    /// Bytes from one pass to the next, and from the last pass of a tile to the first of the warp's next.
    pass: Reg<U64>,
    step: Reg<U64>,
}

impl LaneCopies {
    fn new(
        b: &mut Builder,
        cfg: &Config,
        unit: &Unit,
        (tensor, dim): (&TensorArgument, u32),
        (tile, ring): (&SmemTile, Shared),
        row: Reg<U32>,
    ) -> Self {
        let lane = b.lane();
        let chunks = Chunks::new(b, tile, dim, lane, WARP);
        let start = ring.address(b);
        let places = chunks.places(b, tile, start);
        let row = b.let_(row + chunks.row);
        let from = tensor.at(b, unit.batch, unit.head_kv, row);
        let from = b.let_(from + chunks.chunk.mul_wide(CHUNK_BYTES));
        let pass = b.let_(tensor.row * u64::from(chunks.rows_per_pass));
        let rest = cfg.keys_per_turn() - (chunks.passes - 1) * chunks.rows_per_pass;
        let step = b.let_(tensor.row * u64::from(rest));
        Self { tile: *tile, chunks, places, from: b.var(from), pass, step }
    }

    fn issue(&self, b: &mut Builder, stage: Reg<U32>, there: Reg<S32>) {
        let skip = b.let_(stage * self.tile.bytes());
        let places: Vec<_> = self.places.iter().map(|&place| b.let_(place + skip)).collect();
        let left = b.let_(there - self.chunks.row.signed());
        for pass in 0..self.chunks.passes {
            let rows = pass * self.chunks.rows_per_pass;
            let there = b.let_(left.gt(rows as i32));
            let present = self.chunks.present(b, there);
            let to = self.chunks.place(&self.tile, &places, pass);
            self.chunks.each(b, |b| b.copy_async(CopyWidth::B16, to, self.from, Some(present.into())));
            let on = if pass + 1 < self.chunks.passes { self.pass } else { self.step };
            b.set(self.from, self.from + on);
        }
    }
}

/// Tensor copies, issued by one lane.
#[derive(Debug)]
pub(super) struct TensorCopies {
    map: TensorMap,
    tile: SmemTile,
    ring: Shared,
    leads: Pred,
    head: Reg<U32>,
    batch: Reg<U32>,
    barriers: Mbarrier,
}

impl TensorCopies {
    fn issue(&self, b: &mut Builder, stage: Reg<U32>, row: Reg<U32>) {
        b.if_(self.leads, |b| {
            let done = self.barriers.number(b, stage);
            done.arrive_expecting(b, self.tile.bytes());
            let to = self.ring.plus(b, stage * self.tile.bytes());
            let at = [Val::Const(0), row.into(), self.head.into(), self.batch.into()];
            b.tma_load(self.map, &self.tile, to, at, done);
        });
    }
}

/// Zeros for the rows of a tile from `there` on: hidden keys have probability 0, but 0 · NaN is NaN.
pub(super) fn clear_rows(b: &mut Builder, tile: &SmemTile, start: Shared, there: Reg<S32>) {
    let lane = b.lane();
    let first = b.let_(there.unsigned() * tile.slab_width());
    let at = b.var(lane * CHUNK_BYTES + first);
    b.while_(
        |_| at.lt(tile.slab_bytes()),
        |b| {
            let row = start.plus(b, at);
            for slab in 0..tile.slabs() {
                b.store_shared::<U32>(row.at(slab * tile.slab_bytes()), &[Val::Const(0); 4]);
            }
            b.add_to(at, WARP * CHUNK_BYTES);
        },
    );
}
