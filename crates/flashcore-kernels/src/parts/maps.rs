//! Tensor maps: how tensor copies see a problem's tensors.

use flashcore_core::Layout;
use flashcore_ptx::{
    launch::{Slot, TensorMapSpec},
    layout::Swizzle,
};
use flashcore_tile::Element;

/// Strides of tensor maps are multiples of this many bytes.
const STRIDE_UNIT: u64 = 16;

/// A tensor map over a tensor, moving slabs as wide as the swizzle and `rows` rows high.
pub(crate) fn slab_map(
    layout: &Layout,
    element: Element,
    slot: Slot,
    (rows, swizzle): (u32, Swizzle),
) -> TensorMapSpec {
    let dims = layout.dims();
    let [batch, head, seq, _] = layout.strides();
    // The stride of a single row, head or entry is never taken, but must be one that the driver accepts.
    let stride = |(extent, stride): (usize, usize)| match extent {
        1 => STRIDE_UNIT,
        _ => stride as u64 * u64::from(element.bytes()),
    };
    TensorMapSpec {
        slot,
        element: element.tensor(),
        dims: [dims.dim, dims.seq, dims.heads, dims.batch].map(|n| n as u64).to_vec(),
        strides: [(dims.seq, seq), (dims.heads, head), (dims.batch, batch)].map(stride).to_vec(),
        box_dims: vec![swizzle_cols(swizzle, element), rows, 1, 1],
        swizzle,
    }
}

/// As [`map`], over the rows of `pack` heads: those of one position one after another, then those of the next.
pub(crate) fn packed_map(
    layout: &Layout,
    element: Element,
    slot: Slot,
    rows: u32,
    pack: u32,
) -> TensorMapSpec {
    let mut spec = map(layout, element, slot, rows);
    if pack > 1 {
        let [row, head, batch] = [spec.strides[0], spec.strides[1], spec.strides[2]];
        let members = pack.min(rows);
        spec.dims.splice(1..3, [u64::from(pack), spec.dims[1], spec.dims[2] / u64::from(pack)]);
        spec.strides = vec![head, row, head * u64::from(pack), batch];
        spec.box_dims = vec![element.slab_cols(), members, rows / members, 1, 1];
    }
    spec
}

/// A tensor map over one of the problem's tensors, moving slabs of `rows` rows.
pub(crate) fn map(layout: &Layout, element: Element, slot: Slot, rows: u32) -> TensorMapSpec {
    slab_map(layout, element, slot, (rows, Swizzle::B128))
}

/// Columns of a slab.
const fn swizzle_cols(swizzle: Swizzle, element: Element) -> u32 {
    let bytes = match swizzle {
        Swizzle::None => 16,
        Swizzle::B32 => 32,
        Swizzle::B64 => 64,
        Swizzle::B128 => 128,
    };
    bytes / element.bytes()
}
