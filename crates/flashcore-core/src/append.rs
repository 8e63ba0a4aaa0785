//! New keys and values written into a cache, padded or in pages, with rotary embedding of keys and queries on the way.
//!
//! Row `i` of a sequence goes after the keys already in its cache, to position `length + i`, or to a slot that the call
//! names. Rows without a valid place (a length or slot below 0, a position beyond the cache, a page that does not exist)
//! are not written. If two rows have the same place, either may win.
//!
//! Rotary embedding rotates pairs of features by an angle that grows with the position: `(x, y)` becomes
//! `(x·cos − y·sin, y·cos + x·sin)`. Pairs are neighbours, or features half of the rotated ones apart.
//!
//! A cache may have E4M3 elements: rows written there are divided by the factor of their key head and rounded, and
//! overflow saturates.
//!
//! [`AppendSpec::parse`] makes an [`AppendProblem`], which a backend computes over the memory of an [`AppendCall`].

use std::sync::Arc;

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout},
    lengths::{Index, Sequences},
    pages::{PageTable, Pages},
    problem::{MAX_EXTENT, check_axes},
    scales::{Factors, Scales},
};

/// Where new rows go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Slots {
    /// After the keys that each sequence has; a call gives their number for each batch entry of the new rows.
    #[default]
    Behind,
    /// To slots that a call gives, one for each new row: page times rows of a page, plus row.
    Listed,
}

/// Rotary embedding of keys and queries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rotary {
    /// Features of a row that are rotated, from the first on: an even number.
    pub dim: usize,
    /// Whether neighbours make a pair, rather than features half of `dim` apart.
    pub interleaved: bool,
    /// Positions that the tables of cosines and sines have, which are dense positions × dim / 2; later ones count as the
    /// last.
    pub positions: usize,
    /// Whether all queries of a sequence have the position of its first new key, rather than consecutive positions.
    pub together: bool,
}

/// What a caller asks for, unchecked; [`AppendSpec::parse`] turns it into an [`AppendProblem`].
#[derive(Clone, PartialEq, Debug)]
pub struct AppendSpec {
    /// Element type of all tensors but, maybe, the cache.
    pub dtype: DType,
    /// Element type of the cache, where it is not that of the new rows: E4M3.
    pub cache_dtype: Option<DType>,
    /// That what is written is divided by factors of keys and of values, if it is: into an E4M3 cache.
    pub scales: Option<Scales>,
    /// Layout of the new keys.
    pub k: Layout,
    /// Layout of the new values.
    pub v: Layout,
    /// Layout of the cache of keys: a batch entry for each sequence, or for each page.
    pub cache_k: Layout,
    /// Layout of the cache of values.
    pub cache_v: Layout,
    /// Where new rows go.
    pub slots: Slots,
    /// That the cache lies in pages which a table finds, if it does.
    pub pages: Option<Pages>,
    /// Rotary embedding of keys and queries, if any.
    pub rotary: Option<Rotary>,
    /// Queries to turn, and where they go.
    pub q: Option<[Layout; 2]>,
    /// Element type of lengths in device memory; slots are 64-bit integers.
    pub index: Index,
}

