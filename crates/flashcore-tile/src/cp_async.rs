//! Asynchronous copies of a few bytes per thread from global to shared memory (`cp.async`, sm_80 on).
//!
//! Copies are gathered into groups; waiting for groups makes them visible only to the waiting thread, so a
//! barrier must follow before other threads read them.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
};

use crate::{
    builder::Builder,
    memory::{Global, Shared},
    value::{U32, Val},
};

/// How much one copy moves; both addresses are aligned to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyWidth {
    /// 4 bytes.
    B4,
    /// 8 bytes.
    B8,
    /// 16 bytes, past the first-level cache.
    B16,
    /// Likewise; the second-level cache fetches the 256 bytes around them, which others will ask for.
    B16Of256,
}

impl CopyWidth {
    /// Bytes moved.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B4 => 4,
            Self::B8 => 8,
            Self::B16 | Self::B16Of256 => 16,
        }
    }

    const fn cache(self) -> Mod {
        match self {
            Self::B16 | Self::B16Of256 => Mod::Cg,
            Self::B4 | Self::B8 => Mod::Ca,
        }
    }
}

impl Builder {
    /// Starts a copy of `width`, of which only the first `present` bytes are read; the rest becomes zeros.
    #[track_caller]
    pub fn copy_async(
        &mut self,
        width: CopyWidth,
        to: impl Into<Shared>,
        from: impl Into<Global>,
        present: Option<Val<U32>>,
    ) {
        let around = (width == CopyWidth::B16Of256).then_some(Mod::L2B256);
        let mods: Vec<_> = [width.cache(), Mod::Shared, Mod::Global].into_iter().chain(around).collect();
        let size = Operand::int(i64::from(width.bytes()));
        let operands = [to.into().operand(), from.into().operand(), size];
        let present = present.map(|bytes| bytes.operand());
        self.emit(Op::CpAsync, &mods, operands.into_iter().chain(present).collect::<Vec<_>>());
    }

    /// Closes the group of this thread's copies since the last call; an empty group is complete at once.
    #[track_caller]
    pub fn commit_copies(&mut self) {
        self.emit(Op::CpAsyncCommitGroup, &[], []);
    }

    /// Waits until at most `pending` of this thread's youngest groups are in flight.
    #[track_caller]
    pub fn wait_copies(&mut self, pending: u32) {
        self.emit(Op::CpAsyncWaitGroup, &[], [Operand::int(i64::from(pending))]);
    }
}
