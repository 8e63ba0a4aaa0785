//! Copies that run on their own: `cp.async` and its groups, bulk copies, tensor copies.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::Sm90;
use crate::types::ScalarType::{self, *};
use crate::version::{V8_0, V8_6};

const SMEM: &[Mod] = &[Shared, SharedCta];
const PREFETCH: &[Mod] = &[L2B64, L2B128, L2B256];
const POLICY: OperandSpec = r(is(B64)).with(L2CacheHint);
const CTA_MASK: OperandSpec = r(is(U16)).with(MulticastCluster);
const DIMS: &[Mod] = &[D1, D2, D3, D4, D5];
const BY_SIZE: OperandSpec = src(Kind::Address(Align::Operand(2)));
/// Size of a bulk copy; literals must be multiples of 16.
const BULK_SIZE: OperandSpec = s(is(U32));
const TENSOR: OperandSpec = src(Kind::Tensor);

const fn cp(slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, Op::CpAsync, slots, operands)
        .memory(Memory::ReadWrite)
        .completes(Completion::CpAsyncGroup)
}

const fn group(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, op, slots, operands)
}

/// PTX ISA, "cp.async" and its completion mechanisms.
pub(super) const CP_ASYNC: &[Row] = &[
    cp(
        &[one(&[Ca]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, imm(4, 16, 4), s(is(U32)).maybe(), POLICY],
    ),
    cp(
        &[one(&[Cg]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, imm(16, 16, 1), s(is(U32)).maybe(), POLICY],
    ),
    cp(
        &[one(&[Ca, Cg]), one(SMEM), one(&[Global]), opt(&[L2CacheHint]), opt(PREFETCH)],
        &[BY_SIZE, BY_SIZE, imm(4, 16, 4), src(Kind::Pred), POLICY],
    ),
    group(Op::CpAsyncCommitGroup, &[], &[]),
    group(Op::CpAsyncWaitGroup, &[], &[imm(0, 255, 1)]),
    group(Op::CpAsyncWaitAll, &[], &[]),
    row(
        Class::Barrier,
        Op::CpAsyncMbarrierArrive,
        &[opt(&[Noinc]), opt(&[Shared, SharedCta]), t(&[B64])],
        &[at(8)],
    )
    .memory(Memory::ReadWrite),
];

const fn bulk(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::AsyncCopy, op, slots, operands)
        .memory(Memory::ReadWrite)
        .completes(Completion::Bulk)
        .since(Sm90, V8_0)
}

const REDUCE: &[OperandSpec] = &[at(16), at(16), BULK_SIZE, POLICY];

const fn bulk_reduce(slots: &'static [Slot]) -> Row {
    bulk(Op::CpReduceAsyncBulk, slots, REDUCE)
}

const HALVES: &[ScalarType] = &[F16, Bf16];

/// PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk" and bulk groups.
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
    bulk_reduce(&[
        one(&[Global]),
        one(&[SharedCta]),
        one(&[BulkGroup]),
        opt(&[L2CacheHint]),
        one(&[Add, Min, Max, Inc, Dec, And, Or, Xor]),
        t(&[B32, B64, U32, S32, U64, S64, F32, F64]),
    ]),
    bulk_reduce(&[
        one(&[Global]),
        one(&[SharedCta]),
        one(&[BulkGroup]),
        opt(&[L2CacheHint]),
        one(&[Min, Max]),
        t(HALVES),
    ]),
    bulk_reduce(&[
        one(&[Global]),
        one(&[SharedCta]),
        one(&[BulkGroup]),
        opt(&[L2CacheHint]),
        one(&[Add]),
        one(&[Noftz]),
        t(HALVES),
    ]),
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
