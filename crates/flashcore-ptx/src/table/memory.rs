//! Loads, stores, atomics, cache control.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op};
use crate::target::Target::{Sm75, Sm80, Sm90};
use crate::types::ScalarType::{self, *};
use crate::version::{V7_4, V7_8, V8_0, V8_1, V8_2, V8_3, V9_1};

const ANY: &[ScalarType] = &[B8, B16, B32, B64, B128, U8, U16, U32, U64, S8, S16, S32, S64, F32, F64];
/// What one access to the memory of a device may be.
const ANY_WORD: &[ScalarType] = &[B8, B16, B32, B64, U8, U16, U32, U64, S8, S16, S32, S64, F32, F64];
const SCOPE: &[Mod] = &[Cta, Cluster, Gpu, Sys];
const SHARED: &[Mod] = &[Shared, SharedCta];
const READABLE: &[Mod] = &[Global, Shared, SharedCta, SharedCluster, Local, Const, Param];
const WRITABLE: &[Mod] = &[Global, Shared, SharedCta, SharedCluster, Local];
const ATOMIC: &[Mod] = &[Global, Shared, SharedCta, SharedCluster];
const L1_HINT: &[Mod] = &[L1EvictNormal, L1EvictUnchanged, L1EvictFirst, L1EvictLast, L1NoAllocate];
const PREFETCH: &[Mod] = &[L2B64, L2B128, L2B256];
const DATA: Kind = Kind::Vector(Ty::Loose(Var(0)), Count::VecMod);
const POLICY: OperandSpec = r(is(B64)).with(L2CacheHint);

const LOAD: &[OperandSpec] = &[dst(DATA), mem(), POLICY];
const STORE: &[OperandSpec] = &[mem(), src(DATA), POLICY];

const fn ld(slots: &'static [Slot]) -> Row {
    row(Class::Load, Op::Ld, slots, LOAD).memory(Memory::Read)
}

const fn st(slots: &'static [Slot]) -> Row {
    row(Class::Store, Op::St, slots, STORE).memory(Memory::Write)
}

/// PTX ISA, "ld", "ld.global.nc", "st". Hints for the caches are for global and generic addresses only.
pub(super) const LOAD_STORE: &[Row] = &[
    ld(&[opt(&[Weak]), opt(READABLE), opt(&[Ca, Cg, Cs, Lu, Cv]), opt(&[V2, V4]), t(ANY)]),
    ld(&[
        opt(&[Weak]),
        opt(&[Global]),
        opt(L1_HINT),
        opt(&[L2CacheHint]),
        opt(PREFETCH),
        opt(&[V2, V4]),
        t(ANY),
    ]),
    ld(&[one(&[Volatile]), opt(ATOMIC), opt(&[V2, V4]), t(ANY)]),
    ld(&[one(&[Volatile]), one(&[Local]), opt(&[V2, V4]), t(ANY)]).since(Sm75, V9_1),
    ld(&[one(&[Relaxed, Acquire]), one(SCOPE), opt(ATOMIC), opt(&[V2, V4]), t(ANY)]),
    ld(&[
        one(&[Relaxed, Acquire]),
        one(SCOPE),
        opt(&[Global]),
        opt(L1_HINT),
        opt(&[L2CacheHint]),
        opt(PREFETCH),
        opt(&[V2, V4]),
        t(ANY),
    ]),
    ld(&[
        one(&[Global]),
        opt(&[Ca, Cg, Cs]),
        one(&[Nc]),
        opt(&[L2CacheHint]),
        opt(PREFETCH),
        opt(&[V2, V4]),
        t(ANY),
    ]),
    ld(&[
        one(&[Global]),
        one(&[Nc]),
        opt(L1_HINT),
        opt(&[L2CacheHint]),
        opt(PREFETCH),
        opt(&[V2, V4]),
        t(ANY),
    ]),
    ld(&[one(&[Mmio]), one(&[Relaxed]), one(&[Sys]), opt(&[Global]), t(ANY_WORD)]).since(Sm75, V8_2),
    st(&[one(&[Mmio]), one(&[Relaxed]), one(&[Sys]), opt(&[Global]), t(ANY_WORD)]).since(Sm75, V8_2),
    st(&[opt(&[Weak]), opt(WRITABLE), opt(&[Wb, Cg, Cs, Wt]), opt(&[V2, V4]), t(ANY)]),
    st(&[one(&[Param]), opt(&[V2, V4]), t(ANY)]),
    st(&[opt(&[Weak]), opt(&[Global]), opt(L1_HINT), opt(&[L2CacheHint]), opt(&[V2, V4]), t(ANY)]),
    st(&[one(&[Volatile]), opt(ATOMIC), opt(&[V2, V4]), t(ANY)]),
    st(&[one(&[Volatile]), one(&[Local]), opt(&[V2, V4]), t(ANY)]).since(Sm75, V9_1),
    st(&[one(&[Relaxed, Release]), one(SCOPE), opt(ATOMIC), opt(&[V2, V4]), t(ANY)]),
    st(&[
        one(&[Relaxed, Release]),
        one(SCOPE),
        opt(&[Global]),
        opt(L1_HINT),
        opt(&[L2CacheHint]),
        opt(&[V2, V4]),
        t(ANY),
    ]),
];

