//! Grouped products: one matrix product for each group, whose rows, columns or depth offsets divide among them.
//!
//! | factors | offsets divide | result |
//! | --- | --- | --- |
//! | rows × depth, groups × depth × columns | the rows | rows × columns |
//! | groups × rows × depth, depth × columns | the columns | rows × columns |
//! | rows × depth, depth × columns | the depth | groups × rows × columns |
//! | groups × rows × depth, groups × depth × columns | nothing | groups × rows × columns |
//!
//! That is the meaning of torch's `grouped_mm`. Offset `g` is the end of group `g`, where the next one starts; the first
//! starts at 0. Whatever the numbers are, nothing outside the tensors is touched: an end beyond the divided extent is
//! clamped to it, and one before an earlier end makes an empty group. Results that belong to no group are 0, and so are
//! products of an empty group.
//!
//! [`GroupedSpec::parse`] makes a [`GroupedProblem`], which a backend computes over the memory of a [`GroupedCall`].

mod error;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Operand, ProblemError},
    layout::{Dims, Layout},
    moe::{ExpertLayout, MAX_EXPERTS},
};

pub use error::GroupedError;

/// What offsets divide among groups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Grouping {
    /// Nothing: every group has its own factors.
    Batch,
    /// The rows of the left factor, which all groups share.
    Rows,
    /// The columns of the right factor, which all groups share.
    Columns,
    /// The depth of both factors, among so many groups.
    Depth {
        /// Number of groups.
        groups: usize,
    },
}

/// What a caller asks for, unchecked; [`GroupedSpec::parse`] turns it into a [`GroupedProblem`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupedSpec {
    /// Element type of all tensors.
    pub dtype: DType,
    /// The left factor: matrices × rows × depth.
    pub a: ExpertLayout,
    /// The right factor: matrices × depth × columns.
    pub b: ExpertLayout,
    /// What is divided.
    pub grouping: Grouping,
    /// Layout of the result, matrices as batch entries of one head; dense where `None`.
    pub out: Option<Layout>,
}

impl GroupedSpec {
    /// Into a dense result.
    pub const fn new(dtype: DType, a: ExpertLayout, b: ExpertLayout, grouping: Grouping) -> Self {
        Self { dtype, a, b, grouping, out: None }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<GroupedProblem, ProblemError> {
        self.dtype.check_common("grouped products")?;
        let Self { a, b, grouping, .. } = self;
        let groups = match grouping {
            Grouping::Batch => same("matrices", a.experts(), b.experts())?,
            Grouping::Rows => one(Operand::MatA, a).map(|()| b.experts())?,
            Grouping::Columns => one(Operand::MatB, b).map(|()| a.experts())?,
            Grouping::Depth { groups } => {
                one(Operand::MatA, a)?;
                one(Operand::MatB, b).map(|()| groups)?
            }
        };
        if groups == 0 || groups > MAX_EXPERTS {
            return Err(ProblemError::Grouped(GroupedError::Groups { given: groups, max: MAX_EXPERTS }));
        }
        same("rows", a.cols(), b.rows())?;
        let matrices = match grouping {
            Grouping::Rows | Grouping::Columns => 1,
            Grouping::Batch | Grouping::Depth { .. } => groups,
        };
        let out = self.out.map_or_else(|| Layout::bhsd(Dims::new(matrices, 1, a.rows(), b.cols())), Ok)?;
        let Dims { batch, heads, seq, dim } = out.dims();
        let (got, expected) = ([batch, seq, dim], [matrices, a.rows(), b.cols()]);
        if got != expected || heads != 1 {
            return Err(ProblemError::Grouped(GroupedError::Out { got, expected }));
        }
        out.check_output()?;
        Ok(GroupedProblem { spec: Self { out: Some(out), ..self }, out, groups })
    }
}

fn one(operand: Operand, layout: ExpertLayout) -> Result<(), ProblemError> {
    let given = layout.experts();
    if given == 1 { Ok(()) } else { Err(ProblemError::Grouped(GroupedError::Several { operand, given })) }
}

fn same(what: &'static str, expected: usize, got: usize) -> Result<usize, ProblemError> {
    if got == expected {
        return Ok(got);
    }
    Err(ProblemError::Grouped(GroupedError::Mismatch { what, got, expected }))
}

/// Checked grouped products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupedProblem {
    spec: GroupedSpec,
    out: Layout,
    groups: usize,
}

impl GroupedProblem {
    /// The specification it was parsed from, with defaults filled in.
    pub const fn spec(&self) -> &GroupedSpec {
        &self.spec
    }

