//! What micro-operations carry besides registers and addresses: operators, matrices, copies, barriers, calls.

use super::uop::{Addr, Dst, Order, Reg, Space, Src};
use crate::numeric::{Format, Rounding};
use flashcore_ptx::types::ScalarType;

/// A combining operator of atomics, reductions and votes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Combine {
    Add,
    Min,
    Max,
    Inc,
    Dec,
    And,
    Or,
    Xor,
    Exch,
    Cas,
}

/// `shfl` modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Bfly,
    Idx,
}

/// Votes of a warp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// Reductions of `bar.red`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BarVote {
    And,
    Or,
    Popc,
}

/// A load or store of `dsts.len()` or `srcs.len()` elements.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) addr: Addr,
    /// Bytes of an element.
    pub(crate) bytes: u32,
    /// Whether a narrow element is sign-extended.
    pub(crate) signed: bool,
    pub(crate) order: Order,
}

/// `atom` and `red`.
#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    pub(crate) access: Access,
    pub(crate) op: Combine,
    pub(crate) ty: ScalarType,
    /// What was there before, for each value.
    pub(crate) dsts: Vec<Dst>,
    /// One value, several for vectors, or two halves of 128 bits.
    pub(crate) values: Vec<Src>,
    /// The second values of `cas`.
    pub(crate) swaps: Vec<Src>,
}

/// `mma.sync`.
#[derive(Clone, Debug)]
pub(crate) struct Mma {
    pub(crate) k: usize,
    /// What A and B hold.
    pub(crate) element: Element,
    pub(crate) right: Element,
    /// Whether sums of bytes are clamped.
    pub(crate) saturate: bool,
    pub(crate) accumulate_f16: bool,
    pub(crate) d: Vec<Reg>,
    pub(crate) a: Vec<Src>,
    pub(crate) b: Vec<Src>,
    pub(crate) c: Vec<Src>,
    /// Which half of A is stored, where it is not all of it.
    pub(crate) sparse: Option<Sparse>,
}

/// The metadata of a sparse A.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sparse {
    pub(crate) metadata: Src,
    /// Which lanes of each four hold it.
    pub(crate) selector: usize,
    /// Whether the text promises ascending places.
    pub(crate) ordered: bool,
}

/// What tensor cores multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Element {
    /// A float format of 8 or 16 bits.
    Small(Format, u32),
    /// TF32 in 32 bits.
    Tf32,
    U8,
    S8,
}

impl Element {
    /// Bits of an element.
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::Small(_, bits) => bits,
            Self::Tf32 => 32,
            Self::U8 | Self::S8 => 8,
        }
    }
}

/// A fragment of `wmma`: a matrix spread over the registers of a warp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fragment {
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) element: ScalarType,
}

/// A fragment in memory.
#[derive(Clone, Debug)]
pub(crate) struct WmmaPlace {
    pub(crate) space: Space,
    pub(crate) addr: Addr,
    /// Elements between rows, or between columns.
    pub(crate) stride: Src,
    pub(crate) col_major: bool,
}

/// `wmma.mma`.
#[derive(Clone, Debug)]
pub(crate) struct Wmma {
    /// D, A, B, C.
    pub(crate) fragments: [Fragment; 4],
    pub(crate) d: Vec<Reg>,
    pub(crate) sources: [Vec<Src>; 3],
    pub(crate) saturate: bool,
    /// How bits are multiplied, where they are: by `and` or by `xor`.
    pub(crate) bits: Option<Combine>,
    pub(crate) rounding: Rounding,
}

/// `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub(crate) struct Wgmma {
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// What A and B hold.
    pub(crate) element: Element,
    pub(crate) right: Element,
    /// Whether sums of bytes are clamped.
    pub(crate) saturate: bool,
    pub(crate) accumulate_f16: bool,
    pub(crate) d: Vec<Reg>,
    pub(crate) a: WgmmaA,
    pub(crate) b: Src,
    /// False: D = A·B without the old D.
    pub(crate) scale_d: Src,
    pub(crate) negate_a: bool,
    pub(crate) negate_b: bool,
    /// MN-major operands.
    pub(crate) transpose_a: bool,
    pub(crate) transpose_b: bool,
}

