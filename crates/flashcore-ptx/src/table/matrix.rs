//! Tensor cores: `mma.sync` and `wgmma`.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op, shape};
use crate::target::Target::{Sm75, Sm80, Sm89, Sm90, Sm90a};
use crate::types::ScalarType::*;
use crate::version::{V7_0, V7_1, V7_8, V8_0, V8_4, V8_7};

/// The usual head of an `mma.sync`: shape and layouts.
macro_rules! mma {
    ($m:literal x $n:literal x $k:literal, $cd:ident, $ab:ident : d $d:literal a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape($m, $n, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                one(&[Mod::Type($cd)]),
                one(&[Mod::Type($ab)]),
                one(&[Mod::Type($ab)]),
                one(&[Mod::Type($cd)]),
            ],
            &[
                dst(Kind::Vector(accumulator($cd), Count::Is($d))),
                src(Kind::Vector(is(B32), Count::Is($a))),
                src(Kind::Vector(is(B32), Count::Is($b))),
                src(Kind::Vector(accumulator($cd), Count::Is($d))),
            ],
        )
        .converge(Converge::Warp)
        .since_sm80()
    };
}

/// An `mma.sync` of bytes, whose sums may be clamped.
macro_rules! bytes {
    ($m:literal x $n:literal x $k:literal, $ta:ident, $tb:ident : a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape($m, $n, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                opt(&[Satfinite]),
                one(&[Mod::Type(S32)]),
                one(&[Mod::Type($ta)]),
                one(&[Mod::Type($tb)]),
                one(&[Mod::Type(S32)]),
            ],
            &[
                dst(Kind::Vector(is(S32), Count::Is(4))),
                src(Kind::Vector(is(B32), Count::Is($a))),
                src(Kind::Vector(is(B32), Count::Is($b))),
                src(Kind::Vector(is(S32), Count::Is(4))),
            ],
        )
        .converge(Converge::Warp)
        .since_sm80()
    };
}

/// An `mma.sync` into 32-bit integers.
macro_rules! nibbles {
    ($m:literal x $n:literal x $k:literal, $ta:ident, $tb:ident : d $d:literal a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape($m, $n, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                opt(&[Satfinite]),
                one(&[Mod::Type(S32)]),
                one(&[Mod::Type($ta)]),
                one(&[Mod::Type($tb)]),
                one(&[Mod::Type(S32)]),
            ],
            integers!($d, $a, $b),
        )
        .converge(Converge::Warp)
        .since(Sm75, V7_0)
    };
}

macro_rules! integers {
    ($d:literal, $a:literal, $b:literal) => {
        &[
            dst(Kind::Vector(is(S32), Count::Is($d))),
            src(Kind::Vector(is(B32), Count::Is($a))),
            src(Kind::Vector(is(B32), Count::Is($b))),
            src(Kind::Vector(is(S32), Count::Is($d))),
        ]
    };
}

/// An `mma.sync` that counts bits.
macro_rules! bits {
    ($m:literal x $n:literal x $k:literal, $op:ident : d $d:literal a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape($m, $n, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                one(&[Mod::Type(S32)]),
                one(&[Mod::Type(B1)]),
                one(&[Mod::Type(B1)]),
                one(&[Mod::Type(S32)]),
                one(&[$op]),
                one(&[Popc]),
            ],
            integers!($d, $a, $b),
        )
        .converge(Converge::Warp)
    };
}

/// An `mma.sync` of doubles.
macro_rules! doubles {
    ($m:literal x $n:literal x $k:literal : d $d:literal a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape($m, $n, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                opt(&[Rn, Rz, Rm, Rp]),
                one(&[Mod::Type(F64)]),
                one(&[Mod::Type(F64)]),
                one(&[Mod::Type(F64)]),
                one(&[Mod::Type(F64)]),
            ],
            &[
                dst(Kind::Vector(is(F64), Count::Is($d))),
                src(Kind::Vector(is(F64), Count::Is($a))),
                src(Kind::Vector(is(F64), Count::Is($b))),
                src(Kind::Vector(is(F64), Count::Is($d))),
            ],
        )
        .converge(Converge::Warp)
    };
}

