//! Sparse products of tensor cores: `mma.sp`, whose A stores half of its columns and metadata that says which.

use super::spec::*;
use crate::op::{Mod, Mod::*, Op, shape};
use crate::target::Target::{Sm80, Sm89};
use crate::types::ScalarType::{self, *};
use crate::version::{V7_1, V8_4, V8_5};

const WORD: Ty = is(B32);

/// Both spellings of a sparse product: metadata in any order, and in ascending order. Sums may have a modifier.
///
/// `lanes` is the largest sparsity selector: which lanes of four hold the metadata.
macro_rules! both {
    ($k:literal, [$($clamp:expr)?], $cd:ident, $ta:ident, $tb:ident, [$($counts:literal),+], $lanes:literal, $since:expr) => {
        [
            both!(@ Op::MmaSp, $k, [$($clamp)?], $cd, $ta, $tb, [$($counts),+], $lanes).since($since.0, $since.1),
            both!(@ Op::MmaSpOrdered, $k, [$($clamp)?], $cd, $ta, $tb, [$($counts),+], $lanes).since($since.0, V8_5),
        ]
    };
    (@ $op:expr, $k:literal, [$($clamp:expr)?], $cd:ident, $ta:ident, $tb:ident, [$d:literal, $a:literal, $b:literal], $lanes:literal) => {
        product(
            $op,
            &[
                one(&[Aligned]),
                one(&[Shape(shape(16, 8, $k))]),
                one(&[RowMajor]),
                one(&[ColMajor]),
                $($clamp,)?
                one(&[Mod::Type($cd)]),
                one(&[Mod::Type($ta)]),
                one(&[Mod::Type($tb)]),
                one(&[Mod::Type($cd)]),
            ],
            operands!($cd, $d, $a, $b, $lanes),
        )
    };
}

macro_rules! floats {
    ($k:literal, $cd:ident, $ta:ident, $tb:ident : d $d:literal a $a:literal b $b:literal lanes $lanes:literal, $since:expr) => {
        both!($k, [], $cd, $ta, $tb, [$d, $a, $b], $lanes, $since)
    };
}

/// Sums of bytes may be clamped.
macro_rules! bytes {
    ($k:literal, $ta:ident, $tb:ident : a $a:literal b $b:literal lanes $lanes:literal) => {
        both!($k, [opt(&[Satfinite])], S32, $ta, $tb, [4, $a, $b], $lanes, AMPERE)
    };
}

macro_rules! operands {
    ($cd:ident, $d:literal, $a:literal, $b:literal, $lanes:literal) => {
        &[
            dst(Kind::Vector(sum($cd), Count::Is($d))),
            src(Kind::Vector(WORD, Count::Is($a))),
            src(Kind::Vector(WORD, Count::Is($b))),
            src(Kind::Vector(sum($cd), Count::Is($d))),
            r(WORD),
            imm(0, $lanes, 1),
        ]
    };
}

const fn product(op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    row(Class::Tensor, op, slots, operands).converge(Converge::Warp)
}

/// Registers that hold an accumulator: f16 travels in pairs.
const fn sum(ty: ScalarType) -> Ty {
    if matches!(ty, F16) { WORD } else { is(ty) }
}

const AMPERE: (crate::target::Target, crate::version::Version) = (Sm80, V7_1);
const ADA: (crate::target::Target, crate::version::Version) = (Sm89, V8_4);

/// PTX ISA, "mma.sp".
pub(super) const SPARSE: &[&[Row]] = &[
    &floats!(16, F32, F16, F16 : d 4 a 2 b 2 lanes 3, AMPERE),
    &floats!(16, F16, F16, F16 : d 2 a 2 b 2 lanes 3, AMPERE),
    &floats!(16, F32, Bf16, Bf16 : d 4 a 2 b 2 lanes 3, AMPERE),
    &floats!(32, F32, F16, F16 : d 4 a 4 b 4 lanes 1, AMPERE),
    &floats!(32, F16, F16, F16 : d 2 a 4 b 4 lanes 1, AMPERE),
    &floats!(32, F32, Bf16, Bf16 : d 4 a 4 b 4 lanes 1, AMPERE),
    &floats!(8, F32, Tf32, Tf32 : d 4 a 2 b 2 lanes 3, AMPERE),
    &floats!(16, F32, Tf32, Tf32 : d 4 a 4 b 4 lanes 1, AMPERE),
    &floats!(64, F32, E4m3, E4m3 : d 4 a 4 b 4 lanes 0, ADA),
    &floats!(64, F32, E4m3, E5m2 : d 4 a 4 b 4 lanes 0, ADA),
    &floats!(64, F32, E5m2, E4m3 : d 4 a 4 b 4 lanes 0, ADA),
    &floats!(64, F32, E5m2, E5m2 : d 4 a 4 b 4 lanes 0, ADA),
    &bytes!(32, S8, S8 : a 2 b 2 lanes 1),
    &bytes!(32, S8, U8 : a 2 b 2 lanes 1),
    &bytes!(32, U8, S8 : a 2 b 2 lanes 1),
    &bytes!(32, U8, U8 : a 2 b 2 lanes 1),
    &bytes!(64, S8, S8 : a 4 b 4 lanes 0),
    &bytes!(64, S8, U8 : a 4 b 4 lanes 0),
    &bytes!(64, U8, S8 : a 4 b 4 lanes 0),
    &bytes!(64, U8, U8 : a 4 b 4 lanes 0),
];
