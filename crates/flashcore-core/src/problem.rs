//! The attention problem: parsed once, never wrong afterwards.

use std::sync::Arc;

use crate::{
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout},
    lengths::{Lengths, Sequence},
    mask::Mask,
};

/// Largest extent of any dimension: kernels index rows with signed 32-bit integers.
pub const MAX_EXTENT: usize = i32::MAX as usize;

/// What a caller asks for, unchecked; [`Spec::parse`] makes a [`Problem`] of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    /// Element type of Q, K, V and the output.
    pub dtype: DType,
    /// Layout of the queries.
    pub q: Layout,
    /// Layout of the keys.
    pub k: Layout,
    /// Layout of the values.
    pub v: Layout,
    /// Layout of the result; dense batch × heads × sequence × dim where `None`.
    pub out: Option<Layout>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on QKᵀ; 1/√dim where `None`.
    pub scale: Option<f32>,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One extra logit per query head that takes part in the softmax but has no value.
    pub sinks: Option<Arc<[f32]>>,
    /// Used or packed sequence lengths.
    pub lengths: Lengths,
    /// Keep batch size and head count out of the plan, so that a row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl Spec {
    /// Plain attention over the given layouts.
    pub fn new(dtype: DType, q: Layout, k: Layout, v: Layout) -> Self {
        Self {
            dtype,
            q,
            k,
            v,
            out: None,
            mask: Mask::NONE,
            scale: None,
            softcap: None,
            sinks: None,
            lengths: Lengths::Uniform,
            batch_invariant: false,
        }
    }

    /// Checks everything and fills in what was left out.
    pub fn parse(self) -> Result<Problem, ProblemError> {
        let (q, k, v) = (self.q.dims(), self.k.dims(), self.v.dims());
        check_extents(q, k, v)?;
        self.lengths.check(q, k)?;
        let out_dims = Dims { dim: v.dim, ..q };
        let out = self.out.map_or_else(|| Layout::bhsd(out_dims), Ok)?;
        check_out(q, v, out)?;
        let scale = self.scale.unwrap_or(1.0 / (q.dim as f32).sqrt());
        check_positive(scale, ProblemError::Scale)?;
        self.softcap.map_or(Ok(()), |cap| check_positive(cap, ProblemError::Softcap))?;
        check_sinks(self.sinks.as_deref(), q.heads)?;
        Ok(Problem { spec: Self { out: Some(out), scale: Some(scale), ..self }, out, scale })
    }
}

/// A checked attention problem: `O = softmax(scale·QKᵀ + mask)·V` per head.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    spec: Spec,
    out: Layout,
    scale: f32,
}

impl Problem {
    /// The specification it was parsed from, with what had been left out filled in.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Element type of Q, K, V and the output.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Layout of the queries.
    pub fn q(&self) -> &Layout {
        &self.spec.q
    }

    /// Layout of the keys.
    pub fn k(&self) -> &Layout {
        &self.spec.k
    }

    /// Layout of the values.
    pub fn v(&self) -> &Layout {
        &self.spec.v
    }

    /// Layout of the result.
    pub fn out(&self) -> &Layout {
        &self.out
    }

    /// Batch dimension of the tensors; 1 for packed sequences.
    pub fn batch(&self) -> usize {
        self.q().dims().batch
    }

    /// Heads of the queries.
    pub fn heads_q(&self) -> usize {
        self.q().dims().heads
    }