const fn atomic(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Atomic, op, slots, operands).memory(Memory::ReadWrite)
}

const ATOM: &[OperandSpec] = &[dst(Kind::RegOrSink(T)), mem(), s(T)];
const ATOM_WIDE: &[OperandSpec] = &[dst(Kind::RegOrSink(T)), mem(), r(T)];
const ATOM_VECTOR: &[OperandSpec] = &[dst(DATA), mem(), src(Kind::Vector(T, Count::VecMod)), POLICY];
const SWAP_WIDE: &[OperandSpec] = &[dst(Kind::RegOrSink(T)), mem(), r(T), r(T)];
const COMPARE_AND_SWAP: &[OperandSpec] = &[dst(Kind::RegOrSink(T)), mem(), s(T), s(T)];
const RED: &[OperandSpec] = &[mem(), s(T)];
const RED_VECTOR: &[OperandSpec] = &[mem(), src(Kind::Vector(T, Count::VecMod)), POLICY];
const ATOM_ORDER: &[Mod] = &[Relaxed, Acquire, Release, AcqRel];
const RED_ORDER: &[Mod] = &[Relaxed, Release];

/// `atom` or `red` with the operators and types that go together.
macro_rules! atomic {
    ($op:ident $order:ident $operands:ident [$($operator:ident),+] $($no:ident)?, $types:expr) => {
        atomic(
            Op::$op,
            &[opt($order), opt(SCOPE), opt(ATOMIC), one(&[$($operator),+]), $(one(&[$no]),)? t($types)],
            $operands,
        )
    };
}

/// PTX ISA, "atom", "red".
pub(super) const ATOMICS: &[Row] = &[
    atomic!(Atom ATOM_ORDER ATOM [Add], &[U32, S32, U64, F32, F64]),
    atomic!(Atom ATOM_ORDER ATOM [Add] Noftz, &[F16, F16x2]),
    atomic!(Atom ATOM_ORDER ATOM [Add] Noftz, &[Bf16, Bf16x2]).since(Sm90, V7_8),
    atomic!(Atom ATOM_ORDER ATOM [Min, Max], &[U32, S32, U64, S64]),
    atomic!(Atom ATOM_ORDER ATOM [Inc, Dec], &[U32]),
    atomic!(Atom ATOM_ORDER ATOM [And, Or, Xor, Exch], &[B32, B64]),
    atomic!(Atom ATOM_ORDER COMPARE_AND_SWAP [Cas], &[B16, B32, B64]),
    atomic!(Atom ATOM_ORDER ATOM_WIDE [Exch], &[B128]).since(Sm90, V8_3),
    atomic!(Atom ATOM_ORDER SWAP_WIDE [Cas], &[B128]).since(Sm90, V8_3),
    atomic!(Red RED_ORDER RED [Add], &[U32, S32, U64, F32, F64]),
    atomic!(Red RED_ORDER RED [Add] Noftz, &[F16, F16x2]),
    atomic!(Red RED_ORDER RED [Add] Noftz, &[Bf16, Bf16x2]).since(Sm90, V7_8),
    atomic!(Red RED_ORDER RED [Min, Max], &[U32, S32, U64, S64]),
    atomic!(Red RED_ORDER RED [Inc, Dec], &[U32]),
    atomic!(Red RED_ORDER RED [And, Or, Xor], &[B32, B64]),
];

/// An address and the size of what is meant: the 128 bytes of a line.
const CACHE_LINE: &[OperandSpec] = &[at(128), imm(128, 128, 1)];

/// `atom` or `red` on vectors in global memory.
macro_rules! vectors {
    ($op:ident $order:ident $operands:ident [$($operator:ident),+] $($no:ident)? [$($len:ident),+], $types:expr) => {
        atomic(
            Op::$op,
            &[
                opt($order),
                opt(SCOPE),
                opt(&[Global]),
                one(&[$($operator),+]),
                $(one(&[$no]),)?
                opt(&[L2CacheHint]),
                one(&[$($len),+]),
                t($types),
            ],
            $operands,
        )
        .since(Sm90, V8_1)
    };
}

