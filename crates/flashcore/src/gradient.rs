//! Gradients: a call of attention, its output and LSE, and the output's gradient in, gradients out.

use std::ops::Deref;

use flashcore_core::{
    BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, DataMut, Element, GradientsMut, Ran,
    RowSums, RowTerms, Tensor, TensorView, TensorViewMut,
};

use crate::{attention::Attention, error::Error, output::Output};

/// The gradients of attention.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Gradients<T> {
    /// The gradient of the queries, dense in the order batch, heads, sequence, dim.
    pub dq: Tensor<T>,
    /// The gradient of the keys, likewise; query heads that share a key head add up.
    pub dk: Tensor<T>,
    /// The gradient of the values, likewise.
    pub dv: Tensor<T>,
    /// The gradient of each query head's sink, where there are sinks.
    pub d_sinks: Option<Vec<f32>>,
    /// What computed them.
    pub ran: Ran,
}

/// Attention that was computed and can be differentiated: see [`Attention::run_for_grad`].
pub struct Differentiable<'a, T> {
    call: Attention<'a, T>,
    output: Output<T>,
}

impl<'a, T: Element> Differentiable<'a, T> {
    pub(crate) fn new(call: Attention<'a, T>) -> Result<Self, Error> {
        Ok(Self { output: call.clone().run()?, call })
    }

    /// The gradients of Q, K, V and the sinks, given that of the output.
    pub fn grad(&self, d_out: TensorView<'_, T>) -> Result<Gradients<T>, Error> {
        self.describe(d_out).run()
    }

    /// As [`grad`](Self::grad), with options: another type, the caller's memory.
    pub fn describe<'b>(&'b self, d_out: TensorView<'b, T>) -> AttentionGrad<'b, T, T>
    where
        'a: 'b,
    {
        self.call.clone().grad(d_out, self.output.out.view(), self.output.lse.values())
    }

    /// The result of forward alone.
    pub fn into_output(self) -> Output<T> {
        self.output
    }
}

impl<T> Deref for Differentiable<'_, T> {
    type Target = Output<T>;

    fn deref(&self) -> &Output<T> {
        &self.output
    }
}

/// A call of gradients, with its options so far: see [`Attention::grad`].
#[must_use = "nothing is computed before `run` or `run_into`"]
pub struct AttentionGrad<'a, T, O> {
    call: Attention<'a, T>,
    d_out: TensorView<'a, O>,
    lse: &'a [f32],
    terms: Terms<'a, O>,
}

/// What row sums are made from, or the sums.
enum Terms<'a, O> {
    Out(TensorView<'a, O>),
    Sums(&'a [f32]),
}

/// The caller's gradients of Q, K and V, and where wanted of the sinks.
type Targets<'a, G> = ([TensorViewMut<'a, G>; 3], Option<&'a mut [f32]>);

impl<'a, T: Element, O: Element> AttentionGrad<'a, T, O> {
    pub(crate) fn from_out(
        call: Attention<'a, T>,
        d_out: TensorView<'a, O>,
        out: TensorView<'a, O>,
        lse: &'a [f32],
    ) -> Self {
        Self { call, d_out, lse, terms: Terms::Out(out) }
    }

    pub(crate) fn from_sums(
        call: Attention<'a, T>,
        d_out: TensorView<'a, O>,
        sums: &'a [f32],
        lse: &'a [f32],
    ) -> Self {
        Self { call, d_out, lse, terms: Terms::Sums(sums) }
    }

    /// Checks the arguments without computing anything.
    pub fn problem(&self) -> Result<BackwardProblem, Error> {
        Ok(self.spec().parse()?)
    }

    /// Computes into new memory.
    pub fn run(self) -> Result<Gradients<T>, Error> {
        self.run_as()
    }

    /// As [`run`](Self::run) with gradients of another type: f32, unrounded, for tensors of 16 bits.
    pub fn run_as<G: Element>(self) -> Result<Gradients<G>, Error> {
        let problem = BackwardSpec { grad_dtype: Some(G::DTYPE), ..self.spec() }.parse()?;
        let zeros = |layout| Tensor::<G>::zeros(layout);
        let (mut dq, mut dk, mut dv) = (zeros(*problem.dq())?, zeros(*problem.dk())?, zeros(*problem.dv())?);
        let mut d_sinks = problem.forward().sinks().map(|_| vec![0.0; problem.forward().heads_q()]);
        let targets = ([dq.view_mut()?, dk.view_mut()?, dv.view_mut()?], d_sinks.as_deref_mut());
        let ran = self.backward(&problem, targets)?;
        Ok(Gradients { dq, dk, dv, d_sinks, ran })
    }

