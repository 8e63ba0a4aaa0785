//! Where a warp's tiles of keys or values come from, and how they get into its ring.
//!
//! Lanes copy 16 bytes each (`cp.async`), wherever rows lie: one after another, or each in a page of its own. Tensor copies,
//! on Hopper and later, move a contiguous tile with one instruction of one lane, and signal a barrier when it has arrived.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Mbarrier, Pred, Reg, S32, Shared, SmemTile, TensorMap, U32, U64, Val,
};

use super::{Config, config::Keys, load::Chunks, pages::Entry, unit::Unit};
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

/// What a copy brings: a tile of the sequence.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// First row in the tensor, where keys lie together.
    pub(super) row: Reg<U32>,
    /// How many of its rows are keys.
    pub(super) there: Reg<S32>,
    /// Where its keys lie, if that is in pages: the key of this lane, or the first.
    pub(super) entry: Option<Entry>,
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
                let [head, batch] = [unit.head_kv, unit.sequence.batch];
                Self::Tensor(TensorCopies { map, tile: *tile, ring, leads, head, batch, barriers })
            }
            (Tensor::Rows(rows), _) => {
                Self::Lanes(LaneCopies::new(b, cfg, unit, (&rows, dim), (tile, ring), row))
            }
            (Tensor::Map(_), None) => unreachable!("tensor copies have barriers"),
        }
    }

    /// Starts the copies of the warp's next tile into stage `stage`.
    pub(super) fn issue(&self, b: &mut Builder, stage: Reg<U32>, wanted: Wanted) {
        match self {
            Self::Lanes(lanes) => lanes.issue(b, stage, wanted),
            Self::Tensor(tensor) => tensor.issue(b, stage, wanted),
        }
    }
}

/// Copies of 16 bytes by every lane.
#[derive(Debug)]
pub(super) struct LaneCopies {
    tile: SmemTile,
    chunks: Chunks,
    places: Vec<Reg<U32>>,
    walk: Walk,
}

/// From which addresses lanes copy.
#[derive(Debug)]
enum Walk {
    /// Rows lie one after another.
    Together {
        /// Where this lane's first row of the next tile lies.
        from: Reg<U64>,
        /// Bytes from one pass to the next, and from the last pass of a tile to the first of the warp's next.
        pass: Reg<U64>,
        step: Reg<U64>,
    },
    /// Rows lie in pages; the tensor, and where this lane's chunk of its head starts.
    Paged { tensor: TensorArgument, start: Reg<U64> },
}

impl Walk {
    fn new(
        b: &mut Builder,
        cfg: &Config,
        unit: &Unit,
        (tensor, chunks): (&TensorArgument, &Chunks),
        row: Reg<U32>,
    ) -> Self {
        let chunk = b.let_(chunks.chunk.mul_wide(CHUNK_BYTES));
        if cfg.keys == Keys::Paged {
            let start = tensor.of_head(b, unit.head_kv);
            return Self::Paged { tensor: *tensor, start: b.let_(start + chunk) };
        }
        let row = b.let_(row + chunks.row);
        let from = tensor.at(b, unit.sequence.batch, unit.head_kv, row);
        let from = b.let_(from + chunk);
        let pass = b.let_(tensor.row * u64::from(chunks.rows_per_pass));
        let rest = cfg.keys_per_turn() - (chunks.passes - 1) * chunks.rows_per_pass;
        Self::Together { from: b.var(from), pass, step: b.let_(tensor.row * u64::from(rest)) }
    }

    /// Runs `copy` for every pass over a tile, with the address of this lane's chunk.
    fn each(
        &self,
        b: &mut Builder,
        chunks: &Chunks,
        entry: Option<Entry>,
        mut copy: impl FnMut(&mut Builder, u32, Reg<U64>),
    ) {
        match *self {
            Self::Together { from, pass, step } => {
                for number in 0..chunks.passes {
                    copy(b, number, from);
                    b.set(from, from + if number + 1 < chunks.passes { pass } else { step });
                }
            }
            Self::Paged { tensor, start } => {
                let Some(Entry { page, row }) = entry else { return };
                // Each lane knows where one key lies, and asks the others for those of its rows.
                let offset = tensor.offset(b, page, row);
                for number in 0..chunks.passes {
                    let lane = b.let_(chunks.row + number * chunks.rows_per_pass);
                    let offset = b.shuffle_wide(offset, lane);
                    let from = b.let_(start + offset);
                    copy(b, number, from);
                }
            }
        }
    }
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
        let walk = Walk::new(b, cfg, unit, (tensor, &chunks), row);
        Self { tile: *tile, chunks, places, walk }
    }

    fn issue(&self, b: &mut Builder, stage: Reg<U32>, wanted: Wanted) {
        let (tile, chunks) = (&self.tile, &self.chunks);
        let skip = b.let_(stage * tile.bytes());
        let places: Vec<_> = self.places.iter().map(|&place| b.let_(place + skip)).collect();
        let left = b.let_(wanted.there - chunks.row.signed());
        self.walk.each(b, chunks, wanted.entry, |b, pass, from| {
            let there = b.let_(left.gt((pass * chunks.rows_per_pass) as i32));
            let present = chunks.present(b, there);
            let to = chunks.place(tile, &places, pass);
            chunks.each(b, |b| b.copy_async(CopyWidth::B16, to, from, Some(present.into())));
        });
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
    fn issue(&self, b: &mut Builder, stage: Reg<U32>, wanted: Wanted) {
        let (row, batch) = wanted.entry.map_or((wanted.row, self.batch), |entry| (entry.row, entry.page));
        b.if_(self.leads, |b| {
            let done = self.barriers.number(b, stage);
            done.arrive_expecting(b, self.tile.bytes());
            let to = self.ring.plus(b, stage * self.tile.bytes());
            let at = [Val::Const(0), row.into(), self.head.into(), batch.into()];
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
