//! Scalar types of PTX: width, kind, the prefix of register names, and which register may hold which operand.

use crate::names::named;

named! {
    /// A fundamental or packed type, as it stands behind the dot.
    ScalarType {
        Pred "pred",
        B1 "b1", U4 "u4", S4 "s4",
        B8 "b8", B16 "b16", B32 "b32", B64 "b64", B128 "b128",
        U8 "u8", U16 "u16", U16x2 "u16x2", U32 "u32", U64 "u64",
        S8 "s8", S16 "s16", S16x2 "s16x2", S32 "s32", S64 "s64",
        F16 "f16", F16x2 "f16x2", Bf16 "bf16", Bf16x2 "bf16x2", Tf32 "tf32", F32 "f32", F64 "f64",
        E4m3 "e4m3", E5m2 "e5m2", E4m3x2 "e4m3x2", E5m2x2 "e5m2x2",
    }
}

/// What the bits of a type mean.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TypeKind {
    /// One bit, true or false.
    Pred,
    /// Untyped.
    Bits,
    /// Unsigned integer.
    Unsigned,
    /// Two's complement integer.
    Signed,
    /// Floating point, one value or several packed.
    Float,
}

impl ScalarType {
    /// Width in bits; a predicate counts as 1.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Pred | Self::B1 => 1,
            Self::U4 | Self::S4 => 4,
            Self::B8 | Self::U8 | Self::S8 | Self::E4m3 | Self::E5m2 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 | Self::E4m3x2 | Self::E5m2x2 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::Tf32 => 32,
            Self::F16x2 | Self::Bf16x2 | Self::U16x2 | Self::S16x2 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
            Self::B128 => 128,
        }
    }

    /// Width in bytes in memory.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// What the bits mean.
    pub const fn kind(self) -> TypeKind {
        match self {
            Self::Pred => TypeKind::Pred,
            Self::B1 | Self::B8 | Self::B16 | Self::B32 | Self::B64 | Self::B128 => TypeKind::Bits,
            Self::U4 | Self::U8 | Self::U16 | Self::U16x2 | Self::U32 | Self::U64 => TypeKind::Unsigned,
            Self::S4 | Self::S8 | Self::S16 | Self::S16x2 | Self::S32 | Self::S64 => TypeKind::Signed,
            _ => TypeKind::Float,
        }
    }

    /// Whether it is a signed or unsigned integer.
    pub const fn is_integer(self) -> bool {
        matches!(self.kind(), TypeKind::Unsigned | TypeKind::Signed)
    }

    /// Whether it is a floating-point type, packed or not.
    pub const fn is_float(self) -> bool {
        matches!(self.kind(), TypeKind::Float)
    }

    /// The integer of twice the width, as `mul.wide` produces it.
    pub const fn wide(self) -> Option<Self> {
        Some(match self {
            Self::U16 => Self::U32,
            Self::S16 => Self::S32,
            Self::U32 => Self::U64,
            Self::S32 => Self::S64,
            _ => return None,
        })
    }

    /// Prefix of derived register names; those of the common types are nvcc's.
    pub const fn register_prefix(self) -> &'static str {
        match self {
            Self::Pred => "%p",
            Self::B1 => "%bit",
            Self::U4 => "%un",
            Self::S4 => "%sn",
            Self::B8 => "%rc",
            Self::B16 => "%rs",
            Self::B32 => "%r",
            Self::B64 => "%rd",
            Self::B128 => "%rq",
            Self::U8 => "%uc",
            Self::U16 => "%us",
            Self::U16x2 => "%uss",
            Self::U32 => "%u",
            Self::U64 => "%ud",
            Self::S8 => "%sc",
            Self::S16 => "%ss",
            Self::S16x2 => "%sss",
            Self::S32 => "%s",
            Self::S64 => "%sd",
            Self::F16 => "%h",
            Self::F16x2 => "%hh",
            Self::Bf16 => "%bh",
            Self::Bf16x2 => "%bhh",
            Self::Tf32 => "%tf",
            Self::F32 => "%f",
            Self::F64 => "%fd",
            Self::E4m3 => "%qa",
            Self::E5m2 => "%qb",
            Self::E4m3x2 => "%qaa",
            Self::E5m2x2 => "%qbb",
        }
    }

    /// Whether PTX lets one declare registers of this type.
    pub const fn can_be_register(self) -> bool {
        !matches!(
            self,
            Self::B1
                | Self::U4
                | Self::S4
                | Self::U16x2
                | Self::S16x2
                | Self::Bf16
                | Self::Bf16x2
                | Self::Tf32
                | Self::E4m3
                | Self::E5m2
                | Self::E4m3x2
                | Self::E5m2x2
        )
    }

    /// Whether a register declared as `register` may stand where an instruction of this type wants an operand
    /// (PTX ISA, "Operand Type Checking"): equal width, and the kinds agree or one of them is untyped.
    pub fn accepts(self, register: Self) -> bool {
        self.bits() == register.bits() && self.kind_accepts(register)
    }

    /// Like [`accepts`](Self::accepts), but the register may be wider: the rule of `ld`, `st` and `cvt`.
    pub fn accepts_wider(self, register: Self) -> bool {
        let wider = register.bits() > self.bits() && !self.is_float() && !register.is_float();
        self.accepts(register) || (wider && self != Self::Pred && register != Self::Pred)
    }

    fn kind_accepts(self, register: Self) -> bool {
        use TypeKind::{Bits, Pred};
        match (self.kind(), register.kind()) {
            (Pred, Pred) => true,
            (Pred, _) | (_, Pred) => false,
            (Bits, _) | (_, Bits) => true,
            _ => self == register || (self.is_integer() && register.is_integer()),
        }
    }
}

