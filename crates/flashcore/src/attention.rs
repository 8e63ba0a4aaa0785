//! The call: views and options in, a checked problem to a backend, the result out.

use std::sync::Arc;

use flashcore_core::{
    Backend, Bias, DType, Dropout, Element, Factors, HostCall, Lengths, Mask, Problem, Ran, Spec, Tensor,
    TensorView, TensorViewMut, Values, forward_quantised,
};

use crate::{
    backend::{BackendKind, Choice},
    error::Error,
    gradient::{AttentionGrad, Differentiable},
    output::{Lse, Output},
};

/// Attention over `q`, `k` and `v`, each batch × heads × sequence × dim: `softmax(scale · QKᵀ + mask) · V` per head.
///
/// Nothing is checked or computed before [`Attention::run`] or [`Attention::run_into`].
pub fn attention<'a, T: Element>(
    q: TensorView<'a, T>,
    k: TensorView<'a, T>,
    v: TensorView<'a, T>,
) -> Attention<'a, T> {
    let spec = Spec::new(T::DTYPE, q.layout(), k.layout(), v.layout());
    let inputs = [q.data(), k.data(), v.data()];
    Attention { inputs, spec, values: Values::default(), choice: Choice::Kind(BackendKind::Auto) }
}

/// A call of attention, with its options so far.
#[derive(Clone)]
#[must_use = "nothing is computed before `run` or `run_into`"]
pub struct Attention<'a, T> {
    inputs: [&'a [T]; 3],
    spec: Spec,
    values: Values,
    choice: Choice<'a>,
}

