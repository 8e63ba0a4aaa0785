//! The layout of experts' matrices, and host memory that holds them.

use super::MoeError;
use crate::{
    dtype::Element,
    error::{Operand, ProblemError},
    layout::{Dims, MAX_ELEMENTS},
    problem::MAX_EXTENT,
};

/// One matrix per expert: experts × rows × columns, with strides in elements.
///
/// Columns are what a product sums over. Either they or the rows are contiguous, so that weights serve as checkpoints
/// hold them: `[experts, rows, columns]`, or transposed as `[experts, columns, rows]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExpertLayout {
    extents: [usize; 3],
    strides: [usize; 3],
}

impl ExpertLayout {
    /// Dense, experts × rows × columns in memory order.
    pub fn dense(extents: [usize; 3]) -> Result<Self, ProblemError> {
        let [_, rows, cols] = extents;
        Self::strided(extents, [rows.saturating_mul(cols), cols, 1])
    }

    /// Dense, experts × columns × rows in memory order.
    pub fn transposed(extents: [usize; 3]) -> Result<Self, ProblemError> {
        let [_, rows, cols] = extents;
        Self::strided(extents, [rows.saturating_mul(cols), 1, rows])
    }

    /// Any strides for experts, rows and columns, one of the last two being 1.
    pub fn strided(extents: [usize; 3], strides: [usize; 3]) -> Result<Self, ProblemError> {
        let layout = Self { extents, strides };
        let dims = layout.dims();
        if extents.into_iter().any(|extent| extent > MAX_EXTENT) {
            return Err(ProblemError::Extent { operand: Operand::Experts, dims, max: MAX_EXTENT });
        }
        if strides[1] != 1 && strides[2] != 1 {
            return Err(ProblemError::Moe(MoeError::Strides { strides }));
        }
        if layout.checked_span().is_none() {
            return Err(ProblemError::TooLarge { dims, strides: [strides[0], 0, strides[1], strides[2]] });
        }
        Ok(layout)
    }

    /// Number of experts.
    pub const fn experts(&self) -> usize {
        self.extents[0]
    }

    /// Rows of each matrix.
    pub const fn rows(&self) -> usize {
        self.extents[1]
    }

    /// Columns of each matrix.
    pub const fn cols(&self) -> usize {
        self.extents[2]
    }

    /// Elements from one expert, row and column to the next.
    pub const fn strides(&self) -> [usize; 3] {
        self.strides
    }

    /// Whether the elements of a row are contiguous; else those of a column are.
    pub const fn is_row_major(&self) -> bool {
        self.strides[2] == 1
    }

    /// Index of an element.
    #[inline]
    pub const fn at(&self, expert: usize, row: usize, col: usize) -> usize {
        expert * self.strides[0] + row * self.strides[1] + col * self.strides[2]
    }

    /// One more than the largest index that the matrices reach; 0 where they have no elements.
    pub fn span(&self) -> usize {
        self.checked_span().unwrap_or(usize::MAX)
    }

    fn checked_span(&self) -> Option<usize> {
        let mut steps = self.extents.iter().map(|n| n.saturating_sub(1)).zip(self.strides);
        let last = steps.try_fold(0usize, |sum, (n, stride)| sum.checked_add(n.checked_mul(stride)?))?;
        let span = last.checked_add(1).filter(|&span| span <= MAX_ELEMENTS)?;
        Some(if self.extents.contains(&0) { 0 } else { span })
    }

    /// The extents as messages print them.
    pub(super) const fn dims(&self) -> Dims {
        Dims::new(self.extents[0], 1, self.extents[1], self.extents[2])
    }
}

/// Borrowed matrices of experts that stay inside their slice.
#[derive(Clone, Copy, Debug)]
pub struct ExpertView<'a, T> {
    data: &'a [T],
    layout: ExpertLayout,
}

impl<'a, T: Element> ExpertView<'a, T> {
    /// Views `data` through `layout`.
    pub fn new(data: &'a [T], layout: ExpertLayout) -> Result<Self, ProblemError> {
        if layout.span() > data.len() {
            let (needed, len) = (layout.span(), data.len());
            return Err(ProblemError::BufferTooSmall { operand: Operand::Experts, needed, len });
        }
        Ok(Self { data, layout })
    }

    /// Views dense data in the order experts, rows, columns.
    pub fn dense(data: &'a [T], extents: [usize; 3]) -> Result<Self, ProblemError> {
        Self::new(data, ExpertLayout::dense(extents)?)
    }

    /// Views dense data in the order experts, columns, rows; `extents` stays experts, rows, columns.
    pub fn transposed(data: &'a [T], extents: [usize; 3]) -> Result<Self, ProblemError> {
        Self::new(data, ExpertLayout::transposed(extents)?)
    }

    /// The elements.
    pub const fn data(&self) -> &'a [T] {
        self.data
    }

    /// Where they lie.
    pub const fn layout(&self) -> ExpertLayout {
        self.layout
    }
}