    /// Heads of keys and values.
    pub fn heads_kv(&self) -> usize {
        self.k().dims().heads
    }

    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads_q() / self.heads_kv()
    }

    /// Rows of Q.
    pub fn seq_q(&self) -> usize {
        self.q().dims().seq
    }

    /// Rows of K and V.
    pub fn seq_kv(&self) -> usize {
        self.k().dims().seq
    }

    /// Features of a query or key.
    pub fn dim_qk(&self) -> usize {
        self.q().dims().dim
    }

    /// Features of a value.
    pub fn dim_v(&self) -> usize {
        self.v().dims().dim
    }

    /// Which keys a query sees.
    pub fn mask(&self) -> Mask {
        self.spec.mask
    }

    /// Factor on QKᵀ.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Limit of the scores, if any.
    pub fn softcap(&self) -> Option<f32> {
        self.spec.softcap
    }

    /// One extra logit per query head, if any.
    pub fn sinks(&self) -> Option<&[f32]> {
        self.spec.sinks.as_deref()
    }

    /// Used or packed sequence lengths.
    pub fn lengths(&self) -> &Lengths {
        &self.spec.lengths
    }

    /// Whether a row's bits must not depend on its batch.
    pub fn batch_invariant(&self) -> bool {
        self.spec.batch_invariant
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.spec.lengths.count(self.batch())
    }

    /// Where sequence `n` lies.
    pub fn sequence(&self, n: usize) -> Sequence {
        self.spec.lengths.sequence(n, self.q().dims(), self.k().dims())
    }

    /// Rows of the result, which is also the number of LSE values: batch × heads × queries.
    pub fn rows(&self) -> usize {
        let q = self.q().dims();
        q.batch * q.heads * q.seq
    }

    /// Index of a row's LSE value; LSE is dense batch × heads × sequence.
    pub fn lse_index(&self, batch: usize, head: usize, seq: usize) -> usize {
        (batch * self.heads_q() + head) * self.seq_q() + seq
    }

    /// Visible (query, key) pairs over the whole problem, counting every query head; at most `u64::MAX`.
    pub fn visible_pairs(&self) -> u64 {
        let per_head = |n: usize| {
            let s = self.sequence(n);
            self.mask().pairs(s.q_len, s.kv_len)
        };
        let all = match self.spec.lengths {
            Lengths::Uniform if self.batch() > 0 => per_head(0).saturating_mul(self.batch() as u64),
            _ => (0..self.sequences()).map(per_head).fold(0, u64::saturating_add),
        };
        all.saturating_mul(self.heads_q() as u64)
    }

    /// Floating-point operations of the two matrix products over visible pairs.
    pub fn flops(&self) -> f64 {
        self.visible_pairs() as f64 * 2.0 * (self.dim_qk() + self.dim_v()) as f64
    }
}

fn check_extents(q: Dims, k: Dims, v: Dims) -> Result<(), ProblemError> {
    for (operand, dims) in [(Operand::Q, q), (Operand::K, k), (Operand::V, v)] {
        if dims.heads == 0 || dims.dim == 0 {
            return Err(ProblemError::Empty { operand, dims });
        }
        if dims.array().into_iter().any(|extent| extent > MAX_EXTENT) {
            return Err(ProblemError::Extent { operand, dims, max: MAX_EXTENT });
        }
    }
    // LSE is dense over the rows of Q, so that their number must be representable.
    Layout::bhsd(Dims { dim: 1, ..q })?;
    check_axes((Operand::K, k), (Operand::Q, q), &[Axis::Batch, Axis::Dim])?;
    check_axes((Operand::V, v), (Operand::K, k), &[Axis::Batch, Axis::Heads, Axis::Sequence])?;
    if !q.heads.is_multiple_of(k.heads) {
        return Err(ProblemError::Heads { heads_q: q.heads, heads_kv: k.heads });
    }
    Ok(())
}

fn check_out(q: Dims, v: Dims, out: Layout) -> Result<(), ProblemError> {
    let given = (Operand::Out, out.dims());
    check_axes(given, (Operand::Q, q), &[Axis::Batch, Axis::Heads, Axis::Sequence])?;
    check_axes(given, (Operand::V, v), &[Axis::Dim])?;
    out.check_output()
}

/// Demands that a tensor has the extents of another along some axes.
fn check_axes(
    (operand, dims): (Operand, Dims),
    (because, other): (Operand, Dims),
    axes: &[Axis],
) -> Result<(), ProblemError> {
    for &axis in axes {
        let (got, expected) = (dims.array()[axis as usize], other.array()[axis as usize]);
        if got != expected {
            return Err(ProblemError::Mismatch { operand, axis, got, expected, because, other, dims });
        }
    }
    Ok(())
}

fn check_positive(value: f32, error: impl Fn(f32) -> ProblemError) -> Result<(), ProblemError> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { Err(error(value)) }
}

fn check_sinks(sinks: Option<&[f32]>, heads: usize) -> Result<(), ProblemError> {
    let Some(sinks) = sinks else { return Ok(()) };
    if sinks.len() != heads {
        return Err(ProblemError::SinkCount { given: sinks.len(), heads });
    }
    // −∞ is a sink that takes nothing; NaN and +∞ would erase the row.
    match sinks.iter().position(|s| s.is_nan() || *s == f32::INFINITY) {
        Some(head) => Err(ProblemError::Sink { head, value: sinks[head] }),
        None => Ok(()),
    }
}
