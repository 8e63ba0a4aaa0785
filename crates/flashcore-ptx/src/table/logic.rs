//! Logic, shifts, comparison and selection.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::Sm90;
use crate::types::ScalarType::{self, *};
use crate::version::V7_8;

const BITS: &[ScalarType] = &[Pred, B16, B32, B64];
const EQUALITY: &[Mod] = &[Eq, Ne];
const ORDERED: &[Mod] = &[Eq, Ne, Lt, Le, Gt, Ge];
const UNSIGNED_ORDERED: &[Mod] = &[Eq, Ne, Lt, Le, Gt, Ge, Lo, Ls, Hi, Hs];
const FLOAT_ORDERED: &[Mod] = &[Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan];
const COMBINE: &[Mod] = &[And, Or, Xor];
const SHIFTABLE: &[ScalarType] = &[B16, B32, B64, U16, U32, U64, S16, S32, S64];
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
    logic(Op::Shr, &[t(SHIFTABLE)], &[d(T), s(T), s(is(U32))]),
    logic(Op::Prmt, &[t(&[B32]), opt(&[F4e, B4e, Rc8, Ecl, Ecr, Rc16])], &[d(T), s(T), s(T), s(is(B32))]),
];

/// `setp` and `set` for one class of types, with and without a predicate to combine with.
macro_rules! compare {
    ($order:ident, $ftz:expr, $types:expr) => {
        [
            logic(Op::Setp, &[one($order), opt($ftz), t($types)], &[dst(Kind::PredPair), s(T), s(T)]),
            logic(
                Op::Setp,
                &[one($order), one(COMBINE), opt($ftz), t($types)],
                &[dst(Kind::PredPair), s(T), s(T), src(Kind::Pred)],
            ),
            logic(Op::Set, &[one($order), opt($ftz), t(TRUTH), u($types)], &[d(T), s(U), s(U)]),
            logic(
                Op::Set,
                &[one($order), one(COMBINE), opt($ftz), t(TRUTH), u($types)],
                &[d(T), s(U), s(U), src(Kind::Pred)],
            ),
        ]
    };
}

/// What `set` makes of a comparison.
const TRUTH: &[ScalarType] = &[U32, S32, F32];

/// PTX ISA, "Comparison Instructions", by class of operand.
pub(super) const COMPARE: &[&[Row]] = &[
    &compare!(EQUALITY, &[], &[B16, B32, B64]),
    &compare!(UNSIGNED_ORDERED, &[], &[U16, U32, U64]),
    &compare!(ORDERED, &[], &[S16, S32, S64]),
    &compare!(FLOAT_ORDERED, &[Ftz], &[F32]),
    &compare!(FLOAT_ORDERED, &[], &[F64]),
];

/// `setp` and `set` on halves: a pair of them gives a pair of predicates, or of halves.
macro_rules! compare_halves {
    ($ftz:expr, $ty:ident, $p:expr, $truth:expr $(, $since:expr)?) => {
        [
            logic(Op::Setp, &[one(FLOAT_ORDERED), opt($ftz), t(&[$ty])], &[$p, r(T), r(T)])$(.since(Sm90, $since))?,
            logic(
                Op::Setp,
                &[one(FLOAT_ORDERED), one(COMBINE), opt($ftz), t(&[$ty])],
                &[$p, r(T), r(T), src(Kind::Pred)],
            )$(.since(Sm90, $since))?,
            logic(Op::Set, &[one(FLOAT_ORDERED), opt($ftz), t($truth), u(&[$ty])], &[d(T), r(U), r(U)])
                $(.since(Sm90, $since))?,
            logic(
                Op::Set,
                &[one(FLOAT_ORDERED), one(COMBINE), opt($ftz), t($truth), u(&[$ty])],
                &[d(T), r(U), r(U), src(Kind::Pred)],
            )$(.since(Sm90, $since))?,
        ]
    };
}

/// PTX ISA, "Half Precision Comparison Instructions".
pub(super) const COMPARE_HALVES: &[&[Row]] = &[
    &compare_halves!(&[Ftz], F16, d(is(Pred)), &[F16, U16, S16, U32, S32]),
    &compare_halves!(&[Ftz], F16x2, dst(Kind::Pair(is(Pred))), &[F16x2, U32, S32]),
    &compare_halves!(&[], Bf16, d(is(Pred)), &[Bf16, U16, S16, U32, S32], V7_8),
    &compare_halves!(&[], Bf16x2, dst(Kind::Pair(is(Pred))), &[Bf16x2, U32, S32], V7_8),
];

/// PTX ISA, selection.
pub(super) const SELECT: &[Row] = &[
    select(Op::Selp, &[t(SELECTABLE)], &[d(T), s(T), s(T), r(is(Pred))]),
    select(Op::Slct, &[t(SELECTABLE), u(&[S32])], &[d(T), s(T), s(T), s(U)]),
    select(Op::Slct, &[opt(&[Ftz]), t(SELECTABLE), u(&[F32])], &[d(T), s(T), s(T), s(U)]),
];