impl AppendSpec {
    /// New rows behind what a padded cache holds, as they are.
    pub const fn new(dtype: DType, [k, v]: [Layout; 2], [cache_k, cache_v]: [Layout; 2]) -> Self {
        Self {
            dtype,
            cache_dtype: None,
            scales: None,
            k,
            v,
            cache_k,
            cache_v,
            slots: Slots::Behind,
            pages: None,
            rotary: None,
            q: None,
            index: Index::I32,
        }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<AppendProblem, ProblemError> {
        self.dtype.check_common("appending to a cache")?;
        let cache_dtype = self.check_cache_dtype()?;
        let (k, v, cache_k, cache_v) =
            (self.k.dims(), self.v.dims(), self.cache_k.dims(), self.cache_v.dims());
        for (operand, dims) in
            [(Operand::K, k), (Operand::V, v), (Operand::CacheK, cache_k), (Operand::CacheV, cache_v)]
        {
            check_extents(operand, dims)?;
        }
        let rows = &[Axis::Batch, Axis::Heads, Axis::Sequence];
        check_axes((Operand::V, v), (Operand::K, k), rows)?;
        check_axes((Operand::CacheK, cache_k), (Operand::K, k), &[Axis::Heads, Axis::Dim])?;
        check_axes((Operand::CacheV, cache_v), (Operand::CacheK, cache_k), rows)?;
        check_axes((Operand::CacheV, cache_v), (Operand::V, v), &[Axis::Dim])?;
        self.cache_k.check_output()?;
        self.cache_v.check_output()?;
        let pages = self.check_slots(k, cache_k)?;
        self.check_rotary(k)?;
        Ok(AppendProblem { spec: Self { cache_dtype, pages, ..self } })
    }

    /// The type of the cache, where it is not that of the new rows.
    fn check_cache_dtype(&self) -> Result<Option<DType>, ProblemError> {
        let (dtype, cache) = (self.dtype, self.cache_dtype.filter(|&cache| cache != self.dtype));
        self.scales.map_or(Ok(()), |scales| scales.check(true).map_err(ProblemError::Scales))?;
        match cache {
            None if self.scales.is_some() => Err(ProblemError::ScaledDType { dtype }),
            None | Some(DType::E4M3) => Ok(cache),
            Some(expected) => Err(ProblemError::OtherDType { operand: Operand::K, got: dtype, expected }),
        }
    }

    fn check_slots(&self, k: Dims, cache: Dims) -> Result<Option<Pages>, ProblemError> {
        match (self.slots, self.pages) {
            (Slots::Listed, Some(_)) => Err(ProblemError::SlotsAndTable),
            (Slots::Listed, None) if k.batch != 1 => {
                Err(ProblemError::RaggedBatch { operand: Operand::K, batch: k.batch })
            }
            (Slots::Listed, None) => Ok(None),
            (Slots::Behind, Some(pages)) => {
                pages.parse(cache, Sequences::Used { q: false, kv: true }, k.batch).map(Some)
            }
            (Slots::Behind, None) => {
                check_axes((Operand::CacheK, cache), (Operand::K, k), &[Axis::Batch]).map(|()| None)
            }
        }
    }

    fn check_rotary(&self, k: Dims) -> Result<(), ProblemError> {
        let Some(rotary) = self.rotary else {
            return if self.q.is_some() { Err(ProblemError::QueriesUnturned) } else { Ok(()) };
        };
        if self.slots == Slots::Listed {
            return Err(ProblemError::SlotsWithoutPositions);
        }
        let (dim, most) = (rotary.dim, k.dim);
        if dim == 0 || !dim.is_multiple_of(2) || dim > most {
            return Err(ProblemError::RotaryDim { dim, most });
        }
        if rotary.positions == 0 || rotary.positions > MAX_EXTENT {
            return Err(ProblemError::RotaryPositions { positions: rotary.positions, most: MAX_EXTENT });
        }
        let Some([q, turned]) = self.q.map(|layouts| layouts.map(|layout| layout.dims())) else {
            return Ok(());
        };
        check_extents(Operand::Q, q)?;
        check_axes((Operand::Q, q), (Operand::K, k), &[Axis::Batch, Axis::Dim])?;
        check_axes((Operand::Out, turned), (Operand::Q, q), &Axis::ALL)?;
        self.q.map_or(Ok(()), |[_, turned]| turned.check_output())
    }
}

fn check_extents(operand: Operand, dims: Dims) -> Result<(), ProblemError> {
    if dims.heads == 0 || dims.dim == 0 {
        return Err(ProblemError::Empty { operand, dims });
    }
    if dims.array().into_iter().any(|extent| extent > MAX_EXTENT) {
        return Err(ProblemError::Extent { operand, dims, max: MAX_EXTENT });
    }
    // Kernels number rows.
    Layout::bhsd(Dims { dim: 1, ..dims }).map(drop)
}

/// Checked: what is to be appended where.
#[derive(Clone, PartialEq, Debug)]
pub struct AppendProblem {
    spec: AppendSpec,
}

impl AppendProblem {
    /// The specification, with defaults filled in.
    pub const fn spec(&self) -> &AppendSpec {
        &self.spec
    }

