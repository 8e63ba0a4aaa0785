//! Scale factors of 8-bit tensors.
//!
//! Under queries of 16 bits only K and V have factors: those of a cache.

use std::sync::Arc;

use crate::{
    error::{Operand, ProblemError},
    problem::Problem,
    quantise::ScaleError,
};

/// How many factors Q, K and V have each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scales {
    /// One.
    PerTensor,
    /// One for each batch entry and key head, also of Q; dense, heads next to each other.
    PerHead,
    /// Of Q one for each batch entry, query head and block of rows, of K one for each batch entry, key head and block of
    /// rows, of V one for each batch entry, key head and feature; dense, blocks and features next to each other.
    PerBlock {
        /// Rows of a block of Q.
        q: usize,
        /// Rows of a block of K.
        k: usize,
    },
    /// One for each batch entry and key head, so far apart along both: with a stride of 0 all share one.
    Strided([usize; 2]),
}

impl Scales {
    /// Shares of a tensor that have factors of their own, where it has so many batch entries and heads: a share has one
    /// factor, or one for each block or feature.
    pub const fn count(self, batch: usize, heads: usize) -> usize {
        match self {
            Self::PerTensor => 1,
            Self::PerHead | Self::PerBlock { .. } => batch * heads,
            Self::Strided(_) if batch * heads == 0 => 0,
            Self::Strided([of_batch, of_head]) => {
                let last = (batch - 1).saturating_mul(of_batch);
                last.saturating_add((heads - 1).saturating_mul(of_head)).saturating_add(1)
            }
        }
    }

    /// Distances between neighbouring batch entries and between neighbouring heads, in shares.
    pub const fn strides(self, heads: usize) -> [usize; 2] {
        match self {
            Self::PerTensor => [0, 0],
            Self::PerHead | Self::PerBlock { .. } => [heads, 1],
            Self::Strided(strides) => strides,
        }
    }

    /// Factors of Q, K and V; none of queries over a cache of fewer bits.
    pub fn counts(self, problem: &Problem) -> [usize; 3] {
        if problem.kv_dtype() != problem.dtype() {
            let count = self.count(problem.scaled_entries(), problem.heads_kv());
            return [0, count, count];
        }
        let heads = match self {
            Self::PerBlock { .. } => [problem.heads_q(), problem.heads_kv(), problem.heads_kv()],
            _ => [problem.heads_kv(); 3],
        };
        let shares = heads.map(|heads| self.count(problem.batch(), heads));
        let each = self.of_share(problem);
        [0, 1, 2].map(|n: usize| shares[n] * each[n])
    }

    /// Factors of a share of Q, K and V.
    pub fn of_share(self, problem: &Problem) -> [usize; 3] {
        match self {
            Self::PerBlock { q, k } => {
                [problem.seq_q().div_ceil(q), problem.seq_kv().div_ceil(k), problem.dim_v()]
            }
            _ => [1; 3],
        }
    }

    /// Blocks have rows, and rows of their own: those in pages have not.
    pub(crate) const fn check(self, paged: bool) -> Result<(), ScaleError> {
        match self {
            Self::PerBlock { q: 0, .. } | Self::PerBlock { k: 0, .. } => Err(ScaleError::EmptyBlocks),
            Self::PerBlock { .. } if paged => Err(ScaleError::PagedBlocks),
            _ => Ok(()),
        }
    }
}

/// The factors of one call, on the host.
#[derive(Clone, PartialEq, Debug)]
pub struct Factors {
    kind: Scales,
    qkv: [Arc<[f32]>; 3],
}

impl Factors {
    /// One factor for each tensor: Q, K and V.
    pub fn per_tensor(qkv: [f32; 3]) -> Self {
        Self { kind: Scales::PerTensor, qkv: qkv.map(|factor| Arc::from([factor])) }
    }

    /// Factors for each batch entry and key head.
    pub fn per_head(qkv: [Arc<[f32]>; 3]) -> Self {
        Self { kind: Scales::PerHead, qkv }
    }

    /// Factors for each block of so many rows of Q and K, and for each feature of V; see [`Scales::PerBlock`].
    pub fn per_block([q, k]: [usize; 2], qkv: [Arc<[f32]>; 3]) -> Self {
        Self { kind: Scales::PerBlock { q, k }, qkv }
    }

    /// Factors of K and V alone, under queries that have none: as many as `kind` reaches.
    pub fn of_cache(kind: Scales, [k, v]: [Arc<[f32]>; 2]) -> Self {
        Self { kind, qkv: [Arc::from([]), k, v] }
    }

    /// How many there are.
    pub const fn kind(&self) -> Scales {
        self.kind
    }

    /// The factors of Q, K and V; none of Q where K and V are a cache under wider queries.
    pub const fn all(&self) -> &[Arc<[f32]>; 3] {
        &self.qkv
    }

    /// What a tensor's numbers are multiplied by, for each row of Q or K or feature of V at `index` of a batch entry and
    /// one of its own heads.
    pub(crate) fn fine(
        &self,
        problem: &Problem,
        operand: Operand,
        [batch, head]: [usize; 2],
        index: usize,
    ) -> f32 {
        let n = match operand {
            Operand::Q => 0,
            Operand::K => 1,
            _ => 2,
        };
        let Scales::PerBlock { q, k } = self.kind else {
            let head = if n == 0 { head / problem.group() } else { head };
            return self.at(problem.heads_kv(), batch, head)[n];
        };
        let heads = if n == 0 { problem.heads_q() } else { problem.heads_kv() };
        let share = batch * heads + head;
        self.qkv[n][share * self.kind.of_share(problem)[n] + index / [q, k, 1][n]]
    }

    /// What Q, K and V of a batch entry and key head are multiplied by, where blocks have no factors of their own.
    pub fn at(&self, heads: usize, batch: usize, head: usize) -> [f32; 3] {
        let [of_batch, of_head] = self.kind.strides(heads);
        let at = batch * of_batch + head * of_head;
        let [q, k, v] = &self.qkv;
        [q.get(at).copied().unwrap_or(1.0), k[at], v[at]]
    }

    /// Checks the factors against the problem that asks for them.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        self.check_counts(self.kind.counts(problem))
    }

    /// Checks that there are as many as needed of Q, K and V, and that they are numbers.
    pub(crate) fn check_counts(&self, needed: [usize; 3]) -> Result<(), ProblemError> {
        let operands = [Operand::Q, Operand::K, Operand::V].into_iter().zip(needed);
        for (factors, (operand, needed)) in self.qkv.iter().zip(operands) {
            let apart = matches!(self.kind, Scales::Strided(_)) && needed > 0;
            if factors.len() != needed && !(apart && factors.len() > needed) {
                return Err(ProblemError::FactorCount { operand, given: factors.len(), needed });
            }
            if let Some(&value) = factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
                return Err(ProblemError::Factor { operand, value });
            }
        }
        Ok(())
    }
}
