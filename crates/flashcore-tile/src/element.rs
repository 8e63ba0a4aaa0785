//! What one element of a tile is; sizes of tiles and depths of products follow from it.
//!
//! Tensor cores multiply 32 bytes of depth in one instruction whatever the element, shared memory is permuted in chunks
//! of 16 bytes and rows of at most 128, and all accumulate in f32.

use flashcore_ptx::{launch::TensorElement, layout::Swizzle, types::ScalarType};

use crate::scalar::Half;

/// Bytes that `ldmatrix`, swizzles and the widest copies move as one.
pub const CHUNK_BYTES: u32 = 16;
/// Bytes of depth of one matrix instruction.
const DEPTH_BYTES: u32 = 32;
/// Bytes of a row of the widest swizzle.
const SLAB_BYTES: u32 = 128;

/// The type of an element in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Element {
    /// 8 bits: 4 of exponent, 3 of mantissa.
    E4m3,
    /// 8 bits: 5 of exponent, 2 of mantissa.
    E5m2,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

impl Element {
    /// Every element, narrowest first.
    pub const ALL: [Self; 5] = [Self::E4m3, Self::E5m2, Self::F16, Self::Bf16, Self::F32];

    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::E4m3 | Self::E5m2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Its name, also in the names of kernels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// The type that matrix instructions name; f32 is multiplied as tf32.
    pub const fn ptx(self) -> ScalarType {
        match self {
            Self::E4m3 => ScalarType::E4m3,
            Self::E5m2 => ScalarType::E5m2,
            Self::F16 => ScalarType::F16,
            Self::Bf16 => ScalarType::Bf16,
            Self::F32 => ScalarType::Tf32,
        }
    }

    /// The type that tensor maps name.
    pub const fn tensor(self) -> TensorElement {
        match self {
            Self::E4m3 | Self::E5m2 => TensorElement::U8,
            Self::F16 => TensorElement::F16,
            Self::Bf16 => TensorElement::BF16,
            Self::F32 => TensorElement::F32,
        }
    }

    /// The 16-bit float that this is, if it is one.
    pub const fn half(self) -> Option<Half> {
        match self {
            Self::F16 => Some(Half::F16),
            Self::Bf16 => Some(Half::Bf16),
            Self::E4m3 | Self::E5m2 | Self::F32 => None,
        }
    }

    /// Elements of a chunk of 16 bytes.
    pub const fn per_chunk(self) -> u32 {
        CHUNK_BYTES / self.bytes()
    }

    /// Depth of one matrix instruction.
    pub const fn depth(self) -> u32 {
        DEPTH_BYTES / self.bytes()
    }

    /// Columns of a slab of the widest swizzle.
    pub const fn slab_cols(self) -> u32 {
        SLAB_BYTES / self.bytes()
    }

    /// The widest swizzle for rows of `cols` elements.
    pub fn swizzle(self, cols: u32) -> Swizzle {
        Swizzle::widest_for(cols * self.bytes())
    }
}

impl From<Half> for Element {
    fn from(half: Half) -> Self {
        half.element()
    }
}

impl Half {
    /// The element that this is.
    pub const fn element(self) -> Element {
        match self {
            Self::F16 => Element::F16,
            Self::Bf16 => Element::Bf16,
        }
    }
}
