//! The covering set of tensors to be rounded to 8 bits: small problems whose kernels together contain every pair of options.

use flashcore_core::{DType, Dims, Granularity, Index, Layout, ProblemError, QuantiseProblem, QuantiseSpec};

use crate::covering::rows;

/// Features of a row, and elements by which rows are longer: every width of loads, and rows that one and that several
/// turns of their lanes cover.
const DIMS: [(usize, usize); 4] = [(64, 0), (320, 0), (20, 0), (40, 1)];
/// Which numbers share a factor, and rows of a head: answers of one slice and of several.
const PER: [(Granularity, usize); 6] = [
    (Granularity::PerTensor, 70),
    (Granularity::PerHead, 30),
    (Granularity::PerHead, 70),
    (Granularity::PerBlock(32), 70),
    (Granularity::PerChannel, 30),
    (Granularity::PerChannel, 70),
];
/// Whether means are subtracted, and what lengths are made of.
const OPTIONS: [(bool, Option<Index>); 4] =
    [(false, None), (true, None), (false, Some(Index::I32)), (true, Some(Index::I64))];

/// The set; addresses of its tensors are multiples of 16 bytes.
pub fn covering_quantised() -> Result<Vec<QuantiseProblem>, ProblemError> {
    let extents = [DIMS.len(), PER.len(), OPTIONS.len(), DType::COMMON.len(), 2];
    rows(&extents).into_iter().map(member).chain(TURNED.map(turned)).collect()
}

/// Features, which numbers share a factor and element types of tensors that are turned, and whether rows are used.
const TURNED: [(usize, Granularity, DType, bool); 4] = [
    (64, Granularity::PerChannel, DType::BF16, true),
    (128, Granularity::PerHead, DType::F16, false),
    (208, Granularity::PerTensor, DType::F32, false),
    (256, Granularity::PerChannel, DType::F32, true),
];

fn turned(
    (dim, per, dtype, used): (usize, Granularity, DType, bool),
) -> Result<QuantiseProblem, ProblemError> {
    let x = Layout::bshd(Dims::new(3, 2, 150, dim))?;
    let used = used.then_some(Index::I32);
    QuantiseSpec { per, used, turned: true, ..QuantiseSpec::new(dtype, x) }.parse()
}

fn member([dims, per, options, dtype, to]: [usize; 5]) -> Result<QuantiseProblem, ProblemError> {
    let ((dim, padding), (per, seq), (centred, used)) = (DIMS[dims], PER[per], OPTIONS[options]);
    let (dims, row) = (Dims::new(3, 2, seq, dim), dim + padding);
    let x = Layout::strided(dims, [2 * seq * row, seq * row, row, 1])?;
    let to = [DType::E4M3, DType::E5M2][to];
    let spec =
        QuantiseSpec { to, out: Some(x), per, centred, used, ..QuantiseSpec::new(DType::COMMON[dtype], x) };
    spec.parse()
}
