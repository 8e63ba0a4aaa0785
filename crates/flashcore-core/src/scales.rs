//! What the numbers of 8-bit tensors are multiplied by.

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
}

impl Scales {
    /// Factors of a tensor, where there are so many batch entries and key heads.
    pub const fn count(self, batch: usize, heads: usize) -> usize {
        match self {
            Self::PerTensor => 1,
            Self::PerHead => batch * heads,
        }
    }

    /// Distances between the factors of neighbouring batch entries and of neighbouring heads.
    pub const fn strides(self, heads: usize) -> [usize; 2] {
        match self {
            Self::PerTensor => [0, 0],
            Self::PerHead => [heads, 1],
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

    /// How many there are.
    pub const fn kind(&self) -> Scales {
        self.kind
    }

    /// The factors of Q, K and V.
    pub const fn all(&self) -> &[Arc<[f32]>; 3] {
        &self.qkv
    }

    /// What Q, K and V of a batch entry and key head are multiplied by.
    pub fn at(&self, heads: usize, batch: usize, head: usize) -> [f32; 3] {
        let [of_batch, of_head] = self.kind.strides(heads);
        [0, 1, 2].map(|n: usize| self.qkv[n][batch * of_batch + head * of_head])
    }

    /// Checks the factors against the problem that asks for them.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        let needed = self.kind.count(problem.batch(), problem.heads_kv());
        for (factors, operand) in self.qkv.iter().zip([Operand::Q, Operand::K, Operand::V]) {
            if factors.len() != needed {
                return Err(ProblemError::FactorCount { operand, given: factors.len(), needed });
            }
            if let Some(&value) = factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
                return Err(ProblemError::Factor { operand, value });
            }
        }
        Ok(())
    }
}
