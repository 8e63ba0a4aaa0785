//! The named and adversarial cases, as data: what every backend must compute correctly.
//!
//! A [`Case`] says everything about a call except element type and seed. [`all`] is the whole table; callers pick
//! from it by [`Tag`] and [`Cost`]. [`crate::suite`] runs cases, [`crate::random`] makes more of them.

mod bias;
mod dropout;
mod table;

use std::fmt;

use flashcore_core::{
    DType, Dims, Dropout, Instance, Lengths, Mask, PageTable, Problem, ProblemError, Spec, Values,
};

use crate::{
    inputs::{Inputs, Place, Placement},
    pages::offsets,
    rng::Rng,
};

pub use bias::Biases;
pub use table::all;

/// What a case is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Tag {
    /// The shapes and sequence lengths of the project's own bars.
    Named,
    /// NaN and Inf beyond used lengths.
    UsedLengths,
    /// Rows that see no key.
    EmptyRows,
    /// Zero-length sequences, batch 0.
    ZeroLength,
    /// Scores and values at the ends of their ranges.
    Extremes,
    /// Kinds of data.
    Kinds,
    /// Element offsets past 2^31.
    BigOffsets,
    /// More heads in all than a grid dimension holds.
    ManyHeads,
    /// Padded, unaligned, interleaved and expanded layouts.
    Layouts,
    /// Masks at their edges.
    Masks,
    /// Query heads that share key heads.
    Gqa,
    /// Packed sequences.
    Ragged,
    /// Keys in pages.
    Pages,
    /// Head dimensions.
    HeadDims,
    /// Sequence lengths around tile edges.
    Lengths,
    /// One query over many keys.
    Decode,
    /// Softcap.
    Softcap,
    /// Attention sinks.
    Sinks,
    /// What is added to scores.
    Biases,
    /// Weights dropped at random.
    Dropout,
    /// Drawn at random.
    Random,
}

/// How much work a case is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Cost {
    /// Fit for a simulator.
    Tiny,
    /// Milliseconds.
    Small,
    /// A noticeable part of a second.
    Large,
    /// Gigabytes of address space.
    Huge,
}

/// The sinks of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sinks {
    /// None.
    None,
    /// N(0, 1).
    Normal,
    /// Logits of 20: they take nearly everything.
    Strong,
    /// −∞: they take nothing.
    Nothing,
}

/// One call of attention, but for element type and seed.
#[derive(Clone, PartialEq, Debug)]
pub struct Case {
    /// Unique in the table.
    pub name: String,
    /// What it is about.
    pub tag: Tag,
    /// Extents of Q.
    pub q: Dims,
    /// Extents of K; of keys in pages, a page for each batch entry.
    pub k: Dims,
    /// Features of V.
    pub dim_v: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on the scores.
    pub scale: Option<f32>,
    /// Limit of the scores.
    pub softcap: Option<f32>,
    /// Sinks.
    pub sinks: Sinks,
    /// What is added to scores.
    pub bias: Biases,
    /// With which probability weights are dropped.
    pub dropout: Option<f32>,
    /// Used or packed lengths.
    pub lengths: Lengths,
    /// Which pages hold the keys, where they lie in pages.
    pub table: Option<PageTable>,
    /// Whether bits must not depend on the batch.
    pub batch_invariant: bool,
    /// What the tensors hold.
    pub inputs: Inputs,
    /// How they lie.
    pub placement: Placement,
    /// Largest error allowed in f16, where the project has set one.
    pub f16_bar: Option<f64>,
    /// Element types it makes sense for.
    pub dtypes: &'static [DType],
}

impl Case {
    /// Plain attention: `[batch, heads_q, heads_kv, seq_q, seq_kv]` and a head dimension.
    pub fn new(tag: Tag, name: impl Into<String>, shape: [usize; 5], dim: usize) -> Self {
        let [batch, heads_q, heads_kv, seq_q, seq_kv] = shape;
        Self {
            name: name.into(),
            tag,
            q: Dims::new(batch, heads_q, seq_q, dim),
            k: Dims::new(batch, heads_kv, seq_kv, dim),
            dim_v: dim,
            mask: Mask::NONE,
            scale: None,
            softcap: None,
            sinks: Sinks::None,
            bias: Biases::None,
            dropout: None,
            lengths: Lengths::Uniform,
            table: None,
            batch_invariant: false,
            inputs: Inputs::Normal,
            placement: Placement::Dense,
            f16_bar: None,
            dtypes: &DType::COMMON,
        }
    }

