//! A call cut along its batch: entries whose keys start at different places (left padding) are problems of their own,
//! because K and V are simply looked at from another row on.

use std::ops::Range;

use flashcore::{Layout, Spec};
use flashcore_core::Dims;

use crate::error::CallError;

/// A problem and where its tensors start, in bytes: q, k, v, out and lse.
pub(crate) struct Part {
    pub(crate) spec: Spec,
    pub(crate) offsets: [usize; 5],
    /// The first batch entry, and the first key of its entries.
    pub(crate) first_entry: usize,
    pub(crate) first_key: usize,
}

impl Part {
    pub(crate) fn whole(spec: Spec) -> Self {
        Self { spec, offsets: [0; 5], first_entry: 0, first_key: 0 }
    }

    /// The batch entries `entries` of a problem, with the keys `keys` alone.
    fn of(spec: &Spec, entries: Range<usize>, keys: Range<usize>) -> Result<Self, CallError> {
        let bytes = spec.dtype.bytes();
        let rows = |layout: &Layout, batch: usize, seq: usize| Dims { batch, seq, ..layout.dims() };
        let cut = |layout: &Layout, seq: usize| {
            Layout::strided(rows(layout, entries.len(), seq), layout.strides()).map_err(CallError::from)
        };
        let out = spec.out.unwrap_or(spec.q);
        let Dims { heads, seq, .. } = spec.q.dims();
        let from = |layout: &Layout, row: usize| layout.row(entries.start, 0, row) * bytes;
        let to = out.row(entries.start, 0, 0) * spec.out_dtype.unwrap_or(spec.dtype).bytes();
        let lse = entries.start * heads * seq * size_of::<f32>();
        let (of_k, of_v) = (from(&spec.k, keys.start), from(&spec.v, keys.start));
        Ok(Self {
            offsets: [from(&spec.q, 0), of_k, of_v, to, lse],
            first_entry: entries.start,
            first_key: keys.start,
            spec: Spec {
                q: cut(&spec.q, seq)?,
                k: cut(&spec.k, keys.len())?,
                v: cut(&spec.v, keys.len())?,
                out: Some(cut(&out, seq)?),
                ..spec.clone()
            },
        })
    }
}

/// One part for each run of batch entries with the same keys.
pub(crate) fn split(spec: &Spec, starts: &[u32], ends: &[u32]) -> Result<Vec<Part>, CallError> {
    let (batch, seq) = (spec.q.dims().batch, spec.k.dims().seq);
    for given in [starts.len(), ends.len()] {
        if given != batch {
            return Err(CallError::RangeCount { given, batch });
        }
    }
    let ranges: Vec<_> = starts.iter().copied().zip(ends.iter().copied()).collect();
    if let Some(entry) = ranges.iter().position(|&(start, end)| start > end || end as usize > seq) {
        let (start, end) = ranges[entry];
        return Err(CallError::Range { entry, start, end, seq });
    }
    let mut entry = 0;
    let parts = ranges.chunk_by(|a, b| a == b).map(|run| {
        let entries = entry..entry + run.len();
        entry = entries.end;
        let (start, end) = run[0];
        Part::of(spec, entries, start as usize..end as usize)
    });
    parts.collect()
}
