//! The attention problem: parsed once, never wrong afterwards.

use crate::{
    bias::Bias,
    dropout::Dropout,
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout},
    lengths::{Index, Sequences},
    mask::Mask,
    pages::Pages,
    quantise::ScaleError,
    scales::Scales,
    turned::unturned_dims,
    values::Values,
};

/// Largest extent of any dimension: kernels index rows with signed 32-bit integers.
pub const MAX_EXTENT: usize = i32::MAX as usize;

/// What a caller asks for, unchecked; [`Spec::parse`] turns it into a [`Problem`].
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    /// Element type of Q, and of K and V where nothing else is said.
    pub dtype: DType,
    /// Element type of K and V, where it is not that of Q: E4M3 under queries of f16 or bf16, as in a cache.
    pub kv_dtype: Option<DType>,
    /// Layout of the queries.
    pub q: Layout,
    /// Layout of the keys.
    pub k: Layout,
    /// Layout of the values.
    pub v: Layout,
    /// Whether the values are transposed, as [`QuantiseSpec::turned`](crate::QuantiseSpec) writes them: `v` then has the
    /// extents of [`turned_dims`](crate::turned_dims), and zeros where keys are not used.
    pub turned: bool,
    /// Element type of the result, where it is not that of Q: f32. That of 8-bit tensors is f16, bf16 (the default) or
    /// f32.
    pub out_dtype: Option<DType>,
    /// That Q, K and V are multiplied by factors, if they are: 8-bit ones only.
    pub scales: Option<Scales>,
    /// Accumulate into output and LSE instead of overwriting them.
    pub accumulate: bool,
    /// Layout of the result; dense batch × heads × sequence × dim where `None`.
    pub out: Option<Layout>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on QKᵀ; 1/√dim where `None`.
    pub scale: Option<f32>,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Element type of the sinks, where a call gives one extra logit per query head.
    pub sinks: Option<DType>,
    /// What is added to scores, if anything.
    pub bias: Option<Bias>,
    /// Dropout of the weights, as in training, if any.
    pub dropout: Option<Dropout>,
    /// How sequences lie in the tensors.
    pub sequences: Sequences,
    /// That keys and values lie in pages, if they do: a batch entry of `k` and `v` is a page.
    pub pages: Option<Pages>,
    /// Element type of lengths and offsets in device memory.
    pub index: Index,
    /// Keep batch size and head count out of the plan, so that a row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl Spec {
    /// Plain attention over the given layouts.
    pub fn new(dtype: DType, q: Layout, k: Layout, v: Layout) -> Self {
        Self {
            dtype,
            kv_dtype: None,
            q,
            k,
            v,
            turned: false,
            out: None,
            out_dtype: None,
            scales: None,
            accumulate: false,
            mask: Mask::NONE,
            scale: None,
            softcap: None,
            sinks: None,
            bias: None,
            dropout: None,
            sequences: Sequences::Uniform,
            pages: None,
            index: Index::I32,
            batch_invariant: false,
        }
    }

    /// The same problem with room for these numbers.
    #[must_use]
    pub fn with(self, values: &Values) -> Self {
        let sinks = values.sinks.as_ref().map(|_| DType::F32);
        let pages = values.table.as_ref().map(|table| table.kind());
        let scales = values.factors.as_ref().map(|factors| factors.kind());
        Self { sequences: values.lengths.kind(), sinks, pages, scales, ..self }
    }

    /// The same problem over a cache whose keys and values have this type.
    #[must_use]
    pub fn over(self, kv_dtype: DType) -> Self {
        Self { kv_dtype: Some(kv_dtype), ..self }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<Problem, ProblemError> {
        let (q, k, v) = (self.q.dims(), self.k.dims(), self.value_dims()?);
        self.sequences.check(q, k, self.pages.is_some())?;
        check_extents(q, k, v, self.pages.is_some())?;
        let pages = self.pages.map(|pages| pages.parse(k, self.sequences, q.batch)).transpose()?;
        let out_dims = Dims { dim: v.dim, ..q };
        let out = self.out.map_or_else(|| Layout::bhsd(out_dims), Ok)?;
        check_out(q, v, out)?;
        let kv_dtype = self.check_kv_dtype()?;
        self.check_out_dtype()?;
        let apart = self.pages.is_some() || kv_dtype.is_some();
        let check = |scales: Scales| scales.check(apart).map_err(ProblemError::Scales);
        self.scales.map_or(Ok(()), check)?;
        self.sinks.map_or(Ok(()), |sinks| sinks.check_common("a sink"))?;
        let scale = self.scale.unwrap_or(1.0 / (q.dim as f32).sqrt());
        check_positive(scale, ProblemError::Scale)?;
        self.softcap.map_or(Ok(()), |cap| check_positive(cap, ProblemError::Softcap))?;
        let keys = pages.and_then(|pages| pages.longest_kv).unwrap_or(k.seq);
        let parse = |bias: Bias| bias.parse(q, keys, self.sequences, pages.is_some());
        let bias = self.bias.map(parse).transpose().map_err(ProblemError::Bias)?;
        let dropout = self.check_dropout()?;
        Ok(Problem {
            spec: Self { kv_dtype, out: Some(out), scale: Some(scale), pages, bias, dropout, ..self },
            out,
            scale,
        })
    }
}

