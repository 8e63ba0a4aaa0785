//! Micro-operations: what an instruction became after decoding.

pub(crate) use super::parts::*;
use crate::{error::SimError, tensor_map::Field};
use flashcore_ptx::types::SpecialReg;

/// One value for each lane of a warp; narrower values sit in the low bits.
pub(crate) type Lanes = [u64; 32];

/// A pure function of up to four sources.
pub(crate) type LaneFn = Box<dyn Fn(&[Lanes; 4]) -> Lanes + Send + Sync>;

/// A register of a warp by slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Reg {
    /// At most 32 bits.
    Narrow(u32),
    /// 64 bits.
    Wide(u32),
    /// One bit.
    Predicate(u32),
}

/// A source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Src {
    Reg(Reg),
    /// A negated predicate.
    Not(u32),
    Imm(u64),
    Special(SpecialReg),
    /// An offset into the CTA's own shared memory.
    Shared(u32),
    /// An offset into the frame of the function that the lane is in: an address of local memory.
    Frame(u32),
}

/// A destination; `None` is `_`.
pub(crate) type Dst = Option<Reg>;

/// A place in memory: base plus offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Addr {
    pub(crate) base: Src,
    pub(crate) offset: i64,
    /// Whether the sum wraps at 32 bits.
    pub(crate) narrow: bool,
}

/// A state space as an instruction names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Space {
    Generic,
    Global,
    SharedCta,
    SharedCluster,
    Local,
    Const,
    Param,
}

/// What an access says about order.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Order {
    /// Relaxed or stronger, volatile, atomic: two such accesses never race.
    pub(crate) strong: bool,
    pub(crate) acquire: bool,
    pub(crate) release: bool,
    /// Whether it is strong for the own CTA alone: `.cta`.
    pub(crate) within_cta: bool,
    /// Whether it goes through the cache of memory that nobody writes: `.nc`.
    pub(crate) non_coherent: bool,
}

/// What an instruction does.
pub(crate) enum Uop {
    Alu {
        f: LaneFn,
        dst: Dst,
        srcs: Vec<Src>,
    },
    /// Several sources into parts of one result; compilers leave parts that nobody reads undefined.
    Pack {
        f: LaneFn,
        dst: Dst,
        srcs: Vec<Src>,
    },
    /// A sum that takes a carry, leaves one, or both.
    Carry {
        op: Carry,
        dst: Dst,
        srcs: Vec<Src>,
    },
    /// Two predicates from one comparison; `packed` compares halves separately.
    Compare {
        f: LaneFn,
        p: Dst,
        q: Dst,
        srcs: Vec<Src>,
        packed: bool,
        combine: Option<(Combine, Src)>,
    },
    /// `mov` of one value.
    Move {
        dst: Dst,
        src: Src,
    },
    /// Each source to its destination, all read first.
    Copy {
        dsts: Vec<Dst>,
        srcs: Vec<Src>,
    },
    Unpack {
        dsts: Vec<Dst>,
        src: Src,
        bits: u32,
    },
    ToGeneric {
        dst: Dst,
        src: Src,
        space: Space,
    },
    FromGeneric {
        dst: Dst,
        src: Src,
        space: Space,
    },
    IsSpace {
        dst: Dst,
        src: Src,
        space: Space,
    },
    MapA {
        dst: Dst,
        src: Src,
        rank: Src,
        generic: bool,
    },
    CtaRank {
        dst: Dst,
        src: Src,
    },
    Load {
        access: Access,
        dsts: Vec<Dst>,
    },
    Store {
        access: Access,
        srcs: Vec<Src>,
    },
    Atomic(Box<Atomic>),
    /// `discard.L2`: what a line of global memory holds means nothing any more.
    Discard {
        addr: Addr,
    },
    LoadMatrix {
        space: Space,
        addr: Addr,
        dsts: Vec<Reg>,
        transpose: bool,
    },
    StoreMatrix {
        space: Space,
        addr: Addr,
        srcs: Vec<Src>,
        transpose: bool,
    },
    Shuffle {
        mode: Shuffle,
        dst: Dst,
        ok: Dst,
        value: Src,
        lane: Src,
        clamp: Src,
        mask: Src,
    },
    Vote {
        mode: Vote,
        dst: Dst,
        value: Src,
        mask: Src,
    },
    Match {
        all: bool,
        dst: Dst,
        ok: Dst,
        value: Src,
        mask: Src,
    },
    Redux {
        op: Combine,
        signed: bool,
        dst: Dst,
        value: Src,
        mask: Src,
    },
    Elect {
        dst: Dst,
        ok: Dst,
        mask: Src,
    },
    ActiveMask {
        dst: Dst,
    },
    WarpSync {
        mask: Src,
    },
    MoveMatrix {
        dst: Dst,
        src: Src,
    },
    WmmaLoad {
        fragment: Fragment,
        place: WmmaPlace,
        dsts: Vec<Reg>,
    },
    WmmaStore {
        fragment: Fragment,
        place: WmmaPlace,
        srcs: Vec<Src>,
    },
    Wmma(Box<Wmma>),
    Mma(Box<Mma>),
    /// `mma` of doubles, of less than a byte, or of eight rows.
    MmaOther(Box<Wmma>),
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        keep: u32,
    },
    CpAsync(Box<CpAsync>),
    CpCommit,
    CpWait {
        keep: u32,
        commit: bool,
    },
    CpArrive {
        mbarrier: Addr,
        space: Space,
        noinc: bool,
    },
    Bulk(Box<Bulk>),
    /// `tensormap.replace`.
    ReplaceField {
        place: Addr,
        space: Space,
        field: Field,
        value: Src,
    },
    /// `tensormap.cp_fenceproxy`.
    CopyMap {
        dst: Addr,
        src: Addr,
    },
    /// `fence.proxy.tensormap::generic.acquire`.
    AcquireMap {
        place: Addr,
    },
    BulkCommit,
    BulkWait {
        keep: u32,
        read_only: bool,
    },
    Mbarrier {
        op: MbarrierOp,
        addr: Addr,
        space: Space,
    },
    PendingCount {
        dst: Dst,
        state: Src,
    },
    Fence(Fence),
    Barrier {
        id: Src,
        count: Option<Src>,
        wait: bool,
        vote: Option<(BarVote, Dst, Src)>,
        aligned: bool,
    },
    ClusterArrive {
        release: bool,
        aligned: bool,
    },
    ClusterWait {
        acquire: bool,
        aligned: bool,
    },
    SetMaxReg {
        count: u32,
        grow: bool,
    },
    Branch {
        target: u32,
    },
    /// `brx.idx`.
    BranchTo {
        index: Src,
        targets: Vec<u32>,
    },
    Call(Box<Call>),
    /// The end of a function: of the routine with that number.
    Return {
        routine: usize,
    },
    /// `alloca`: bytes of the thread's stack.
    Alloca {
        dst: Dst,
        bytes: Src,
        align: u32,
    },
    StackSave {
        dst: Dst,
    },
    StackRestore {
        src: Src,
    },
    Exit,
    Trap,
    /// What cannot be simulated: the launch fails where it is executed.
    Refused(Box<SimError>),
    /// Hints: prefetches, policies without a result, `nanosleep`, `griddepcontrol`.
    Nop,
}
