//! What a call knows of one tensor: address, place, element type, extents and strides; made by `import`.

use std::fmt;

use flashcore::{DType, Layout, Operand};
use flashcore_core::Dims;

use crate::{
    dlpack::{DataType, Device, Tensor},
    error::CallError,
};

/// Most dimensions of a tensor that attention takes.
const MOST_DIMENSIONS: usize = 4;

/// Where the tensors of a call are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Host,
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the CPU"),
            Self::Cuda(index) => write!(f, "GPU {index}"),
        }
    }
}

/// In which order a caller's tensors have their dimensions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Batch, heads, sequence, dim.
    Bhsd,
    /// Batch, sequence, heads, dim.
    Bshd,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bhsd => "batch, heads, sequence, dim",
            Self::Bshd => "batch, sequence, heads, dim",
        })
    }
}

/// Extents and strides (in elements) in the caller's order; unused dimensions are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct View {
    rank: usize,
    extents: [i64; MOST_DIMENSIONS],
    strides: [i64; MOST_DIMENSIONS],
}

/// One tensor of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array {
    pub(crate) operand: Operand,
    pub(crate) address: usize,
    pub(crate) place: Place,
    pub(crate) dtype: DType,
    pub(crate) view: View,
}

impl Array {
    /// Reads a DLPack view, whose dimensions are to be those of `order`. `bits_are_bf16` reads 16-bit integers as bf16,
    /// for producers that cannot say so.
    ///
    /// # Safety
    /// The tensor's shape and strides must be those of a live producer.
    pub(crate) unsafe fn read(
        tensor: &Tensor,
        operand: Operand,
        order: Order,
        bits_are_bf16: bool,
    ) -> Result<Self, CallError> {
        Ok(Self {
            operand,
            // Empty tensors may have any address, null included.
            address: (tensor.data as usize).wrapping_add(tensor.byte_offset as usize),
            place: place(tensor.device, operand)?,
            dtype: dtype(tensor.dtype, operand, bits_are_bf16)?,
            // SAFETY: the caller's promise.
            view: unsafe { View::read(tensor, operand, order)? },
        })
    }

    /// Where the elements lie, batch × heads × sequence × dim.
    pub(crate) fn layout(&self, order: Order) -> Result<Layout, CallError> {
        let View { rank, extents, strides } = self.view;
        if rank != MOST_DIMENSIONS {
            return Err(CallError::Rank { operand: self.operand, rank, order });
        }
        let unsigned = |numbers: [i64; 4]| {
            let [batch, a, b, dim] = numbers.map(usize::try_from);
            let (heads, seq) = if order == Order::Bhsd { (a, b) } else { (b, a) };
            Some([batch.ok()?, heads.ok()?, seq.ok()?, dim.ok()?])
        };
        let negative = CallError::NegativeStride { operand: self.operand, strides: strides.to_vec() };
        let (Some([batch, heads, seq, dim]), Some(strides)) = (unsigned(extents), unsigned(strides)) else {
            return Err(negative);
        };
        Ok(Layout::strided(Dims::new(batch, heads, seq, dim), strides)?)
    }

    /// Demands f32 values, one after another, with these extents.
    pub(crate) fn check_dense_f32(&self, extents: [usize; 3]) -> Result<(), CallError> {
        let wanted = extents.map(|extent| extent as i64);
        let dense = [wanted[1] * wanted[2], wanted[2], 1];
        let View { rank, extents: given, strides } = self.view;
        let steps = |at: usize| given[at] <= 1 || strides[at] == dense[at];
        let empty = wanted.contains(&0);
        let good =
            rank == 3 && given[..3] == wanted && (empty || (0..3).all(steps)) && self.dtype == DType::F32;
        let bytes = size_of::<f32>();
        if !good {
            Err(CallError::Lse { extents })
        } else if self.address.is_multiple_of(bytes) {
            Ok(())
        } else {
            Err(CallError::Unaligned { operand: self.operand, address: self.address, bytes })
        }
    }
}

impl View {
    unsafe fn read(tensor: &Tensor, operand: Operand, order: Order) -> Result<Self, CallError> {
        let rank = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        if rank > MOST_DIMENSIONS {
            return Err(CallError::Rank { operand, rank, order });
        }
        let mut view = Self { rank, extents: [0; MOST_DIMENSIONS], strides: [0; MOST_DIMENSIONS] };
        // SAFETY: the caller's promise: as many extents as dimensions.
        view.extents[..rank].copy_from_slice(unsafe { numbers(tensor.shape, rank) });
        // Producers disagree about the strides of tensors without elements, which mean nothing.
        if tensor.strides.is_null() || view.extents[..rank].contains(&0) {
            view.strides = dense_strides(view.extents, rank);
        } else {
            // SAFETY: as above.
            view.strides[..rank].copy_from_slice(unsafe { numbers(tensor.strides, rank) });
        }
        Ok(view)
    }
}

/// # Safety
/// `start` must be the first of `len` numbers, or `len` must be 0.
unsafe fn numbers<'a>(start: *const i64, len: usize) -> &'a [i64] {
    // SAFETY: the caller's promise.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, len) } }
}

fn dense_strides(extents: [i64; MOST_DIMENSIONS], rank: usize) -> [i64; MOST_DIMENSIONS] {
    let mut strides = [0; MOST_DIMENSIONS];
    let mut step = 1i64;
    for at in (0..rank).rev() {
        strides[at] = step;
        step = step.saturating_mul(extents[at]);
    }
    strides
}

fn place(device: Device, operand: Operand) -> Result<Place, CallError> {
    let index = u32::try_from(device.id).unwrap_or(0);
    match device.kind {
        Device::CPU | Device::CUDA_HOST => Ok(Place::Host),
        Device::CUDA | Device::CUDA_MANAGED => Ok(Place::Cuda(index)),
        kind => Err(CallError::DeviceKind { operand, kind }),
    }
}

fn dtype(dtype: DataType, operand: Operand, bits_are_bf16: bool) -> Result<DType, CallError> {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (DataType::FLOAT, 32, 1) => Ok(DType::F32),
        (DataType::FLOAT, 16, 1) => Ok(DType::F16),
        (DataType::BFLOAT, 16, 1) => Ok(DType::BF16),
        (DataType::UINT | DataType::INT, 16, 1) if bits_are_bf16 => Ok(DType::BF16),
        _ => Err(CallError::Elements { operand, dtype: dtype.to_string() }),
    }
}
