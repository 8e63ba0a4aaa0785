//! The vocabulary of instructions: mnemonics ([`Op`]) and their dotted modifiers ([`Mod`]).
//!
//! The rows of [`crate::table`] say which modifiers a mnemonic may have.

use crate::{names::named, types::ScalarType};
use std::fmt;

named! {
    /// A mnemonic. Multi-part names such as `cp.async.bulk.tensor` are one operation with one meaning; the
    /// parser takes the longest that fits.
    Op {
        Abs "abs", Add "add", Addc "addc", Bfe "bfe", Bfi "bfi", Bfind "bfind", Bmsk "bmsk", Brev "brev", Clz "clz", Copysign "copysign",
        Cos "cos", Div "div", Dp2a "dp2a", Dp4a "dp4a", Ex2 "ex2", Fma "fma", Fns "fns", Lg2 "lg2", Mad "mad", Mad24 "mad24", Madc "madc", Max "max", Min "min",
        Mul "mul", Mul24 "mul24", Neg "neg", Popc "popc", Rcp "rcp", Rem "rem", Rsqrt "rsqrt", Sad "sad", Sin "sin",
        Sqrt "sqrt", Sub "sub", Subc "subc", Szext "szext", Tanh "tanh", Testp "testp",
        Vabsdiff2 "vabsdiff2", Vabsdiff4 "vabsdiff4", Vadd2 "vadd2", Vadd4 "vadd4", Vavrg2 "vavrg2",
        Vavrg4 "vavrg4", Vmax2 "vmax2", Vmax4 "vmax4", Vmin2 "vmin2", Vmin4 "vmin4", Vset2 "vset2", Vset4 "vset4", Vsub2 "vsub2", Vsub4 "vsub4",
        And "and", Cnot "cnot", Lop3 "lop3", Not "not", Or "or", Prmt "prmt", Shf "shf", Shl "shl", Shr "shr",
        Xor "xor",
        Selp "selp", Set "set", Setp "setp", Slct "slct",
        Cvt "cvt", CvtPack "cvt.pack", Cvta "cvta", Getctarank "getctarank", Isspacep "isspacep", Mapa "mapa", Mov "mov",
        Applypriority "applypriority", Atom "atom", Createpolicy "createpolicy", Discard "discard", Ld "ld", Ldmatrix "ldmatrix",
        Prefetch "prefetch", Prefetchu "prefetchu", Red "red", RedAsync "red.async",
        St "st", StAsync "st.async", Stmatrix "stmatrix",
        CpAsync "cp.async", CpAsyncCommitGroup "cp.async.commit_group", CpAsyncWaitGroup "cp.async.wait_group",
        CpAsyncWaitAll "cp.async.wait_all", CpAsyncMbarrierArrive "cp.async.mbarrier.arrive",
        CpAsyncBulk "cp.async.bulk", CpAsyncBulkCommitGroup "cp.async.bulk.commit_group",
        CpAsyncBulkWaitGroup "cp.async.bulk.wait_group", CpAsyncBulkPrefetch "cp.async.bulk.prefetch",
        CpAsyncBulkTensor "cp.async.bulk.tensor", CpAsyncBulkPrefetchTensor "cp.async.bulk.prefetch.tensor",
        CpReduceAsyncBulk "cp.reduce.async.bulk", CpReduceAsyncBulkTensor "cp.reduce.async.bulk.tensor",
        TensormapReplace "tensormap.replace", TensormapCpFenceproxy "tensormap.cp_fenceproxy",
        MbarrierInit "mbarrier.init", MbarrierInval "mbarrier.inval", MbarrierArrive "mbarrier.arrive",
        MbarrierArriveDrop "mbarrier.arrive_drop", MbarrierExpectTx "mbarrier.expect_tx",
        MbarrierCompleteTx "mbarrier.complete_tx", MbarrierTestWait "mbarrier.test_wait",
        MbarrierTryWait "mbarrier.try_wait", MbarrierPendingCount "mbarrier.pending_count",
        Fence "fence", FenceProxy "fence.proxy", FenceMbarrierInit "fence.mbarrier_init", Membar "membar",
        BarArrive "bar.arrive", BarRed "bar.red", BarSync "bar.sync", BarWarpSync "bar.warp.sync",
        BarrierArrive "barrier.arrive", BarrierRed "barrier.red", BarrierSync "barrier.sync",
        BarrierClusterArrive "barrier.cluster.arrive", BarrierClusterWait "barrier.cluster.wait",
        Activemask "activemask", ElectSync "elect.sync", Match "match", ReduxSync "redux.sync",
        ShflSync "shfl.sync", VoteSync "vote.sync",
        MmaSync "mma.sync", MmaSp "mma.sp.sync", MmaSpOrdered "mma.sp::ordered_metadata.sync", Movmatrix "movmatrix", WmmaLoadA "wmma.load.a", WmmaLoadB "wmma.load.b",
        WmmaLoadC "wmma.load.c", WmmaMma "wmma.mma", WmmaStoreD "wmma.store.d", WgmmaCommitGroup "wgmma.commit_group", WgmmaFence "wgmma.fence",
        WgmmaMmaAsync "wgmma.mma_async", WgmmaWaitGroup "wgmma.wait_group",
        Bra "bra", BrxIdx "brx.idx", Brkpt "brkpt", Call "call", Exit "exit", Griddepcontrol "griddepcontrol", Nanosleep "nanosleep", Ret "ret",
        Setmaxnreg "setmaxnreg", Alloca "alloca", Stackrestore "stackrestore", Stacksave "stacksave", Trap "trap",
    }
}

