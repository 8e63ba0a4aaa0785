//! Asynchronous copies: `cp.async` and its groups, bulk copies, tensor copies.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::{Sm80, Sm90, Sm90a};
use crate::types::ScalarType::*;
use crate::version::{V7_5, V8_0, V8_1, V8_3, V8_6};

const SMEM: &[Mod] = &[Shared, SharedCta];
const PREFETCH: &[Mod] = &[L2B64, L2B128, L2B256];
const POLICY: OperandSpec = r(is(B64)).with(L2CacheHint);
const CTA_MASK: OperandSpec = r(is(U16)).with(MulticastCluster);
const DIMS: &[Mod] = &[D1, D2, D3, D4, D5];
const BY_SIZE: OperandSpec = src(Kind::Address(Align::Operand(2)));
/// Size of a bulk copy; literals must be multiples of 16.
const BULK_SIZE: OperandSpec = ranged(is(U32), 0, 1 << 20, 16);
/// Bytes that are really read; the rest is filled with zeros.
const SOURCE_SIZE: OperandSpec = ranged(is(U32), 0, 16, 1).maybe();
const COPY_SIZE: OperandSpec = src(Kind::OneOf(&[4, 8, 16]));
const SIXTEEN: OperandSpec = src(Kind::OneOf(&[16]));
const TENSOR: OperandSpec = src(Kind::Tensor);

const fn cp(slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, Op::CpAsync, slots, operands)
        .memory(Memory::ReadWrite)
        .completes(Completion::CpAsyncGroup)
        .since_sm80()
}

const fn group(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, op, slots, operands).since_sm80()
}

