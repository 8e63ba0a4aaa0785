//! Merging partial results: attention over parts of the keys, merged by the log-sum-exp of each part.
//!
//! `out = Σ wᵢ · partᵢ` with `wᵢ = exp(lseᵢ − lse)` and `lse = ln Σ exp(lseᵢ)`, row by row, in the order of the parts. A
//! part whose LSE is −∞ contributes nothing, whatever its rows hold; if all are, the row is 0 and its LSE −∞.
//!
//! [`MergeSpec::parse`] makes a [`MergeProblem`], which a backend computes over the memory of a [`MergeCall`].

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout, MAX_ELEMENTS},
    problem::{MAX_EXTENT, check_axes},
};

/// Most parts that may lie at addresses of their own; more must be stacked in one tensor.
pub const MAX_LISTED: usize = 16;

/// Why parts cannot be merged.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// No parts to merge, or too many.
    #[error(
        "{given} parts cannot be merged: give 1 to {max}, and stack them in one tensor if there are more than 16"
    )]
    Count {
        /// Parts given.
        given: usize,
        /// Most parts.
        max: usize,
    },
    /// Another number of parts, or of their LSE, than the problem says.
    #[error(
        "{given} buffers for {operand} but the problem expects {expected}; give each part its rows and its lse"
    )]
    Buffers {
        /// What was given.
        operand: Operand,
        /// How many.
        given: usize,
        /// How many are needed.
        expected: usize,
    },
    /// Parts with different layouts.
    #[error("part {part} differs from part 0 in shape or strides; give all parts the same layout")]
    Layout {
        /// Number of the part, from 0.
        part: usize,
    },
    /// A stack of parts that cannot be divided.
    #[error(
        "a stack of batch {batch} cannot be split into {count} parts of equal batch; stack the parts along the batch"
    )]
    Batch {
        /// Batch of the stack.
        batch: usize,
        /// Parts in it.
        count: usize,
    },
}

impl From<PartError> for ProblemError {
    fn from(error: PartError) -> Self {
        Self::Part(error)
    }
}

/// Where the parts lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Parts {
    /// In one tensor, one after the other, and so are their LSE.
    Stacked {
        /// How many.
        count: usize,
        /// Elements from one to the next.
        stride: usize,
    },
    /// This many at separate addresses, at most [`MAX_LISTED`], and so are their LSE.
    Listed(usize),
}

impl Parts {
    /// How many there are.
    pub const fn count(self) -> usize {
        match self {
            Self::Stacked { count, .. } | Self::Listed(count) => count,
        }
    }

    /// Tensors in which they come.
    pub const fn tensors(self) -> usize {
        match self {
            Self::Stacked { .. } => 1,
            Self::Listed(count) => count,
        }
    }
}

/// What a caller wants merged, unchecked; [`MergeSpec::parse`] turns it into a [`MergeProblem`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MergeSpec {
    /// Element type of the parts.
    pub dtype: DType,
    /// Layout of each part.
    pub part: Layout,
    /// Where the parts lie.
    pub parts: Parts,
    /// Element type of the result.
    pub out_dtype: DType,
    /// Layout of the result; dense batch × heads × sequence × dim where `None`.
    pub out: Option<Layout>,
}

impl MergeSpec {
    /// A dense result of the parts' own type.
    pub const fn new(dtype: DType, part: Layout, parts: Parts) -> Self {
        Self { dtype, part, parts, out_dtype: dtype, out: None }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<MergeProblem, ProblemError> {
        let dims = self.part.dims();
        [self.dtype, self.out_dtype].into_iter().try_for_each(|dtype| dtype.check_common("merging"))?;
        check_dims(dims)?;
        self.check_parts()?;
        let out = self.out.map_or_else(|| Layout::bhsd(dims), Ok)?;
        check_axes((Operand::Out, out.dims()), (Operand::Part, dims), &Axis::ALL)?;
        out.check_output()?;
        Ok(MergeProblem { spec: Self { out: Some(out), ..self }, out })
    }

    /// There are parts, and all that they and their LSE reach can be indexed.
    fn check_parts(&self) -> Result<(), ProblemError> {
        let (given, dims) = (self.parts.count(), self.part.dims());
        let max = if matches!(self.parts, Parts::Listed(_)) { MAX_LISTED } else { MAX_EXTENT };
        if given == 0 || given > max {
            return Err(ProblemError::Part(PartError::Count { given, max }));
        }
        let rows = Layout::bhsd(Dims { dim: 1, ..dims })?.span();
        let within = |step: usize, first: usize| {
            let reach = step.checked_mul(given - 1).and_then(|last| last.checked_add(first));
            reach.is_some_and(|reach| reach <= MAX_ELEMENTS)
        };
        let stride = if let Parts::Stacked { stride, .. } = self.parts { stride } else { 0 };
        if within(rows, rows) && within(stride, self.part.span()) {
            return Ok(());
        }
        Err(ProblemError::TooLarge { dims, strides: self.part.strides() })
    }
}

fn check_dims(dims: Dims) -> Result<(), ProblemError> {
    let operand = Operand::Part;
    if dims.heads == 0 || dims.dim == 0 {
        return Err(ProblemError::Empty { operand, dims });
    }
    if dims.array().into_iter().any(|extent| extent > MAX_EXTENT) {
        return Err(ProblemError::Extent { operand, dims, max: MAX_EXTENT });
    }
    Ok(())
}

/// Checked parts to be merged.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MergeProblem {
    spec: MergeSpec,
    out: Layout,
}

