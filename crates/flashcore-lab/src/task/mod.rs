//! What is measured: one named operation over tensors of known extents, as plain data for files and other processes.
//! [`crate::suites`] and the command line make tasks; competitors and the record take them.

mod attention;
mod experts;

use std::{fmt, sync::Arc};

use flashcore_core::{
    BackwardProblem, BackwardSpec, DType, Dims, Layout, Mask, MoeProblem, Problem, ProblemError, Spec, Values,
};
use flashcore_testkit::{Kind, cases::Sinks};
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_json::Value;

pub use attention::{AttentionSpec, Extents, Traffic};
pub use experts::ExpertSpec;

/// Most sinks that are drawn: what files say must not decide how much memory is taken.
const MOST_SINKS: usize = 1 << 16;
/// Random routings that a mixture of experts goes through in turn, so that weights do not come from a cache.
pub const ROUTINGS: usize = 8;
/// Bytes of keys and values after which nothing of them is left in a GPU's L2.
const BEYOND_CACHE: f64 = (320u64 << 20) as f64;
/// Most copies of keys and values that are read in turn.
const MOST_COPIES: usize = 32;

/// A task as it stands in files and messages.
#[derive(Clone, PartialEq, Serialize, Debug)]
#[serde(untagged)]
pub enum TaskSpec {
    Attention(AttentionSpec),
    Experts(ExpertSpec),
}

impl<'de> Deserialize<'de> for TaskSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // Told apart by a field, so that errors are about the one that is meant.
        let value = Value::deserialize(from)?;
        let read = match value.get("experts") {
            Some(_) => serde_json::from_value(value).map(Self::Experts),
            None => serde_json::from_value(value).map(Self::Attention),
        };
        read.map_err(D::Error::custom)
    }
}

impl TaskSpec {
    /// Element type.
    pub fn dtype(&self) -> &str {
        match self {
            Self::Attention(spec) => &spec.dtype,
            Self::Experts(spec) => &spec.dtype,
        }
    }

    /// What the inputs are like.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Attention(spec) => spec.kind,
            Self::Experts(_) => Kind::Normal,
        }
    }

    /// Itself over normal inputs.
    pub fn without_kind(&self) -> Self {
        match self {
            Self::Attention(spec) => Self::Attention(AttentionSpec { kind: Kind::Normal, ..spec.clone() }),
            Self::Experts(spec) => Self::Experts(spec.clone()),
        }
    }
}

/// Why a [`TaskSpec`] is not a task.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    #[error("{0}")]
    DType(String),
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Lengths, pages and sinks of tasks are drawn.
    #[error("only dense tensors without lengths, with random sinks, can be measured")]
    NotPlain,
    #[error("a token goes to {top_k} different experts but there are {experts}; use a top-k of at most that")]
    TopK { top_k: usize, experts: usize },
    #[error("{task} is not forward attention over dense tensors; name such a problem")]
    NotForward { task: String },
}

/// What is computed.
#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are as many as tasks, which are few")]
pub enum Operation {
    Forward(Problem),
    Backward(BackwardProblem),
    Experts(MoeProblem),
}

/// A problem to measure.
#[derive(Clone, PartialEq, Debug)]
pub struct Task {
    spec: TaskSpec,
    operation: Operation,
    /// Queries and keys of each sequence, where they differ or lie in pages.
    sequences: Option<Vec<Extents>>,
}

impl Task {
    /// The task of a problem over dense tensors, with normal inputs.
    pub fn new(problem: Problem) -> Result<Self, TaskError> {
        let task = Self::parse(TaskSpec::Attention(AttentionSpec::of(&problem)))?;
        if *task.forward()? == problem { Ok(task) } else { Err(TaskError::NotPlain) }
    }