/// PTX ISA, "cp.async" and its completion mechanisms.
pub(super) const CP_ASYNC: &[Row] = &[
    cp(
        &[one(&[Ca]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, COPY_SIZE, SOURCE_SIZE, POLICY],
    ),
    cp(
        &[one(&[Cg]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, SIXTEEN, SOURCE_SIZE, POLICY],
    ),
    cp(
        &[one(&[Ca]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, COPY_SIZE, src(Kind::Pred), POLICY],
    )
    .since(Sm80, V7_5),
    cp(
        &[one(&[Cg]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, SIXTEEN, src(Kind::Pred), POLICY],
    )
    .since(Sm80, V7_5),
    group(Op::CpAsyncCommitGroup, &[], &[]),
    group(Op::CpAsyncWaitGroup, &[], &[imm(0, 255, 1)]),
    group(Op::CpAsyncWaitAll, &[], &[]),
    row(
        Class::Barrier,
        Op::CpAsyncMbarrierArrive,
        &[opt(&[Noinc]), opt(&[Shared, SharedCta]), t(&[B64])],
        &[at(8)],
    )
    .memory(Memory::ReadWrite)
    .since_sm80(),
];

const fn bulk(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, op, slots, operands)
        .memory(Memory::ReadWrite)
        .completes(Completion::Bulk)
        .since(Sm90, V8_0)
}

/// `st.async`: registers to shared memory of the cluster, counted by an mbarrier there.
const fn send(slots: &'static [Slot]) -> Row {
    const DATA: OperandSpec = src(Kind::Vector(Ty::Loose(Var(0)), Count::VecMod));
    const OPERANDS: &[OperandSpec] = &[mem(), DATA, at(8)];
    row(Class::AsyncCopy, Op::StAsync, slots, OPERANDS)
        .memory(Memory::Write)
        .completes(Completion::Bulk)
        .since(Sm90, V8_1)
}

/// `red.async`: registers combined with what shared memory of the cluster holds, counted in the same way.
macro_rules! send_sum {
    ([$($operator:ident),+], $types:expr) => {
        row(
            Class::Atomic,
            Op::RedAsync,
            &[
                one(&[Relaxed]), one(&[Cluster]), one(&[SharedCluster]), one(&[CompleteTxBytes]),
                one(&[$($operator),+]), t($types),
            ],
            &[mem(), s(T), at(8)],
        )
        .memory(Memory::ReadWrite)
        .completes(Completion::Bulk)
        .since(Sm90, V8_1)
    };
}

/// `cp.reduce.async.bulk` into shared memory of the cluster.
macro_rules! bulk_reduce_there {
    ([$($operator:ident),+], $types:expr) => {
        bulk(
            Op::CpReduceAsyncBulk,
            &[
                one(&[SharedCluster]), one(&[SharedCta]), one(&[CompleteTxBytes]),
                one(&[$($operator),+]), t($types),
            ],
            &[at(16), at(16), BULK_SIZE, at(8)],
        )
    };
}

/// `cp.reduce.async.bulk` with the operators and types that go together.
macro_rules! bulk_reduce {
    ([$($operator:ident),+] $($no:ident)?, $types:expr) => {
        bulk(
            Op::CpReduceAsyncBulk,
            &[
                one(&[Global]), one(&[SharedCta]), one(&[BulkGroup]), opt(&[L2CacheHint]),
                one(&[$($operator),+]), $(one(&[$no]),)? t($types),
            ],
            &[at(16), at(16), BULK_SIZE, POLICY],
        )
    };
}

/// PTX ISA, "cp.async.bulk", "st.async", "red.async", "cp.reduce.async.bulk" and bulk groups.
pub(super) const BULK: &[Row] = &[
    bulk(
        Op::CpAsyncBulk,
        &[
            one(&[SharedCluster]),
            one(&[Global]),
            one(&[CompleteTxBytes]),
            opt(&[MulticastCluster]),
            opt(&[L2CacheHint]),
        ],
        &[at(16), at(16), BULK_SIZE, at(8), CTA_MASK, POLICY],
    ),
    bulk(
        Op::CpAsyncBulk,
        &[one(&[SharedCta]), one(&[Global]), one(&[CompleteTxBytes]), opt(&[L2CacheHint])],
        &[at(16), at(16), BULK_SIZE, at(8), POLICY],
    )
    .since(Sm90, V8_6),
    bulk(
        Op::CpAsyncBulk,
        &[one(&[SharedCluster]), one(&[SharedCta]), one(&[CompleteTxBytes])],
        &[at(16), at(16), BULK_SIZE, at(8)],
    ),
    bulk(
        Op::CpAsyncBulk,
        &[one(&[Global]), one(&[SharedCta]), one(&[BulkGroup]), opt(&[L2CacheHint])],
        &[at(16), at(16), BULK_SIZE, POLICY],
    ),
    send(&[
        opt(&[Weak]),
        one(&[SharedCluster]),
        one(&[CompleteTxBytes]),
        opt(&[V2, V4]),
        t(&[B32, U32, S32, F32]),
    ]),
    send(&[
        opt(&[Weak]),
        one(&[SharedCluster]),
        one(&[CompleteTxBytes]),
        opt(&[V2]),
        t(&[B64, U64, S64, F64]),
    ]),
    send_sum!([Add], &[U32, S32, U64]),
    send_sum!([Min, Max], &[U32, S32]),
    send_sum!([Inc, Dec], &[U32]),
    send_sum!([And, Or, Xor], &[B32]),
    bulk_reduce_there!([Add], &[U32, S32, U64]),
    bulk_reduce_there!([Min, Max], &[U32, S32]),
    bulk_reduce_there!([Inc, Dec], &[U32]),
    bulk_reduce_there!([And, Or, Xor], &[B32]),
    bulk_reduce!([Add], &[U32, S32, U64, F32, F64]),
    bulk_reduce!([Add] Noftz, &[F16, Bf16]),
    bulk_reduce!([Min, Max], &[U32, S32, U64, S64, F16, Bf16]),
    bulk_reduce!([Inc, Dec], &[U32]),
    bulk_reduce!([And, Or, Xor], &[B32, B64]),
    bulk(
        Op::CpAsyncBulkPrefetch,
        &[one(&[L2]), one(&[Global]), opt(&[L2CacheHint])],
        &[at(16), BULK_SIZE, POLICY],
    )
    .memory(Memory::None)
    .completes(Completion::Now),
    group(Op::CpAsyncBulkCommitGroup, &[], &[]).since(Sm90, V8_0),
    group(Op::CpAsyncBulkWaitGroup, &[opt(&[Read])], &[imm(0, 255, 1)]).since(Sm90, V8_0),
];

/// `tensormap.replace`: one field of a tensor map.
macro_rules! replace {
    ([$($field:ident),+] $ty:ident, [$($operand:expr),+]) => {
        row(
            Class::AsyncCopy,
            Op::TensormapReplace,
            &[one(&[Tile]), one(&[$($field),+]), one(&[Global, SharedCta]), one(&[B1024]), t(&[$ty])],
            &[at(64), $($operand),+],
        )
        .memory(Memory::ReadWrite)
        .since(Sm90a, V8_3)
    };
}

/// Which dimension a field is of.
const ORDINAL: OperandSpec = imm(0, 4, 1);
/// Bytes of a tensor map.
const MAP_BYTES: OperandSpec = imm(128, 128, 1);

/// PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy", "fence.proxy.tensormap".
pub(super) const TENSOR_MAPS: &[Row] = &[
    replace!([GlobalAddress] B64, [r(T)]),
    replace!([Rank] B32, [s(T)]),
    replace!([GlobalStride] B64, [imm(0, 3, 1), r(T)]),
    replace!([BoxDim, GlobalDim, ElementStride] B32, [ORDINAL, s(T)]),
    replace!([Elemtype] B32, [imm(0, 12, 1)]),
    replace!([InterleaveLayout] B32, [imm(0, 2, 1)]),
    replace!([SwizzleMode] B32, [imm(0, 3, 1)]),
    replace!([FillMode] B32, [imm(0, 1, 1)]),
    row(
        Class::AsyncCopy,
        Op::TensormapCpFenceproxy,
        &[
            one(&[Global]),
            one(&[SharedCta]),
            one(&[TensormapGeneric]),
            one(&[Release]),
            one(&[Cta, Cluster, Gpu, Sys]),
            one(&[Sync]),
            one(&[Aligned]),
        ],
        &[at(128), at(128), MAP_BYTES],
    )
    .memory(Memory::ReadWrite)
    .converge(Converge::Warp)
    .since(Sm90, V8_3),
    row(
        Class::Barrier,
        Op::FenceProxy,
        &[one(&[TensormapGeneric]), one(&[Acquire]), one(&[Cta, Cluster, Gpu, Sys])],
        &[at(128), MAP_BYTES],
    )
    .since(Sm90, V8_3),
    row(
        Class::Barrier,
        Op::FenceProxy,
        &[one(&[TensormapGeneric]), one(&[Release]), one(&[Cta, Cluster, Gpu, Sys])],
        &[],
    )
    .since(Sm90, V8_3),
];

/// PTX ISA, "cp.async.bulk.tensor" and relatives, tiled mode. Shared-memory sides are aligned to 128 bytes.
pub(super) const TENSOR_COPY: &[Row] = &[
    bulk(
        Op::CpAsyncBulkTensor,
        &[
            one(DIMS),
            one(&[SharedCluster]),
            one(&[Global]),
            opt(&[Tile]),
            one(&[CompleteTxBytes]),
            opt(&[MulticastCluster]),
            opt(&[L2CacheHint]),
        ],
        &[at(128), TENSOR, at(8), CTA_MASK, POLICY],
    ),
    bulk(
        Op::CpAsyncBulkTensor,
        &[
            one(DIMS),
            one(&[SharedCta]),
            one(&[Global]),
            opt(&[Tile]),
            one(&[CompleteTxBytes]),
            opt(&[L2CacheHint]),
        ],
        &[at(128), TENSOR, at(8), POLICY],
    )
    .since(Sm90, V8_6),
    bulk(
        Op::CpAsyncBulkTensor,
        &[one(DIMS), one(&[Global]), one(&[SharedCta]), opt(&[Tile]), one(&[BulkGroup]), opt(&[L2CacheHint])],
        &[TENSOR, at(128), POLICY],
    ),
    bulk(
        Op::CpReduceAsyncBulkTensor,
        &[
            one(DIMS),
            one(&[Global]),
            one(&[SharedCta]),
            one(&[Add, Min, Max, Inc, Dec, And, Or, Xor]),
            opt(&[Tile]),
            one(&[BulkGroup]),
            opt(&[L2CacheHint]),
        ],
        &[TENSOR, at(128), POLICY],
    ),
    bulk(
        Op::CpAsyncBulkPrefetchTensor,
        &[one(DIMS), one(&[L2]), one(&[Global]), opt(&[Tile]), opt(&[L2CacheHint])],
        &[TENSOR, POLICY],
    )
    .memory(Memory::None)
    .completes(Completion::Now),
];
