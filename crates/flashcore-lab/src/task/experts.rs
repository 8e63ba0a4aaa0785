//! A mixture of experts to measure, as plain data: SwiGLU over dense weights, the routing given. [`super::Task`] is made of it.

use std::fmt;

use flashcore_core::{DType, ExpertLayout, Index, Layout, MoeProblem, MoeSpec, Routing};
use serde::{Deserialize, Serialize};

use super::TaskError;

/// A layer and its tokens as they stand in files and messages.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct ExpertSpec {
    /// Element type: `f16`, `bf16` or `f32`.
    pub dtype: String,
    pub tokens: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
}

impl ExpertSpec {
    pub(super) fn parse(&self) -> Result<MoeProblem, TaskError> {
        let dtype: DType = self.dtype.parse().map_err(TaskError::DType)?;
        let Self { tokens, hidden, intermediate, experts, top_k, .. } = *self;
        if top_k > experts {
            return Err(TaskError::TopK { top_k, experts });
        }
        let up = intermediate.checked_mul(2).ok_or(TaskError::NotPlain)?;
        let gate_up = ExpertLayout::dense([experts, up, hidden])?;
        let down = ExpertLayout::dense([experts, hidden, intermediate])?;
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        Ok(MoeSpec::new(dtype, Layout::matrix(tokens, hidden)?, gate_up, down, routing).parse()?)
    }

    /// Experts that some token goes to, on average over routings of chance.
    pub(super) fn touched(&self) -> f64 {
        let missed = 1.0 - self.top_k as f64 / self.experts as f64;
        self.experts as f64 * (1.0 - missed.powf(self.tokens as f64))
    }
}

impl fmt::Display for ExpertSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, tokens, hidden, intermediate, experts, top_k } = self;
        write!(f, "moe {tokens}x{hidden}x{intermediate} {dtype} experts{experts} top{top_k}")
    }
}