impl Spec {
    /// Extents of the values, transposed or not.
    fn value_dims(&self) -> Result<Dims, ProblemError> {
        if !self.turned {
            return Ok(self.v.dims());
        }
        let own =
            matches!(self.sequences, Sequences::Uniform | Sequences::Used { .. }) && self.pages.is_none();
        let alike = self.kv_dtype.is_none_or(|kv| kv == self.dtype);
        if !own || self.dtype != DType::E4M3 || !alike {
            return Err(ProblemError::Scales(ScaleError::NotTurned));
        }
        unturned_dims(self.v.dims(), self.k.dims().seq)
    }

    /// Dropout, if it drops anything: only for tensors as in training, whole sequences of 16 or 32 bits.
    fn check_dropout(&self) -> Result<Option<Dropout>, ProblemError> {
        let dropout = self.dropout.map_or(Ok(None), Dropout::parse)?;
        let narrow = self.dtype.is_narrow() || self.kv_dtype.is_some_and(DType::is_narrow);
        match self {
            _ if dropout.is_none() => Ok(None),
            Self { pages: Some(_), .. } => Err(ProblemError::DropoutWith("keys in pages")),
            Self { accumulate: true, .. } => Err(ProblemError::DropoutWith("accumulated results")),
            _ if narrow => Err(ProblemError::DropoutWith("8-bit tensors")),
            _ => Ok(dropout),
        }
    }

    /// The type of K and V, where it is not that of Q; factors only where there are tensors of 8 bits.
    fn check_kv_dtype(&self) -> Result<Option<DType>, ProblemError> {
        let (dtype, kv_dtype) = (self.dtype, self.kv_dtype.filter(|&kv| kv != self.dtype));
        match (dtype, kv_dtype) {
            (_, None) | (DType::F16 | DType::BF16, Some(DType::E4M3)) => {}
            (dtype, Some(kv)) => return Err(ProblemError::KeyDType { kv, dtype }),
        }
        match self.scales {
            Some(_) if !dtype.is_narrow() && kv_dtype.is_none() => Err(ProblemError::ScaledDType { dtype }),
            _ => Ok(kv_dtype),
        }
    }

    fn check_out_dtype(&self) -> Result<(), ProblemError> {
        let (dtype, out) = (self.dtype, self.out_dtype.unwrap_or(self.dtype.of_result()));
        if out.is_narrow() {
            return Err(ProblemError::NarrowOut { out });
        }
        match (out == DType::F32, self.accumulate) {
            (false, true) => Err(ProblemError::AccumulateDType { out }),
            (false, false) if out != dtype && !dtype.is_narrow() => {
                Err(ProblemError::OutDType { out, dtype })
            }
            _ => Ok(()),
        }
    }
}

/// A checked attention problem: `O = softmax(scale·QKᵀ + mask)·V` per head.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    spec: Spec,
    out: Layout,
    scale: f32,
}

impl AsRef<Self> for Problem {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Problem {
    /// The specification it was parsed from, with defaults filled in.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Element type of Q.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Element type of K and V: that of Q, unless they are a cache of fewer bits.
    pub fn kv_dtype(&self) -> DType {
        self.spec.kv_dtype.unwrap_or(self.spec.dtype)
    }

    /// Element type of the result.
    pub fn out_dtype(&self) -> DType {
        self.spec.out_dtype.unwrap_or(self.spec.dtype.of_result())
    }