    /// Element type of the cache.
    pub fn cache_dtype(&self) -> DType {
        self.spec.cache_dtype.unwrap_or(self.spec.dtype)
    }

    /// Positions of a sequence in the cache.
    pub fn capacity(&self) -> usize {
        let paged = self.spec.pages.and_then(|pages| pages.longest_kv);
        paged.unwrap_or(self.spec.cache_k.dims().seq)
    }

    /// New rows of keys: batch × heads × sequence; there are as many of values.
    pub fn rows(&self) -> usize {
        let dims = self.spec.k.dims();
        dims.batch * dims.heads * dims.seq
    }

    /// Rows of the queries.
    pub fn query_rows(&self) -> usize {
        let dims = self.spec.q.map(|[q, _]| q.dims());
        dims.map_or(0, |dims| dims.batch * dims.heads * dims.seq)
    }
}

/// Lengths, slots, page table and factors of one call, on the host.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AppendValues {
    /// Keys that each sequence has already, or −1 for a sequence that is none; empty where slots are listed.
    pub lengths: Arc<[i32]>,
    /// The slot of each new row, or −1; empty where rows go behind others.
    pub slots: Arc<[i64]>,
    /// Which pages hold the keys of which sequence.
    pub table: Option<PageTable>,
    /// What keys and values of a cache of 8 bits are divided by, for each batch entry of the new rows and key head.
    pub factors: Option<Factors>,
}

impl AppendValues {
    /// Checks that there are as many numbers as the problem asks for.
    pub fn check(&self, problem: &AppendProblem) -> Result<(), ProblemError> {
        let (spec, dims) = (&problem.spec, problem.spec.k.dims());
        let (lengths, slots) = match spec.slots {
            Slots::Behind => (dims.batch, 0),
            Slots::Listed => (0, dims.seq),
        };
        if self.lengths.len() != lengths {
            let (operand, given) = (Operand::K, self.lengths.len());
            return Err(ProblemError::LengthCount { operand, given, batch: lengths });
        }
        if self.slots.len() != slots {
            return Err(ProblemError::SlotCount { given: self.slots.len(), rows: slots });
        }
        let given = self.table.as_ref().map(PageTable::columns);
        let asked = spec.pages.map(|pages| pages.columns);
        if given != asked {
            return Err(ProblemError::OtherTable { given, asked });
        }
        self.table.as_ref().map_or(Ok(()), |table| table.check(dims.batch))?;
        let given = self.factors.as_ref().map(Factors::kind);
        if given != spec.scales {
            return Err(ProblemError::OtherFactors { given: given.is_some() });
        }
        let needed = spec.scales.map_or(0, |scales| scales.count(dims.batch, dims.heads));
        self.factors.as_ref().map_or(Ok(()), |factors| factors.check_counts([0, needed, needed]))
    }

    /// What new keys and values of a batch entry and head are divided by.
    pub fn divisors(&self, problem: &AppendProblem, batch: usize, head: usize) -> [f32; 2] {
        let heads = problem.spec.k.dims().heads;
        let [_, k, v] = self.factors.as_ref().map_or([1.0; 3], |factors| factors.at(heads, batch, head));
        [k, v]
    }

    /// Batch entry (or page) and row of the cache that new row `row` of batch entry `batch` goes to, if it has a place.
    pub fn place(&self, problem: &AppendProblem, batch: usize, row: usize) -> Option<(usize, usize)> {
        let cache = problem.spec.cache_k.dims();
        let (pages, size) = (cache.batch, cache.seq);
        if problem.spec.slots == Slots::Listed {
            let slot = usize::try_from(self.slots[row]).ok()?;
            return (slot < pages * size).then(|| (slot / size, slot % size));
        }
        let position = self.position(batch)? + row;
        if position >= problem.capacity() {
            return None;
        }
        let Some(table) = &self.table else { return Some((batch, position)) };
        let page = usize::try_from(table.row(batch)[position / size]).ok()?;
        (page < pages).then_some((page, position % size))
    }