/// The left operand of a `wgmma`.
#[derive(Clone, Debug)]
pub(crate) enum WgmmaA {
    Registers(Vec<Reg>),
    Descriptor(Src),
}

/// `cp.async`.
#[derive(Clone, Debug)]
pub(crate) struct CpAsync {
    pub(crate) dst: Addr,
    pub(crate) src: Addr,
    pub(crate) bytes: u32,
    pub(crate) limit: CpLimit,
}

/// How much of a `cp.async` is read; the rest is zeros.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CpLimit {
    All,
    /// That many bytes.
    Bytes(Src),
    /// Nothing where the predicate holds.
    IgnoreIf(Src),
}

/// One side of a bulk copy that is not shared memory of the issuing CTA.
#[derive(Clone, Debug)]
pub(crate) enum BulkPlace {
    Global(Addr),
    Tensor { map: Addr, coords: Vec<Src> },
}

/// Bulk copies, tensor copies and their reductions.
#[derive(Clone, Debug)]
pub(crate) enum Bulk {
    /// Global memory to shared memory, counted by an mbarrier.
    Load {
        dst: Addr,
        src: BulkPlace,
        size: Option<Src>,
        mbarrier: Addr,
        multicast: Option<Src>,
        cluster: bool,
    },
    /// Own shared memory to shared memory of the cluster, counted by an mbarrier there.
    Remote { dst: Addr, src: Addr, size: Src, mbarrier: Addr, reduce: Option<(Combine, ScalarType)> },
    /// Registers of `bytes` bytes each to shared memory of the cluster, counted by an mbarrier there.
    Send { dst: Addr, srcs: Vec<Src>, bytes: u32, mbarrier: Addr, reduce: Option<(Combine, ScalarType)> },
    /// Own shared memory to global memory, in a bulk group.
    Store { dst: BulkPlace, src: Addr, size: Option<Src>, reduce: Option<(Combine, Option<ScalarType>)> },
}

/// What to do to an mbarrier.
#[derive(Clone, Debug)]
pub(crate) enum MbarrierOp {
    Init { count: Src },
    Inval,
    Arrive { state: Dst, count: Src, expect: Option<Src>, drop: bool, no_complete: bool, release: bool },
    ExpectTx { bytes: Src },
    CompleteTx { bytes: Src },
    Wait { done: Dst, phase: WaitPhase, may_block: bool, acquire: bool },
}

/// How a wait names its phase.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitPhase {
    Parity(Src),
    State(Src),
}

/// Fences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fence {
    /// `fence`, `membar`; of scope `.cta` or wider, in one direction or both.
    Memory { within_cta: bool, acquire: bool, release: bool },
    /// `fence.proxy.async`, for shared memory, global memory or both.
    ProxyAsync { shared: bool, global: bool },
    /// `fence.mbarrier_init`: what follows publishes the initialisations of mbarriers, even if it is relaxed.
    MbarrierInit,
    /// Fences without effect here: `fence.proxy.alias`.
    Other,
}

/// `add.cc` and its like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Carry {
    pub(crate) ty: ScalarType,
    /// Whether the second summand is taken away.
    pub(crate) subtract: bool,
    /// Whether the first summand is the upper half of a product, or the lower one; else there is no product.
    pub(crate) product: Option<bool>,
    pub(crate) takes: bool,
    pub(crate) leaves: bool,
}

/// `call`.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) callee: Callee,
    /// Where the arguments lie in the caller's frame.
    pub(crate) args: Vec<Piece>,
    /// Where the result goes in the caller's frame.
    pub(crate) result: Option<Piece>,
    /// Bytes of the caller's frame.
    pub(crate) frame: u32,
}

/// Who is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Callee {
    /// A routine of the program, by number.
    Routine(usize),
    /// A function that the system provides.
    Builtin(Builtin),
    /// An address.
    Pointer(Src),
}

/// Functions that the system provides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Builtin {
    /// `vprintf`: the text goes to the outcome.
    Print,
    /// `__assertfail`.
    Assert,
}

/// Bytes of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
}
