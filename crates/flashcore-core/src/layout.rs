//! Where the elements of a 4-D tensor lie.

use std::fmt;

use crate::error::{Operand, ProblemError};

/// Extents of a tensor: batch × heads × sequence × dim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dims {
    /// Batch entries.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Positions.
    pub seq: usize,
    /// Features of one head.
    pub dim: usize,
}

impl Dims {
    /// Extents in the order batch, heads, sequence, dim.
    pub const fn new(batch: usize, heads: usize, seq: usize, dim: usize) -> Self {
        Self { batch, heads, seq, dim }
    }

    /// The extents as an array.
    pub const fn array(self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.dim]
    }

    /// Number of elements, or `None` on overflow.
    pub fn count(self) -> Option<usize> {
        self.array().into_iter().try_fold(1usize, usize::checked_mul)
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}x{}", self.batch, self.heads, self.seq, self.dim)
    }
}

/// Elements that a layout may reach: byte offsets and byte strides fit in an i64, whatever the element type.
pub(crate) const MAX_ELEMENTS: usize = isize::MAX as usize / 8;

/// Extents and strides (in elements); the stride of `dim` is 1 by construction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    dims: Dims,
    strides: [usize; 3],
}

impl Layout {
    /// Dense, batch × heads × sequence × dim in memory order.
    pub fn bhsd(dims: Dims) -> Result<Self, ProblemError> {
        Self::dense(dims, |d| {
            let head = d.seq.checked_mul(d.dim)?;
            Some([head.checked_mul(d.heads)?, head, d.dim])
        })
    }

    /// Dense, batch × sequence × heads × dim in memory order.
    pub fn bshd(dims: Dims) -> Result<Self, ProblemError> {
        Self::dense(dims, |d| {
            let position = d.heads.checked_mul(d.dim)?;
            Some([position.checked_mul(d.seq)?, d.dim, position])
        })
    }

    /// Dense rows × columns: a tensor of batch 1 and one head.
    pub fn matrix(rows: usize, cols: usize) -> Result<Self, ProblemError> {
        Self::bhsd(Dims::new(1, 1, rows, cols))
    }

    /// Any strides, given in elements for batch, heads, sequence and dim; the last must be 1.
    ///
    /// A stride of 0 repeats the same elements, which inputs may do.
    pub fn strided(dims: Dims, strides: [usize; 4]) -> Result<Self, ProblemError> {
        let [batch, head, seq, dim] = strides;
        if dim != 1 && dims.dim > 1 {
            return Err(ProblemError::InnermostStride { stride: dim });
        }
        let layout = Self { dims, strides: [batch, head, seq] };
        let strides_fit = layout.strides.into_iter().all(|stride| stride <= MAX_ELEMENTS);
        let fits = strides_fit && layout.checked_span().is_some();
        if fits { Ok(layout) } else { Err(ProblemError::TooLarge { dims, strides: layout.strides() }) }
    }

    fn dense(dims: Dims, strides: impl Fn(Dims) -> Option<[usize; 3]>) -> Result<Self, ProblemError> {
        let too_large = ProblemError::TooLarge { dims, strides: [0, 0, 0, 1] };
        let [batch, head, seq] = strides(dims).ok_or(too_large)?;
        Self::strided(dims, [batch, head, seq, 1])
    }

    /// The extents.
    pub const fn dims(&self) -> Dims {
        self.dims
    }

    /// The strides in elements, innermost last.
    pub const fn strides(&self) -> [usize; 4] {
        [self.strides[0], self.strides[1], self.strides[2], 1]
    }

    /// Index of the first element of a row.
    #[inline]
    pub const fn row(&self, batch: usize, head: usize, seq: usize) -> usize {
        batch * self.strides[0] + head * self.strides[1] + seq * self.strides[2]
    }

    /// One more than the largest index that the tensor reaches; 0 when it has no elements.
    pub fn span(&self) -> usize {
        self.checked_span().unwrap_or(usize::MAX)
    }

    fn checked_span(&self) -> Option<usize> {
        // An extent of 0 counts as 1, so that `row` cannot overflow for the positions of its other dimensions.
        let dims = self.dims.array();
        let mut outer = dims.iter().map(|n| n.saturating_sub(1)).zip(self.strides);
        let last = outer.try_fold(0usize, |sum, (n, s)| sum.checked_add(n.checked_mul(s)?))?;
        let span = last.checked_add(self.dims.dim).filter(|&span| span <= MAX_ELEMENTS)?;
        Some(if dims.contains(&0) { 0 } else { span })
    }

    /// Whether two different positions may share an element; an output must not.
    ///
    /// Dimensions are ordered by stride; each must step over everything the smaller ones reach. Exotic interleaved
    /// layouts that this cannot prove disjoint are reported as overlapping.
    pub fn may_overlap(&self) -> bool {
        let dims = self.dims.array();
        let mut outer: [_; 3] = std::array::from_fn(|n| (dims[n], self.strides[n]));
        outer.sort_unstable_by_key(|&(_, stride)| stride);
        let mut reach = self.dims.dim;
        for (extent, stride) in outer.into_iter().filter(|&(extent, _)| extent > 1) {
            if stride < reach {
                return true;
            }
            reach += (extent - 1) * stride;
        }
        false
    }

    pub(crate) fn check_output(&self) -> Result<(), ProblemError> {
        if self.span() > 0 && self.may_overlap() {
            return Err(ProblemError::OverlappingOutput { strides: self.strides() });
        }
        Ok(())
    }

    pub(crate) fn check_len(&self, operand: Operand, len: usize) -> Result<(), ProblemError> {
        if self.span() > len {
            return Err(ProblemError::BufferTooSmall { operand, needed: self.span(), len });
        }
        Ok(())
    }
}