    /// Element type of all tensors.
    pub const fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// What is divided.
    pub const fn grouping(&self) -> Grouping {
        self.spec.grouping
    }

    /// Number of groups.
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// The left factor: matrices × rows × depth.
    pub const fn a(&self) -> &ExpertLayout {
        &self.spec.a
    }

    /// The right factor: matrices × depth × columns.
    pub const fn b(&self) -> &ExpertLayout {
        &self.spec.b
    }

    /// Layout of the result.
    pub const fn out(&self) -> &Layout {
        &self.out
    }

    /// Rows of the result.
    pub const fn rows(&self) -> usize {
        self.spec.a.rows()
    }

    /// Columns of the result.
    pub const fn columns(&self) -> usize {
        self.spec.b.cols()
    }

    /// What is summed over, in all groups together.
    pub const fn depth(&self) -> usize {
        self.spec.a.cols()
    }

    /// How much there is to divide; nothing where every group has its own factors.
    pub const fn divided(&self) -> usize {
        match self.spec.grouping {
            Grouping::Batch => 0,
            Grouping::Rows => self.rows(),
            Grouping::Columns => self.columns(),
            Grouping::Depth { .. } => self.depth(),
        }
    }

    /// What each group has of that, whatever the numbers are.
    pub fn ranges(&self, offsets: &[i32]) -> Vec<Range<usize>> {
        let mut start = 0;
        let range = |&end: &i32| {
            let end = usize::try_from(end).unwrap_or(0).min(self.divided()).max(start);
            std::mem::replace(&mut start, end)..end
        };
        offsets.iter().map(range).collect()
    }

    /// Floating-point operations, where groups have all that there is to divide.
    pub fn flops(&self) -> f64 {
        let each = 2.0 * self.rows() as f64 * self.columns() as f64 * self.depth() as f64;
        if self.spec.grouping == Grouping::Batch { self.groups as f64 * each } else { each }
    }
}

/// The tensors that grouped products read.
#[derive(Clone, Copy, Debug)]
pub struct GroupedInputs<'a> {
    /// The left factor.
    pub a: Data<'a>,
    /// The right factor.
    pub b: Data<'a>,
    /// The end of each group, where something is divided; any numbers will do.
    pub offsets: Option<&'a [i32]>,
}

/// Grouped products with the host memory they work on.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, so that a
/// backend indexes without checking again. Offsets may be anything.
#[derive(Debug)]
pub struct GroupedCall<'a> {
    problem: &'a GroupedProblem,
    inputs: GroupedInputs<'a>,
    out: DataMut<'a>,
}

impl<'a> GroupedCall<'a> {
    /// Binds `problem` to memory.
    pub fn bind(
        problem: &'a GroupedProblem,
        inputs: GroupedInputs<'a>,
        out: DataMut<'a>,
    ) -> Result<Self, ProblemError> {
        let expected = problem.dtype();
        let bound = [
            (Operand::MatA, inputs.a, problem.a().span()),
            (Operand::MatB, inputs.b, problem.b().span()),
            (Operand::Out, out.as_data(), problem.out().span()),
        ];
        for (operand, data, needed) in bound {
            if data.dtype() != expected {
                return Err(ProblemError::OtherDType { operand, got: data.dtype(), expected });
            }
            if data.len() < needed {
                return Err(ProblemError::BufferTooSmall { operand, needed, len: data.len() });
            }
        }
        check_offsets(problem, inputs.offsets.map(<[i32]>::len))?;
        Ok(Self { problem, inputs, out })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a GroupedProblem {
        self.problem
    }

    /// What is read.
    pub const fn inputs(&self) -> &GroupedInputs<'a> {
        &self.inputs
    }

    /// The result.
    pub fn out(&mut self) -> DataMut<'_> {
        self.out.reborrow()
    }
}

/// There are as many offsets as groups, if there are to be any.
fn check_offsets(problem: &GroupedProblem, len: Option<usize>) -> Result<(), ProblemError> {
    let error = match (len, problem.grouping()) {
        (None, Grouping::Batch) => return Ok(()),
        (Some(len), Grouping::Rows | Grouping::Columns | Grouping::Depth { .. })
            if len == problem.groups() =>
        {
            return Ok(());
        }
        (given, Grouping::Batch) => GroupedError::Offsets { given: given.is_some() },
        (None, _) => GroupedError::Offsets { given: false },
        (Some(len), _) => GroupedError::OffsetCount { len, groups: problem.groups() },
    };
    Err(ProblemError::Grouped(error))
}
