//! Addresses of elements as slices.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use flashcore::{BackendError, DType, Layout, bf16, f16};
use flashcore_core::{Data, DataMut, E4M3, E5M2};

use crate::error::CallError;

/// # Safety
/// There must be a live tensor of that layout at that address.
pub(super) unsafe fn read<'a>(at: usize, dtype: DType, layout: &Layout) -> Result<Data<'a>, CallError> {
    // SAFETY: the caller's promise.
    unsafe { elements(at, dtype, layout.span()) }
}

/// # Safety
/// There must be as many live elements at that address.
pub(crate) unsafe fn elements<'a>(at: usize, dtype: DType, len: usize) -> Result<Data<'a>, CallError> {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => Ok(Data::F16(from_raw_parts(pointer::<f16>(at, len), len))),
            DType::BF16 => Ok(Data::BF16(from_raw_parts(pointer::<bf16>(at, len), len))),
            DType::F32 => Ok(Data::F32(from_raw_parts(pointer::<f32>(at, len), len))),
            DType::E4M3 => Ok(Data::E4M3(from_raw_parts(pointer::<E4M3>(at, len), len))),
            DType::E5M2 => Ok(Data::E5M2(from_raw_parts(pointer::<E5M2>(at, len), len))),
            other => Err(unsupported(other)),
        }
    }
}

/// # Safety
/// There must be a live tensor of that layout at that address, which nobody else uses.
pub(crate) unsafe fn write<'a>(at: usize, dtype: DType, layout: &Layout) -> Result<DataMut<'a>, CallError> {
    let len = layout.span();
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => Ok(DataMut::F16(from_raw_parts_mut(pointer::<f16>(at, len), len))),
            DType::BF16 => Ok(DataMut::BF16(from_raw_parts_mut(pointer::<bf16>(at, len), len))),
            DType::F32 => Ok(DataMut::F32(from_raw_parts_mut(pointer::<f32>(at, len), len))),
            DType::E4M3 => Ok(DataMut::E4M3(from_raw_parts_mut(pointer::<E4M3>(at, len), len))),
            DType::E5M2 => Ok(DataMut::E5M2(from_raw_parts_mut(pointer::<E5M2>(at, len), len))),
            other => Err(unsupported(other)),
        }
    }
}

/// Empty tensors may have any address; slices may not.
pub(crate) fn pointer<T>(at: usize, len: usize) -> *mut T {
    if len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { at as *mut T }
}

pub(super) fn unsupported(dtype: DType) -> CallError {
    let (what, instead) = (format!("{dtype} tensors"), "convert them to f32".to_owned());
    BackendError::Unsupported { backend: "cpu", what, instead }.into()
}

/// Writes values one after another.
///
/// # Safety
/// There must be as many live f32 at that address, which nobody else uses.
pub(crate) unsafe fn store(at: usize, values: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe { from_raw_parts_mut(pointer::<f32>(at, values.len()), values.len()) }.copy_from_slice(values);
}