named! {
    /// A read-only register that the hardware provides.
    SpecialReg {
        TidX "%tid.x", TidY "%tid.y", TidZ "%tid.z",
        NtidX "%ntid.x", NtidY "%ntid.y", NtidZ "%ntid.z",
        CtaidX "%ctaid.x", CtaidY "%ctaid.y", CtaidZ "%ctaid.z",
        NctaidX "%nctaid.x", NctaidY "%nctaid.y", NctaidZ "%nctaid.z",
        ClusteridX "%clusterid.x", ClusteridY "%clusterid.y", ClusteridZ "%clusterid.z",
        NclusteridX "%nclusterid.x", NclusteridY "%nclusterid.y", NclusteridZ "%nclusterid.z",
        ClusterCtaidX "%cluster_ctaid.x", ClusterCtaidY "%cluster_ctaid.y", ClusterCtaidZ "%cluster_ctaid.z",
        ClusterNctaidX "%cluster_nctaid.x", ClusterNctaidY "%cluster_nctaid.y",
        ClusterNctaidZ "%cluster_nctaid.z",
        ClusterCtarank "%cluster_ctarank", ClusterNctarank "%cluster_nctarank",
        IsExplicitCluster "%is_explicit_cluster",
        Laneid "%laneid", Warpid "%warpid", Nwarpid "%nwarpid", Smid "%smid", Nsmid "%nsmid", Gridid "%gridid",
        LanemaskEq "%lanemask_eq", LanemaskLe "%lanemask_le", LanemaskLt "%lanemask_lt",
        LanemaskGe "%lanemask_ge", LanemaskGt "%lanemask_gt",
        Clock "%clock", ClockHi "%clock_hi", Clock64 "%clock64", Globaltimer "%globaltimer",
        GlobaltimerLo "%globaltimer_lo", GlobaltimerHi "%globaltimer_hi", AggrSmemSize "%aggr_smem_size",
        DynamicSmemSize "%dynamic_smem_size", TotalSmemSize "%total_smem_size",
        ReservedSmemBegin "%reserved_smem_offset_begin", ReservedSmemEnd "%reserved_smem_offset_end",
        ReservedSmemCap "%reserved_smem_offset_cap", ReservedSmem0 "%reserved_smem_offset_0",
        ReservedSmem1 "%reserved_smem_offset_1",
        // Where the driver puts the address of a cooperative grid's barrier: its upper and its lower half.
        Envreg1 "%envreg1", Envreg2 "%envreg2",
    }
}

impl SpecialReg {
    /// The type it reads as.
    pub const fn ty(self) -> ScalarType {
        match self {
            Self::Clock64 | Self::Globaltimer | Self::Gridid => ScalarType::U64,
            Self::IsExplicitCluster => ScalarType::Pred,
            _ => ScalarType::U32,
        }
    }

    /// Whether it arrived with thread-block clusters (PTX 7.8, sm_90).
    pub const fn needs_clusters(self) -> bool {
        matches!(
            self,
            Self::ClusteridX
                | Self::ClusteridY
                | Self::ClusteridZ
                | Self::NclusteridX
                | Self::NclusteridY
                | Self::NclusteridZ
                | Self::ClusterCtaidX
                | Self::ClusterCtaidY
                | Self::ClusterCtaidZ
                | Self::ClusterNctaidX
                | Self::ClusterNctaidY
                | Self::ClusterNctaidZ
                | Self::ClusterCtarank
                | Self::ClusterNctarank
                | Self::IsExplicitCluster
        )
    }
}
