//! What is measured: one attention problem over dense tensors, by a name, as plain data that files and other
//! processes can hold. [`crate::suites`] and the command line make tasks; competitors and the record take them.

use std::{fmt, ops::Not, sync::Arc};

use flashcore_core::{Align, DType, Dims, Layout, Mask, Problem, ProblemError, Spec, Values};
use flashcore_testkit::{Kind, cases::Sinks};
use serde::{Deserialize, Serialize};

/// Most sinks that are drawn: what files say must not decide how much memory is taken.
const MOST_SINKS: usize = 1 << 16;

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
}

/// Why a [`TaskSpec`] is not a task.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    #[error("{0}")]
    DType(String),
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Tasks have dense tensors, no lengths, and only sinks of [`normal_sinks`].
    #[error("only dense tensors without lengths, and with sinks that are drawn, can be measured")]
    NotPlain,
}

/// A problem to measure.
#[derive(Clone, PartialEq, Debug)]
pub struct Task {
    spec: TaskSpec,
    problem: Problem,
}

impl Task {
    /// The task of a problem over dense tensors, with normal inputs.
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
            sinks: problem.sinks().is_some(),
            kind: Kind::Normal,
        };
        let task = Self::parse(spec)?;
        if task.problem == problem { Ok(task) } else { Err(TaskError::NotPlain) }
    }

    /// Checks a description from elsewhere.
    pub fn parse(spec: TaskSpec) -> Result<Self, TaskError> {
        let dtype: DType = spec.dtype.parse().map_err(TaskError::DType)?;
        if spec.sinks && spec.q[1] > MOST_SINKS {
            return Err(TaskError::NotPlain);
        }
        let dims = |[batch, heads, seq, dim]: [usize; 4]| Dims::new(batch, heads, seq, dim);
        let (q, k) = (dims(spec.q), dims(spec.k));
        let v = Dims { dim: spec.dim_v, ..k };
        let mask = Mask::window(spec.left, spec.right);
        let plain = Spec::new(dtype, Layout::bhsd(q)?, Layout::bhsd(k)?, Layout::bhsd(v)?);
        let problem = Spec {
            mask: if spec.top_left { mask.top_left() } else { mask },
            scale: Some(spec.scale),
            softcap: spec.softcap,
            sinks: spec.sinks.then_some(DType::F32),
            ..plain
        };
        Ok(Self { problem: problem.parse()?, spec })
    }

    /// Self-attention over `batch × heads × seq × dim`.
    pub fn square(dtype: DType, [batch, heads, seq, dim]: [usize; 4], mask: Mask) -> Result<Self, TaskError> {
        let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim))?;
        Self::new(Spec { mask, ..Spec::new(dtype, layout, layout, layout) }.parse()?)
    }

    /// The same over inputs of `kind`.
    #[must_use]
    pub fn of_kind(mut self, kind: Kind) -> Self {
        self.spec.kind = kind;
        self
    }

    /// Its sinks, if it has any, drawn from `seed`.
    pub fn values(&self, seed: u64) -> Values {
        let sinks = self.spec.sinks.then(|| normal_sinks(self.problem.heads_q(), seed)).flatten();
        Values { sinks, ..Values::default() }
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

/// A standard normal sink for each of `heads` query heads, but never so many that the memory for them could matter;
/// problems with more heads are then refused because sinks are missing.
pub fn normal_sinks(heads: usize, seed: u64) -> Option<Arc<[f32]>> {
    Sinks::Normal.logits(heads.min(MOST_SINKS), seed).map(Into::into)
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
        self.softcap.map_or(Ok(()), |cap| write!(f, " cap{cap}"))?;
        if self.sinks {
            f.write_str(" sinks")?;
        }
        if self.kind.is_normal() { Ok(()) } else { write!(f, " {}", self.kind.name()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_survive_the_way_through_json() {
        let plain = Task::square(DType::BF16, [2, 4, 100, 64], Mask::window(7, 0).top_left()).unwrap();
        let sinks = Task::parse(TaskSpec { sinks: true, ..plain.spec().clone() }).unwrap();
        let sharp = sinks.clone().of_kind(Kind::Sharp);
        for (task, end) in [(&plain, "top-left"), (&sinks, " sinks"), (&sharp, " sinks sharp")] {
            let text = serde_json::to_string(task.spec()).unwrap();
            assert_eq!(Task::parse(serde_json::from_str(&text).unwrap()).unwrap(), *task);
            let name = task.to_string();
            assert!(name.starts_with("2x4x100x64 bf16") && name.ends_with(end), "{name}");
        }
    }

    #[test]
    fn what_files_do_not_say_is_usual() {
        let text = r#"{"dtype":"f16","q":[1,2,3,8],"k":[1,2,3,8],"dim_v":8,"left":null,"right":0,"top_left":false,
            "scale":0.5,"softcap":null}"#;
        let spec: TaskSpec = serde_json::from_str(text).unwrap();
        assert!(!spec.sinks && spec.kind.is_normal());
        let again = serde_json::to_string(&spec).unwrap();
        assert!(
            !again.contains("sinks") && !again.contains("kind"),
            "what old programs read stays so: {again}"
        );
    }

    #[test]
    fn the_seed_decides_about_sinks() {
        let plain = Task::square(DType::F16, [1, 4, 3, 8], Mask::NONE).unwrap();
        let task = Task::parse(TaskSpec { sinks: true, ..plain.spec().clone() }).unwrap();
        assert_eq!(Task::new(task.problem().clone()).unwrap(), task);
        assert_ne!(task.values(0), task.values(1));
        assert_eq!(task.values(1).sinks.map(|sinks| sinks.len()), Some(4));
        assert_eq!(plain.values(1), Values::default());
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
            TaskSpec { softcap: Some(-1.0), ..good.clone() },
            TaskSpec { q: [1, 1 << 30, 3, 4], k: [1, 1 << 30, 3, 4], sinks: true, ..good },
        ];
        for spec in bad {
            assert!(Task::parse(spec.clone()).is_err(), "{spec:?}");
        }
    }
}