    /// Computes into the caller's memory: gradients of Q's type or f32 in any layout and, if requested, those of the sinks.
    pub fn run_into<G: Element>(
        self,
        grads: [TensorViewMut<'_, G>; 3],
        d_sinks: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        let problem = self.spec_into(&grads).parse()?;
        self.backward(&problem, (grads, d_sinks))
    }

    /// Adds the gradients to the contents of the caller's memory.
    ///
    /// With the LSE and row sums of attention over all keys ([`Attention::grad_from_sums`]) the gradients of parts of the
    /// keys add up to those of the whole:
    ///
    /// ```
    /// # use flashcore::{Tensor, TensorView, TensorViewMut, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 16 * 8], [1, 1, 16, 8])?;
    /// # let keys = Tensor::bhsd((0..32 * 8).map(|n| (n % 7) as f32 / 8.0).collect(), [1, 1, 32, 8])?;
    /// # let d_out = q.clone();
    /// let whole = attention(q.view(), keys.view(), keys.view()).run_for_grad()?;
    /// let sums: Vec<f32> = whole.out.data().chunks(8).map(|row| row.iter().map(|x| 0.5 * x).sum()).collect();
    /// let mut dq = vec![0.0; 16 * 8];
    /// for part in keys.data().chunks(16 * 8) {
    ///     let part = TensorView::bhsd(part, [1, 1, 16, 8])?;
    ///     let (mut dk, mut dv) = (vec![0.0; 16 * 8], vec![0.0; 16 * 8]);
    ///     let grads = [&mut dq, &mut dk, &mut dv].map(|grad| TensorViewMut::bhsd(grad, [1, 1, 16, 8]));
    ///     let [dq, dk, dv] = grads;
    ///     let call = attention(q.view(), part, part).grad_from_sums(d_out.view(), &sums, whole.lse.values());
    ///     call.accumulate_into([dq?, dk?, dv?], None)?;
    /// }
    /// let expected = whole.grad(d_out.view())?.dq;
    /// assert!(dq.iter().zip(expected.data()).all(|(a, b)| (a - b).abs() < 1e-5));
    /// # Ok(())
    /// # }
    /// ```
    pub fn accumulate_into(
        self,
        grads: [TensorViewMut<'_, f32>; 3],
        d_sinks: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        let problem = BackwardSpec { accumulate: true, ..self.spec_into(&grads) }.parse()?;
        self.backward(&problem, (grads, d_sinks))
    }

    fn spec(&self) -> BackwardSpec {
        let mut forward = self.call.spec();
        forward.out_dtype = Some(O::DTYPE);
        let row_sums = match self.terms {
            Terms::Out(out) => {
                forward.out = Some(out.layout());
                RowSums::Computed
            }
            Terms::Sums(_) => RowSums::Given,
        };
        BackwardSpec { d_out: Some(self.d_out.layout()), row_sums, ..BackwardSpec::new(forward) }
    }

    fn spec_into<G: Element>(&self, [dq, dk, dv]: &[TensorViewMut<'_, G>; 3]) -> BackwardSpec {
        BackwardSpec {
            dq: Some(dq.layout()),
            dk: Some(dk.layout()),
            dv: Some(dv.layout()),
            grad_dtype: Some(G::DTYPE),
            ..self.spec()
        }
    }

    fn backward<G: Element>(
        &self,
        problem: &BackwardProblem,
        (grads, sinks): Targets<'_, G>,
    ) -> Result<Ran, Error> {
        let terms = match self.terms {
            Terms::Out(out) => RowTerms::Out(O::erase(out.data())),
            Terms::Sums(sums) => RowTerms::Sums(sums),
        };
        let inputs = BackwardInputs {
            qkv: self.call.inputs().map(T::erase),
            lse: self.lse,
            terms,
            d_out: O::erase(self.d_out.data()),
        };
        let qkv: [DataMut<'_>; 3] = grads.map(|grad| G::erase_mut(grad.into_data()));
        let mut call = BackwardCall::bind(problem, self.call.values(), inputs, GradientsMut { qkv, sinks })?;
        Ok(self.call.choice().run(|backend| backend.backward(&mut call))?)
    }
}