/// An `mma.sync` of two 8-bit floats, perhaps of different kinds.
macro_rules! narrow {
    ($k:literal, $cd:ident, $ta:ident, $tb:ident : d $d:literal a $a:literal b $b:literal) => {
        row(
            Class::Tensor,
            Op::MmaSync,
            &[
                one(&[Aligned]),
                one(&[Shape(shape(16, 8, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                one(&[Mod::Type($cd)]),
                one(&[Mod::Type($ta)]),
                one(&[Mod::Type($tb)]),
                one(&[Mod::Type($cd)]),
            ],
            &[
                dst(Kind::Vector(accumulator($cd), Count::Is($d))),
                src(Kind::Vector(is(B32), Count::Is($a))),
                src(Kind::Vector(is(B32), Count::Is($b))),
                src(Kind::Vector(accumulator($cd), Count::Is($d))),
            ],
        )
        .converge(Converge::Warp)
    };
}

/// Registers that hold an accumulator: f16 travels in pairs.
const fn accumulator(ty: crate::types::ScalarType) -> Ty {
    if matches!(ty, F16) { is(B32) } else { is(ty) }
}

/// PTX ISA, "mma".
pub(super) const MMA: &[Row] = &[
    mma!(16 x 8 x 16, F32, F16 : d 4 a 4 b 2),
    mma!(16 x 8 x 16, F32, Bf16 : d 4 a 4 b 2),
    mma!(16 x 8 x 16, F16, F16 : d 2 a 4 b 2),
    mma!(16 x 8 x 8, F32, F16 : d 4 a 2 b 1).since(Sm75, V7_0),
    mma!(16 x 8 x 8, F32, Bf16 : d 4 a 2 b 1),
    mma!(16 x 8 x 8, F16, F16 : d 2 a 2 b 1).since(Sm75, V7_0),
    mma!(16 x 8 x 8, F32, Tf32 : d 4 a 4 b 2),
    mma!(16 x 8 x 4, F32, Tf32 : d 4 a 2 b 1),
    bytes!(16 x 8 x 16, S8, S8 : a 2 b 1),
    bytes!(16 x 8 x 16, S8, U8 : a 2 b 1),
    bytes!(16 x 8 x 16, U8, S8 : a 2 b 1),
    bytes!(16 x 8 x 16, U8, U8 : a 2 b 1),
    bytes!(16 x 8 x 32, S8, S8 : a 4 b 2),
    bytes!(16 x 8 x 32, S8, U8 : a 4 b 2),
    bytes!(16 x 8 x 32, U8, S8 : a 4 b 2),
    bytes!(16 x 8 x 32, U8, U8 : a 4 b 2),
    nibbles!(8 x 8 x 32, S4, S4 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 32, S4, U4 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 32, U4, S4 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 32, U4, U4 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 16, S8, S8 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 16, S8, U8 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 16, U8, S8 : d 2 a 1 b 1),
    nibbles!(8 x 8 x 16, U8, U8 : d 2 a 1 b 1),
    nibbles!(16 x 8 x 32, S4, S4 : d 4 a 2 b 1).since_sm80(),
    nibbles!(16 x 8 x 32, S4, U4 : d 4 a 2 b 1).since_sm80(),
    nibbles!(16 x 8 x 32, U4, S4 : d 4 a 2 b 1).since_sm80(),
    nibbles!(16 x 8 x 32, U4, U4 : d 4 a 2 b 1).since_sm80(),
    nibbles!(16 x 8 x 64, S4, S4 : d 4 a 4 b 2).since_sm80(),
    nibbles!(16 x 8 x 64, S4, U4 : d 4 a 4 b 2).since_sm80(),
    nibbles!(16 x 8 x 64, U4, S4 : d 4 a 4 b 2).since_sm80(),
    nibbles!(16 x 8 x 64, U4, U4 : d 4 a 4 b 2).since_sm80(),
    bits!(8 x 8 x 128, Xor : d 2 a 1 b 1).since(Sm75, V7_0),
    bits!(8 x 8 x 128, And : d 2 a 1 b 1).since(Sm80, V7_1),
    bits!(16 x 8 x 128, Xor : d 4 a 2 b 1).since_sm80(),
    bits!(16 x 8 x 128, And : d 4 a 2 b 1).since(Sm80, V7_1),
    bits!(16 x 8 x 256, Xor : d 4 a 4 b 2).since_sm80(),
    bits!(16 x 8 x 256, And : d 4 a 4 b 2).since(Sm80, V7_1),
    doubles!(8 x 8 x 4 : d 2 a 1 b 1).since_sm80(),
    doubles!(16 x 8 x 4 : d 4 a 2 b 1).since(Sm90, V7_8),
    doubles!(16 x 8 x 8 : d 4 a 4 b 2).since(Sm90, V7_8),
    doubles!(16 x 8 x 16 : d 4 a 8 b 4).since(Sm90, V7_8),
    narrow!(32, F32, E4m3, E4m3 : d 4 a 4 b 2).since(Sm89, V8_4),
    narrow!(32, F32, E4m3, E5m2 : d 4 a 4 b 2).since(Sm89, V8_4),
    narrow!(32, F32, E5m2, E4m3 : d 4 a 4 b 2).since(Sm89, V8_4),
    narrow!(32, F32, E5m2, E5m2 : d 4 a 4 b 2).since(Sm89, V8_4),
    narrow!(32, F16, E4m3, E4m3 : d 2 a 4 b 2).since(Sm89, V8_7),
    narrow!(32, F16, E4m3, E5m2 : d 2 a 4 b 2).since(Sm89, V8_7),
    narrow!(32, F16, E5m2, E4m3 : d 2 a 4 b 2).since(Sm89, V8_7),
    narrow!(32, F16, E5m2, E5m2 : d 2 a 4 b 2).since(Sm89, V8_7),
    narrow!(16, F32, E4m3, E4m3 : d 4 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F32, E4m3, E5m2 : d 4 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F32, E5m2, E4m3 : d 4 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F32, E5m2, E5m2 : d 4 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F16, E4m3, E4m3 : d 2 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F16, E4m3, E5m2 : d 2 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F16, E5m2, E4m3 : d 2 a 2 b 1).since(Sm89, V8_7),
    narrow!(16, F16, E5m2, E5m2 : d 2 a 2 b 1).since(Sm89, V8_7),
];

const DESCRIPTOR: OperandSpec = r(is(B64));
const A_REGISTERS: OperandSpec = src(Kind::Vector(is(B32), Count::Is(4)));
const SCALE_D: OperandSpec = src(Kind::Bool);
const SIGN: OperandSpec = imm(-1, 1, 2);
const TRANSPOSE: OperandSpec = imm(0, 1, 1);
const D_F32: OperandSpec = operand(Access::InOut, Kind::Vector(is(F32), Count::ShapeN(2)));
const D_S32: OperandSpec = operand(Access::InOut, Kind::Vector(is(S32), Count::ShapeN(2)));
const D_F16: OperandSpec = operand(Access::InOut, Kind::Vector(is(B32), Count::ShapeN(4)));

const fn wgmma(slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Tensor, Op::WgmmaMmaAsync, slots, operands)
        .converge(Converge::Warpgroup)
        .memory(Memory::Read)
        .completes(Completion::WgmmaGroup)
        .since(Sm90a, V8_0)
}

/// Both forms of a `wgmma` on 16-bit operands: A from shared memory or from registers.
macro_rules! wgmma16 {
    ($d:ident, $cd:ident, $ab:ident) => {
        [
            wgmma(
                wgmma_slots!(16, $cd, $ab, $ab),
                &[$d, DESCRIPTOR, DESCRIPTOR, SCALE_D, SIGN, SIGN, TRANSPOSE, TRANSPOSE],
            ),
            wgmma(
                wgmma_slots!(16, $cd, $ab, $ab),
                &[$d, A_REGISTERS, DESCRIPTOR, SCALE_D, SIGN, SIGN, TRANSPOSE],
            ),
        ]
    };
}

/// Both forms of a `wgmma` on operands that must be K-major.
macro_rules! wgmma_k_major {
    ($k:literal, $d:ident, $cd:ident, $a:ident, $b:ident) => {
        [
            wgmma(wgmma_slots!($k, $cd, $a, $b), &[$d, DESCRIPTOR, DESCRIPTOR, SCALE_D, SIGN, SIGN]),
            wgmma(wgmma_slots!($k, $cd, $a, $b), &[$d, A_REGISTERS, DESCRIPTOR, SCALE_D, SIGN, SIGN]),
        ]
    };
}

macro_rules! wgmma_slots {
    ($k:literal, $cd:ident, $a:ident, $b:ident) => {
        &[
            one(&[Sync]),
            one(&[Aligned]),
            Slot::WgmmaShape($k),
            one(&[Mod::Type($cd)]),
            one(&[Mod::Type($a)]),
            one(&[Mod::Type($b)]),
        ]
    };
}

/// Both forms of a `wgmma` on bytes, which are K-major and have no signs to flip.
macro_rules! wgmma_bytes {
    ($a:ident, $b:ident, $since:expr) => {
        [
            wgmma(wgmma_byte_slots!($a, $b), &[D_S32, DESCRIPTOR, DESCRIPTOR, SCALE_D]).since(Sm90a, $since),
            wgmma(wgmma_byte_slots!($a, $b), &[D_S32, A_REGISTERS, DESCRIPTOR, SCALE_D]).since(Sm90a, $since),
        ]
    };
}

macro_rules! wgmma_byte_slots {
    ($a:ident, $b:ident) => {
        &[
            one(&[Sync]),
            one(&[Aligned]),
            Slot::WgmmaByteShape(32),
            opt(&[Satfinite]),
            one(&[Mod::Type(S32)]),
            one(&[Mod::Type($a)]),
            one(&[Mod::Type($b)]),
        ]
    };
}

/// PTX ISA, "wgmma.mma_async".
pub(super) const WGMMA: &[&[Row]] = &[
    &wgmma16!(D_F32, F32, F16),
    &wgmma16!(D_F32, F32, Bf16),
    &wgmma16!(D_F16, F16, F16),
    &wgmma_k_major!(8, D_F32, F32, Tf32, Tf32),
    &wgmma_k_major!(32, D_F32, F32, E4m3, E4m3),
    &wgmma_k_major!(32, D_F32, F32, E4m3, E5m2),
    &wgmma_k_major!(32, D_F32, F32, E5m2, E4m3),
    &wgmma_k_major!(32, D_F32, F32, E5m2, E5m2),
    &wgmma_k_major!(32, D_F16, F16, E4m3, E4m3),
    &wgmma_k_major!(32, D_F16, F16, E4m3, E5m2),
    &wgmma_k_major!(32, D_F16, F16, E5m2, E4m3),
    &wgmma_k_major!(32, D_F16, F16, E5m2, E5m2),
    &wgmma_bytes!(S8, S8, V8_0),
    &wgmma_bytes!(U8, U8, V8_0),
    &wgmma_bytes!(S8, U8, V8_4),
    &wgmma_bytes!(U8, S8, V8_4),
];

const GROUP: &[Slot] = &[one(&[Sync]), one(&[Aligned])];

const fn group(op: Op, operands: &'static [OperandSpec]) -> Row {
    row(Class::Tensor, op, GROUP, operands).converge(Converge::Warpgroup).since(Sm90a, V8_0)
}

/// PTX ISA, "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group".
pub(super) const WGMMA_GROUPS: &[Row] = &[
    group(Op::WgmmaFence, &[]),
    group(Op::WgmmaCommitGroup, &[]),
    group(Op::WgmmaWaitGroup, &[imm(0, 7, 1)]),
];
