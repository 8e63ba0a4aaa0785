//! Rounding to 8 bits: a view and options in, a checked problem to a backend, floats and factors out.

use std::sync::Arc;

use flashcore_core::{
    Backend, E4M3, Element, Granularity, Index, QuantiseCall, QuantiseProblem, QuantiseSpec, QuantisedMut,
    Ran, Tensor, TensorView,
};

use crate::{
    backend::{BackendKind, Choice},
    error::Error,
};

/// Quantises a tensor to 8-bit floats with factors, such that each float times its factor approximates the number: what
/// [`Attention::factors`](crate::Attention::factors) takes.
///
/// A factor maps the largest magnitude among its numbers to the largest float. Infinities become the largest float, NaN stays
/// NaN, and neither affects factors. Nothing is checked or computed before [`Quantise::run`].
///
/// ```
/// # use flashcore::{Factors, Granularity, Tensor, attention, quantise};
/// # fn main() -> Result<(), flashcore::Error> {
/// # let x = Tensor::bhsd((0..2 * 16 * 8).map(|n| (n as f32).sin()).collect(), [1, 2, 16, 8])?;
/// let narrow = quantise(x.view()).per(Granularity::PerHead).run()?;
/// let factors = Factors::per_head([(); 3].map(|()| narrow.factors.clone()));
/// let x = narrow.values.view();
/// let result = attention(x, x, x).factors(factors).run_as::<f32>()?;
/// # Ok(())
/// # }
/// ```
pub fn quantise<T: Element>(x: TensorView<'_, T>) -> Quantise<'_, T> {
    let spec = QuantiseSpec::new(T::DTYPE, x.layout());
    Quantise { x: x.data(), spec, used: None, choice: Choice::Kind(BackendKind::Auto) }
}

/// A tensor to quantise, with options so far.
#[derive(Clone)]
#[must_use = "nothing is computed before `run`"]
pub struct Quantise<'a, T> {
    x: &'a [T],
    spec: QuantiseSpec,
    used: Option<Arc<[u32]>>,
    choice: Choice<'a>,
}

/// A tensor of 8-bit floats and its factors.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Quantised<N> {
    /// The floats, dense in the order batch, heads, sequence, dim, unless they are turned (transposed).
    pub values: Tensor<N>,
    /// The factors, dense: one; batch × groups of heads; batch × heads × blocks; batch × heads × dim.
    pub factors: Arc<[f32]>,
    /// The means that were subtracted, dense batch × heads × dim, if the tensor was centred.
    pub means: Option<Vec<f32>>,
    /// What computed it.
    pub ran: Ran,
}

impl<'a, T: Element> Quantise<'a, T> {
    /// Which numbers share a factor; by default all.
    pub fn per(mut self, per: Granularity) -> Self {
        self.spec.per = per;
        self
    }

    /// How many neighbouring heads share a factor per head; for queries, the heads of one key head.
    pub fn group(mut self, heads: usize) -> Self {
        self.spec.group = heads;
        self
    }

    /// Subtracts each head's mean over its rows first. Attention over such keys is the same except for its LSE, which lacks
    /// `scale · q · mean`; sinks and softcaps see different scores.
    pub fn centred(mut self, yes: bool) -> Self {
        self.spec.centred = yes;
        self
    }

    /// Writes values turned (transposed), as [`Attention::turned`](crate::Attention::turned) reads them: batch × heads ×
    /// (dim + 8) × rows padded to a multiple of 128. For E4M3, a multiple of 16 features, and factors per tensor, head or
    /// channel.
    pub fn turned(mut self, yes: bool) -> Self {
        self.spec.turned = yes;
        self
    }

    /// How many rows each batch entry uses; the others are not read and become zeros.
    pub fn used(mut self, rows: impl Into<Arc<[u32]>>) -> Self {
        self.spec.used = Some(Index::I32);
        self.used = Some(rows.into());
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
    pub fn problem(&self) -> Result<QuantiseProblem, Error> {
        Ok(self.spec.clone().parse()?)
    }

    /// Rounds to E4M3.
    pub fn run(self) -> Result<Quantised<E4M3>, Error> {
        self.run_as()
    }

    /// Rounds to either 8-bit type.
    pub fn run_as<N: Element>(mut self) -> Result<Quantised<N>, Error> {
        self.spec.to = N::DTYPE;
        let problem = self.problem()?;
        let mut values = Tensor::zeros(*problem.out())?;
        let mut factors = vec![0.0; problem.factors()];
        let mut means = self.spec.centred.then(|| vec![0.0; problem.means()]);
        let into = QuantisedMut {
            out: N::erase_mut(values.view_mut()?.into_data()),
            factors: &mut factors,
            means: means.as_deref_mut(),
        };
        let mut call = QuantiseCall::bind(&problem, T::erase(self.x), self.used.as_deref(), into)?;
        let ran = self.choice.run(|backend| backend.quantise(&mut call))?;
        Ok(Quantised { values, factors: factors.into(), means, ran })
    }
}