impl<'a, T: Element> Attention<'a, T> {
    /// Hides keys from queries; by default every query sees every key.
    ///
    /// ```
    /// # use flashcore::{Mask, Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 16 * 8], [1, 1, 16, 8])?;
    /// let window = Mask::window(4, 0); // the last five keys, itself included
    /// let result = attention(q.view(), q.view(), q.view()).mask(window).run()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn mask(mut self, mask: Mask) -> Self {
        self.spec.mask = mask;
        self
    }

    /// The factor on QKᵀ; by default 1/√dim.
    pub fn scale(mut self, scale: f32) -> Self {
        self.spec.scale = Some(scale);
        self
    }

    /// Softcap: each score becomes `cap · tanh(score / cap)` before the mask.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.spec.softcap = Some(cap);
        self
    }

    /// Attention sinks: one extra logit per query head that takes part in the softmax and adds nothing to the output.
    ///
    /// The LSE includes it.
    pub fn sinks(mut self, logits: impl Into<Arc<[f32]>>) -> Self {
        self.values.sinks = Some(logits.into());
        self
    }

    /// The scale factors of 8-bit Q, K and V.
    ///
    /// ```
    /// # use flashcore::{E4M3, Factors, Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// let q = Tensor::bhsd(vec![E4M3::from_f32(0.5); 16 * 8], [1, 1, 16, 8])?;
    /// let result = attention(q.view(), q.view(), q.view()).factors(Factors::per_tensor([1.0, 1.0, 3.0])).run_as::<f32>()?;
    /// assert_eq!(result.out.data()[0], 1.5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn factors(mut self, factors: Factors) -> Self {
        self.values.factors = Some(factors);
        self
    }

    /// Whether the values are turned (transposed), as [`Quantise::turned`](crate::Quantise::turned) writes them: on Hopper
    /// this saves transposing them in every call.
    ///
    /// ```
    /// # use flashcore::{Tensor, attention, quantise};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let x = Tensor::bhsd((0..2 * 40 * 16).map(|n| (n as f32).sin()).collect(), [1, 2, 40, 16])?;
    /// let (narrow, turned) = (quantise(x.view()).run()?, quantise(x.view()).turned(true).run()?);
    /// let (x, v) = (narrow.values.view(), turned.values.view());
    /// let result = attention(x, x, v).turned(true).run_as::<f32>()?;
    /// assert_eq!(result.out, attention(x, x, x).run_as::<f32>()?.out);
    /// # Ok(())
    /// # }
    /// ```
    pub fn turned(mut self, yes: bool) -> Self {
        self.spec.turned = yes;
        self
    }

    /// A bias that is added to the score of each query and key, after a softcap: batch × heads × queries × keys, where
    /// the first three may be 1 to share it. −∞ hides a key.
    ///
    /// ```
    /// # use flashcore::{Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 2 * 2 * 16 * 8], [2, 2, 16, 8])?;
    /// let bias = Tensor::bhsd(vec![0.1_f32; 2 * 16 * 16], [1, 2, 16, 16])?; // the same for both batch entries
    /// let result = attention(q.view(), q.view(), q.view()).bias(bias.view()).run()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn bias(mut self, bias: TensorView<'_, f32>) -> Self {
        self.spec.bias = Some(Bias::Pairs { dtype: DType::F32, layout: bias.layout() });
        self.values.bias = Some(bias.data().into());
        self
    }

    /// ALiBi: minus the slope of the query head times the distance to the key is added to each score.
    ///
    /// The last query is aligned with the last key. There is one slope per query head, or per sequence and query head.
    pub fn alibi(mut self, slopes: impl Into<Arc<[f32]>>) -> Self {
        let slopes = slopes.into();
        self.spec.bias = Some(Bias::Slopes { per_sequence: slopes.len() != self.spec.q.dims().heads });
        self.values.bias = Some(slopes);
        self
    }

    /// Dropout: drops each weight with this probability and scales the others so that sums stay the same on
    /// average. The LSE is that of all weights.
    ///
    /// Whether a weight is dropped depends on the seed and on the weight's position, so gradients of the same call drop the
    /// same weights, on every backend.
    ///
    /// ```
    /// # use flashcore::{Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 64 * 8], [1, 1, 64, 8])?;
    /// let call = attention(q.view(), q.view(), q.view()).dropout(0.1, 42);
    /// let again = call.clone().run()?;
    /// assert_eq!(call.run()?.out, again.out);
    /// assert_ne!(attention(q.view(), q.view(), q.view()).run()?.out, again.out);
    /// # Ok(())
    /// # }
    /// ```
    pub fn dropout(mut self, probability: f32, seed: u64) -> Self {
        self.spec.dropout = Some(Dropout::new(probability));
        self.values.seed = Some(seed);
        self
    }

    /// How much of its sequence each batch entry uses, or how sequences are packed.
    ///
    /// ```
    /// # use flashcore::{Lengths, Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 2 * 16 * 8], [2, 1, 16, 8])?;
    /// // Two batch entries of 16 keys, of which the second uses only the first 5.
    /// let result = attention(q.view(), q.view(), q.view()).lengths(Lengths::keys(vec![16, 5])).run()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lengths(mut self, lengths: Lengths) -> Self {
        self.values.lengths = lengths;
        self
    }

    /// Makes the bits of a row independent of the rest of the batch, at some cost in speed; the bits of a prompt's row also of
    /// how the prompt is chunked, if each chunk has many queries.
    pub fn batch_invariant(mut self, yes: bool) -> Self {
        self.spec.batch_invariant = yes;
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

    /// Checks the arguments without computing anything.
    pub fn problem(&self) -> Result<Problem, Error> {
        Ok(self.spec().parse()?)
    }

    /// Computes into new memory.
    pub fn run(self) -> Result<Output<T>, Error> {
        self.run_as()
    }

    /// As [`run`](Self::run) with a result of another type: f32, unrounded, for tensors of 16 bits; f16, bf16 or f32 for
    /// tensors of 8 bits, which need it.
    pub fn run_as<O: Element>(mut self) -> Result<Output<O>, Error> {
        self.spec.out_dtype = Some(O::DTYPE);
        let problem = self.problem()?;
        let mut out = Tensor::zeros(*problem.out())?;
        let mut lse = Lse::zeros(problem.q().dims())?;
        let view = out.view_mut()?;
        let ran = self.forward(&problem, view, Some(lse.values_mut()))?;
        Ok(Output { out, lse, ran })
    }

    /// As [`run`](Self::run) for tensors of 16 or 32 bits, quantised to 8 bits: Q and K are rounded to E4M3 by blocks of rows
    /// and V by features, after subtracting the mean of the keys. The LSE is that of the keys including their
    /// mean.
    ///
    /// On Hopper 8-bit products are faster; the result is off by a few percent.
    ///
    /// ```
    /// # use flashcore::{Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 16 * 8], [1, 1, 16, 8])?;
    /// let result = attention(q.view(), q.view(), q.view()).run_quantised()?;
    /// assert!((result.out.data()[0] - 0.5).abs() < 1e-3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_quantised(mut self) -> Result<Output<T>, Error> {
        self.spec.out_dtype = Some(T::DTYPE);
        let problem = self.problem()?;
        let mut out = Tensor::zeros(*problem.out())?;
        let mut lse = Lse::zeros(problem.q().dims())?;
        let view = out.view_mut()?.into_data();
        let mut call = HostCall::bind(&problem, &self.values, self.inputs, view, Some(lse.values_mut()))?;
        let ran = self.choice.run(|backend| forward_quantised(backend, &mut call))?;
        Ok(Output { out, lse, ran })
    }

    /// Computes into the caller's memory: `out` in any layout and, if requested, the LSE of each row, dense in the order
    /// batch, heads, sequence.
    ///
    /// ```
    /// # use flashcore::{Tensor, TensorViewMut, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 2 * 16 * 8], [1, 2, 16, 8])?;
    /// let mut out = vec![0.0; 2 * 16 * 8];
    /// let mut lse = vec![0.0; 2 * 16];
    /// let into = TensorViewMut::bshd(&mut out, [1, 2, 16, 8])?;
    /// attention(q.view(), q.view(), q.view()).run_into(into, Some(&mut lse))?;
    /// assert_eq!(out[0], 0.5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_into<O: Element>(
        mut self,
        out: TensorViewMut<'_, O>,
        lse: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        self.spec.out = Some(out.layout());
        self.spec.out_dtype = Some(O::DTYPE);
        let problem = self.problem()?;
        self.forward(&problem, out, lse)
    }

    /// Accumulates the result into `out` and `lse`, which then hold attention over the earlier keys and these together.
    ///
    /// An LSE of −∞ means that `out` holds nothing yet, whatever is in its memory.
    ///
    /// ```
    /// # use flashcore::{Tensor, TensorViewMut, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 16 * 8], [1, 1, 16, 8])?;
    /// # let parts = [q.clone(), q.clone()];
    /// let (mut out, mut lse) = (vec![f32::NAN; 16 * 8], vec![f32::NEG_INFINITY; 16]);
    /// for part in &parts {
    ///     let into = TensorViewMut::bhsd(&mut out, [1, 1, 16, 8])?;
    ///     attention(q.view(), part.view(), part.view()).accumulate_into(into, &mut lse)?;
    /// }
    /// assert_eq!(out[0], 0.5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn accumulate_into(mut self, out: TensorViewMut<'_, f32>, lse: &mut [f32]) -> Result<Ran, Error> {
        self.spec.accumulate = true;
        self.run_into(out, Some(lse))
    }

    /// As [`run`](Self::run), and keeps what gradients need.
    ///
    /// ```
    /// # use flashcore::{Mask, Tensor, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 2 * 16 * 8], [1, 2, 16, 8])?;
    /// # let (k, v) = (q.clone(), q.clone());
    /// let result = attention(q.view(), k.view(), v.view()).mask(Mask::CAUSAL).run_for_grad()?;
    /// let d_out = Tensor::zeros(result.out.layout())?; // the gradient of the loss
    /// let grads = result.grad(d_out.view())?;
    /// assert_eq!(grads.dk.layout(), k.layout());
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_for_grad(self) -> Result<Differentiable<'a, T>, Error> {
        Differentiable::new(self)
    }

    /// The gradients of this call, given the gradient of its output, the output and its LSE.
    ///
    /// ```
    /// # use flashcore::{Mask, Tensor, TensorViewMut, attention};
    /// # fn main() -> Result<(), flashcore::Error> {
    /// # let q = Tensor::bhsd(vec![0.5_f32; 2 * 16 * 8], [1, 2, 16, 8])?;
    /// # let (k, v, d_out) = (q.clone(), q.clone(), q.clone());
    /// let call = attention(q.view(), k.view(), v.view()).mask(Mask::CAUSAL);
    /// let result = call.clone().run()?;
    /// let mut memory = vec![0.0; 3 * 2 * 16 * 8];
    /// let (dq, rest) = memory.split_at_mut(2 * 16 * 8);
    /// let (dk, dv) = rest.split_at_mut(2 * 16 * 8);
    /// let into = |grad| TensorViewMut::bshd(grad, [1, 2, 16, 8]);
    /// let grads = [into(dq)?, into(dk)?, into(dv)?];
    /// call.grad(d_out.view(), result.out.view(), result.lse.values()).run_into(grads, None)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn grad<O: Element>(
        self,
        d_out: TensorView<'a, O>,
        out: TensorView<'a, O>,
        lse: &'a [f32],
    ) -> AttentionGrad<'a, T, O> {
        AttentionGrad::from_out(self, d_out, out, lse)
    }

    /// As [`grad`](Self::grad) with the sums of `d_out ∘ out` over each row instead of the output, dense in the order
    /// batch, heads, sequence.
    ///
    /// LSE and sums may be those of attention over more keys than these, as gradients over part of the keys need
    /// ([`AttentionGrad::accumulate_into`]).
    pub fn grad_from_sums<O: Element>(
        self,
        d_out: TensorView<'a, O>,
        sums: &'a [f32],
        lse: &'a [f32],
    ) -> AttentionGrad<'a, T, O> {
        AttentionGrad::from_sums(self, d_out, sums, lse)
    }

    pub(crate) fn spec(&self) -> Spec {
        self.spec.clone().with(&self.values)
    }

    pub(crate) const fn inputs(&self) -> [&'a [T]; 3] {
        self.inputs
    }

    pub(crate) const fn values(&self) -> &Values {
        &self.values
    }

    pub(crate) const fn choice(&self) -> &Choice<'a> {
        &self.choice
    }

    fn forward<O: Element>(
        &self,
        problem: &Problem,
        out: TensorViewMut<'_, O>,
        lse: Option<&mut [f32]>,
    ) -> Result<Ran, Error> {
        let mut call = HostCall::bind(problem, &self.values, self.inputs, out.into_data(), lse)?;
        Ok(self.choice.run(|backend| backend.forward(&mut call))?)
    }
}
