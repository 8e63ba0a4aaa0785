//! Tensor maps: how tensor copies see a factor, whichever way its lines run.

use flashcore_ptx::{launch::TensorMapSpec, layout::Swizzle};

use super::{
    super::{Work, product::slot},
    Config, TILE_M,
};
use crate::parts::lines::DEPTH;

/// Bytes of an element.
const BYTES: u64 = 2;
/// Strides of tensor maps are multiples of this many bytes.
const STRIDE_UNIT: u64 = 16;

/// The first factor or the second: what is contiguous, the other dimension, matrices. A copy moves the lines of a stage, or
/// 64 of them where they run across the depth.
pub(super) fn factor(cfg: &Config, work: &Work, which: usize) -> TensorMapSpec {
    let (layout, along) = ([&work.rows, &work.columns][which], cfg.along[which]);
    let [matrix, row, col] = layout.strides().map(|stride| stride as u64 * BYTES);
    let (lines, depth) = (layout.rows(), layout.cols());
    let ([inner, outer], step) = if along { ([depth, lines], row) } else { ([lines, depth], col) };
    // The stride of a single line or matrix is never taken, but must be one that the driver accepts.
    let stride = |extent: usize, stride: u64| if extent == 1 { STRIDE_UNIT } else { stride };
    let outer_box = match (along, which) {
        (true, 0) => TILE_M,
        (true, _) => cfg.shape.tile_n,
        (false, _) => DEPTH,
    };
    TensorMapSpec {
        slot: slot(cfg.turned, which),
        element: cfg.half.element().tensor(),
        dims: [inner, outer, layout.experts()].map(|n| n as u64).to_vec(),
        strides: vec![stride(outer, step), stride(layout.experts(), matrix)],
        box_dims: vec![DEPTH, outer_box, 1],
        swizzle: Swizzle::B128,
    }
}
