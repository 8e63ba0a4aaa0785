//! How many factors 8-bit tensors of a call have, told from their arrays.

use flashcore_core::{Dims, Scales};

use crate::{array::Array, error::CallError};

/// The kind of factors that those of q, k and v are, tensors of these extents; `blocks` are rows of a block of q and of k.
pub(crate) fn scales(
    all: &[Array; 3],
    blocks: Option<[usize; 2]>,
    dims: [Dims; 3],
) -> Result<Scales, CallError> {
    match blocks {
        Some(blocks) => of_blocks(all, blocks, dims),
        None => of_heads(all, dims[0].batch, dims[1].heads),
    }
}

/// One for each tensor, or one for each batch entry and key head; all tensors have as many.
fn of_heads(all: &[Array; 3], batch: usize, heads: usize) -> Result<Scales, CallError> {
    let [q, k, v] = all.each_ref().map(|factors| factors.scales(batch, heads));
    let (q, k, v) = (q?, k?, v?);
    match [(k, &all[1]), (v, &all[2])].into_iter().find(|(kind, _)| *kind != q) {
        Some((_, other)) => {
            Err(CallError::Factors { operand: other.operand, given: other.count(), batch, heads })
        }
        None => Ok(q),
    }
}

/// One for each block of q and of k and for each feature of v.
fn of_blocks(all: &[Array; 3], blocks: [usize; 2], dims: [Dims; 3]) -> Result<Scales, CallError> {
    let [rows_q, rows_k] = blocks.map(|rows| rows.max(1));
    let each = [dims[0].seq.div_ceil(rows_q), dims[1].seq.div_ceil(rows_k), dims[2].dim];
    for ((factors, dims), each) in all.iter().zip(dims).zip(each) {
        factors.check_count(dims.batch * dims.heads * each)?;
    }
    Ok(Scales::PerBlock { q: blocks[0], k: blocks[1] })
}
