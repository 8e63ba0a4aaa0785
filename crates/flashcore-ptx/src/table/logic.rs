//! Logic, shifts, comparison and selection.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::Sm90;
use crate::types::ScalarType::{self, *};
use crate::version::V7_8;

const BITS: &[ScalarType] = &[Pred, B16, B32, B64];
const ORDERED: &[Mod] = &[Eq, Ne, Lt, Le, Gt, Ge, Lo, Ls, Hi, Hs];
const FLOAT_ORDERED: &[Mod] = &[Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan];
const COMBINE: &[Mod] = &[And, Or, Xor];
const COMPARABLE: &[ScalarType] = &[B16, B32, B64, U16, U32, U64, S16, S32, S64];
const SELECTABLE: &[ScalarType] = &[B16, B32, B64, U16, U32, U64, S16, S32, S64, F32, F64];

const fn logic(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Integer, op, slots, operands)
}

const fn select(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Move, op, slots, operands)
}

/// PTX ISA, "Logic and Shift Instructions".
pub(super) const LOGIC: &[Row] = &[
    logic(Op::And, &[t(BITS)], &[d(T), s(T), s(T)]),
    logic(Op::Or, &[t(BITS)], &[d(T), s(T), s(T)]),
    logic(Op::Xor, &[t(BITS)], &[d(T), s(T), s(T)]),
    logic(Op::Not, &[t(BITS)], &[d(T), s(T)]),
    logic(Op::Cnot, &[t(&[B16, B32, B64])], &[d(T), s(T)]),
    logic(Op::Lop3, &[t(&[B32])], &[d(T), s(T), s(T), s(T), imm(0, 255, 1)]),
    logic(Op::Shf, &[one(&[L, R]), one(&[Clamp, Wrap]), t(&[B32])], &[d(T), s(T), s(T), s(is(U32))]),
    logic(Op::Shl, &[t(&[B16, B32, B64])], &[d(T), s(T), s(is(U32))]),
    logic(Op::Shr, &[t(COMPARABLE)], &[d(T), s(T), s(is(U32))]),
    logic(Op::Prmt, &[t(&[B32]), opt(&[F4e, B4e, Rc8, Ecl, Ecr, Rc16])], &[d(T), s(T), s(T), s(is(B32))]),
];

/// PTX ISA, "Comparison and Selection Instructions".
pub(super) const COMPARE: &[Row] = &[
    logic(Op::Setp, &[one(ORDERED), t(COMPARABLE)], &[dst(Kind::PredPair), s(T), s(T)]),
    logic(
        Op::Setp,
        &[one(ORDERED), one(COMBINE), t(COMPARABLE)],
        &[dst(Kind::PredPair), s(T), s(T), src(Kind::Pred)],
    ),
    logic(Op::Setp, &[one(FLOAT_ORDERED), opt(&[Ftz]), t(&[F32, F64])], &[dst(Kind::PredPair), s(T), s(T)]),
    logic(
        Op::Setp,
        &[one(FLOAT_ORDERED), one(COMBINE), opt(&[Ftz]), t(&[F32, F64])],
        &[dst(Kind::PredPair), s(T), s(T), src(Kind::Pred)],
    ),
    logic(Op::Setp, &[one(FLOAT_ORDERED), opt(&[Ftz]), t(&[F16, F16x2])], &[dst(Kind::PredPair), r(T), r(T)]),
    logic(Op::Setp, &[one(FLOAT_ORDERED), t(&[Bf16, Bf16x2])], &[dst(Kind::PredPair), r(T), r(T)])
        .since(Sm90, V7_8),
    logic(Op::Set, &[one(ORDERED), t(&[U32, S32, F32]), u(COMPARABLE)], &[d(T), s(U), s(U)]),
    logic(
        Op::Set,
        &[one(FLOAT_ORDERED), opt(&[Ftz]), t(&[U32, S32, F32]), u(&[F32, F64])],
        &[d(T), s(U), s(U)],
    ),
    select(Op::Selp, &[t(SELECTABLE)], &[d(T), s(T), s(T), r(is(Pred))]),
    select(Op::Slct, &[t(SELECTABLE), u(&[S32])], &[d(T), s(T), s(T), s(U)]),
    select(Op::Slct, &[opt(&[Ftz]), t(SELECTABLE), u(&[F32])], &[d(T), s(T), s(T), s(U)]),
];
