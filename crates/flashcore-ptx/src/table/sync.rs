//! Barriers and fences: mbarrier, named barriers, cluster barriers, memory and proxy fences.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::{Sm80, Sm90};
use crate::types::ScalarType::*;
use crate::version::{V7_1, V7_5, V7_8, V8_0, V8_6};

const SMEM: &[Mod] = &[Shared, SharedCta];
const REMOTE: &[Mod] = &[SharedCluster];
const ANY_SMEM: &[Mod] = &[Shared, SharedCta, SharedCluster];
const SCOPE: &[Mod] = &[Cta, Cluster];
const ARRIVE: &[Mod] = &[Release, Relaxed];
const WAIT: &[Mod] = &[Acquire, Relaxed];
const STATE: OperandSpec = dst(Kind::RegOrSink(is(B64)));
const COUNT: OperandSpec = s(is(U32));
const PARITY: OperandSpec = ranged(is(U32), 0, 1, 1);
/// A barrier of another CTA returns no state.
const NO_STATE: OperandSpec = dst(Kind::Sink);

const fn mbarrier(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Barrier, op, slots, operands).memory(Memory::ReadWrite).since_sm80()
}

/// The forms of `mbarrier.arrive` and `mbarrier.arrive_drop`.
macro_rules! arrive {
    ($op:ident) => {
        [
            mbarrier(Op::$op, &[opt_pair(ARRIVE, SCOPE), opt(SMEM), t(&[B64])], &[STATE, at(8)]),
            mbarrier(Op::$op, &[opt_pair(ARRIVE, SCOPE), opt(SMEM), t(&[B64])], &[STATE, at(8), COUNT])
                .since(Sm90, V7_8),
            mbarrier(
                Op::$op,
                &[opt_pair(ARRIVE, SCOPE), one(REMOTE), t(&[B64])],
                &[NO_STATE, at(8), COUNT.maybe()],
            )
            .since(Sm90, V8_0),
            mbarrier(
                Op::$op,
                &[one(&[NoComplete]), opt_pair(&[Release], &[Cta]), opt(SMEM), t(&[B64])],
                &[STATE, at(8), COUNT],
            ),
            mbarrier(
                Op::$op,
                &[one(&[ExpectTx]), opt_pair(ARRIVE, SCOPE), opt(SMEM), t(&[B64])],
                &[STATE, at(8), COUNT],
            )
            .since(Sm90, V8_0),
            mbarrier(
                Op::$op,
                &[one(&[ExpectTx]), opt_pair(ARRIVE, SCOPE), one(REMOTE), t(&[B64])],
                &[NO_STATE, at(8), COUNT],
            )
            .since(Sm90, V8_0),
        ]
    };
}

/// PTX ISA, "mbarrier.arrive", "mbarrier.arrive_drop".
pub(super) const ARRIVALS: &[&[Row]] = &[&arrive!(MbarrierArrive), &arrive!(MbarrierArriveDrop)];

/// PTX ISA, "mbarrier".
pub(super) const MBARRIER: &[Row] = &[
    mbarrier(Op::MbarrierInit, &[opt(SMEM), t(&[B64])], &[at(8), COUNT]),
    mbarrier(Op::MbarrierInval, &[opt(SMEM), t(&[B64])], &[at(8)]),
    mbarrier(Op::MbarrierExpectTx, &[opt_pair(&[Relaxed], SCOPE), opt(ANY_SMEM), t(&[B64])], &[at(8), COUNT])
        .since(Sm90, V8_0),
    mbarrier(
        Op::MbarrierCompleteTx,
        &[opt_pair(&[Relaxed], SCOPE), opt(ANY_SMEM), t(&[B64])],
        &[at(8), COUNT],
    )
    .since(Sm90, V8_0),
    mbarrier(
        Op::MbarrierTestWait,
        &[opt_pair(WAIT, SCOPE), opt(SMEM), t(&[B64])],
        &[d(is(Pred)), at(8), r(is(B64))],
    ),
    mbarrier(
        Op::MbarrierTestWait,
        &[one(&[Parity]), opt_pair(WAIT, SCOPE), opt(SMEM), t(&[B64])],
        &[d(is(Pred)), at(8), PARITY],
    )
    .since(Sm80, V7_1),
    mbarrier(
        Op::MbarrierTryWait,
        &[opt_pair(WAIT, SCOPE), opt(SMEM), t(&[B64])],
        &[d(is(Pred)), at(8), r(is(B64)), COUNT.maybe()],
    )
    .since(Sm90, V7_8),
    mbarrier(
        Op::MbarrierTryWait,
        &[one(&[Parity]), opt_pair(WAIT, SCOPE), opt(SMEM), t(&[B64])],
        &[d(is(Pred)), at(8), PARITY, COUNT.maybe()],
    )
    .since(Sm90, V7_8),
    row(Class::Barrier, Op::MbarrierPendingCount, &[t(&[B64])], &[d(is(U32)), r(T)]).since_sm80(),
];

