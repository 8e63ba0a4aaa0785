//! Merging partial results: parts and their LSE in, a checked problem to a backend, the whole out.

use flashcore_core::{
    Backend, Data, Dims, Element, Layout, MAX_LISTED, MergeCall, MergeProblem, MergeSpec, PartError, Parts,
    ProblemError, Ran, Tensor, TensorView, TensorViewMut,
};

use crate::{
    backend::{BackendKind, Choice},
    error::Error,
    output::{Lse, Output},
};

/// Merges attention over parts of the keys, at most 16 of them, into attention over all keys: every row is the sum of the
/// parts' rows, each weighted by `exp(lse_part − lse)`. A part whose LSE is −∞ is ignored, whatever it holds.
///
/// All parts have the same layout, and each comes with its LSE, dense in the order batch, heads, sequence. Nothing is checked
/// or computed before [`Merge::run`] or [`Merge::run_into`].
///
/// ```
/// # use flashcore::{Tensor, TensorView, attention, merge};
/// # fn main() -> Result<(), flashcore::Error> {
/// # let q = Tensor::bhsd(vec![0.5_f32; 16 * 8], [1, 1, 16, 8])?;
/// # let keys = [q.clone(), q.clone()];
/// let left = attention(q.view(), keys[0].view(), keys[0].view()).run()?;
/// let right = attention(q.view(), keys[1].view(), keys[1].view()).run()?;
/// let parts = [left.out.view(), right.out.view()];
/// let whole = merge(&parts, &[left.lse.values(), right.lse.values()]).run()?;
/// assert_eq!(whole.out.data()[0], 0.5);
/// # Ok(())
/// # }
/// ```
pub fn merge<'a, T: Element>(parts: &[TensorView<'a, T>], lses: &[&'a [f32]]) -> Merge<'a, T> {
    let choice = Choice::Kind(BackendKind::Auto);
    Merge { tensors: parts.to_vec(), lses: lses.to_vec(), stacked: None, choice }
}

/// As [`merge`] for any number of parts that are stacked along the batch of one tensor: part `n` of `count`
/// is the `n`-th share of the batch entries. `lse` holds the LSE of all parts in the same order.
pub fn merge_stacked<'a, T: Element>(parts: TensorView<'a, T>, count: usize, lse: &'a [f32]) -> Merge<'a, T> {
    let choice = Choice::Kind(BackendKind::Auto);
    Merge { tensors: vec![parts], lses: vec![lse], stacked: Some(count), choice }
}

/// A merge, with its options so far.
#[must_use = "nothing is computed before `run` or `run_into`"]
pub struct Merge<'a, T> {
    tensors: Vec<TensorView<'a, T>>,
    lses: Vec<&'a [f32]>,
    /// Number of parts in the one tensor.
    stacked: Option<usize>,
    choice: Choice<'a>,
}

impl<'a, T: Element> Merge<'a, T> {
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
    pub fn run(self) -> Result<Output<T>, Error> {
        self.run_as()
    }

    /// As [`run`](Self::run) with a result of another type.
    pub fn run_as<O: Element>(self) -> Result<Output<O>, Error> {
        let problem = MergeSpec { out_dtype: O::DTYPE, ..self.spec()? }.parse()?;
        let mut out = Tensor::zeros(*problem.out())?;
        let mut lse = Lse::zeros(problem.dims())?;
        let view = out.view_mut()?;
        let ran = self.merge(&problem, view, Some(lse.values_mut()))?;
        Ok(Output { out, lse, ran })
    }

    /// Computes into the caller's memory: `out` of any type in any layout and, if requested, the LSE of each row.
    pub fn run_into<O: Element>(
        self,
        out: TensorViewMut<'_, O>,
        lse: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        let spec = MergeSpec { out_dtype: O::DTYPE, out: Some(out.layout()), ..self.spec()? };
        self.merge(&spec.parse()?, out, lse)
    }

    fn spec(&self) -> Result<MergeSpec, ProblemError> {
        let none = ProblemError::Part(PartError::Count { given: 0, max: MAX_LISTED });
        let layout = self.tensors.first().ok_or(none)?.layout();
        if let Some(count) = self.stacked {
            let (part, stride) = share(layout, count)?;
            return Ok(MergeSpec::new(T::DTYPE, part, Parts::Stacked { count, stride }));
        }
        match self.tensors.iter().position(|part| part.layout() != layout) {
            Some(part) => Err(ProblemError::Part(PartError::Layout { part })),
            None => Ok(MergeSpec::new(T::DTYPE, layout, Parts::Listed(self.tensors.len()))),
        }
    }

    fn merge<O: Element>(
        &self,
        problem: &MergeProblem,
        out: TensorViewMut<'_, O>,
        lse: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        let parts: Vec<Data<'_>> = self.tensors.iter().map(|part| T::erase(part.data())).collect();
        let out = O::erase_mut(out.into_data());
        let mut call = MergeCall::bind(problem, &parts, &self.lses, out, lse)?;
        Ok(self.choice.run(|backend| backend.merge(&mut call))?)
    }
}

/// The layout of one of `count` parts that share a tensor's batch, and elements from one to the next.
fn share(stack: Layout, count: usize) -> Result<(Layout, usize), ProblemError> {
    let Dims { batch, .. } = stack.dims();
    if count == 0 || !batch.is_multiple_of(count) {
        return Err(ProblemError::Part(PartError::Batch { batch, count }));
    }
    let dims = Dims { batch: batch / count, ..stack.dims() };
    Ok((Layout::strided(dims, stack.strides())?, dims.batch * stack.strides()[0]))
}
