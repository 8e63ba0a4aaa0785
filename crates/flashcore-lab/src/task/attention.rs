//! Attention to measure, as plain data: dense tensors, or a cache as in inference engines, with unequal lengths and in
//! pages. [`super::Task`] contains it.

use std::{fmt, ops::Not};

use flashcore_core::{Align, DType, Dims, Layout, Lengths, Mask, PageTable, Pages, Problem, Sequences, Spec};
use flashcore_testkit::{Kind, Rng};
use serde::{Deserialize, Serialize};

use super::{MOST_SINKS, TaskError};

/// Most sequences of a task whose lengths differ, and most pages: what files say must not decide how much memory is taken.
const MOST_SEQUENCES: usize = 1 << 16;
const MOST_PAGES: usize = 1 << 24;
/// One sequence in so many is new in a mixed batch.
const ONE_IN: usize = 10;
/// What lengths are drawn from: they are part of the task, so that its bytes are.
const LENGTHS_SEED: u64 = 19;

/// How the sequences of a batch differ.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Traffic {
    /// Any number of keys up to that of the shape.
    Random,
    /// Likewise, with one query each, but for one sequence in ten, which has as many as the shape says; packed.
    Mixed,
}

impl Traffic {
    /// The name used in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Mixed => "mixed",
        }
    }
}

/// A problem as it stands in files and messages.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Element type: `f16`, `bf16` or `f32`.
    pub dtype: String,
    /// Batch, heads, sequence, features of Q.
    pub q: [usize; 4],
    /// Batch, heads, sequence, features of K.
    pub k: [usize; 4],
    pub dim_v: usize,
    /// Keys visible before the diagonal; all where missing.
    pub left: Option<u32>,
    /// Keys visible after the diagonal; all where missing.
    pub right: Option<u32>,
    /// Whether the diagonal starts at the first query and key instead of ending at the last.
    pub top_left: bool,
    pub scale: f32,
    pub softcap: Option<f32>,
    #[serde(default, skip_serializing_if = "Not::not")]
    pub sinks: bool,
    /// What the inputs are like.
    #[serde(default, skip_serializing_if = "Kind::is_normal")]
    pub kind: Kind,
    /// Whether its gradients are computed, from an output that is there.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub backward: bool,
    /// Rows of a page, where keys and values lie in pages, which are in an order of chance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<usize>,
    /// How sequences differ; not at all where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
    /// Whether a row's bits may not depend on its batch.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub invariant: bool,
}

/// Queries and keys of a sequence.
pub type Extents = [u32; 2];

impl AttentionSpec {
    /// That of a problem over dense tensors, with normal inputs.
    pub fn of(problem: &Problem) -> Self {
        Self {
            dtype: problem.dtype().name().to_owned(),
            q: problem.q().dims().array(),
            k: problem.k().dims().array(),
            dim_v: problem.dim_v(),
            left: problem.mask().left(),
            right: problem.mask().right(),
            top_left: problem.mask().align() == Align::TopLeft,
            scale: problem.scale(),
            softcap: problem.softcap(),
            sinks: problem.sinks().is_some(),
            kind: Kind::Normal,
            backward: false,
            page: None,
            traffic: None,
            invariant: problem.batch_invariant(),
        }
    }

    /// The problem, and its sequences where they differ or lie in pages.
    pub(super) fn parse(&self) -> Result<(Problem, Option<Vec<Extents>>), TaskError> {
        let dtype: DType = self.dtype.parse().map_err(TaskError::DType)?;
        if self.sinks && self.q[1] > MOST_SINKS {
            return Err(TaskError::NotPlain);
        }
        let dims = |[batch, heads, seq, dim]: [usize; 4]| Dims::new(batch, heads, seq, dim);
        let (q, k) = (dims(self.q), dims(self.k));
        let v = Dims { dim: self.dim_v, ..k };
        let sequences = self.sequences()?;
        let plain = match (self.page, &sequences) {
            (Some(_), Some(sequences)) => self.paged(dtype, [q, k, v], sequences)?,
            _ => Spec::new(dtype, Layout::bhsd(q)?, Layout::bhsd(k)?, Layout::bhsd(v)?),
        };
        let lengths = sequences.as_deref().map_or(Sequences::Uniform, |all| self.lengths(all).kind());
        let problem = Spec {
            mask: self.mask(),
            scale: Some(self.scale),
            softcap: self.softcap,
            sinks: self.sinks.then_some(DType::F32),
            sequences: lengths,
            batch_invariant: self.invariant,
            ..plain
        };
        Ok((problem.parse()?, sequences))
    }