const fn fence(op: Op, slots: &'static [Slot]) -> Row {
    row(Class::Barrier, op, slots, &[])
}

/// PTX ISA, "membar / fence".
pub(super) const FENCES: &[Row] = &[
    fence(Op::Fence, &[opt(&[Sc, AcqRel, Acquire, Release]), one(&[Cta, Cluster, Gpu, Sys])]),
    fence(Op::FenceProxy, &[one(&[Alias])]).since(Sm80, V7_5),
    fence(Op::FenceProxy, &[one(&[Async]), opt(&[Global, SharedCta, SharedCluster])]).since(Sm90, V8_0),
    fence(Op::Fence, &[one(&[Acquire]), one(&[RestrictCluster]), one(&[Cluster])]).since(Sm90, V8_6),
    fence(Op::Fence, &[one(&[Release]), one(&[RestrictCta]), one(&[Cluster])]).since(Sm90, V8_6),
    fence(Op::FenceProxy, &[one(&[AsyncGeneric]), one(&[Acquire]), one(&[RestrictCluster]), one(&[Cluster])])
        .since(Sm90, V8_6),
    fence(Op::FenceProxy, &[one(&[AsyncGeneric]), one(&[Release]), one(&[RestrictCta]), one(&[Cluster])])
        .since(Sm90, V8_6),
    fence(Op::FenceMbarrierInit, &[one(&[Release]), one(&[Cluster])]).since(Sm90, V8_0),
    fence(Op::Membar, &[one(&[Cta, Gl, Sys])]),
];

const fn bar(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Barrier, op, slots, operands).converge(Converge::Warp)
}

const fn barrier(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Barrier, op, slots, operands).converge(Converge::WarpIfAligned)
}

const ID: OperandSpec = ranged(is(U32), 0, 15, 1);
/// Threads that meet at a named barrier: whole warps.
const THREADS: OperandSpec = ranged(is(U32), 32, 1024, 32);
const VOTE: OperandSpec = src(Kind::Pred);

/// PTX ISA, "bar", "barrier", "bar.warp.sync", "barrier.cluster".
pub(super) const BARRIERS: &[Row] = &[
    bar(Op::BarSync, &[], &[ID, THREADS.maybe()]),
    bar(Op::BarArrive, &[], &[ID, THREADS]),
    bar(Op::BarRed, &[one(&[Popc]), t(&[U32])], &[d(T), ID, THREADS.maybe(), VOTE]),
    bar(Op::BarRed, &[one(&[And, Or]), t(&[Pred])], &[d(T), ID, THREADS.maybe(), VOTE]),
    barrier(Op::BarrierSync, &[opt(&[Aligned])], &[ID, THREADS.maybe()]),
    barrier(Op::BarrierArrive, &[opt(&[Aligned])], &[ID, THREADS]),
    barrier(Op::BarrierRed, &[one(&[Popc]), opt(&[Aligned]), t(&[U32])], &[d(T), ID, THREADS.maybe(), VOTE]),
    barrier(
        Op::BarrierRed,
        &[one(&[And, Or]), opt(&[Aligned]), t(&[Pred])],
        &[d(T), ID, THREADS.maybe(), VOTE],
    ),
    row(Class::Barrier, Op::BarWarpSync, &[], &[s(is(B32))]).converge(Converge::Mask),
    barrier(Op::BarrierClusterArrive, &[opt(&[Release, Relaxed]), opt(&[Aligned])], &[]).since(Sm90, V7_8),
    barrier(Op::BarrierClusterWait, &[opt(&[Acquire]), opt(&[Aligned])], &[]).since(Sm90, V7_8),
];
