//! What [`crate::Attention::run`] and [`crate::Merge::run`] return.

use flashcore_core::{Dims, ProblemError, Ran, Tensor};

/// The result of attention or of a merge.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Output<T> {
    /// The output, dense in the order batch, heads, sequence, dim.
    pub out: Tensor<T>,
    /// The log-sum-exp of each row.
    pub lse: Lse,
    /// What computed it.
    pub ran: Ran,
}

/// The natural logarithm of each row's softmax denominator: batch × heads × sequence values.
///
/// [`merge`](crate::merge()) uses it to combine attention over parts of the keys.
#[derive(Clone, PartialEq, Debug)]
pub struct Lse {
    values: Vec<f32>,
    dims: [usize; 3],
}

impl Lse {
    /// One value for each row of a tensor of these extents.
    pub(crate) fn zeros(dims: Dims) -> Result<Self, ProblemError> {
        let Dims { batch, heads, seq, .. } = dims;
        let (rows, mut values) = (batch * heads * seq, Vec::new());
        values.try_reserve_exact(rows).map_err(|_| ProblemError::OutOfMemory {
            bytes: rows.saturating_mul(size_of::<f32>()),
            dims: Dims::new(batch, heads, seq, 1),
        })?;
        values.resize(rows, 0.0);
        Ok(Self { values, dims: [batch, heads, seq] })
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The value of one row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn at(&self, batch: usize, head: usize, seq: usize) -> f32 {
        let [batches, heads, seqs] = self.dims;
        assert!(batch < batches && head < heads && seq < seqs, "row {batch},{head},{seq} of {:?}", self.dims);
        self.values[(batch * heads + head) * seqs + seq]
    }

    /// All values, dense.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Batch, heads, sequence.
    pub const fn dims(&self) -> [usize; 3] {
        self.dims
    }

    /// All values, owned.
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }
}
