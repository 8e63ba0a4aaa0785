//! The covering set of grouped products: small problems whose kernels together contain every pair of options.

use flashcore_core::{DType, ExpertLayout, GroupedProblem, GroupedSpec, Grouping, ProblemError};

use crate::covering::rows;

/// Rows, of which two groups have half each: so many that tiles of every height are chosen.
const ROWS: [usize; 4] = [16, 48, 96, 200];

/// What is divided, and whether lines of either factor run along the depth.
const FORMS: [(Grouping, [bool; 2]); 9] = [
    (Grouping::Rows, [true, true]),
    (Grouping::Rows, [true, false]),
    (Grouping::Columns, [true, true]),
    (Grouping::Columns, [false, true]),
    (Grouping::Depth { groups: 2 }, [false, false]),
    (Grouping::Batch, [true, true]),
    (Grouping::Batch, [true, false]),
    (Grouping::Batch, [false, true]),
    (Grouping::Batch, [false, false]),
];

/// The set; addresses of its tensors are multiples of 16 bytes.
pub fn covering_grouped() -> Result<Vec<GroupedProblem>, ProblemError> {
    rows(&[ROWS.len(), FORMS.len(), 2]).into_iter().map(member).collect()
}

fn member([size, form, dtype]: [usize; 3]) -> Result<GroupedProblem, ProblemError> {
    let ((grouping, along), many) = (FORMS[form], ROWS[size]);
    let (rows, columns) = if grouping == Grouping::Columns { (72, many) } else { (many, 72) };
    let of = |shared: bool| if shared { 1 } else { 2 };
    let depth = matches!(grouping, Grouping::Depth { .. });
    let layout = |extents: [usize; 3], along: bool| match along {
        true => ExpertLayout::dense(extents),
        false => ExpertLayout::transposed(extents),
    };
    let a = layout([of(grouping == Grouping::Rows || depth), rows, 136], along[0])?;
    // The depth is the rows of the right factor.
    let b = layout([of(grouping == Grouping::Columns || depth), 136, columns], !along[1])?;
    GroupedSpec::new([DType::F16, DType::BF16][dtype], a, b, grouping).parse()
}
