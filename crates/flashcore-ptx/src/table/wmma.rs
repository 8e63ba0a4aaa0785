//! Matrix products of one warp with fragments of no published layout: `wmma`. Loads and stores name the fragment by its
//! letter; how many registers it has follows from shape and type.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op, shape};
use crate::target::Target::Sm80;
use crate::types::ScalarType::{self, *};
use crate::version::V7_1;

const MAJOR: &[Mod] = &[RowMajor, ColMajor];
const SPACE: &[Mod] = &[Global, Shared, SharedCta];
/// Elements between rows or columns in memory.
const STRIDE: OperandSpec = s(is(U32)).maybe();

const SQUARE: Mod = Shape(shape(16, 16, 16));
const WIDE: Mod = Shape(shape(32, 8, 16));
const TALL: Mod = Shape(shape(8, 32, 16));
const TF32_SHAPE: Mod = Shape(shape(16, 16, 8));
const NIBBLES: Mod = Shape(shape(8, 8, 32));
const BITS: Mod = Shape(shape(8, 8, 128));
const DOUBLES: Mod = Shape(shape(8, 8, 4));
const SIXTEEN_DEEP: &[Mod] = &[SQUARE, WIDE, TALL];
const ANY_8X8: &[Mod] = &[NIBBLES, BITS];

const fn wmma(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Tensor, op, slots, operands).converge(Converge::Warp)
}

/// Registers of a fragment whose elements have that type.
const fn registers(ty: ScalarType) -> Ty {
    if matches!(ty, F32 | F64 | S32) { is(ty) } else { is(B32) }
}

/// A load of a fragment of `$count` registers, for one type or several.
macro_rules! load {
    ($op:ident $major:expr, $shapes:expr, [$first:ident $(, $ty:ident)*], $count:literal) => {
        wmma(
            Op::$op,
            &[
                one(&[Sync]), one(&[Aligned]), one($major), one($shapes), opt(SPACE),
                one(&[Mod::Type($first) $(, Mod::Type($ty))*]),
            ],
            &[dst(Kind::Vector(registers($first), Count::Is($count))), at(1), STRIDE],
        )
        .memory(Memory::Read)
    };
}

macro_rules! store {
    ($shapes:expr, $ty:ident, $count:literal) => {
        wmma(
            Op::WmmaStoreD,
            &[one(&[Sync]), one(&[Aligned]), one(MAJOR), one($shapes), opt(SPACE), one(&[Mod::Type($ty)])],
            &[at(1), src(Kind::Vector(registers($ty), Count::Is($count))), STRIDE],
        )
        .memory(Memory::Write)
    };
}

/// PTX ISA, "wmma.load", "wmma.store". Fragments of less than a byte an element have one layout only.
pub(super) const WMMA_MEMORY: &[Row] = &[
    load!(WmmaLoadA MAJOR, SIXTEEN_DEEP, [F16], 8),
    load!(WmmaLoadB MAJOR, SIXTEEN_DEEP, [F16], 8),
    load!(WmmaLoadA MAJOR, &[SQUARE], [Bf16], 4).since_sm80(),
    load!(WmmaLoadB MAJOR, &[SQUARE], [Bf16], 4).since_sm80(),
    load!(WmmaLoadA MAJOR, &[WIDE], [Bf16], 8).since_sm80(),
    load!(WmmaLoadB MAJOR, &[WIDE], [Bf16], 2).since_sm80(),
    load!(WmmaLoadA MAJOR, &[TALL], [Bf16], 2).since_sm80(),
    load!(WmmaLoadB MAJOR, &[TALL], [Bf16], 8).since_sm80(),
    load!(WmmaLoadA MAJOR, &[TF32_SHAPE], [Tf32], 4).since_sm80(),
    load!(WmmaLoadB MAJOR, &[TF32_SHAPE], [Tf32], 4).since_sm80(),
    load!(WmmaLoadA MAJOR, &[SQUARE], [S8, U8], 2),
    load!(WmmaLoadB MAJOR, &[SQUARE], [S8, U8], 2),
    load!(WmmaLoadA MAJOR, &[WIDE], [S8, U8], 4),
    load!(WmmaLoadB MAJOR, &[WIDE], [S8, U8], 1),
    load!(WmmaLoadA MAJOR, &[TALL], [S8, U8], 1),
    load!(WmmaLoadB MAJOR, &[TALL], [S8, U8], 4),
    load!(WmmaLoadA & [RowMajor], &[NIBBLES], [S4, U4], 1),
    load!(WmmaLoadB & [ColMajor], &[NIBBLES], [S4, U4], 1),
    load!(WmmaLoadA & [RowMajor], &[BITS], [B1], 1),
    load!(WmmaLoadB & [ColMajor], &[BITS], [B1], 1),
    load!(WmmaLoadA MAJOR, &[DOUBLES], [F64], 1).since_sm80(),
    load!(WmmaLoadB MAJOR, &[DOUBLES], [F64], 1).since_sm80(),
    load!(WmmaLoadC MAJOR, SIXTEEN_DEEP, [F16], 4),
    load!(WmmaLoadC MAJOR, SIXTEEN_DEEP, [F32], 8),
    load!(WmmaLoadC MAJOR, SIXTEEN_DEEP, [S32], 8),
    load!(WmmaLoadC MAJOR, &[TF32_SHAPE], [F32], 8).since_sm80(),
    load!(WmmaLoadC MAJOR, ANY_8X8, [S32], 2),
    load!(WmmaLoadC MAJOR, &[DOUBLES], [F64], 2).since_sm80(),
    store!(SIXTEEN_DEEP, F16, 4),
    store!(SIXTEEN_DEEP, F32, 8),
    store!(SIXTEEN_DEEP, S32, 8),
    store!(&[TF32_SHAPE], F32, 8).since_sm80(),
    store!(ANY_8X8, S32, 2),
    store!(&[DOUBLES], F64, 2).since_sm80(),
];