macro_rules! modifiers {
    ($($variant:ident $text:literal),* $(,)?) => {
        /// A dotted word behind a mnemonic.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Mod {
            /// A type.
            Type(ScalarType),
            /// A matrix shape.
            Shape(Shape),
            $(#[doc = concat!("`.", $text, "`")] $variant),*
        }

        impl Mod {
            /// Every modifier that is neither type nor shape.
            pub const WORDS: &'static [Self] = &[$(Self::$variant),*];

            fn word(self) -> Option<&'static str> {
                match self { Self::Type(_) | Self::Shape(_) => None, $(Self::$variant => Some($text)),* }
            }

            fn parse_word(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

modifiers! {
    // rounding and arithmetic
    Rn "rn", Rz "rz", Rm "rm", Rp "rp", Rna "rna", Rni "rni", Rzi "rzi", Rmi "rmi", Rpi "rpi",
    Ftz "ftz", Sat "sat", Satfinite "satfinite", Relu "relu", NaN "NaN",
    Cc "cc", Approx "approx", Full "full", Lo "lo", Hi "hi", Wide "wide", Noftz "noftz", Shiftamt "shiftamt",
    // comparison (`lo`, `hi` serve both mul and setp)
    Eq "eq", Ne "ne", Lt "lt", Le "le", Gt "gt", Ge "ge", Ls "ls", Hs "hs",
    Equ "equ", Neu "neu", Ltu "ltu", Leu "leu", Gtu "gtu", Geu "geu", Num "num", Nan "nan",
    Finite "finite", Infinite "infinite", Number "number", Notanumber "notanumber", Normal "normal",
    Subnormal "subnormal",
    // combining operators
    Add "add", Min "min", Max "max", Inc "inc", Dec "dec", And "and", Or "or", Xor "xor", Exch "exch", Cas "cas",
    Popc "popc",
    // byte permutes and funnel shifts
    F4e "f4e", B4e "b4e", Rc8 "rc8", Ecl "ecl", Ecr "ecr", Rc16 "rc16", L "l", R "r", Clamp "clamp", Wrap "wrap",
    // state spaces
    Global "global", Shared "shared", SharedCta "shared::cta", SharedCluster "shared::cluster", Local "local",
    Const "const", Param "param", To "to",
    // memory order and scope
    Weak "weak", Volatile "volatile", Relaxed "relaxed", Acquire "acquire", Release "release", AcqRel "acq_rel",
    Sc "sc", Mmio "mmio", Cta "cta", Cluster "cluster", Gpu "gpu", Gl "gl", Sys "sys",
    // caches
    Nc "nc", Ca "ca", Cg "cg", Cs "cs", Lu "lu", Cv "cv", Wb "wb", Wt "wt", L1 "L1", L2 "L2",
    L1EvictNormal "L1::evict_normal", L1EvictUnchanged "L1::evict_unchanged", L1EvictFirst "L1::evict_first",
    L1EvictLast "L1::evict_last", L1NoAllocate "L1::no_allocate", L2EvictNormal "L2::evict_normal",
    L2EvictFirst "L2::evict_first", L2EvictLast "L2::evict_last", L2EvictUnchanged "L2::evict_unchanged",
    L2CacheHint "L2::cache_hint", L2B64 "L2::64B", L2B128 "L2::128B", L2B256 "L2::256B",
    Fractional "fractional", Range "range", Tensormap "tensormap",
    // vectors
    V2 "v2", V4 "v4", V8 "v8", X1 "x1", X2 "x2", X4 "x4", Trans "trans",
    // asynchronous copies
    Read "read", BulkGroup "bulk_group", CompleteTxBytes "mbarrier::complete_tx::bytes",
    MulticastCluster "multicast::cluster", Tile "tile", D1 "1d", D2 "2d", D3 "3d", D4 "4d", D5 "5d",
    // tensor maps
    TensormapGeneric "tensormap::generic", B1024 "b1024", GlobalAddress "global_address", Rank "rank",
    BoxDim "box_dim", GlobalDim "global_dim", GlobalStride "global_stride", ElementStride "element_stride",
    Elemtype "elemtype", InterleaveLayout "interleave_layout", SwizzleMode "swizzle_mode", FillMode "fill_mode",
    // barriers
    AsyncGeneric "async::generic", RestrictCta "sync_restrict::shared::cta",
    RestrictCluster "sync_restrict::shared::cluster",
    NoComplete "noComplete", Noinc "noinc", ExpectTx "expect_tx", Parity "parity", Async "async",
    Alias "alias",
    // convergence and warps
    Sync "sync", Aligned "aligned", All "all", Any "any", Uni "uni", Ballot "ballot", Bfly "bfly", Down "down",
    Idx "idx", Up "up",
    // matrices
    RowMajor "row", ColMajor "col",
    // control
    LaunchDependents "launch_dependents", Wait "wait",
}

/// The extents of a matrix instruction; `k` is 0 where the text names none (`.m8n8`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Shape {
    /// Rows of D.
    pub m: u16,
    /// Columns of D.
    pub n: u16,
    /// Depth of the product.
    pub k: u16,
}

/// Shorthand for [`Shape`].
pub const fn shape(m: u16, n: u16, k: u16) -> Shape {
    Shape { m, n, k }
}

impl Shape {
    /// Reads `m64n128k16` and `m8n8`.
    pub fn parse(text: &str) -> Option<Self> {
        let (m, rest) = text.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k').map_or((rest, None), |(n, k)| (n, Some(k)));
        let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok()).flatten();
        let parsed = Self { m: number(m)?, n: number(n)?, k: k.map_or(Some(0), number)? };
        (parsed.to_string() == text).then_some(parsed)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}n{}", self.m, self.n)?;
        if self.k > 0 { write!(f, "k{}", self.k) } else { Ok(()) }
    }
}

impl Mod {
    /// Reads the word behind a dot.
    pub fn parse(text: &str) -> Option<Self> {
        let ty = || ScalarType::parse(text).map(Self::Type);
        Self::parse_word(text).or_else(ty).or_else(|| Shape::parse(text).map(Self::Shape))
    }

    /// The type, if this modifier is one.
    pub const fn as_type(self) -> Option<ScalarType> {
        if let Self::Type(ty) = self { Some(ty) } else { None }
    }

    /// The shape, if this modifier is one.
    pub const fn as_shape(self) -> Option<Shape> {
        if let Self::Shape(shape) = self { Some(shape) } else { None }
    }
}

impl From<ScalarType> for Mod {
    fn from(ty: ScalarType) -> Self {
        Self::Type(ty)
    }
}

impl From<Shape> for Mod {
    fn from(shape: Shape) -> Self {
        Self::Shape(shape)
    }
}

/// The word without its dot.
impl fmt::Display for Mod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Type(ty) => ty.fmt(f),
            Self::Shape(shape) => shape.fmt(f),
            word => f.write_str(word.word().unwrap_or_default()),
        }
    }
}
