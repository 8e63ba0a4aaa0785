//! Exchange inside a warp, and control flow.

use super::spec::*;
use crate::op::{Mod::*, Op};
use crate::target::Target::{Sm75, Sm90, Sm90a};
use crate::types::ScalarType::*;
use crate::version::{V7_3, V7_8, V8_0};

const MASK: OperandSpec = s(is(B32));

const fn warp(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Warp, op, slots, operands).converge(Converge::Mask)
}

/// PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync", "activemask".
pub(super) const WARP: &[Row] = &[
    warp(
        Op::ShflSync,
        &[one(&[Up, Down, Bfly, Idx]), t(&[B32])],
        &[dst(Kind::RegOrPair(T)), s(T), s(is(B32)), s(is(B32)), MASK],
    ),
    warp(Op::VoteSync, &[one(&[All, Any, Uni]), t(&[Pred])], &[d(T), src(Kind::Bool), MASK]),
    warp(Op::VoteSync, &[one(&[Ballot]), t(&[B32])], &[d(T), src(Kind::Bool), MASK]),
    warp(Op::Match, &[one(&[Any]), one(&[Sync]), t(&[B32, B64])], &[d(is(B32)), s(T), MASK]),
    warp(
        Op::Match,
        &[one(&[All]), one(&[Sync]), t(&[B32, B64])],
        &[dst(Kind::RegOrPair(is(B32))), s(T), MASK],
    ),
    warp(Op::ReduxSync, &[one(&[Add, Min, Max]), t(&[U32, S32])], &[d(T), s(T), MASK]).since_sm80(),
    warp(Op::ReduxSync, &[one(&[And, Or, Xor]), t(&[B32])], &[d(T), s(T), MASK]).since_sm80(),
    warp(Op::ElectSync, &[], &[dst(Kind::Pair(is(B32))), MASK]).since(Sm90, V8_0),
    row(Class::Warp, Op::Activemask, &[t(&[B32])], &[d(T)]),
];

const fn control(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Control, op, slots, operands)
}

/// A call; its effect on memory is unknown here.
const fn call(operands: &'static [OperandSpec]) -> Row {
    const SLOTS: &[Slot] = &[opt(&[Uni])];
    control(Op::Call, SLOTS, operands).memory(Memory::ReadWrite)
}

/// PTX ISA, "Control Flow Instructions" and "Miscellaneous Instructions".
pub(super) const CONTROL: &[Row] = &[
    control(Op::Bra, &[opt(&[Uni])], &[src(Kind::Label)]).terminator(),
    control(Op::BrxIdx, &[opt(&[Uni])], &[r(is(U32)), src(Kind::Targets)]).terminator(),
    call(&[src(Kind::Function)]),
    call(&[src(Kind::Function), src(Kind::Group)]),
    call(&[dst(Kind::Group), src(Kind::Function), src(Kind::Group)]),
    call(&[r(is(U64)), src(Kind::Group), src(Kind::Targets)]),
    call(&[dst(Kind::Group), r(is(U64)), src(Kind::Group), src(Kind::Targets)]),
    control(Op::Ret, &[opt(&[Uni])], &[]).terminator(),
    control(Op::Exit, &[], &[]).terminator(),
    control(Op::Trap, &[], &[]).terminator(),
    control(Op::Brkpt, &[], &[]),
    control(
        Op::Alloca,
        &[t(&[U32, U64])],
        &[d(T), s(T), src(Kind::OneOf(&[1, 2, 4, 8, 16, 32, 64, 128])).maybe()],
    )
    .since(Sm75, V7_3),
    control(Op::Stacksave, &[t(&[U32, U64])], &[d(T)]).since(Sm75, V7_3),
    control(Op::Stackrestore, &[t(&[U32, U64])], &[r(T)]).since(Sm75, V7_3),
    control(Op::Nanosleep, &[t(&[U32])], &[s(T)]),
    control(
        Op::Setmaxnreg,
        &[one(&[Inc, Dec]), one(&[Sync]), one(&[Aligned]), t(&[U32])],
        &[imm(24, 256, 8)],
    )
    .converge(Converge::Warpgroup)
    .since(Sm90a, V8_0),
    control(Op::Griddepcontrol, &[one(&[LaunchDependents, Wait])], &[]).since(Sm90, V7_8),
];
