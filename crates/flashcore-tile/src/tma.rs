//! Tensor copies between global and shared memory, driven by tensor maps.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    barrier::Mbarrier,
    builder::Builder,
    error::FaultKind,
    memory::{Global, Shared},
    smem::SmemTile,
    value::{Reg, U32, U64, Val},
};

/// The address of a tensor map among the kernel's parameters.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    pub(crate) address: Reg<U64>,
}

impl Builder {
    /// Fetches a tensor map ahead of its first use.
    #[track_caller]
    pub fn tma_prefetch(&mut self, map: TensorMap) {
        self.emit(Op::Prefetch, &[Mod::Tensormap], [Operand::at(map.address.id(), 0)]);
    }

    /// Copies a whole tile to shared memory, slab by slab; its bytes complete on `done`. `at` is where the box starts,
    /// innermost coordinate, the column, first.
    #[track_caller]
    pub fn tma_load(
        &mut self,
        map: TensorMap,
        tile: &SmemTile,
        to: Shared,
        at: impl AsRef<[Val<U32>]>,
        done: Mbarrier,
    ) {
        for slab in 0..tile.slabs() {
            let at = self.skip_columns(at.as_ref(), slab * tile.slab_cols());
            let to = to.at(slab * tile.slab_bytes());
            let operands = [to.operand(), map.operand(&at), done.at.operand()];
            let mods = [self.rank(&at), Mod::SharedCluster, Mod::Global, Mod::Tile, Mod::CompleteTxBytes];
            self.emit(Op::CpAsyncBulkTensor, &mods, operands);
        }
    }

    /// Like [`tma_load`](Self::tma_load), to the same place in all CTAs of the cluster whose bit in `ctas` is set; the
    /// bytes complete on `done` in each of them.
    #[track_caller]
    pub fn tma_load_to(
        &mut self,
        ctas: u16,
        map: TensorMap,
        (tile, to): (&SmemTile, Shared),
        at: impl AsRef<[Val<U32>]>,
        done: Mbarrier,
    ) {
        let mask = self.fresh_id(ScalarType::U16);
        let operands = [Operand::Reg(mask), Operand::int(i64::from(ctas))];
        self.emit(Op::Mov, &[Mod::Type(ScalarType::U16)], operands);
        for slab in 0..tile.slabs() {
            let at = self.skip_columns(at.as_ref(), slab * tile.slab_cols());
            let to = to.at(slab * tile.slab_bytes());
            let operands = [to.operand(), map.operand(&at), done.at.operand(), Operand::Reg(mask)];
            let kind =
                [Mod::SharedCluster, Mod::Global, Mod::Tile, Mod::CompleteTxBytes, Mod::MulticastCluster];
            let mods: Vec<_> = std::iter::once(self.rank(&at)).chain(kind).collect();
            self.emit(Op::CpAsyncBulkTensor, &mods, operands);
        }
    }

    /// Copies neighbouring bytes, a multiple of 16 at multiples of 16, to shared memory; they complete on `done`.
    #[track_caller]
    pub fn bulk_load(&mut self, from: impl Into<Global>, to: Shared, bytes: u32, done: Mbarrier) {
        let size = Operand::int(i64::from(bytes));
        let operands = [to.operand(), from.into().operand(), size, done.at.operand()];
        self.emit(Op::CpAsyncBulk, &[Mod::SharedCluster, Mod::Global, Mod::CompleteTxBytes], operands);
    }

    /// Copies one slab from shared memory; rows beyond the tensor are clipped.
    #[track_caller]
    pub fn tma_store(&mut self, map: TensorMap, from: Shared, at: impl AsRef<[Val<U32>]>) {
        let at = at.as_ref();
        let mods = [self.rank(at), Mod::Global, Mod::SharedCta, Mod::Tile, Mod::BulkGroup];
        self.emit(Op::CpAsyncBulkTensor, &mods, [map.operand(at), from.operand()]);
    }

    /// Adds `bytes` of f32 in shared memory, a multiple of 16, to those in global memory.
    #[track_caller]
    pub fn bulk_add(&mut self, from: Shared, to: impl Into<Global>, bytes: u32) {
        let operands = [to.into().operand(), from.operand(), Operand::int(i64::from(bytes))];
        let mods = [Mod::Global, Mod::SharedCta, Mod::BulkGroup, Mod::Add, Mod::Type(ScalarType::F32)];
        self.emit(Op::CpReduceAsyncBulk, &mods, operands);
    }

    /// Closes the group of stores issued since the last one.
    #[track_caller]
    pub fn tma_commit(&mut self) {
        self.emit(Op::CpAsyncBulkCommitGroup, &[], []);
    }

    /// Waits until all but the `pending` latest groups of stores have read their shared memory, which may then be
    /// written again.
    #[track_caller]
    pub fn tma_wait_read(&mut self, pending: u32) {
        self.emit(Op::CpAsyncBulkWaitGroup, &[Mod::Read], [Operand::int(i64::from(pending))]);
    }

    /// Waits until all but the `pending` latest groups of stores have been written.
    #[track_caller]
    pub fn tma_wait(&mut self, pending: u32) {
        self.emit(Op::CpAsyncBulkWaitGroup, &[], [Operand::int(i64::from(pending))]);
    }

    #[track_caller]
    fn skip_columns(&mut self, at: &[Val<U32>], skip: u32) -> Vec<Val<U32>> {
        let mut at = at.to_vec();
        if let Some(col) = at.first_mut() {
            *col = match *col {
                Val::Const(col) => Val::Const(col + skip),
                Val::Reg(_) if skip == 0 => *col,
                Val::Reg(_) => self.add(*col, skip).into(),
            };
        }
        at
    }

    /// The number of dimensions as the instruction names it.
    #[track_caller]
    fn rank(&mut self, at: &[Val<U32>]) -> Mod {
        const RANKS: [Mod; 5] = [Mod::D1, Mod::D2, Mod::D3, Mod::D4, Mod::D5];
        let rank = at.len().wrapping_sub(1);
        RANKS.get(rank).copied().unwrap_or_else(|| {
            self.fault(FaultKind::Tile(format!("a tensor copy has 1 to 5 coordinates, not {}", at.len())));
            Mod::D1
        })
    }
}

impl TensorMap {
    fn operand(self, at: &[Val<U32>]) -> Operand {
        Operand::tensor(self.address.id(), at.iter().map(|&coordinate| coordinate.operand()))
    }
}
