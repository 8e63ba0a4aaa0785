//! What the numbers of 8-bit tensors are multiplied by.
//!
//! Under queries of 16 bits only K and V have factors: those of a cache.

use std::sync::Arc;

use crate::{
    error::{Operand, ProblemError},
    problem::Problem,
};

/// How many factors Q, K and V have each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scales {
    /// One.
    PerTensor,
    /// One for each batch entry and key head, also of Q; dense, heads next to each other.
    PerHead,
    /// One for each batch entry and key head, so far apart along both: with a stride of 0 all share one.
    Strided([usize; 2]),
}

impl Scales {
    /// Factors of a tensor, where there are so many batch entries and key heads.
    pub const fn count(self, batch: usize, heads: usize) -> usize {
        match self {
            Self::PerTensor => 1,
            Self::PerHead => batch * heads,
            Self::Strided(_) if batch * heads == 0 => 0,
            Self::Strided([of_batch, of_head]) => {
                let last = (batch - 1).saturating_mul(of_batch);
                last.saturating_add((heads - 1).saturating_mul(of_head)).saturating_add(1)
            }
        }
    }

    /// Distances between the factors of neighbouring batch entries and of neighbouring heads.
    pub const fn strides(self, heads: usize) -> [usize; 2] {
        match self {
            Self::PerTensor => [0, 0],
            Self::PerHead => [heads, 1],
            Self::Strided(strides) => strides,
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

    /// What Q, K and V of a batch entry and key head are multiplied by.
    pub fn at(&self, heads: usize, batch: usize, head: usize) -> [f32; 3] {
        let [of_batch, of_head] = self.kind.strides(heads);
        let at = batch * of_batch + head * of_head;
        let [_, k, v] = &self.qkv;
        [self.qkv[0].get(at).copied().unwrap_or(1.0), k[at], v[at]]
    }

    /// Checks the factors against the problem that asks for them.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        let needed = self.kind.count(problem.scaled_entries(), problem.heads_kv());
        let of_q = if problem.kv_dtype() == problem.dtype() { needed } else { 0 };
        self.check_counts([of_q, needed, needed])
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
