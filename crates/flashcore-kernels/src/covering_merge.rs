//! The covering set of merges: small problems whose kernels together contain every pair of options.

use flashcore_core::{DType, Dims, Layout, MergeProblem, MergeSpec, Parts, ProblemError};

use crate::covering::rows;

/// Features of a row, and elements by which rows are longer: every width of loads, rows that one and that several turns
/// of their lanes cover, lanes without work.
const DIMS: [(usize, usize); 7] = [(128, 0), (64, 0), (100, 0), (6, 0), (7, 0), (320, 0), (128, 1)];

/// Parts in one tensor where `None`.
const LISTED: [Option<usize>; 3] = [None, Some(3), Some(16)];

/// The set; addresses of its tensors are multiples of 16 bytes.
pub fn covering_merges() -> Result<Vec<MergeProblem>, ProblemError> {
    let extents = [DIMS.len(), LISTED.len(), DType::COMMON.len(), DType::COMMON.len()];
    rows(&extents).into_iter().map(member).collect()
}

fn member([dims, listed, dtype, out]: [usize; 4]) -> Result<MergeProblem, ProblemError> {
    let (dim, padding) = DIMS[dims];
    // More rows than a CTA has, and not a multiple.
    let (dims, row) = (Dims::new(3, 2, 23, dim), dim + padding);
    let part = Layout::strided(dims, [2 * 23 * row, 23 * row, row, 1])?;
    let parts = match LISTED[listed] {
        Some(count) => Parts::Listed(count),
        None => Parts::Stacked { count: 5, stride: part.span() + padding },
    };
    let spec = MergeSpec::new(DType::COMMON[dtype], part, parts);
    MergeSpec { out_dtype: DType::COMMON[out], out: Some(part), ..spec }.parse()
}
