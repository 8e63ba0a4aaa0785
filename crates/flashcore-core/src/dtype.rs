//! Element types: one enum inside, one trait at the edge.

use bytemuck::Pod;
use half::{bf16, f16};
use std::{fmt, str::FromStr};

use crate::call::{Data, DataMut};

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
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// Size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// `value` rounded to this type and back.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F16 => f16::from_f64(value).to_f64(),
            Self::BF16 => bf16::from_f64(value).to_f64(),
            Self::F32 => f64::from(value as f32),
        }
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
        known.ok_or_else(|| format!("unknown element type `{text}`; use f16, bf16 or f32"))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A type that tensors can hold: `f32`, [`half::f16`], [`half::bf16`].
pub trait Element: sealed::Sealed + Pod + Send + Sync + fmt::Debug + PartialEq {
    /// The same type as a value.
    const DTYPE: DType;
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
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
