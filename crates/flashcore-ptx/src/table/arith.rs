//! Integer, single- and double-precision arithmetic.

use super::spec::*;
use crate::op::{Mod::*, Op};
use crate::target::Target::{Sm75, Sm90};
use crate::types::ScalarType::*;
use crate::version::{V7_6, V8_0};

const INT: &[crate::types::ScalarType] = &[U16, U32, U64, S16, S32, S64];
const INT32: &[crate::types::ScalarType] = &[U32, S32];
const PAIRS: &[crate::types::ScalarType] = &[U16x2, S16x2];
const SIGNED: &[crate::types::ScalarType] = &[S16, S32, S64];
const ROUND: &[crate::op::Mod] = &[Rn, Rz, Rm, Rp];

const fn int(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Integer, op, slots, operands)
}

const fn float(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Float, op, slots, operands)
}

const fn special(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Special, op, slots, operands)
}

/// PTX ISA, "Integer Arithmetic Instructions".
pub(super) const INTEGER: &[Row] = &[
    int(Op::Add, &[opt(&[Sat]), t(&[S32])], &[d(T), s(T), s(T)]),
    int(Op::Add, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Sub, &[opt(&[Sat]), t(&[S32])], &[d(T), s(T), s(T)]),
    int(Op::Sub, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Mul, &[one(&[Lo, Hi]), t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Mul, &[one(&[Wide]), t(&[U16, S16, U32, S32])], &[d(Ty::Wide(Var(0))), s(T), s(T)]),
    int(Op::Mad, &[one(&[Lo, Hi]), t(INT)], &[d(T), s(T), s(T), s(T)]),
    int(
        Op::Mad,
        &[one(&[Wide]), t(&[U16, S16, U32, S32])],
        &[d(Ty::Wide(Var(0))), s(T), s(T), s(Ty::Wide(Var(0)))],
    ),
    int(Op::Mad, &[one(&[Hi]), one(&[Sat]), t(&[S32])], &[d(T), s(T), s(T), s(T)]),
    int(Op::Div, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Rem, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Sad, &[t(INT)], &[d(T), s(T), s(T), s(T)]),
    int(Op::Abs, &[t(SIGNED)], &[d(T), s(T)]),
    int(Op::Neg, &[t(SIGNED)], &[d(T), s(T)]),
    int(Op::Min, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Max, &[t(INT)], &[d(T), s(T), s(T)]),
    int(Op::Add, &[t(PAIRS)], &[d(T), r(T), r(T)]).since(Sm90, V8_0),
    int(Op::Min, &[t(PAIRS)], &[d(T), r(T), r(T)]).since(Sm90, V8_0),
    int(Op::Max, &[t(PAIRS)], &[d(T), r(T), r(T)]).since(Sm90, V8_0),
    int(Op::Min, &[t(&[S16x2]), one(&[Relu])], &[d(T), r(T), r(T)]).since(Sm90, V8_0),
    int(Op::Min, &[t(&[S32]), one(&[Relu])], &[d(T), s(T), s(T)]).since(Sm90, V8_0),
    int(Op::Max, &[t(&[S16x2]), one(&[Relu])], &[d(T), r(T), r(T)]).since(Sm90, V8_0),
    int(Op::Max, &[t(&[S32]), one(&[Relu])], &[d(T), s(T), s(T)]).since(Sm90, V8_0),
    int(Op::Popc, &[t(&[B32, B64])], &[d(is(U32)), s(T)]),
    int(Op::Clz, &[t(&[B32, B64])], &[d(is(U32)), s(T)]),
    int(Op::Bfind, &[opt(&[Shiftamt]), t(&[U32, U64, S32, S64])], &[d(is(U32)), s(T)]),
    int(Op::Brev, &[t(&[B32, B64])], &[d(T), s(T)]),
    int(Op::Bmsk, &[one(&[Clamp, Wrap]), t(&[B32])], &[d(T), s(is(U32)), s(is(U32))]).since(Sm75, V7_6),
    int(Op::Szext, &[one(&[Clamp, Wrap]), t(INT32)], &[d(T), s(T), s(is(U32))]).since(Sm75, V7_6),
    int(Op::Fns, &[t(&[B32])], &[d(T), s(T), s(is(B32)), s(is(S32))]),
    int(Op::Bfe, &[t(&[U32, U64, S32, S64])], &[d(T), s(T), s(is(U32)), s(is(U32))]),
    int(Op::Bfi, &[t(&[B32, B64])], &[d(T), s(T), s(T), s(is(U32)), s(is(U32))]),
    int(Op::Dp2a, &[one(&[Lo, Hi]), t(INT32), u(INT32)], &[d(is(B32)), s(is(B32)), s(is(B32)), s(is(B32))]),
    int(Op::Mul24, &[one(&[Lo, Hi]), t(INT32)], &[d(T), s(T), s(T)]),
    int(Op::Mad24, &[one(&[Lo, Hi]), t(INT32)], &[d(T), s(T), s(T), s(T)]),
    int(Op::Mad24, &[one(&[Hi]), one(&[Sat]), t(&[S32])], &[d(T), s(T), s(T), s(T)]),
    int(Op::Dp4a, &[t(INT32), u(INT32)], &[d(is(B32)), s(is(B32)), s(is(B32)), s(is(B32))]),
];

const CARRIED: &[crate::types::ScalarType] = &[U32, S32, U64, S64];

/// PTX ISA, "Extended-Precision Integer Arithmetic Instructions": those that leave a carry, and those that take one.
pub(super) const CARRY: &[Row] = &[
    int(Op::Add, &[one(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T)]),
    int(Op::Addc, &[opt(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T)]),
    int(Op::Sub, &[one(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T)]),
    int(Op::Subc, &[opt(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T)]),
    int(Op::Mad, &[one(&[Lo, Hi]), one(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T), s(T)]),
    int(Op::Madc, &[one(&[Lo, Hi]), opt(&[Cc]), t(CARRIED)], &[d(T), s(T), s(T), s(T)]),
];

/// PTX ISA, "SIMD Video Instructions": bytes or halves of words, each for itself, or their sum added to a third word.
macro_rules! video {
    ($($op:ident),+) => {
        &[$(
            int(
                Op::$op,
                &[t(INT32), u(INT32), one(WORDS), opt(&[Sat])],
                &[d(is(B32)), r(is(B32)), r(is(B32)), r(is(B32))],
            ),
            int(
                Op::$op,
                &[t(INT32), u(INT32), one(WORDS), one(&[Add])],
                &[d(is(B32)), r(is(B32)), r(is(B32)), r(is(B32))],
            ),
        )+]
    };
}

const WORDS: &[crate::op::Mod] = &[Type(U32), Type(S32)];

pub(super) const VIDEO: &[Row] =
    video!(Vadd2, Vsub2, Vavrg2, Vabsdiff2, Vmin2, Vmax2, Vadd4, Vsub4, Vavrg4, Vabsdiff4, Vmin4, Vmax4);

const COMPARED: &[crate::op::Mod] = &[Eq, Ne, Lt, Le, Gt, Ge];

/// PTX ISA, "vset2, vset4": 0 or 1 for each element, or how many are true added to a third word.
macro_rules! video_set {
    ($($op:ident),+) => {
        &[$(int(
            Op::$op,
            &[t(INT32), u(INT32), one(COMPARED), opt(&[Add])],
            &[d(is(B32)), r(is(B32)), r(is(B32)), r(is(B32))],
        )),+]
    };
}

pub(super) const VIDEO_SET: &[Row] = video_set!(Vset2, Vset4);

/// PTX ISA, "Floating Point Instructions".
pub(super) const FLOAT: &[Row] = &[
    float(Op::Add, &[opt(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Add, &[opt(ROUND), t(&[F64])], &[d(T), s(T), s(T)]),
    float(Op::Sub, &[opt(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Sub, &[opt(ROUND), t(&[F64])], &[d(T), s(T), s(T)]),
    float(Op::Mul, &[opt(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Mul, &[opt(ROUND), t(&[F64])], &[d(T), s(T), s(T)]),
    float(Op::Fma, &[one(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32])], &[d(T), s(T), s(T), s(T)]),
    float(Op::Fma, &[one(ROUND), t(&[F64])], &[d(T), s(T), s(T), s(T)]),
    float(Op::Mad, &[one(ROUND), opt(&[Ftz]), opt(&[Sat]), t(&[F32])], &[d(T), s(T), s(T), s(T)]),
    float(Op::Abs, &[opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    float(Op::Abs, &[t(&[F64])], &[d(T), s(T)]),
    float(Op::Neg, &[opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    float(Op::Neg, &[t(&[F64])], &[d(T), s(T)]),
    float(Op::Min, &[opt(&[Ftz]), opt(&[NaN]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Min, &[t(&[F64])], &[d(T), s(T), s(T)]),
    float(Op::Max, &[opt(&[Ftz]), opt(&[NaN]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Max, &[t(&[F64])], &[d(T), s(T), s(T)]),
    float(Op::Copysign, &[t(&[F32, F64])], &[d(T), s(T), s(T)]),
    float(
        Op::Testp,
        &[one(&[Finite, Infinite, Number, Notanumber, Normal, Subnormal]), t(&[F32, F64])],
        &[d(is(Pred)), s(T)],
    ),
    float(Op::Div, &[one(&[Approx, Full]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Div, &[one(ROUND), opt(&[Ftz]), t(&[F32])], &[d(T), s(T), s(T)]),
    float(Op::Div, &[one(ROUND), t(&[F64])], &[d(T), s(T), s(T)]),
    special(Op::Rcp, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    special(Op::Rcp, &[one(&[Approx]), one(&[Ftz]), t(&[F64])], &[d(T), s(T)]),
    float(Op::Rcp, &[one(ROUND), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    float(Op::Rcp, &[one(ROUND), t(&[F64])], &[d(T), s(T)]),
    special(Op::Sqrt, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    float(Op::Sqrt, &[one(ROUND), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    float(Op::Sqrt, &[one(ROUND), t(&[F64])], &[d(T), s(T)]),
    special(Op::Rsqrt, &[one(&[Approx]), opt(&[Ftz]), t(&[F32, F64])], &[d(T), s(T)]),
    special(Op::Sin, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    special(Op::Cos, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    special(Op::Lg2, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    special(Op::Ex2, &[one(&[Approx]), opt(&[Ftz]), t(&[F32])], &[d(T), s(T)]),
    special(Op::Tanh, &[one(&[Approx]), t(&[F32])], &[d(T), s(T)]),
];