    /// Checks a description from elsewhere.
    pub fn parse(spec: TaskSpec) -> Result<Self, TaskError> {
        let (operation, sequences) = match &spec {
            TaskSpec::Experts(spec) => (Operation::Experts(spec.parse()?), None),
            TaskSpec::Attention(spec) => match (spec.parse()?, spec.backward) {
                ((problem, sequences), false) => (Operation::Forward(problem), sequences),
                ((problem, _), true) => {
                    (Operation::Backward(BackwardSpec::new(problem.spec().clone()).parse()?), None)
                }
            },
        };
        Ok(Self { spec, operation, sequences })
    }

    /// Self-attention over `batch × heads × seq × dim`.
    pub fn square(dtype: DType, [batch, heads, seq, dim]: [usize; 4], mask: Mask) -> Result<Self, TaskError> {
        let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim))?;
        Self::new(Spec { mask, ..Spec::new(dtype, layout, layout, layout) }.parse()?)
    }

    /// The same attention with something changed; other operations stay as they are.
    pub fn changed(&self, change: impl FnOnce(&mut AttentionSpec)) -> Result<Self, TaskError> {
        let mut spec = self.spec.clone();
        if let TaskSpec::Attention(spec) = &mut spec {
            change(spec);
        }
        Self::parse(spec)
    }

    /// The same over inputs of `kind`.
    #[must_use]
    pub fn of_kind(mut self, kind: Kind) -> Self {
        if let TaskSpec::Attention(spec) = &mut self.spec {
            spec.kind = kind;
        }
        self
    }

    /// Its lengths, and its page table and sinks drawn from `seed`, as far as it has any.
    pub fn values(&self, seed: u64) -> Values {
        let TaskSpec::Attention(spec) = &self.spec else { return Values::default() };
        let sinks = spec.sinks.then(|| normal_sinks(spec.q[1], seed)).flatten();
        let sequences = self.sequences.as_deref();
        let lengths = sequences.map_or_else(Default::default, |all| spec.lengths(all));
        let table = sequences.and_then(|all| spec.table(all, seed));
        Values { sinks, lengths, table, ..Values::default() }
    }

    /// The task as plain data.
    pub fn spec(&self) -> &TaskSpec {
        &self.spec
    }

    /// The attention that it is about, as plain data.
    pub const fn attention(&self) -> Option<&AttentionSpec> {
        match &self.spec {
            TaskSpec::Attention(spec) => Some(spec),
            TaskSpec::Experts(_) => None,
        }
    }

    /// What is computed.
    pub const fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The problem, where the task is forward attention over dense tensors.
    pub fn forward(&self) -> Result<&Problem, TaskError> {
        match (&self.operation, &self.sequences) {
            (Operation::Forward(problem), None) => Ok(problem),
            _ => Err(TaskError::NotForward { task: self.to_string() }),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.operation {
            Operation::Forward(problem) => problem.dtype(),
            Operation::Backward(problem) => problem.grad_dtype(),
            Operation::Experts(problem) => problem.dtype(),
        }
    }

    /// Sets of keys and values, or of routings, that calls take in turn, so that nothing comes from a cache.
    pub fn sets(&self) -> usize {
        match (&self.operation, self.attention()) {
            (Operation::Experts(_), _) => ROUTINGS,
            (_, Some(spec)) if spec.page.is_some() && self.bytes() < BEYOND_CACHE => {
                ((BEYOND_CACHE / self.bytes()).ceil() as usize + 1).min(MOST_COPIES)
            }
            _ => 1,
        }
    }

    /// Bytes that must move at least: every input that is used read once, every output written once.
    pub fn bytes(&self) -> f64 {
        let elements = match &self.operation {
            Operation::Forward(p) => forward_elements(p, self.sequences.as_deref()),
            Operation::Backward(p) => {
                let f = p.forward();
                // Q, K, V, the output and its gradient, and three gradients.
                (2.0 * (f.q().span() + f.k().span() + f.v().span() + f.out().span()) as f64)
                    + f.rows() as f64 * size_of::<f32>() as f64 / f.dtype().bytes() as f64
            }
            Operation::Experts(p) => {
                let TaskSpec::Experts(spec) = &self.spec else { return 0.0 };
                let each = 3.0 * p.hidden() as f64 * p.intermediate() as f64;
                spec.touched() * each + 2.0 * p.tokens() as f64 * p.hidden() as f64
            }
        };
        elements * self.dtype().bytes() as f64
    }

    /// Operations of the matrix products over visible pairs, or of both products of experts.
    pub fn flops(&self) -> f64 {
        match (&self.operation, &self.sequences) {
            (Operation::Forward(p), None) => p.flops(),
            (Operation::Forward(p), Some(all)) => {
                let pairs = all.iter().map(|&[q, kv]| p.mask().pairs(q as usize, kv as usize) as f64);
                2.0 * (p.dim_qk() + p.dim_v()) as f64 * p.heads_q() as f64 * pairs.sum::<f64>()
            }
            (Operation::Backward(p), _) => p.flops(),
            (Operation::Experts(p), _) => p.flops(),
        }
    }
}

