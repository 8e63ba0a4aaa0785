//! Tensor maps: what their 128 bytes mean, and boxes of the tensor as rows of bytes.
//!
//! The layout of a `CUtensorMap` is not public; these have a layout of their own. Kernels copy them, and change them
//! field by field (`tensormap.replace`).

use flashcore_ptx::{
    launch::TensorMapSpec,
    layout::{Swizzle, box_bytes},
    types::ScalarType,
};
use std::array::from_fn;

mod element;
mod fields;

pub(crate) use element::Element;
pub(crate) use fields::{Field, MapBytes};

/// Most bytes of a box: the shared memory of a CTA.
const MAX_BOX_BYTES: u64 = 227 * 1024;
/// Bytes of a tensor map.
pub(crate) const MAP_BYTES: usize = 128;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 5;

/// A tensor in global memory and the box that copies of it move; dimension 0 is the innermost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TensorMap {
    pub(crate) address: u64,
    element: Element,
    rank: usize,
    dims: [u64; MAX_RANK],
    /// Bytes between neighbours along each dimension, the innermost included.
    strides: [u64; MAX_RANK],
    box_dims: [u32; MAX_RANK],
    pub(crate) swizzle: Swizzle,
}

/// One row of a box: contiguous in both memories, apart from the swizzle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BoxRow {
    /// Bytes from the start of the (unswizzled) box.
    pub(crate) offset: u32,
    /// Bytes at the front that lie before the tensor.
    pub(crate) skip: u32,
    /// Address of the first byte inside the tensor, and how many follow; 0 where the row lies outside.
    pub(crate) address: u64,
    pub(crate) inside: u32,
}

impl TensorMap {
    /// Checks a spec as `cuTensorMapEncodeTiled` does; the error says what it would reject.
    pub(crate) fn new(spec: &TensorMapSpec, address: u64) -> Result<Self, String> {
        let rank = spec.dims.len();
        let need = |ok: bool, what: &str| if ok { Ok(()) } else { Err(format!("tensor map: {what}")) };
        need((1..=MAX_RANK).contains(&rank), "rank must be 1 to 5")?;
        need(spec.box_dims.len() == rank, "the box must have the tensor's rank")?;
        need(spec.strides.len() + 1 == rank, "one stride fewer than dimensions")?;
        let element = Element::of(spec.element)
            .ok_or_else(|| format!("tensor map: {:?} cannot be simulated", spec.element))?;
        let stride = |i: usize| if i == 0 { element.bytes().into() } else { spec.strides[i - 1] };
        let map = Self {
            address,
            element,
            rank,
            dims: from_fn(|i| if i < rank { spec.dims[i] } else { 1 }),
            strides: from_fn(|i| if i < rank { stride(i) } else { 0 }),
            box_dims: from_fn(|i| if i < rank { spec.box_dims[i] } else { 1 }),
            swizzle: spec.swizzle,
        };
        map.check()?;
        Ok(map)
    }

    /// What the hardware asks of a tensor map.
    fn check(&self) -> Result<(), String> {
        let need = |ok: bool, what: &str| if ok { Ok(()) } else { Err(format!("tensor map: {what}")) };
        let (dims, box_dims) = (&self.dims[..self.rank], &self.box_dims[..self.rank]);
        need(dims.iter().all(|&d| (1..=1 << 32).contains(&d)), "dimensions must be 1 to 2^32")?;
        need(box_dims.iter().all(|d| (1..=256).contains(d)), "box dimensions must be 1 to 256")?;
        let strides = &self.strides[1..self.rank];
        need(strides.iter().all(|s| s % 16 == 0 && *s < 1 << 40), "strides must be multiples of 16")?;
        need(self.address.is_multiple_of(16), "the address must be a multiple of 16")?;
        let row = self.row_bytes();
        need(row.is_multiple_of(16), "a box row must be a multiple of 16 bytes")?;
        let fits = self.swizzle == Swizzle::None || row <= self.swizzle.row_bytes();
        need(fits, "a box row must not be longer than the swizzle's row")?;
        let small = box_bytes(box_dims, self.element.bytes()) <= MAX_BOX_BYTES;
        need(small, "the box must fit into shared memory")
    }

    pub(crate) const fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes of an element.
    pub(crate) const fn element_bytes(&self) -> u32 {
        self.element.bytes()
    }

    /// What reductions take an element for.
    pub(crate) const fn element_type(&self) -> ScalarType {
        self.element.scalar()
    }

    /// Bytes of one row of the box.
    pub(crate) fn row_bytes(&self) -> u32 {
        self.box_dims[0] * self.element.bytes()
    }

    /// The rows of the box at `coords`.
    pub(crate) fn rows(&self, coords: &[i32]) -> Vec<BoxRow> {
        let count: u32 = self.box_dims[1..self.rank].iter().product();
        (0..count).map(|number| self.row(coords, number)).collect()
    }

    fn row(&self, coords: &[i32], number: u32) -> BoxRow {
        let (mut rest, mut address, mut inside) = (number, self.address, true);
        for (dim, coord) in coords.iter().enumerate().skip(1) {
            let index = i64::from(*coord) + i64::from(rest % self.box_dims[dim]);
            rest /= self.box_dims[dim];
            inside &= index >= 0 && (index as u64) < self.dims[dim];
            address = address.wrapping_add((index as u64).wrapping_mul(self.strides[dim]));
        }
        let element = i64::from(self.element.bytes());
        let (start, width) = (i64::from(coords[0]), i64::from(self.box_dims[0]));
        let low = start.clamp(0, self.dims[0] as i64);
        let high = (start + width).clamp(0, self.dims[0] as i64);
        let inside = if inside { (high - low).max(0) * element } else { 0 };
        BoxRow {
            offset: number * self.row_bytes(),
            skip: ((low - start).clamp(0, width) * element) as u32,
            address: address.wrapping_add((low * element) as u64),
            inside: inside as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::launch::{Slot, TensorElement};

    fn map() -> TensorMap {
        let spec = TensorMapSpec {
            slot: Slot(0),
            element: TensorElement::F16,
            dims: vec![10, 3],
            strides: vec![32],
            box_dims: vec![8, 2],
            swizzle: Swizzle::None,
        };
        TensorMap::new(&spec, 0x1000).expect("a valid map")
    }

    #[test]
    fn rows_are_clipped_on_every_side() {
        let expect = |coords: [i32; 2], row: usize, skip: u32, address: u64, inside: u32| {
            let got = map().rows(&coords)[row];
            assert_eq!(got, BoxRow { offset: row as u32 * 16, skip, address, inside }, "{coords:?}");
        };
        expect([0, 0], 1, 0, 0x1000 + 32, 16);
        expect([4, 2], 0, 0, 0x1000 + 64 + 8, 12);
        expect([4, 2], 1, 0, 0x1000 + 96 + 8, 0);
        expect([-3, 0], 0, 6, 0x1000, 10);
        assert_eq!(map().rows(&[64, 0])[0].inside, 0);
        assert_eq!(map().rows(&[0, -1])[0].inside, 0);
    }
}