    /// Whether the result is merged into what output and LSE hold already.
    pub fn accumulate(&self) -> bool {
        self.spec.accumulate
    }

    /// Element type of lengths and offsets in device memory.
    pub fn index(&self) -> Index {
        self.spec.index
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

    /// Rows of K and V; of keys in pages, as many as a sequence may have.
    pub fn seq_kv(&self) -> usize {
        let paged = self.spec.pages.and_then(|pages| pages.longest_kv);
        paged.unwrap_or(self.k().dims().seq)
    }

    /// That keys and values lie in pages, if they do.
    pub fn pages(&self) -> Option<Pages> {
        self.spec.pages
    }

    /// Keys of a page, where they lie in pages.
    pub fn page_size(&self) -> Option<usize> {
        self.pages().map(|_| self.k().dims().seq)
    }

    /// Extents of the keys as if those of every sequence lay together.
    pub(crate) fn key_dims(&self) -> Dims {
        let pool = self.k().dims();
        let batch = if self.pages().is_some() { self.sequences() } else { pool.batch };
        Dims { batch, seq: self.seq_kv(), ..pool }
    }

    /// Features of a query or key.
    pub fn dim_qk(&self) -> usize {
        self.q().dims().dim
    }

    /// Features of a value.
    pub fn dim_v(&self) -> usize {
        self.out.dims().dim
    }

    /// Whether the values are transposed.
    pub fn turned(&self) -> bool {
        self.spec.turned
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

    /// Element type of the sinks, if there are any.
    pub fn sinks(&self) -> Option<DType> {
        self.spec.sinks
    }

    /// For how many entries each key head has factors: sequences of a cache, batch entries of tensors otherwise.
    pub fn scaled_entries(&self) -> usize {
        if self.spec.kv_dtype.is_some() { self.sequences() } else { self.batch() }
    }

    /// That Q, K and V are multiplied by factors, if they are.
    pub fn scales(&self) -> Option<Scales> {
        self.spec.scales
    }

    /// What is added to scores, if anything.
    pub fn bias(&self) -> Option<Bias> {
        self.spec.bias
    }

    /// Dropout of the weights, if any.
    pub fn dropout(&self) -> Option<Dropout> {
        self.spec.dropout
    }

    /// Where a bias for each query and key lies, and its element type, if there is one.
    pub const fn bias_pairs(&self) -> Option<(&Layout, DType)> {
        match &self.spec.bias {
            Some(Bias::Pairs { dtype, layout }) => Some((layout, *dtype)),
            _ => None,
        }
    }

    /// How sequences lie in the tensors.
    pub fn sequences_kind(&self) -> Sequences {
        self.spec.sequences
    }

    /// Whether a row's bits must not depend on its batch.
    pub fn batch_invariant(&self) -> bool {
        self.spec.batch_invariant
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.spec.sequences.count(self.batch())
    }

    /// Queries of the longest sequence at most.
    pub fn longest_q(&self) -> usize {
        match self.spec.sequences {
            Sequences::Ragged { longest_q, .. } | Sequences::PackedQueries { longest_q, .. } => {
                longest_q.min(self.seq_q())
            }
            _ => self.seq_q(),
        }
    }

    /// Keys of the longest sequence at most.
    pub fn longest_kv(&self) -> usize {
        match self.spec.sequences {
            Sequences::Ragged { longest_kv, .. } => longest_kv.min(self.seq_kv()),
            _ => self.seq_kv(),
        }
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

    /// Floating-point operations of the two matrix products over visible pairs, were every sequence as long as it may
    /// be; an [`crate::Instance`] knows how long they are.
    pub fn flops(&self) -> f64 {
        let per_head = self.mask().pairs(self.longest_q(), self.longest_kv()) as f64;
        per_head * self.sequences() as f64 * self.heads_q() as f64 * self.flops_per_pair()
    }

    pub(crate) fn flops_per_pair(&self) -> f64 {
        2.0 * (self.dim_qk() + self.dim_v()) as f64
    }
}

fn check_extents(q: Dims, k: Dims, v: Dims, paged: bool) -> Result<(), ProblemError> {
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
    let alike: &[Axis] = if paged { &[Axis::Dim] } else { &[Axis::Batch, Axis::Dim] };
    check_axes((Operand::K, k), (Operand::Q, q), alike)?;
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
pub(crate) fn check_axes(
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
