//! The covering set of appends: small problems whose kernels together contain every pair of options.

use flashcore_core::{
    AppendProblem, AppendSpec, DType, Dims, Index, Layout, Pages, ProblemError, Rotary, Scales, Slots,
};

use crate::covering::rows;

/// Where rows go: behind those of a padded cache or of pages, or to slots.
const TO: [(Slots, bool); 3] = [(Slots::Behind, false), (Slots::Behind, true), (Slots::Listed, false)];
/// Whether pairs are neighbours, and whether there are queries, where anything is turned.
const TURNED: [Option<(bool, bool)>; 5] =
    [None, Some((true, true)), Some((false, true)), Some((true, false)), Some((false, false))];

/// The set; slots are not turned.
pub fn covering_appends() -> Result<Vec<AppendProblem>, ProblemError> {
    let extents = [TO.len(), TURNED.len(), DType::COMMON.len()];
    let legal = |row: &[usize; 3]| TO[row[0]].0 == Slots::Behind || TURNED[row[1]].is_none();
    let chosen: Vec<_> = rows(&extents).into_iter().filter(legal).collect();
    // Into a cache of 8 bits, with factors and without.
    let narrow = chosen.iter().enumerate().map(|(n, &row)| {
        let scales = [Some(Scales::PerHead), None, Some(Scales::Strided([0, 1]))][n % 3];
        AppendSpec { cache_dtype: Some(DType::E4M3), scales, ..member(row)? }.parse()
    });
    chosen.iter().map(|&row| member(row)?.parse()).chain(narrow).collect()
}

fn member([to, turned, dtype]: [usize; 3]) -> Result<AppendSpec, ProblemError> {
    let ((slots, paged), turned) = (TO[to], TURNED[turned]);
    let batch = if slots == Slots::Listed { 1 } else { 3 };
    let layout = |batch, heads, rows| Layout::bshd(Dims::new(batch, heads, rows, 40));
    let cache = if paged || slots == Slots::Listed { layout(9, 2, 8)? } else { layout(batch, 2, 48)? };
    let rotary =
        turned.map(|(interleaved, _)| Rotary { dim: 32, interleaved, positions: 40, together: false });
    let q = turned.filter(|turned| turned.1).map(|_| layout(batch, 4, 3)).transpose()?;
    Ok(AppendSpec {
        slots,
        pages: paged.then(|| Pages::new(3)),
        rotary,
        q: q.map(|q| [q; 2]),
        index: if turned.is_some() { Index::I64 } else { Index::I32 },
        ..AppendSpec::new(DType::COMMON[dtype], [layout(batch, 2, 3)?; 2], [cache; 2])
    })
}