    /// Position of the first new row of a sequence, where it is one.
    pub fn position(&self, batch: usize) -> Option<usize> {
        usize::try_from(self.lengths[batch]).ok()
    }
}

/// A problem with its numbers and the host memory it works on.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches.
#[derive(Debug)]
pub struct AppendCall<'a> {
    problem: &'a AppendProblem,
    values: &'a AppendValues,
    inputs: AppendInputs<'a>,
    outputs: AppendOutputs<'a>,
}

/// What is read.
#[derive(Clone, Copy, Debug)]
pub struct AppendInputs<'a> {
    /// New keys.
    pub k: Data<'a>,
    /// New values.
    pub v: Data<'a>,
    /// Cosines and sines, positions × half of the turned features, where the problem turns.
    pub rotary: Option<[Data<'a>; 2]>,
    /// Queries to turn, where the problem has some.
    pub q: Option<Data<'a>>,
}

/// What is written.
#[derive(Debug)]
pub struct AppendOutputs<'a> {
    /// The cache of keys.
    pub cache_k: DataMut<'a>,
    /// The cache of values.
    pub cache_v: DataMut<'a>,
    /// The rotated queries.
    pub q: Option<DataMut<'a>>,
}

impl<'a> AppendCall<'a> {
    /// Binds a problem to its numbers and to memory.
    pub fn bind(
        problem: &'a AppendProblem,
        values: &'a AppendValues,
        inputs: AppendInputs<'a>,
        outputs: AppendOutputs<'a>,
    ) -> Result<Self, ProblemError> {
        values.check(problem)?;
        let spec = &problem.spec;
        let check = |operand, data: Data<'_>, needed: usize| {
            let cached = matches!(operand, Operand::CacheK | Operand::CacheV);
            let (got, expected) = (data.dtype(), if cached { problem.cache_dtype() } else { spec.dtype });
            if got != expected {
                return Err(ProblemError::OtherDType { operand, got, expected });
            }
            if data.len() < needed {
                return Err(ProblemError::BufferTooSmall { operand, needed, len: data.len() });
            }
            Ok(())
        };
        check(Operand::K, inputs.k, spec.k.span())?;
        check(Operand::V, inputs.v, spec.v.span())?;
        check(Operand::CacheK, outputs.cache_k.as_data(), spec.cache_k.span())?;
        check(Operand::CacheV, outputs.cache_v.as_data(), spec.cache_v.span())?;
        let tables = spec.rotary.map(|rotary| rotary.positions * (rotary.dim / 2));
        match (inputs.rotary, tables) {
            (Some(given), Some(needed)) => given
                .map(|data| check(Operand::Rotary, data, needed))
                .into_iter()
                .collect::<Result<(), _>>()?,
            (None, None) => {}
            (given, _) => return Err(ProblemError::OtherRotary { given: given.is_some() }),
        }
        match (inputs.q, &outputs.q, spec.q) {
            (Some(q), Some(to), Some([of_q, of_out])) => {
                check(Operand::Q, q, of_q.span())?;
                check(Operand::Out, to.as_data(), of_out.span())?;
            }
            (None, None, None) => {}
            (given, ..) => return Err(ProblemError::OtherQueries { given: given.is_some() }),
        }
        Ok(Self { problem, values, inputs, outputs })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a AppendProblem {
        self.problem
    }

    /// Its lengths, slots and table.
    pub const fn values(&self) -> &'a AppendValues {
        self.values
    }

    /// What is read.
    pub const fn inputs(&self) -> AppendInputs<'a> {
        self.inputs
    }

    /// What is written.
    pub fn outputs(&mut self) -> AppendOutputs<'_> {
        let AppendOutputs { cache_k, cache_v, q } = &mut self.outputs;
        AppendOutputs {
            cache_k: cache_k.reborrow(),
            cache_v: cache_v.reborrow(),
            q: q.as_mut().map(DataMut::reborrow),
        }
    }
}