    /// Sequences of `(queries, keys)` packed one after another.
    pub fn ragged(
        tag: Tag,
        name: impl Into<String>,
        pairs: &[(u32, u32)],
        heads: [usize; 2],
        dim: usize,
    ) -> Self {
        let (q, kv): (Vec<u32>, Vec<u32>) = pairs.iter().copied().unzip();
        let (q, kv) = (offsets(&q), offsets(&kv));
        let total = |offsets: &[u32]| offsets.last().map_or(0, |&end| end as usize);
        let shape = [1, heads[0], heads[1], total(&q), total(&kv)];
        Self { lengths: Lengths::ragged(q, kv), ..Self::new(tag, name, shape, dim) }
    }

    /// Extents of V.
    pub const fn v(&self) -> Dims {
        Dims { dim: self.dim_v, ..self.k }
    }

    /// Extents of the output.
    pub const fn out(&self) -> Dims {
        Dims { dim: self.dim_v, ..self.q }
    }

    /// Where Q, K, V and the output lie.
    pub fn places(&self) -> Result<[Place; 4], ProblemError> {
        self.placement.places([self.q, self.k, self.v(), self.out()])
    }

    /// The lengths, table, sinks, biases and seed of the case; the seed decides about the numbers.
    pub fn values(&self, seed: u64) -> Values {
        let sinks = self.sinks.logits(self.q.heads, seed).map(Into::into);
        let bias = self.bias.numbers(self, seed).map(Into::into);
        // Not the seed that tensors are drawn from, and one whose upper half counts.
        let seed = self.dropout.map(|_| seed ^ 0xD509_0000_0D50);
        Values { lengths: self.lengths.clone(), sinks, bias, seed, table: self.table.clone(), factors: None }
    }

    /// The case as a problem.
    pub fn problem(&self, dtype: DType) -> Result<Problem, ProblemError> {
        let [q, k, v, out] = self.places()?.map(|(layout, _)| layout);
        let spec = Spec {
            out: Some(out),
            mask: self.mask,
            scale: self.scale,
            softcap: self.softcap,
            bias: self.bias.kind(self)?,
            dropout: self.dropout.map(Dropout::new),
            batch_invariant: self.batch_invariant,
            ..Spec::new(dtype, q, k, v)
        };
        spec.with(&self.values(0)).parse()
    }

    /// How much work it is; a case that is no problem costs nothing.
    pub fn cost(&self) -> Cost {
        let (Ok(problem), values) = (self.problem(DType::F32), self.values(0)) else { return Cost::Tiny };
        let Ok(problem) = Instance::new(&problem, &values) else { return Cost::Tiny };
        let layouts = [problem.q(), problem.k(), problem.v(), problem.out()];
        let span = layouts.into_iter().map(|layout| layout.span() as f64).sum::<f64>();
        let work = problem.flops() / 2.0 + 4.0 * span;
        match work {
            _ if span > 1e9 => Cost::Huge,
            _ if work <= 4e6 => Cost::Tiny,
            _ if work <= 1e8 => Cost::Small,
            _ => Cost::Large,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (q {}, k {}, {})", self.name, self.q, self.k, self.mask)
    }
}

impl Sinks {
    /// The logits of `heads` query heads; `None` where there are no sinks.
    pub fn logits(self, heads: usize, seed: u64) -> Option<Vec<f32>> {
        let mut rng = Rng::new(seed ^ 0x51_4b);
        let logits = |logit: &mut dyn FnMut() -> f32| Some((0..heads).map(|_| logit()).collect());
        match self {
            Self::None => None,
            Self::Normal => logits(&mut || rng.normal()),
            Self::Strong => logits(&mut || 20.0),
            Self::Nothing => logits(&mut || f32::NEG_INFINITY),
        }
    }
}

/// The cases that cost at most `cost`.
pub fn up_to(cost: Cost) -> Vec<Case> {
    all().into_iter().filter(|case| case.cost() <= cost).collect()
}

/// The cases about `tag`.
pub fn tagged(tag: Tag) -> Vec<Case> {
    all().into_iter().filter(|case| case.tag == tag).collect()
}