/// Elements of Q, of the output, and of the keys and values that sequences use.
fn forward_elements(p: &Problem, sequences: Option<&[Extents]>) -> f64 {
    let keys = match sequences {
        None => p.k().span() + p.v().span(),
        Some(all) => {
            let keys: usize = all.iter().map(|[_, keys]| *keys as usize).sum();
            keys * p.heads_kv() * (p.dim_qk() + p.dim_v())
        }
    };
    (p.q().span() + p.out().span() + keys) as f64
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
        match self {
            Self::Attention(spec) => spec.fmt(f),
            Self::Experts(spec) => spec.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_survive_the_way_through_json() {
        let plain = Task::square(DType::BF16, [2, 4, 100, 64], Mask::window(7, 0).top_left()).unwrap();
        let sinks = plain.changed(|spec| spec.sinks = true).unwrap();
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
        assert_eq!(spec.kind(), Kind::Normal);
        let again = serde_json::to_string(&spec).unwrap();
        assert!(
            ["sinks", "kind", "backward", "page", "traffic", "invariant"]
                .iter()
                .all(|name| !again.contains(name)),
            "what old programs read stays so: {again}"
        );
    }

    #[test]
    fn the_seed_decides_about_sinks() {
        let plain = Task::square(DType::F16, [1, 4, 3, 8], Mask::NONE).unwrap();
        let task = plain.changed(|spec| spec.sinks = true).unwrap();
        assert_eq!(Task::new(task.forward().unwrap().clone()).unwrap(), task);
        assert_ne!(task.values(0), task.values(1));
        assert_eq!(task.values(1).sinks.map(|sinks| sinks.len()), Some(4));
        assert_eq!(plain.values(1), Values::default());
    }

    #[test]
    fn impossible_tasks_are_refused() {
        let good = Task::square(DType::F16, [1, 2, 3, 4], Mask::NONE).unwrap();
        let bad: [fn(&mut AttentionSpec); 13] = [
            |spec| spec.dtype = "f13".to_owned(),
            |spec| spec.q = [1, 0, 3, 4],
            |spec| spec.k = [1, 2, 3, 5],
            |spec| spec.q = [usize::MAX; 4],
            |spec| spec.scale = f32::NAN,
            |spec| spec.softcap = Some(-1.0),
            |spec| {
                (spec.q, spec.k, spec.sinks) = ([1, 1 << 30, 3, 4], [1, 1 << 30, 3, 4], true);
            },
            |spec| spec.page = Some(0),
            |spec| (spec.page, spec.q[0]) = (Some(1), usize::MAX),
            |spec| (spec.page, spec.k[2]) = (Some(1), 1 << 40),
            |spec| spec.traffic = Some(Traffic::Mixed),
            |spec| (spec.traffic, spec.k[2]) = (Some(Traffic::Random), 0),
            |spec| (spec.page, spec.backward) = (Some(16), true),
        ];
        for (n, change) in bad.into_iter().enumerate() {
            assert!(good.changed(change).is_err(), "{n}");
        }
        let layer = |experts, intermediate| ExpertSpec {
            dtype: "bf16".to_owned(),
            tokens: 3,
            hidden: 8,
            intermediate,
            experts,
            top_k: 2,
        };
        assert!(Task::parse(TaskSpec::Experts(layer(4, 8))).is_ok());
        for spec in [layer(1, 8), layer(4, 0), layer(4, usize::MAX)] {
            assert!(Task::parse(TaskSpec::Experts(spec.clone())).is_err(), "{spec}");
        }
    }

    /// Every operation, its name, its operations and bytes, and its way through JSON.
    #[test]
    fn operations_know_their_work() {
        let check = |task: Task, name: &str, flops: f64, bytes: f64| {
            let text = serde_json::to_string(task.spec()).unwrap();
            assert_eq!(Task::parse(serde_json::from_str(&text).unwrap()).unwrap(), task);
            assert_eq!((task.to_string().as_str(), task.flops(), task.bytes()), (name, flops, bytes));
        };
        let plain = Task::square(DType::F16, [2, 4, 32, 16], Mask::NONE).unwrap();
        let forward = 4.0 * (2 * 4 * 32 * 32 * 16) as f64;
        check(plain.clone(), "2x4x32x16 f16", forward, (4 * 2 * 2 * 4 * 32 * 16) as f64);
        let backward = plain.changed(|spec| spec.backward = true).unwrap();
        let elements = (8 * 2 * 2 * 4 * 32 * 16 + 4 * 2 * 4 * 32) as f64;
        check(backward, "2x4x32x16 f16 backward", 2.5 * forward, elements);
        let decode = plain.changed(|spec| (spec.q[2], spec.k[1], spec.page) = (1, 2, Some(8))).unwrap();
        let (rows, keys) = (2 * 4 * 16, 2 * 32 * 2 * 16);
        let bytes = (2 * (2 * rows + 2 * keys)) as f64;
        check(decode.clone(), "2x4x1x16 f16 kv2 keys32 page8", 4.0 * (2 * 4 * 32 * 16) as f64, bytes);
        assert!(decode.sets() > 1 && plain.sets() == 1, "a cache is read from memory");
        let random = decode.changed(|spec| spec.traffic = Some(Traffic::Random)).unwrap();
        assert!(random.bytes() < decode.bytes() && random.to_string().ends_with(" page8 random"));
        let layer = ExpertSpec {
            dtype: "f16".to_owned(),
            tokens: 1,
            hidden: 8,
            intermediate: 4,
            experts: 16,
            top_k: 2,
        };
        let layer = Task::parse(TaskSpec::Experts(layer)).unwrap();
        let bytes = (2.0 * (2.0 * 3.0 * 32.0 + 16.0f64)).round();
        assert_eq!((layer.flops(), layer.bytes().round()), (2.0 * 6.0 * 32.0, bytes));
        assert_eq!(layer.to_string(), "moe 1x8x4 f16 experts16 top2");
    }

    #[test]
    fn a_mixed_batch_has_new_sequences_among_others() {
        let plain = Task::square(DType::BF16, [40, 4, 64, 16], Mask::CAUSAL).unwrap();
        let change = |spec: &mut AttentionSpec| {
            (spec.page, spec.traffic, spec.k[2]) = (Some(4), Some(Traffic::Mixed), 512)
        };
        let task = plain.changed(change).unwrap();
        let sequences = task.sequences.clone().unwrap();
        assert_eq!(sequences.iter().filter(|[queries, _]| *queries == 64).count(), 4);
        assert!(sequences.iter().all(|[queries, keys]| keys >= queries && *keys <= 512));
        let Operation::Forward(problem) = task.operation() else { panic!("forward") };
        task.values(1).check(problem).unwrap();
        assert!(task.forward().is_err(), "its tensors are not dense");
    }
}
