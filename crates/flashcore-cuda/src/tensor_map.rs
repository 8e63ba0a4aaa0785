//! Tensor maps: what TMA knows about a tensor, 128 opaque bytes made by the driver.
//!
//! `launch.rs` encodes one per tensor-map parameter when a launch is prepared and swaps the address at each launch: by
//! writing it into the map if the driver was seen to do just that (`TensorMap::address_word`), else by a call. Every
//! documented limit of `cuTensorMapEncodeTiled` is checked first, so that a refusal says which one was exceeded.

use crate::sys::{
    CUtensorMap, CUtensorMapDataType as Type, CUtensorMapFloatOOBfill as Fill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle,
};
use crate::{driver::Device, error::Error};
use flashcore_ptx::{
    launch::{TensorElement, TensorMapSpec},
    layout::Swizzle,
};
use std::ffi::c_void;

/// Most dimensions of a tensor map.
pub const MAX_RANK: usize = 5;
/// Addresses and strides are multiples of this.
pub const ALIGNMENT: u64 = 16;
const MAX_DIM: u64 = 1 << 32;
const STRIDE_END: u64 = 1 << 40;
const MAX_BOX: u32 = 256;
/// Addresses below this are tried when looking for the address in a map.
pub(crate) const PROBED_END: u64 = 1 << 47;

/// A limit of tensor maps that a tensor breaks. Dimension 0 is the innermost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorMapError {
    /// Too few or too many dimensions.
    #[error("a tensor map has 1 to 5 dimensions, not {rank}")]
    Rank {
        /// Requested dimensions.
        rank: usize,
    },
    /// The lists of the specification disagree in length.
    #[error("{rank} dimensions need {rank} box extents and {} strides; there are {boxes} and {strides}", rank - 1)]
    Lists {
        /// Dimensions of the tensor.
        rank: usize,
        /// Strides given.
        strides: usize,
        /// Box extents given.
        boxes: usize,
    },
    /// An extent that is zero or too large.
    #[error("dimension {dim} has {extent} elements; TMA takes 1 to 2^32")]
    Extent {
        /// Which dimension.
        dim: usize,
        /// Its extent.
        extent: u64,
    },
    /// A stride that is misaligned or too large.
    #[error("dimension {dim} has a stride of {stride} bytes; TMA takes multiples of 16 below 2^40")]
    Stride {
        /// Which dimension.
        dim: usize,
        /// Its stride in bytes.
        stride: u64,
    },
    /// A box extent that is zero or too large.
    #[error("the box has {extent} elements along dimension {dim}; TMA takes 1 to 256")]
    Box {
        /// Which dimension.
        dim: usize,
        /// The box's extent.
        extent: u32,
    },
    /// A box row that TMA cannot copy whole.
    #[error("a box row has {bytes} bytes; TMA takes multiples of 16")]
    BoxRow {
        /// Bytes of a row.
        bytes: u32,
    },
    /// A box row that is wider than the swizzle pattern.
    #[error("a box row has {bytes} bytes; the swizzle takes at most {limit}: use several boxes")]
    SwizzledRow {
        /// Bytes of a row.
        bytes: u32,
        /// The swizzle's width.
        limit: u32,
    },
    /// An address that TMA cannot use.
    #[error("a tensor map needs an address that is a multiple of 16 and not null, not {address:#x}")]
    Address {
        /// The address.
        address: u64,
    },
    /// An element type that this crate does not know.
    #[error("element type {element:?} cannot be put into a tensor map")]
    Element {
        /// The type.
        element: TensorElement,
    },
    /// A GPU without TMA.
    #[error("tensor maps need compute capability 9.0; the GPU has {}.{}", capability.0, capability.1)]
    Unsupported {
        /// The GPU's compute capability.
        capability: (u32, u32),
    },
}

/// Checks everything but the address.
pub fn check(spec: &TensorMapSpec) -> Result<(), TensorMapError> {
    check_lists(spec)?;
    for (dim, &extent) in spec.dims.iter().enumerate() {
        if !(1..=MAX_DIM).contains(&extent) {
            return Err(TensorMapError::Extent { dim, extent });
        }
    }
    for (below, &stride) in spec.strides.iter().enumerate() {
        if !stride.is_multiple_of(ALIGNMENT) || stride >= STRIDE_END {
            return Err(TensorMapError::Stride { dim: below + 1, stride });
        }
    }
    for (dim, &extent) in spec.box_dims.iter().enumerate() {
        if !(1..=MAX_BOX).contains(&extent) {
            return Err(TensorMapError::Box { dim, extent });
        }
    }
    check_row(spec)
}

