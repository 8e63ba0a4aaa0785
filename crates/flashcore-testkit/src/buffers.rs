//! Host tensors with guard bands: they show missing writes and stray writes.
//!
//! [`crate::suite`] makes all of a call's tensors here. Everything outside a tensor's rows (guards before and after,
//! gaps between rows) holds a fill pattern that must survive the call.

use std::ops::Range;

use flashcore_core::{DType, Element, Layout};

use crate::values::for_each_row;

/// Elements before and after each tensor; a multiple of every vector width, so that tensors stay aligned.
const GUARD: usize = 256;
/// Gaps beyond this length are filled and watched near rows only, so that sparse tensors cost no memory.
const LONG_GAP: usize = 1 << 20;
/// How near.
const EDGE: usize = 64;

/// A tensor amid guard bands.
#[derive(Clone, Debug)]
pub struct Buffer<T> {
    elements: Vec<T>,
    start: usize,
    layout: Layout,
    fill: T,
}

impl<T: Element> Buffer<T> {
    /// A tensor whose rows, gaps and guards all hold `fill`; `None` when there is no memory for it.
    ///
    /// `shift` moves the first element by that many elements from an aligned address.
    pub fn filled(layout: Layout, shift: usize, fill: T) -> Option<Self> {
        let len = layout.span().checked_add(2 * GUARD + shift)?;
        let elements = bytemuck::allocation::try_zeroed_vec(len).ok()?;
        let mut buffer = Self { elements, start: GUARD + shift, layout, fill };
        for range in buffer.rows().into_iter().chain(buffer.watched()) {
            buffer.elements[range].fill(fill);
        }
        Some(buffer)
    }

    /// Where the tensor lies in [`Self::slice`].
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tensor and the guard after it.
    pub fn slice(&self) -> &[T] {
        &self.elements[self.start..]
    }

    /// The tensor and the guard after it.
    pub fn slice_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.start..]
    }

    /// The first row, counted in the order batch, heads, sequence, with an element that still holds the fill.
    pub fn first_unwritten_row(&self) -> Option<usize> {
        self.rows().into_iter().position(|row| self.elements[row].iter().any(|&x| same_bits(x, self.fill)))
    }

    /// The element nearest the start of the tensor, outside its rows, that no longer holds the fill; its index is
    /// relative to the tensor's first element.
    pub fn first_disturbed(&self) -> Option<isize> {
        let watched = self.watched().into_iter().flatten();
        let mut disturbed = watched.filter(|&i| !same_bits(self.elements[i], self.fill));
        disturbed.next().map(|i| i as isize - self.start as isize)
    }

    fn rows(&self) -> Vec<Range<usize>> {
        let mut rows = Vec::new();
        if self.layout.span() > 0 {
            let dim = self.layout.dims().dim;
            for_each_row(&self.layout, |_, row| rows.push(self.start + row..self.start + row + dim));
        }
        rows
    }

    /// What lies outside all rows, without the middle of long gaps.
    fn watched(&self) -> Vec<Range<usize>> {
        let mut rows = self.rows();
        rows.sort_unstable_by_key(|row| row.start);
        let mut watched = Vec::new();
        let mut end = 0;
        let after = self.elements.len()..self.elements.len();
        for row in rows.into_iter().chain(std::iter::once(after)) {
            if row.start > end + LONG_GAP {
                watched.extend([end..end + EDGE, row.start - EDGE..row.start]);
            } else if row.start > end {
                watched.push(end..row.start);
            }
            end = end.max(row.end);
        }
        watched
    }
}

/// What outputs hold before a call: a NaN that no processor produces by itself.
pub fn unwritten<T: Element>() -> T {
    bytemuck::pod_read_unaligned(&[0xff; 4][..size_of::<T>()])
}

/// What lies around inputs: a NaN, other than [`unwritten`].
pub fn never_read<T: Element>() -> T {
    let bits = match T::DTYPE {
        DType::F16 => 0x7e55,
        DType::BF16 => 0x7fd5,
        DType::E4M3 => 0x7f,
        _ => 0x7fd5_5555u32,
    };
    bytemuck::pod_read_unaligned(&bits.to_le_bytes()[..size_of::<T>()])
}

/// Whether two elements are the same bit for bit, NaN included.
pub fn same_bits<T: Element>(a: T, b: T) -> bool {
    bytemuck::bytes_of(&a) == bytemuck::bytes_of(&b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::Dims;
    use half::{bf16, f16};

    fn padded() -> Buffer<f32> {
        let layout = Layout::strided(Dims::new(1, 2, 3, 4), [0, 21, 6, 1]).unwrap();
        Buffer::filled(layout, 1, unwritten()).unwrap()
    }

    #[test]
    fn fills_are_distinct_nans() {
        assert!(unwritten::<f32>().is_nan() && never_read::<f32>().is_nan());
        assert!(unwritten::<f16>().is_nan() && never_read::<f16>().is_nan());
        assert!(unwritten::<bf16>().is_nan() && never_read::<bf16>().is_nan());
        assert!(!same_bits(unwritten::<f16>(), never_read()));
        assert!(!same_bits(unwritten::<bf16>(), never_read()));
    }

    #[test]
    fn writing_all_rows_disturbs_nothing() {
        let mut buffer = padded();
        assert_eq!(buffer.first_unwritten_row(), Some(0));
        for row in 0..6 {
            let start = row / 3 * 21 + row % 3 * 6;
            assert_eq!(buffer.first_unwritten_row(), Some(row));
            buffer.slice_mut()[start..start + 4].fill(1.0);
        }
        assert_eq!(buffer.first_unwritten_row(), None);
        assert_eq!(buffer.first_disturbed(), None);
    }

    #[test]
    fn every_element_outside_the_rows_is_watched() {
        let rows: Vec<usize> = padded().rows().into_iter().flatten().collect();
        for index in 0..padded().elements.len() {
            let mut buffer = padded();
            buffer.elements[index] = 1.0;
            let expected = (!rows.contains(&index)).then(|| index as isize - buffer.start as isize);
            assert_eq!(buffer.first_disturbed(), expected, "{index}");
        }
    }

    #[test]
    fn long_gaps_are_watched_near_rows() {
        let layout = Layout::strided(Dims::new(2, 1, 1, 4), [1 << 22, 0, 0, 1]).unwrap();
        for (index, seen) in
            [(3, false), (4, true), (1 << 21, false), ((1 << 22) - 1, true), ((1 << 22) + 4, true)]
        {
            let mut buffer = Buffer::filled(layout, 0, unwritten::<f16>()).unwrap();
            buffer.slice_mut()[index] = f16::ONE;
            assert_eq!(buffer.first_disturbed().is_some(), seen, "{index}");
        }
    }
}
