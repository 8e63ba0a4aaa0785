//! How to launch a kernel, as plain data: made by kernels, executed by `flashcore-cuda` and `flashcore-sim` alike.
//!
//! A [`LaunchSpec`] holds no pointer. It names buffers by [`Slot`]; the executor supplies the address of each
//! slot, so one spec serves every call with the same problem.

use crate::{ident::Ident, layout::Swizzle};

/// The number of a buffer that the caller binds at launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot(pub u8);

/// One launch: which kernel, how many threads, what arguments.
#[derive(Clone, PartialEq, Debug)]
pub struct LaunchSpec {
    /// The kernel's name.
    pub entry: Ident,
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster along x, y, z; `[1, 1, 1]` where the kernel knows no clusters.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// Whether the kernel may start before its predecessor in the stream has ended (programmatic dependent launch).
    pub dependent: bool,
    /// The arguments in the order of the kernel's parameters.
    pub params: Vec<Param>,
    /// Memory that belongs to this launch while it is in flight.
    pub workspace: Vec<Workspace>,
}

/// One kernel argument.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Param {
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
    /// The bytes of a struct, or of a number of another type.
    Bytes(Vec<u8>),
    /// A struct by value, its members laid out as C does it: numbers and addresses at multiples of their size, tensor
    /// maps at multiples of 64, bytes anywhere.
    Struct(Vec<Self>),
    /// The address of a bound buffer.
    Buffer(Slot),
    /// A 128-byte tensor map over a bound buffer.
    TensorMap(TensorMapSpec),
}

/// Scratch memory that the executor provides under `slot`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workspace {
    /// The slot under which kernels' arguments name it.
    pub slot: Slot,
    /// Its size.
    pub bytes: u64,
    /// Whether the kernel expects zeros, and leaves zeros behind.
    pub zeroed: bool,
}

/// What `cuTensorMapEncodeTiled` needs besides the address; dimension 0 is the innermost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorMapSpec {
    /// The buffer it describes.
    pub slot: Slot,
    /// What an element is.
    pub element: TensorElement,
    /// Extent of each dimension in elements.
    pub dims: Vec<u64>,
    /// Distance in bytes between neighbours along dimensions 1 and up.
    pub strides: Vec<u64>,
    /// Extent of the box that one copy moves.
    pub box_dims: Vec<u32>,
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
}

/// Element types of tensor maps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum TensorElement {
    /// Bytes (FP8 travels as bytes).
    U8,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Single precision.
    F32,
    /// Unsigned integers of 16 bits.
    U16,
    /// Unsigned integers of 32 bits.
    U32,
    /// Signed integers of 32 bits.
    S32,
    /// Unsigned integers of 64 bits.
    U64,
    /// Signed integers of 64 bits.
    S64,
    /// Double precision.
    F64,
}

impl TensorElement {
    /// Size of an element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::BF16 | Self::U16 => 2,
            Self::F32 | Self::U32 | Self::S32 => 4,
            Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }
}
