//! Dropout's seed as callers have it: 64 bits where the tensors are, which kernels read when they run. And `dropout_mask`,
//! which says what a seed drops.

use flashcore_core::{Dropout, DropoutWords, HeadDropout, Operand};
use pyo3::{exceptions::PyMemoryError, prelude::*, types::PyByteArray};

use crate::{
    array::{Order, Place, View, place},
    dlpack::{DataType, Tensor},
    error::CallError,
};

/// The seed of a call: one number of 64 bits, or two of 32 with the low one first, as JAX has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seed {
    pub(crate) address: usize,
    pub(crate) place: Place,
}

impl Seed {
    /// Reads a DLPack view.
    ///
    /// # Safety
    /// The tensor's shape and strides must be those of a live producer.
    pub(crate) unsafe fn read(tensor: &Tensor) -> Result<Self, CallError> {
        let words = match (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) {
            (DataType::INT | DataType::UINT, 64, 1) => 1,
            (DataType::INT | DataType::UINT, 32, 1) => 2,
            _ => return Err(CallError::SeedElements { dtype: tensor.dtype.to_string() }),
        };
        // SAFETY: the caller's promise.
        let view = unsafe { View::read(tensor, Operand::Seed, Order::Bhsd)? };
        if !view.is_dense(&[words]) {
            return Err(CallError::SeedShape);
        }
        let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
        Self::at(address, place(tensor.device, Operand::Seed)?)
    }

    /// The seed at an address where 64 bits may lie.
    pub(crate) fn at(address: usize, place: Place) -> Result<Self, CallError> {
        let (operand, bytes) = (Operand::Seed, size_of::<u64>());
        if address.is_multiple_of(bytes) {
            Ok(Self { address, place })
        } else {
            Err(CallError::Unaligned { operand, address, bytes })
        }
    }
}

/// Which weights stay with that probability and seed: a byte for each sequence, query head, query and key, in this order.
#[pyfunction]
pub(crate) fn dropout_mask(
    py: Python<'_>,
    probability: f32,
    seed: u64,
    extents: [u32; 4],
) -> PyResult<Bound<'_, PyByteArray>> {
    let [sequences, heads, queries, keys] = extents.map(|extent| extent as usize);
    let dropout = Dropout::new(probability).parse().map_err(CallError::from)?;
    let bytes = [sequences, heads, queries, keys].into_iter().try_fold(1, usize::checked_mul);
    let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
    let bytes = bytes
        .ok_or_else(|| PyMemoryError::new_err("the mask exceeds the address space; ask for fewer heads"))?;
    PyByteArray::new_with(py, bytes, |mask| {
        py.detach(|| match dropout {
            Some(dropout) if bytes > 0 => write(dropout, seed, [queries, keys], mask),
            _ => mask.fill(1),
        });
        Ok(())
    })
}

/// The mask of as many planes of queries × keys as there is room for.
fn write(dropout: Dropout, seed: u64, [queries, keys]: [usize; 2], mask: &mut [u8]) {
    for (plane, rows) in mask.chunks_exact_mut(queries * keys).enumerate() {
        let head = HeadDropout::new(DropoutWords::of_plane(seed, plane as u32), dropout);
        for (query, row) in rows.chunks_exact_mut(keys).enumerate() {
            row.iter_mut().enumerate().for_each(|(key, stays)| *stays = head.keeps(query, key).into());
        }
    }
}
