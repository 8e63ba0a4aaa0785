//! Moves, conversions of types and of addresses.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::{Sm75, Sm80, Sm89, Sm90};
use crate::types::ScalarType::{self, *};
use crate::version::{V7_1, V7_7, V7_8, V8_1, V8_3};

const INT: &[ScalarType] = &[U8, U16, U32, U64, S8, S16, S32, S64];
const MOVABLE: &[ScalarType] = &[Pred, B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64];
const ROUND: &[Mod] = &[Rn, Rz, Rm, Rp];
const ROUND_INT: &[Mod] = &[Rni, Rzi, Rmi, Rpi];
const FP8X2: &[ScalarType] = &[E4m3x2, E5m2x2];
const WIDE_T: Ty = Ty::Loose(Var(0));
const WIDE_U: Ty = Ty::Loose(Var(1));

const fn cvt(slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Convert, Op::Cvt, slots, operands)
}

const fn mov(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Move, op, slots, operands)
}

/// PTX ISA, "cvt". In `cvt….x2.f32 d, a, b` the first source becomes the upper half.
pub(super) const CONVERT: &[Row] = &[
    cvt(&[t(INT), u(INT)], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U8, S8]), u(&[U16, S16, U32, S32, U64, S64])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U16, S16]), u(&[U32, S32, U64, S64])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U32, S32]), u(&[U64, S64])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U8, U16, U32, U64]), u(&[S8])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U16, U32, U64]), u(&[S16])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U32, U64]), u(&[S32])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[U64]), u(&[S64])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[S8]), u(&[U8])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[S16]), u(&[U16])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[S32]), u(&[U32])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(&[Sat]), t(&[S64]), u(&[U64])], &[d(WIDE_T), s(WIDE_U)]),
    cvt(&[one(ROUND_INT), opt(&[Ftz]), opt(&[Sat]), t(INT), u(&[F32])], &[d(WIDE_T), s(U)]),
    cvt(&[one(ROUND_INT), opt(&[Sat]), t(INT), u(&[F64])], &[d(WIDE_T), s(U)]),
    cvt(&[one(ROUND_INT), opt(&[Sat]), t(INT), u(&[F16])], &[d(WIDE_T), r(U)]),
    cvt(&[one(ROUND_INT), t(&[U8, S8]), u(&[Bf16])], &[d(T), r(U)]).since(Sm90, V7_8),
    cvt(&[one(ROUND_INT), t(&[U16, S16, U32, S32, U64, S64]), u(&[Bf16])], &[d(WIDE_T), r(U)])
        .since(Sm90, V7_8),
    cvt(&[one(ROUND), opt(&[Sat]), t(&[F16, F32, F64]), u(INT)], &[d(T), s(WIDE_U)]),
    cvt(&[one(ROUND), t(&[Bf16]), u(&[U16, S16, U32, S32, U64, S64])], &[d(T), s(WIDE_U)]).since(Sm90, V7_8),
    cvt(&[opt(&[Ftz]), opt(&[Sat]), t(&[F32]), u(&[F16])], &[d(T), r(U)]),
    cvt(&[t(&[F32]), u(&[Bf16])], &[d(T), r(U)]).since(Sm80, V7_1),
    cvt(&[opt(&[Ftz]), opt(&[Sat]), t(&[F64]), u(&[F32])], &[d(T), s(U)]),
    cvt(&[t(&[F64]), u(&[F16])], &[d(T), r(U)]),
    cvt(&[one(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32]), u(&[F64])], &[d(T), s(U)]),
    cvt(&[one(ROUND), opt(&[Sat]), t(&[F16]), u(&[F64])], &[d(T), s(U)]),
    cvt(&[one(ROUND_INT), opt(&[Ftz]), opt(&[Sat]), t(&[F32]), u(&[F32])], &[d(T), s(U)]),
    cvt(&[one(ROUND_INT), t(&[F64]), u(&[F64])], &[d(T), s(U)]),
    cvt(&[one(ROUND_INT), t(&[F16]), u(&[F16])], &[d(T), r(U)]),
    cvt(&[one(ROUND_INT), t(&[Bf16]), u(&[Bf16])], &[d(T), r(U)]).since(Sm90, V7_8),
    cvt(&[one(&[Rm, Rp]), t(&[Bf16]), u(&[F32])], &[d(T), s(U)]).since(Sm90, V7_8),
    cvt(&[one(ROUND), t(&[Bf16]), u(&[F64])], &[d(T), s(U)]).since(Sm90, V7_8),
    cvt(&[opt(ROUND), t(&[Bf16]), u(&[F16])], &[d(T), r(U)]).since(Sm90, V7_8),
    cvt(&[opt(ROUND), t(&[F16]), u(&[Bf16])], &[d(T), r(U)]).since(Sm90, V7_8),
    cvt(&[t(&[F64]), u(&[Bf16])], &[d(T), r(U)]).since(Sm90, V7_8),
    cvt(&[opt(&[Ftz]), one(&[Sat]), t(&[F32]), u(&[F32])], &[d(T), s(U)]),
    cvt(&[one(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F16]), u(&[F32])], &[d(T), s(U)]),
    cvt(&[one(&[Rn, Rz]), one(&[Relu]), t(&[F16]), u(&[F32])], &[d(T), s(U)]),
    cvt(&[one(&[Rn, Rz]), opt(&[Relu]), t(&[Bf16]), u(&[F32])], &[d(T), s(U)]).since_sm80(),
    cvt(&[one(&[Rn, Rz]), opt(&[Relu]), t(&[F16x2, Bf16x2]), u(&[F32])], &[d(T), s(U), s(U)]).since_sm80(),
    cvt(
        &[one(&[Rn, Rz]), one(&[Satfinite]), opt(&[Relu]), t(&[F16x2, Bf16x2]), u(&[F32])],
        &[d(T), s(U), s(U)],
    )
    .since(Sm80, V8_1),
    cvt(&[one(&[Rn, Rz]), one(&[Satfinite]), opt(&[Relu]), t(&[F16]), u(&[F32])], &[d(T), s(U)])
        .since(Sm75, V8_1),
    cvt(&[one(&[Rn, Rz]), one(&[Satfinite]), opt(&[Relu]), t(&[Bf16]), u(&[F32])], &[d(T), s(U)])
        .since(Sm80, V8_1),
    cvt(&[one(&[Rna]), t(&[Tf32]), u(&[F32])], &[d(T), s(U)]).since_sm80(),
    cvt(&[one(&[Rn, Rz]), opt(&[Relu]), t(&[Tf32]), u(&[F32])], &[d(T), s(U)]).since(Sm90, V7_8),
    cvt(&[one(&[Rn]), one(&[Satfinite]), opt(&[Relu]), t(FP8X2), u(&[F32])], &[d(T), s(U), s(U)])
        .since(Sm89, V8_1),
    cvt(&[one(&[Rn]), one(&[Satfinite]), opt(&[Relu]), t(FP8X2), u(&[F16x2])], &[d(T), r(U)])
        .since(Sm89, V8_1),
    cvt(&[one(&[Rn]), opt(&[Relu]), t(&[F16x2]), u(FP8X2)], &[d(T), r(U)]).since(Sm89, V8_1),
];