/// PTX ISA, "atom" and "red" on vectors, "applypriority", "discard", "prefetch", "prefetchu", "createpolicy".
pub(super) const CACHE: &[Row] = &[
    vectors!(Atom ATOM_ORDER ATOM_VECTOR [Add] [V2, V4], &[F32]),
    vectors!(Atom ATOM_ORDER ATOM_VECTOR [Add, Min, Max] Noftz [V2, V4, V8], &[F16, Bf16]),
    vectors!(Atom ATOM_ORDER ATOM_VECTOR [Add, Min, Max] Noftz [V2, V4], &[F16x2, Bf16x2]),
    vectors!(Red RED_ORDER RED_VECTOR [Add] [V2, V4], &[F32]),
    vectors!(Red RED_ORDER RED_VECTOR [Add, Min, Max] Noftz [V2, V4, V8], &[F16, Bf16]),
    vectors!(Red RED_ORDER RED_VECTOR [Add, Min, Max] Noftz [V2, V4], &[F16x2, Bf16x2]),
    row(Class::Load, Op::Prefetch, &[opt(&[Global, Local]), one(&[L1, L2])], &[at(1)]),
    row(Class::Load, Op::Prefetch, &[one(&[Global]), one(&[L2EvictNormal, L2EvictLast])], &[at(1)])
        .since(Sm80, V7_4),
    row(Class::Load, Op::Prefetchu, &[one(&[L1])], &[at(1)]),
    row(Class::Load, Op::Applypriority, &[opt(&[Global]), one(&[L2EvictNormal])], CACHE_LINE)
        .since(Sm80, V7_4),
    row(Class::Store, Op::Discard, &[opt(&[Global]), one(&[L2])], CACHE_LINE)
        .memory(Memory::Write)
        .since(Sm80, V7_4),
    row(Class::Load, Op::Prefetch, &[opt(&[Const, Param]), one(&[Tensormap])], &[at(64)]).since(Sm90, V8_0),
    row(
        Class::Move,
        Op::Createpolicy,
        &[
            one(&[Fractional]),
            one(&[L2EvictLast, L2EvictNormal, L2EvictFirst, L2EvictUnchanged]),
            opt(&[L2EvictFirst, L2EvictUnchanged]),
            t(&[B64]),
        ],
        &[d(T), s(is(F32)).maybe()],
    )
    .since(Sm80, V7_4),
    row(
        Class::Move,
        Op::Createpolicy,
        &[
            one(&[Range]),
            opt(&[Global]),
            one(&[L2EvictLast, L2EvictNormal, L2EvictFirst, L2EvictUnchanged]),
            opt(&[L2EvictFirst, L2EvictUnchanged]),
            t(&[B64]),
        ],
        &[d(T), at(1), r(is(U32)), r(is(U32))],
    )
    .since(Sm80, V7_4),
];

const MATRIX: &[Mod] = &[Shape(crate::op::shape(8, 8, 0))];
const FRAGMENT: Kind = Kind::Vector(is(B32), Count::XMod);

/// PTX ISA, "ldmatrix", "stmatrix", "movmatrix".
pub(super) const MATRICES: &[Row] = &[
    row(
        Class::Warp,
        Op::Movmatrix,
        &[one(&[Sync]), one(&[Aligned]), one(MATRIX), one(&[Trans]), one(&[Mod::Type(B16)])],
        &[d(is(B32)), r(is(B32))],
    )
    .since(Sm75, V7_8)
    .converge(Converge::Warp),
    row(
        Class::Load,
        Op::Ldmatrix,
        &[
            one(&[Sync]),
            one(&[Aligned]),
            one(MATRIX),
            one(&[X1, X2, X4]),
            opt(&[Trans]),
            opt(SHARED),
            t(&[B16]),
        ],
        &[dst(FRAGMENT), at(16)],
    )
    .memory(Memory::Read)
    .converge(Converge::Warp),
    row(
        Class::Store,
        Op::Stmatrix,
        &[
            one(&[Sync]),
            one(&[Aligned]),
            one(MATRIX),
            one(&[X1, X2, X4]),
            opt(&[Trans]),
            opt(SHARED),
            t(&[B16]),
        ],
        &[at(16), src(FRAGMENT)],
    )
    .since(Sm90, V7_8)
    .memory(Memory::Write)
    .converge(Converge::Warp),
];