/// `wmma.mma` with registers of D, A, B, C.
macro_rules! product {
    ([$($slot:expr),+], $d:ident $nd:literal, $ab:ident $na:literal $nb:literal, $c:ident $nc:literal) => {
        wmma(
            Op::WmmaMma,
            &[one(&[Sync]), one(&[Aligned]), $($slot),+],
            &[
                dst(Kind::Vector(registers($d), Count::Is($nd))),
                src(Kind::Vector(registers($ab), Count::Is($na))),
                src(Kind::Vector(registers($ab), Count::Is($nb))),
                src(Kind::Vector(registers($c), Count::Is($nc))),
            ],
        )
    };
}

/// The types of D and C of a product of halves, which names no others.
macro_rules! halves {
    ($d:ident $nd:literal, $c:ident $nc:literal) => {
        product!(
            [one(MAJOR), one(MAJOR), one(SIXTEEN_DEEP), one(&[Mod::Type($d)]), one(&[Mod::Type($c)])],
            $d $nd, F16 8 8, $c $nc
        )
    };
}

/// A product that names the types of D, A, B and C.
macro_rules! typed {
    ($a:ident $b:ident, $shapes:expr, $d:ident $nd:literal, $ab:ident $na:literal $nb:literal $(, $last:expr)?) => {
        product!(
            [
                one($a), one($b), one($shapes),
                one(&[Mod::Type($d)]), one(&[Mod::Type($ab)]), one(&[Mod::Type($ab)]), one(&[Mod::Type($d)])
                $(, $last)?
            ],
            $d $nd, $ab $na $nb, $d $nd
        )
    };
}

const ROW: &[Mod] = &[RowMajor];
const COL: &[Mod] = &[ColMajor];
const CLAMPED: Slot = opt(&[Satfinite]);

/// `wmma.mma.xor.popc` and its twin.
const fn bits(operator: &'static [Slot]) -> Row {
    const WORD: OperandSpec = src(Kind::Vector(is(B32), Count::Is(1)));
    const OPERANDS: &[OperandSpec] =
        &[dst(Kind::Vector(is(S32), Count::Is(2))), WORD, WORD, src(Kind::Vector(is(S32), Count::Is(2)))];
    wmma(Op::WmmaMma, operator, OPERANDS)
}

macro_rules! bit_slots {
    ($operator:ident) => {
        &[
            one(&[$operator]),
            one(&[Popc]),
            one(&[Sync]),
            one(&[Aligned]),
            one(ROW),
            one(COL),
            one(&[BITS]),
            one(&[Mod::Type(S32)]),
            one(&[Mod::Type(B1)]),
            one(&[Mod::Type(B1)]),
            one(&[Mod::Type(S32)]),
        ]
    };
}

/// PTX ISA, "wmma.mma".
pub(super) const WMMA: &[Row] = &[
    halves!(F32 8, F32 8),
    halves!(F16 4, F16 4),
    halves!(F32 8, F16 4),
    halves!(F16 4, F32 8),
    typed!(MAJOR MAJOR, &[SQUARE], F32 8, Bf16 4 4).since_sm80(),
    typed!(MAJOR MAJOR, &[WIDE], F32 8, Bf16 8 2).since_sm80(),
    typed!(MAJOR MAJOR, &[TALL], F32 8, Bf16 2 8).since_sm80(),
    typed!(MAJOR MAJOR, &[TF32_SHAPE], F32 8, Tf32 4 4).since_sm80(),
    typed!(MAJOR MAJOR, &[SQUARE], S32 8, S8 2 2, CLAMPED),
    typed!(MAJOR MAJOR, &[WIDE], S32 8, S8 4 1, CLAMPED),
    typed!(MAJOR MAJOR, &[TALL], S32 8, S8 1 4, CLAMPED),
    typed!(MAJOR MAJOR, &[SQUARE], S32 8, U8 2 2, CLAMPED),
    typed!(MAJOR MAJOR, &[WIDE], S32 8, U8 4 1, CLAMPED),
    typed!(MAJOR MAJOR, &[TALL], S32 8, U8 1 4, CLAMPED),
    typed!(ROW COL, &[NIBBLES], S32 2, S4 1 1, CLAMPED),
    typed!(ROW COL, &[NIBBLES], S32 2, U4 1 1, CLAMPED),
    typed!(MAJOR MAJOR, &[DOUBLES], F64 2, F64 1 1, opt(&[Rn, Rz, Rm, Rp])).since_sm80(),
    bits(bit_slots!(Xor)),
    bits(bit_slots!(And)).since(Sm80, V7_1),
];
