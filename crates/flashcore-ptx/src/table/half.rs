//! Half-precision arithmetic: f16 and bf16, single and packed in pairs.

use super::spec::*;
use crate::op::{Mod::*, Op};
use crate::target::Target::Sm90;
use crate::types::ScalarType::{self, *};
use crate::version::V7_8;

const F16S: &[ScalarType] = &[F16, F16x2];
const BF16S: &[ScalarType] = &[Bf16, Bf16x2];

const fn half(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Half, op, slots, operands)
}

const fn special(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Special, op, slots, operands)
}

/// PTX ISA, "Half Precision Floating-Point Instructions".
pub(super) const HALF: &[Row] = &[
    half(Op::Add, &[opt(&[Rn]), opt(&[Ftz]), opt(&[Sat]), t(F16S)], &[d(T), r(T), r(T)]),
    half(Op::Add, &[opt(&[Rn]), t(BF16S)], &[d(T), r(T), r(T)]).since(Sm90, V7_8),
    half(Op::Sub, &[opt(&[Rn]), opt(&[Ftz]), opt(&[Sat]), t(F16S)], &[d(T), r(T), r(T)]),
    half(Op::Sub, &[opt(&[Rn]), t(BF16S)], &[d(T), r(T), r(T)]).since(Sm90, V7_8),
    half(Op::Mul, &[opt(&[Rn]), opt(&[Ftz]), opt(&[Sat]), t(F16S)], &[d(T), r(T), r(T)]),
    half(Op::Mul, &[opt(&[Rn]), t(BF16S)], &[d(T), r(T), r(T)]).since(Sm90, V7_8),
    half(Op::Fma, &[one(&[Rn]), opt(&[Ftz]), opt(&[Sat, Relu]), t(F16S)], &[d(T), r(T), r(T), r(T)]),
    half(Op::Fma, &[one(&[Rn]), opt(&[Relu]), t(BF16S)], &[d(T), r(T), r(T), r(T)]).since_sm80(),
    half(Op::Neg, &[opt(&[Ftz]), t(F16S)], &[d(T), r(T)]),
    half(Op::Neg, &[t(BF16S)], &[d(T), r(T)]).since_sm80(),
    half(Op::Abs, &[opt(&[Ftz]), t(F16S)], &[d(T), r(T)]),
    half(Op::Abs, &[t(BF16S)], &[d(T), r(T)]).since_sm80(),
    half(Op::Min, &[opt(&[Ftz]), opt(&[NaN]), t(F16S)], &[d(T), r(T), r(T)]).since_sm80(),
    half(Op::Min, &[opt(&[NaN]), t(BF16S)], &[d(T), r(T), r(T)]).since_sm80(),
    half(Op::Max, &[opt(&[Ftz]), opt(&[NaN]), t(F16S)], &[d(T), r(T), r(T)]).since_sm80(),
    half(Op::Max, &[opt(&[NaN]), t(BF16S)], &[d(T), r(T), r(T)]).since_sm80(),
    special(Op::Ex2, &[one(&[Approx]), t(F16S)], &[d(T), r(T)]),
    special(Op::Ex2, &[one(&[Approx]), one(&[Ftz]), t(BF16S)], &[d(T), r(T)]).since(Sm90, V7_8),
    special(Op::Tanh, &[one(&[Approx]), t(F16S)], &[d(T), r(T)]),
    special(Op::Tanh, &[one(&[Approx]), t(BF16S)], &[d(T), r(T)]).since(Sm90, V7_8),
];
