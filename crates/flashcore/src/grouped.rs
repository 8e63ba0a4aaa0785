//! Grouped products: operands and offsets in, a checked problem to a backend, products out.

use flashcore_core::{
    Backend, DataMut, Element, ExpertView, GroupedCall, GroupedInputs, GroupedProblem, GroupedSpec, Grouping,
    Ran, Tensor, TensorViewMut,
};

use crate::{
    backend::{BackendKind, Choice},
    error::Error,
};

/// One matrix product for each group, with the meaning of torch's `grouped_mm`.
///
/// `a` is matrices × rows × depth and `b` matrices × depth × columns; the operand that [`Grouping`] divides into groups is
/// one matrix, and offset `g` ([`GroupedMm::offsets`]) is the end of group `g`. Offsets may be any numbers: invalid ones
/// make empty groups, and what belongs to no group is 0 in the result. Nothing is checked or computed before
/// [`GroupedMm::run`] or [`GroupedMm::run_into`].
///
/// ```
/// use flashcore::{ExpertView, Grouping, grouped_mm};
///
/// # fn main() -> Result<(), flashcore::Error> {
/// let a = vec![1.0_f32; 5 * 8]; // five rows
/// let b = vec![0.5_f32; 2 * 8 * 3]; // for two groups
/// let result = grouped_mm(ExpertView::dense(&a, [1, 5, 8])?, ExpertView::dense(&b, [2, 8, 3])?, Grouping::Rows)
///     .offsets(&[2, 4])
///     .run()?;
/// assert_eq!(result.out.data()[..4 * 3], [4.0; 4 * 3]);
/// assert_eq!(result.out.data()[4 * 3..], [0.0; 3]); // a row of no group
/// # Ok(())
/// # }
/// ```
pub fn grouped_mm<'a, T: Element>(
    a: ExpertView<'a, T>,
    b: ExpertView<'a, T>,
    grouping: Grouping,
) -> GroupedMm<'a, T> {
    GroupedMm { a, b, grouping, offsets: None, choice: Choice::Kind(BackendKind::Auto) }
}

/// Grouped products, with their options so far.
#[must_use = "nothing is computed before `run` or `run_into`"]
pub struct GroupedMm<'a, T> {
    a: ExpertView<'a, T>,
    b: ExpertView<'a, T>,
    grouping: Grouping,
    offsets: Option<&'a [i32]>,
    choice: Choice<'a>,
}

/// What [`GroupedMm::run`] returns.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct GroupedOutput<T> {
    /// Matrices (as batch entries of one head) × rows × columns, dense.
    pub out: Tensor<T>,
    /// What computed it.
    pub ran: Ran,
}

impl<'a, T: Element> GroupedMm<'a, T> {
    /// The end of each group.
    pub const fn offsets(mut self, ends: &'a [i32]) -> Self {
        self.offsets = Some(ends);
        self
    }

    /// The backend to compute on; by default the best one found.
    pub fn backend(mut self, kind: BackendKind) -> Self {
        self.choice = Choice::Kind(kind);
        self
    }

    /// Computes on the caller's own backend.
    pub fn on(mut self, backend: &'a dyn Backend) -> Self {
        self.choice = Choice::This(backend);
        self
    }

    /// Computes into new memory.
    pub fn run(self) -> Result<GroupedOutput<T>, Error> {
        let problem = self.spec().parse()?;
        let mut out = Tensor::zeros(*problem.out())?;
        let view = out.view_mut()?;
        let ran = self.compute(&problem, T::erase_mut(view.into_data()))?;
        Ok(GroupedOutput { out, ran })
    }

    /// Computes into the caller's memory.
    pub fn run_into(self, out: TensorViewMut<'_, T>) -> Result<Ran, Error> {
        let problem = GroupedSpec { out: Some(out.layout()), ..self.spec() }.parse()?;
        self.compute(&problem, T::erase_mut(out.into_data()))
    }

    fn spec(&self) -> GroupedSpec {
        GroupedSpec::new(T::DTYPE, self.a.layout(), self.b.layout(), self.grouping)
    }

    fn compute(&self, problem: &GroupedProblem, out: DataMut<'_>) -> Result<Ran, Error> {
        let (a, b) = (T::erase(self.a.data()), T::erase(self.b.data()));
        let inputs = GroupedInputs { a, b, offsets: self.offsets };
        let mut call = GroupedCall::bind(problem, inputs, out)?;
        Ok(self.choice.run(|backend| backend.grouped(&mut call))?)
    }
}