fn check_lists(spec: &TensorMapSpec) -> Result<(), TensorMapError> {
    let (rank, strides, boxes) = (spec.dims.len(), spec.strides.len(), spec.box_dims.len());
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(TensorMapError::Rank { rank });
    }
    if boxes != rank || strides + 1 != rank {
        return Err(TensorMapError::Lists { rank, strides, boxes });
    }
    Ok(())
}

fn check_row(spec: &TensorMapSpec) -> Result<(), TensorMapError> {
    let bytes = spec.box_dims[0] * spec.element.bytes();
    if !bytes.is_multiple_of(ALIGNMENT as u32) {
        return Err(TensorMapError::BoxRow { bytes });
    }
    match swizzle(spec.swizzle).1 {
        Some(limit) if bytes > limit => Err(TensorMapError::SwizzledRow { bytes, limit }),
        _ => Ok(()),
    }
}

/// Checks an address.
pub fn check_address(address: u64) -> Result<(), TensorMapError> {
    if address == 0 || !address.is_multiple_of(ALIGNMENT) {
        Err(TensorMapError::Address { address })
    } else {
        Ok(())
    }
}

/// The driver's name for a swizzle, and the widest box row it takes.
fn swizzle(swizzle: Swizzle) -> (CUtensorMapSwizzle, Option<u32>) {
    match swizzle {
        Swizzle::None => (CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE, None),
        Swizzle::B32 => (CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B, Some(32)),
        Swizzle::B64 => (CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B, Some(64)),
        Swizzle::B128 => (CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B, Some(128)),
    }
}

fn element(element: TensorElement) -> Result<Type, TensorMapError> {
    Ok(match element {
        TensorElement::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        TensorElement::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        TensorElement::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        TensorElement::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        element => return Err(TensorMapError::Element { element }),
    })
}

/// An encoded tensor map: 128 bytes, aligned as the driver asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub(crate) CUtensorMap);

impl TensorMap {
    /// Size of a tensor map as a kernel parameter.
    pub const BYTES: usize = size_of::<CUtensorMap>();

