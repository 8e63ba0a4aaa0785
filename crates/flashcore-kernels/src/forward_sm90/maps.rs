//! Tensor maps: how copies see the problem's tensors.

use flashcore_core::Layout;
use flashcore_ptx::{
    launch::{Slot, TensorMapSpec},
    layout::Swizzle,
};
use flashcore_tile::Element;

use crate::parts::maps::slab_map;

/// As [`map`], over the rows of `pack` heads: those of one position one after another, then those of the next.
pub(super) fn packed_map(
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
pub(super) fn map(layout: &Layout, element: Element, slot: Slot, rows: u32) -> TensorMapSpec {
    slab_map(layout, element, slot, (rows, Swizzle::B128))
}
