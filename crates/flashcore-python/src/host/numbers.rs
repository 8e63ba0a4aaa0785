//! Lengths, page tables, sinks, factors, biases and seeds on the host, read into what a call's values are made of.

use std::{slice::from_raw_parts, sync::Arc};

use flashcore::{DType, Index, bf16, f16};
use flashcore_core::{Data, Factors, PageTable};

use super::{
    elements,
    memory::{pointer, unsupported},
};
use crate::{
    array::{Array, Numbers, Table},
    dropout::Seed,
    error::CallError,
};

/// Lengths or offsets on the host; a view that its producer handed out and its caller holds.
pub(crate) fn lengths(numbers: &Numbers) -> Result<Arc<[u32]>, CallError> {
    let operand = numbers.operand;
    let narrow = |(at, value): (usize, i64)| {
        u32::try_from(value).map_err(|_| CallError::Negative { operand, at, value })
    };
    wide(numbers).into_iter().enumerate().map(narrow).collect()
}

/// As [`lengths`] of keys in pages, where a sequence that is none has a length below 0: nothing.
pub(crate) fn page_lengths(numbers: &Numbers) -> Result<Arc<[u32]>, CallError> {
    let narrow = |value: i64| u32::try_from(value.max(0)).unwrap_or(u32::MAX);
    Ok(wide(numbers).into_iter().map(narrow).collect())
}

/// The page table on the host; a view that its producer handed out and its caller holds.
pub(crate) fn table(table: &Table) -> PageTable {
    let Table { address, rows, columns, row_stride, .. } = *table;
    let row = |n: usize| {
        let at = address + n * row_stride * size_of::<i32>();
        // SAFETY: `Table::read` saw as many numbers one after another in each row, at aligned addresses.
        unsafe { from_raw_parts(pointer::<i32>(at, columns), columns) }.iter().copied()
    };
    PageTable::new((0..rows).flat_map(row).collect::<Vec<_>>(), columns)
}

/// Numbers on the host; a view that its producer handed out and its caller holds.
pub(crate) fn wide(numbers: &Numbers) -> Vec<i64> {
    let Numbers { address, len, .. } = *numbers;
    // SAFETY: `Numbers::read` saw as many numbers of that width, one after another, at an aligned address.
    unsafe {
        match numbers.index {
            Index::I32 => {
                from_raw_parts(pointer::<i32>(address, len), len).iter().map(|&x| x.into()).collect()
            }
            Index::I64 => from_raw_parts(pointer::<i64>(address, len), len).to_vec(),
        }
    }
}

/// The seed of dropout on the host; a view that its producer handed out and its caller holds.
pub(crate) fn seed(seed: &Seed) -> u64 {
    // SAFETY: `Seed` was seen to have 64 bits at an address where they may lie.
    unsafe { *pointer::<u64>(seed.address, 1) }
}

/// The sinks of `len` heads on the host; a view that its producer handed out and its caller holds.
pub(crate) fn sinks(array: &Array, len: usize) -> Result<Arc<[f32]>, CallError> {
    array.check_sinks(len)?;
    // SAFETY: checked just now: as many values, one after another, at an aligned address.
    unsafe {
        match array.dtype {
            DType::F16 => {
                let values = from_raw_parts(pointer::<f16>(array.address, len), len);
                Ok(values.iter().map(|x| x.to_f32()).collect())
            }
            DType::BF16 => {
                let values = from_raw_parts(pointer::<bf16>(array.address, len), len);
                Ok(values.iter().map(|x| x.to_f32()).collect())
            }
            DType::F32 => Ok(from_raw_parts(pointer::<f32>(array.address, len), len).into()),
            other => Err(unsupported(other)),
        }
    }
}

/// The factors of a cache's keys or values on the host, with what lies between them; checked when their number was asked for.
pub(crate) fn cache_factors(array: &Array) -> Arc<[f32]> {
    let len = array.range().len() / size_of::<f32>();
    // SAFETY: `scales` found f32 at an aligned address, of which the view reaches as many; the caller holds it.
    unsafe { from_raw_parts(pointer::<f32>(array.address, len), len).into() }
}

/// The factors of Q, K and V on the host, checked when their number was asked for.
pub(crate) fn factors(arrays: &[Array; 3], blocks: Option<[usize; 2]>) -> Factors {
    let read = |array: &Array| -> Arc<[f32]> {
        let len = array.count();
        // SAFETY: `scales` found as many f32, one after another, at an aligned address; the caller holds the view.
        unsafe { from_raw_parts(pointer::<f32>(array.address, len), len).into() }
    };
    let all = arrays.each_ref().map(read);
    if let Some(blocks) = blocks {
        return Factors::per_block(blocks, all);
    }
    if all.iter().all(|factors| factors.len() == 1) {
        return Factors::per_tensor(all.map(|factors| factors[0]));
    }
    Factors::per_head(all)
}

/// A bias on the host, as its layout lies: a view that its producer handed out and its caller holds.
pub(crate) fn bias(array: &Array) -> Result<Arc<[f32]>, CallError> {
    array.check_alignment()?;
    let len = array.range().len() / array.dtype.bytes();
    // SAFETY: the view reaches as many elements, at an aligned address.
    Ok(match unsafe { elements(array.address, array.dtype, len)? } {
        Data::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
        Data::BF16(values) => values.iter().map(|x| x.to_f32()).collect(),
        Data::F32(values) => values.into(),
        other => return Err(unsupported(other.dtype())),
    })
}
