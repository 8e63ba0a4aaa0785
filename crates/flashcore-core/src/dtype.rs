//! Element types: one enum internally, one trait in the API.

use bytemuck::Pod;
use half::{bf16, f16};
use std::{fmt, str::FromStr};

use crate::{
    call::{Data, DataMut},
    error::ProblemError,
    float8::{E4M3, E5M2},
};

/// The element type of Q, K, V and the output.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// 8 bits: 4 of exponent, 3 of mantissa; see [`E4M3`].
    E4M3,
    /// 8 bits: 5 of exponent, 2 of mantissa; see [`E5M2`].
    E5M2,
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 5] = [Self::F16, Self::BF16, Self::F32, Self::E4M3, Self::E5M2];
    /// Those that every operation takes.
    pub const COMMON: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// Size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::E4M3 | Self::E5M2 => 1,
        }
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    /// `value` rounded to this type and back.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F16 => f16::from_f64(value).to_f64(),
            Self::BF16 => bf16::from_f64(value).to_f64(),
            Self::F32 => f64::from(value as f32),
            Self::E4M3 => f64::from(E4M3::from_f32(value as f32).to_f32()),
            Self::E5M2 => f64::from(E5M2::from_f32(value as f32).to_f32()),
        }
    }

    /// Default element type of results of such tensors: 8 bits are too few for them.
    pub const fn of_result(self) -> Self {
        match self {
            Self::E4M3 | Self::E5M2 => Self::BF16,
            other => other,
        }
    }

    /// The largest number.
    pub const fn largest(self) -> f32 {
        match self {
            Self::F16 => 65504.0,
            Self::BF16 => f32::from_bits(0x7f7f_0000),
            Self::F32 => f32::MAX,
            Self::E4M3 => E4M3::MAX,
            Self::E5M2 => E5M2::MAX,
        }
    }

    /// Whether it is one of those that are scaled, having few bits.
    pub const fn is_narrow(self) -> bool {
        matches!(self, Self::E4M3 | Self::E5M2)
    }

    /// Refuses what only attention takes.
    pub(crate) fn check_common(self, operation: &'static str) -> Result<(), ProblemError> {
        if self.is_narrow() { Err(ProblemError::Narrow { operation, dtype: self }) } else { Ok(()) }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|d| d.name() == text);
        known.ok_or_else(|| format!("unknown element type `{text}`; use f16, bf16, f32, e4m3 or e5m2"))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for crate::float8::E4M3 {}
    impl Sealed for crate::float8::E5M2 {}
}

/// A type that tensors can hold: `f32`, [`half::f16`], [`half::bf16`], [`E4M3`], [`E5M2`].
pub trait Element: sealed::Sealed + Pod + Send + Sync + fmt::Debug + PartialEq {
    /// The same type as a value.
    const DTYPE: DType;
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even; 8-bit floats have no infinity, but a largest number.
    fn from_f32(value: f32) -> Self;
    /// Forgets the element type of a slice.
    fn erase(slice: &[Self]) -> Data<'_>;
    /// Forgets the element type of a mutable slice.
    fn erase_mut(slice: &mut [Self]) -> DataMut<'_>;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $to:expr, $from:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }

            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $from(value)
            }

            fn erase(slice: &[Self]) -> Data<'_> {
                Data::$dtype(slice)
            }

            fn erase_mut(slice: &mut [Self]) -> DataMut<'_> {
                DataMut::$dtype(slice)
            }
        }
    };
}

element!(f32, F32, |x| x, |x| x);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(bf16, BF16, bf16::to_f32, bf16::from_f32);
element!(E4M3, E4M3, E4M3::to_f32, E4M3::from_f32);
element!(E5M2, E5M2, E5M2::to_f32, E5M2::from_f32);