    /// Queries and output packed or with heads inside, as engines have them, over pages likewise.
    fn paged(&self, dtype: DType, [q, k, v]: [Dims; 3], sequences: &[Extents]) -> Result<Spec, TaskError> {
        let (rows, columns) = (self.page.unwrap_or(1), self.columns());
        let pages = Dims { batch: sequences.iter().map(|one| self.pages(one)).sum(), seq: rows, ..k };
        let new: usize = sequences.iter().map(|[queries, _]| *queries as usize).sum();
        let packed = self.traffic == Some(Traffic::Mixed);
        let q = Layout::bshd(if packed { Dims { batch: 1, seq: new, ..q } } else { q })?;
        let out = Layout::bshd(Dims { dim: v.dim, ..q.dims() })?;
        let [k, v] = [pages.dim, v.dim].map(|dim| Layout::bshd(Dims { dim, ..pages }));
        let table = Pages { longest_kv: Some(self.k[2]), ..Pages::new(columns) };
        Ok(Spec { out: Some(out), pages: Some(table), ..Spec::new(dtype, q, k?, v?) })
    }

    /// Page numbers of the longest sequence.
    fn columns(&self) -> usize {
        self.k[2].div_ceil(self.page.unwrap_or(1).max(1))
    }

    /// Pages that a sequence uses.
    fn pages(&self, [_, keys]: &Extents) -> usize {
        (*keys as usize).div_ceil(self.page.unwrap_or(1).max(1))
    }

    /// Queries and keys of each sequence, where they differ or lie in pages.
    fn sequences(&self) -> Result<Option<Vec<Extents>>, TaskError> {
        if self.page.is_none() && self.traffic.is_none() {
            return Ok(None);
        }
        let [batch, _, queries, _] = self.q;
        let pages = batch.checked_mul(self.columns()).filter(|&pages| pages <= MOST_PAGES);
        let few = [queries, self.k[2]].map(|extent| u32::try_from(extent).ok().filter(|&n| n > 0));
        let ([Some(queries), Some(keys)], Some(_), 1..=MOST_SEQUENCES) = (few, pages, batch) else {
            return Err(TaskError::NotPlain);
        };
        if self.backward
            || self.page == Some(0)
            || self.traffic == Some(Traffic::Mixed) && self.page.is_none()
        {
            return Err(TaskError::NotPlain);
        }
        let mut rng = Rng::new(LENGTHS_SEED);
        let mut one = |n: usize| match self.traffic {
            None => [queries, keys],
            Some(Traffic::Random) => [queries, rng.range(1..=keys as usize) as u32],
            Some(Traffic::Mixed) => {
                let own = if n % ONE_IN == ONE_IN / 2 { queries.min(keys) } else { 1 };
                [own, rng.range(own as usize..=keys as usize) as u32]
            }
        };
        Ok(Some((0..batch).map(&mut one).collect()))
    }

    /// The numbers that a call brings.
    pub(super) fn lengths(&self, sequences: &[Extents]) -> Lengths {
        let keys: Vec<u32> = sequences.iter().map(|[_, keys]| *keys).collect();
        if self.traffic != Some(Traffic::Mixed) {
            return Lengths::keys(keys);
        }
        let mut offsets = vec![0];
        offsets.extend(sequences.iter().scan(0, |sum, [queries, _]| {
            *sum += queries;
            Some(*sum)
        }));
        Lengths::packed_queries(offsets, keys)
    }

    /// Which pages hold which keys; 0 beyond the keys of a sequence.
    pub(super) fn table(&self, sequences: &[Extents], seed: u64) -> Option<PageTable> {
        self.page?;
        let all = sequences.iter().map(|one| self.pages(one)).sum();
        let (mut order, columns) = (Rng::new(seed).permutation(all).into_iter(), self.columns());
        let mut numbers = Vec::with_capacity(sequences.len() * columns);
        for (n, sequence) in sequences.iter().enumerate() {
            numbers.extend(order.by_ref().take(self.pages(sequence)).map(|page| page as i32));
            numbers.resize((n + 1) * columns, 0);
        }
        Some(PageTable::new(numbers, columns))
    }

    /// Which keys a query sees.
    pub fn mask(&self) -> Mask {
        let mask = Mask::window(self.left, self.right);
        if self.top_left { mask.top_left() } else { mask }
    }
}

impl fmt::Display for AttentionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [batch, heads, seq, dim] = self.q;
        write!(f, "{batch}x{heads}x{seq}x{dim} {}", self.dtype)?;
        let others = [(self.k[1], heads, "kv"), (self.k[2], seq, "keys"), (self.dim_v, dim, "dv")];
        for (other, _, name) in others.into_iter().filter(|(other, usual, _)| other != usual) {
            write!(f, " {name}{other}")?;
        }
        if self.mask() != Mask::NONE {
            write!(f, " {}", self.mask())?;
        }
        self.softcap.map_or(Ok(()), |cap| write!(f, " cap{cap}"))?;
        self.page.map_or(Ok(()), |rows| write!(f, " page{rows}"))?;
        self.traffic.map_or(Ok(()), |traffic| write!(f, " {}", traffic.name()))?;
        let words = [(self.sinks, " sinks"), (self.invariant, " invariant"), (self.backward, " backward")];
        words.into_iter().filter(|word| word.0).try_for_each(|word| f.write_str(word.1))?;
        if self.kind.is_normal() { Ok(()) } else { write!(f, " {}", self.kind.name()) }
    }
}