    /// Encodes `spec` over the tensor at `address`.
    pub fn new(device: Device, spec: &TensorMapSpec, address: u64) -> Result<Self, Error> {
        if !device.props().tensor_maps() {
            return Err(TensorMapError::Unsupported { capability: device.props().capability }.into());
        }
        check(spec)?;
        check_address(address)?;
        let element = element(spec.element)?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        let unit_steps = [1u32; MAX_RANK];
        let _inside = device.enter()?;
        // SAFETY: the lists have the lengths that the rank implies (checked above); `map` is aligned and writable.
        let status = unsafe {
            device.api().tensor_map_encode(
                &mut map,
                element,
                spec.dims.len() as u32,
                address as *mut c_void,
                spec.dims.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_dims.as_ptr(),
                unit_steps.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(spec.swizzle).0,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        device.check(status)?;
        Ok(Self(map))
    }

    /// Points the map at another tensor of the same shape.
    pub fn set_address(&mut self, device: Device, address: u64) -> Result<(), Error> {
        let _inside = device.enter()?;
        // SAFETY: the map was encoded by `new`.
        unsafe { replace_address(device, &mut self.0, address) }
    }

    /// Which of the map's 64-bit words is the address, as it is and alone, below [`PROBED_END`]; `None` where the driver
    /// encodes otherwise. The encoding is not documented, so every bit of an address is tried.
    pub(crate) fn address_word(&self, device: Device) -> Result<Option<usize>, Error> {
        let _inside = device.enter()?;
        let mut words: Vec<usize> = (0..self.0.opaque.len()).collect();
        for bit in ALIGNMENT.trailing_zeros()..PROBED_END.trailing_zeros() {
            let (mut moved, address) = (*self, 1 << bit);
            moved.set_address(device, address)?;
            words.retain(|&word| {
                let mut expected = self.0.opaque;
                expected[word] = address;
                expected == moved.0.opaque
            });
        }
        Ok(words.first().copied())
    }
}

/// Swaps the address in an encoded map; the device's context must be current.
///
/// # Safety
/// `map` must point to an encoded, aligned, writable map.
pub(crate) unsafe fn replace_address(
    device: Device,
    map: *mut CUtensorMap,
    address: u64,
) -> Result<(), Error> {
    check_address(address)?;
    // SAFETY: the caller's promise.
    device.check(unsafe { device.api().tensor_map_replace_address(map, address as *mut c_void) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::launch::Slot;

    fn spec() -> TensorMapSpec {
        TensorMapSpec {
            slot: Slot(0),
            element: TensorElement::BF16,
            dims: vec![128, 4096, 16],
            strides: vec![256, 256 * 4096],
            box_dims: vec![64, 128, 1],
            swizzle: Swizzle::B128,
        }
    }

    #[track_caller]
    fn expect(expected: Result<(), TensorMapError>, change: impl FnOnce(&mut TensorMapSpec)) {
        let mut spec = spec();
        change(&mut spec);
        assert_eq!(check(&spec), expected, "{spec:?}");
    }

    #[test]
    fn every_documented_limit_is_an_error_of_its_own() {
        use TensorMapError as E;
        expect(Ok(()), |_| {});
        expect(Err(E::Rank { rank: 0 }), |s| s.dims.clear());
        expect(Err(E::Rank { rank: 6 }), |s| s.dims = vec![1; 6]);
        expect(Err(E::Lists { rank: 3, strides: 1, boxes: 3 }), |s| s.strides.truncate(1));
        expect(Err(E::Lists { rank: 3, strides: 2, boxes: 2 }), |s| s.box_dims.truncate(2));
        expect(Err(E::Extent { dim: 1, extent: 0 }), |s| s.dims[1] = 0);
        expect(Ok(()), |s| s.dims[1] = 1 << 32);
        expect(Err(E::Extent { dim: 2, extent: (1 << 32) + 1 }), |s| s.dims[2] = (1 << 32) + 1);
        expect(Err(E::Stride { dim: 1, stride: 24 }), |s| s.strides[0] = 24);
        expect(Ok(()), |s| s.strides[0] = 0);
        expect(Ok(()), |s| s.strides[1] = (1 << 40) - 16);
        expect(Err(E::Stride { dim: 2, stride: 1 << 40 }), |s| s.strides[1] = 1 << 40);
        expect(Err(E::Box { dim: 1, extent: 0 }), |s| s.box_dims[1] = 0);
        expect(Ok(()), |s| s.box_dims[1] = 256);
        expect(Err(E::Box { dim: 1, extent: 257 }), |s| s.box_dims[1] = 257);
        expect(Err(E::Box { dim: 0, extent: u32::MAX }), |s| s.box_dims[0] = u32::MAX);
        expect(Err(E::BoxRow { bytes: 40 }), |s| s.box_dims[0] = 20);
    }

    #[test]
    fn a_box_row_fits_the_swizzle() {
        let cases = [(Swizzle::B128, 64, 128), (Swizzle::B64, 32, 64), (Swizzle::B32, 16, 32)];
        for (swizzle, elements, limit) in cases {
            let set = |s: &mut TensorMapSpec, n| (s.swizzle, s.box_dims[0]) = (swizzle, n);
            expect(Ok(()), |s| set(s, elements));
            let bytes = limit + 16;
            expect(Err(TensorMapError::SwizzledRow { bytes, limit }), |s| set(s, elements + 8));
        }
        expect(Ok(()), |s| (s.swizzle, s.box_dims[0]) = (Swizzle::None, 256));
    }

    #[test]
    fn addresses_are_aligned_and_not_null() {
        for (address, good) in
            [(0, false), (8, false), (16, true), (0x7f00_0000_0008, false), (0x7f00_0000_0010, true)]
        {
            assert_eq!(check_address(address).is_ok(), good, "{address:#x}");
        }
        assert_eq!((TensorMap::BYTES, align_of::<TensorMap>() % 64), (128, 0));
    }
}
