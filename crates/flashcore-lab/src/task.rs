//! What is measured: one attention problem over dense tensors, by a name, as plain data that files and other
//! processes can hold. [`crate::suites`] and the command line make tasks; arms and the record take them.

use std::fmt;

use flashcore_core::{Align, DType, Dims, Layout, Mask, Problem, ProblemError, Spec};
use serde::{Deserialize, Serialize};

/// A problem as it stands in files and messages.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct TaskSpec {
    /// Element type: `f16`, `bf16` or `f32`.
    pub dtype: String,
    /// Batch, heads, sequence, features of Q.
    pub q: [usize; 4],
    /// Batch, heads, sequence, features of K.
    pub k: [usize; 4],
    /// Features of V.
    pub dim_v: usize,
    /// Keys visible before the diagonal; all where missing.
    pub left: Option<u32>,
    /// Keys visible after the diagonal; all where missing.
    pub right: Option<u32>,
    /// Whether the diagonal starts at the first query and key instead of ending at the last.
    pub top_left: bool,
    /// Factor on the scores.
    pub scale: f32,
    /// Limit of the scores.
    pub softcap: Option<f32>,
}

/// Why a [`TaskSpec`] is no task.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// The element type is unknown.
    #[error("{0}")]
    DType(String),
    /// The rest is inconsistent.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Tasks have dense tensors and no sinks or lengths.
    #[error("only dense tensors without sinks and lengths can be measured")]
    NotPlain,
}

/// A problem to measure.
#[derive(Clone, PartialEq, Debug)]
pub struct Task {
    spec: TaskSpec,
    problem: Problem,
}

impl Task {
    /// The task of a problem over dense tensors.
    pub fn new(problem: Problem) -> Result<Self, TaskError> {
        let spec = TaskSpec {
            dtype: problem.dtype().name().to_owned(),
            q: problem.q().dims().array(),
            k: problem.k().dims().array(),
            dim_v: problem.dim_v(),
            left: problem.mask().left(),
            right: problem.mask().right(),
            top_left: problem.mask().align() == Align::TopLeft,
            scale: problem.scale(),
            softcap: problem.softcap(),
        };
        let task = Self::parse(spec)?;
        if task.problem == problem { Ok(task) } else { Err(TaskError::NotPlain) }
    }

    /// Checks a description from elsewhere.
    pub fn parse(spec: TaskSpec) -> Result<Self, TaskError> {
        let dtype: DType = spec.dtype.parse().map_err(TaskError::DType)?;
        let dims = |[batch, heads, seq, dim]: [usize; 4]| Dims::new(batch, heads, seq, dim);
        let (q, k) = (dims(spec.q), dims(spec.k));
        let v = Dims { dim: spec.dim_v, ..k };
        let mask = Mask::window(spec.left, spec.right);
        let plain = Spec::new(dtype, Layout::bhsd(q)?, Layout::bhsd(k)?, Layout::bhsd(v)?);
        let problem = Spec {
            mask: if spec.top_left { mask.top_left() } else { mask },
            scale: Some(spec.scale),
            softcap: spec.softcap,
            ..plain
        };
        Ok(Self { problem: problem.parse()?, spec })
    }

    /// Self-attention over `batch × heads × seq × dim`.
    pub fn square(dtype: DType, [batch, heads, seq, dim]: [usize; 4], mask: Mask) -> Result<Self, TaskError> {
        let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim))?;
        Self::new(Spec { mask, ..Spec::new(dtype, layout, layout, layout) }.parse()?)
    }

    /// The task as plain data.
    pub fn spec(&self) -> &TaskSpec {
        &self.spec
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Bytes that must move at least: every input read once, the output written once.
    pub fn bytes(&self) -> f64 {
        let p = &self.problem;
        let elements: usize = [p.q(), p.k(), p.v(), p.out()].iter().map(|layout| layout.span()).sum();
        elements as f64 * p.dtype().bytes() as f64
    }

    /// Operations of the two matrix products over visible pairs.
    pub fn flops(&self) -> f64 {
        self.problem.flops()
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.spec.fmt(f)
    }
}

impl fmt::Display for TaskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [batch, heads, seq, dim] = self.q;
        write!(f, "{batch}x{heads}x{seq}x{dim} {}", self.dtype)?;
        let others = [(self.k[1], heads, "kv"), (self.k[2], seq, "keys"), (self.dim_v, dim, "dv")];
        for (other, _, name) in others.into_iter().filter(|(other, usual, _)| other != usual) {
            write!(f, " {name}{other}")?;
        }
        let mask = Mask::window(self.left, self.right);
        let mask = if self.top_left { mask.top_left() } else { mask };
        if mask != Mask::NONE {
            write!(f, " {mask}")?;
        }
        self.softcap.map_or(Ok(()), |cap| write!(f, " cap{cap}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_survive_the_way_through_json() {
        let task = Task::square(DType::BF16, [2, 4, 100, 64], Mask::window(7, 0).top_left()).unwrap();
        let text = serde_json::to_string(task.spec()).unwrap();
        assert_eq!(Task::parse(serde_json::from_str(&text).unwrap()).unwrap(), task);
        assert!(task.to_string().starts_with("2x4x100x64 bf16"), "{task}");
    }

    #[test]
    fn impossible_tasks_are_refused() {
        let good = Task::square(DType::F16, [1, 2, 3, 4], Mask::NONE).unwrap().spec().clone();
        let bad = [
            TaskSpec { dtype: "f13".to_owned(), ..good.clone() },
            TaskSpec { q: [1, 0, 3, 4], ..good.clone() },
            TaskSpec { k: [1, 2, 3, 5], ..good.clone() },
            TaskSpec { q: [usize::MAX; 4], ..good.clone() },
            TaskSpec { scale: f32::NAN, ..good.clone() },
            TaskSpec { softcap: Some(-1.0), ..good },
        ];
        for spec in bad {
            assert!(Task::parse(spec.clone()).is_err(), "{spec:?}");
        }
    }
}