impl MergeProblem {
    /// Element type of the parts.
    pub const fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Element type of the result.
    pub const fn out_dtype(&self) -> DType {
        self.spec.out_dtype
    }

    /// Layout of each part.
    pub const fn part(&self) -> &Layout {
        &self.spec.part
    }

    /// Where the parts lie.
    pub const fn parts(&self) -> Parts {
        self.spec.parts
    }

    /// Layout of the result.
    pub const fn out(&self) -> &Layout {
        &self.out
    }

    /// Extents of the result and of each part.
    pub const fn dims(&self) -> Dims {
        self.out.dims()
    }

    /// Rows of the result, which is also the number of LSE values of each part: batch × heads × sequence.
    pub const fn rows(&self) -> usize {
        let Dims { batch, heads, seq, .. } = self.dims();
        batch * heads * seq
    }

    /// Elements from one part to the next, where they are stacked.
    pub const fn stride(&self) -> usize {
        match self.spec.parts {
            Parts::Stacked { stride, .. } => stride,
            Parts::Listed(_) => 0,
        }
    }

    /// Elements that a tensor of parts reaches.
    fn reach(&self) -> usize {
        match (self.spec.parts, self.spec.part.span()) {
            (_, 0) => 0,
            (Parts::Stacked { count, stride }, span) => (count - 1) * stride + span,
            (Parts::Listed(_), span) => span,
        }
    }

    /// LSE values that come with a tensor of parts.
    fn lses(&self) -> usize {
        self.rows() * (self.spec.parts.count() / self.spec.parts.tensors())
    }
}

/// Parts with the host memory that they and the result lie in.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, so that a
/// backend indexes without checking again.
#[derive(Debug)]
pub struct MergeCall<'a> {
    problem: &'a MergeProblem,
    parts: &'a [Data<'a>],
    lses: &'a [&'a [f32]],
    out: DataMut<'a>,
    lse: Option<&'a mut [f32]>,
}

impl<'a> MergeCall<'a> {
    /// Binds `problem` to memory: each part and its LSE, or one tensor of all parts and one slice of all LSE where they
    /// are stacked.
    pub fn bind(
        problem: &'a MergeProblem,
        parts: &'a [Data<'a>],
        lses: &'a [&'a [f32]],
        out: DataMut<'a>,
        lse: Option<&'a mut [f32]>,
    ) -> Result<Self, ProblemError> {
        let expected = problem.parts().tensors();
        for (operand, given) in [(Operand::Part, parts.len()), (Operand::PartLse, lses.len())] {
            if given != expected {
                return Err(ProblemError::Part(PartError::Buffers { operand, given, expected }));
            }
        }
        parts.iter().try_for_each(|&part| check(Operand::Part, part, problem.dtype(), problem.reach()))?;
        check(Operand::Out, out.as_data(), problem.out_dtype(), problem.out().span())?;
        let mut lens = lses.iter().map(|lse| lse.len());
        if let Some(len) = lens.find(|&len| len != problem.lses()) {
            return Err(ProblemError::LseLength { needed: problem.lses(), len });
        }
        if let Some(len) = lse.as_ref().map(|lse| lse.len()).filter(|&len| len != problem.rows()) {
            return Err(ProblemError::LseLength { needed: problem.rows(), len });
        }
        Ok(Self { problem, parts, lses, out, lse })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a MergeProblem {
        self.problem
    }

    /// The tensors of parts: one for each, or one with all of them where they are stacked.
    pub const fn parts(&self) -> &'a [Data<'a>] {
        self.parts
    }

    /// The LSE values that come with each tensor of parts.
    pub const fn lses(&self) -> &'a [&'a [f32]] {
        self.lses
    }

    /// The result and, if asked for, its LSE.
    pub fn outputs(&mut self) -> (DataMut<'_>, Option<&mut [f32]>) {
        (self.out.reborrow(), self.lse.as_deref_mut())
    }
}

fn check(operand: Operand, data: Data<'_>, expected: DType, needed: usize) -> Result<(), ProblemError> {
    if data.dtype() != expected {
        return Err(ProblemError::OtherDType { operand, got: data.dtype(), expected });
    }
    if data.len() < needed {
        return Err(ProblemError::BufferTooSmall { operand, needed, len: data.len() });
    }
    Ok(())
}