/// PTX ISA, "cvt.pack": two words saturated into halves, or into the lower bytes of a word whose upper ones are the third's.
pub(super) const PACK: &[Row] = &[
    row(Class::Convert, Op::CvtPack, &[one(&[Sat]), t(&[U16, S16]), u(&[S32])], &[d(is(B32)), s(U), s(U)]),
    row(
        Class::Convert,
        Op::CvtPack,
        &[one(&[Sat]), t(&[U8, S8]), u(&[S32]), one(&[Mod::Type(B32)])],
        &[d(is(B32)), s(U), s(U), s(is(B32))],
    ),
];

/// PTX ISA, "mov", "cvta", "isspacep", "mapa", "getctarank".
pub(super) const MOVE: &[Row] = &[
    mov(Op::Mov, &[t(MOVABLE)], &[d(T), src(Kind::Movable(T))]),
    mov(Op::Mov, &[t(&[B16, B32, B64])], &[d(T), src(Kind::PackedValues(T))]),
    mov(Op::Mov, &[t(&[B16, B32, B64])], &[dst(Kind::Packed(T)), r(T)]),
    mov(Op::Mov, &[t(&[B128])], &[d(T), src(Kind::Packed(T))]).since(Sm80, V8_3),
    mov(Op::Mov, &[t(&[B128])], &[dst(Kind::Packed(T)), r(T)]).since(Sm80, V8_3),
    mov(
        Op::Cvta,
        &[opt(&[To]), one(&[Global, Shared, SharedCta, SharedCluster, Local, Const, Param]), t(&[U64])],
        &[d(T), src(Kind::Movable(T))],
    ),
    mov(
        Op::Isspacep,
        &[one(&[Global, Shared, SharedCta, SharedCluster, Local, Const])],
        &[d(is(Pred)), r(is(U64))],
    ),
    mov(Op::Isspacep, &[one(&[Param])], &[d(is(Pred)), r(is(U64))]).since(Sm75, V7_7),
    mov(Op::Mapa, &[one(&[SharedCluster]), t(&[U32, U64])], &[d(T), src(Kind::Movable(T)), s(is(U32))])
        .since(Sm90, V7_8),
    mov(Op::Mapa, &[t(&[U64])], &[d(T), src(Kind::Movable(T)), s(is(U32))]).since(Sm90, V7_8),
    mov(Op::Getctarank, &[one(&[SharedCluster]), t(&[U32, U64])], &[d(is(U32)), src(Kind::Movable(T))])
        .since(Sm90, V7_8),
    mov(Op::Getctarank, &[t(&[U64])], &[d(is(U32)), src(Kind::Movable(T))]).since(Sm90, V7_8),
];
