//! Named sets of tasks: what `bench --suite` and `gate --suite` measure.
//!
//! Some suites consist of comparisons: their tasks are those needed, and `bench` reports each result.

mod compared;
mod operations;

use flashcore_core::{DType, Dims, Layout, Mask, Spec};
use flashcore_testkit::Kind;

use self::compared::Comparisons;
use crate::{
    comparison,
    judge::Care,
    protocol::{Mode, Protocol},
    task::{Task, TaskError},
};

/// A set of tasks that go together.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// The name used on the command line and in results.
    pub name: &'static str,
    /// The default element type.
    pub dtype: DType,
    /// Whether calls are so short that they must be replayed from a graph to see the kernel alone.
    pub replays: bool,
    /// How much of each task is judged.
    pub care: Care,
    content: Content,
}

/// The contents of a suite.
#[derive(Clone, Copy, Debug)]
enum Content {
    Tasks(fn(DType) -> Result<Vec<Task>, TaskError>),
    Comparisons(fn(DType) -> Comparisons),
    /// Tasks, some of which are compared with each other too.
    Both(fn(DType) -> Result<Vec<Task>, TaskError>, fn(DType) -> Comparisons),
}

impl Suite {
    /// Long and short sequences at 16,384 tokens and 2,048 features, as the field reports them.
    pub const FORWARD: Self = Self::new("forward", DType::BF16, Content::Tasks(forward));
    /// Shapes of a few microseconds, where launching costs as much as computing.
    pub const SMALL: Self = Self {
        replays: true,
        ..Self::new("small", DType::F16, Content::Tasks(|dtype| squares(dtype, &SMALL)))
    };
    /// Shapes that a CPU computes in milliseconds.
    pub const CPU: Self = Self::new("cpu", DType::F32, Content::Tasks(|dtype| squares(dtype, &CPU)));
    /// Every kind of data, for error and for time.
    pub const KINDS: Self =
        Self { care: Care::Thorough, ..Self::new("kinds", DType::BF16, Content::Tasks(kinds)) };
    /// Grouped heads, sinks, windows and limits of scores, beside the plain kernel or a peer.
    pub const OPTIONS: Self = Self::new("options", DType::F16, Content::Comparisons(compared::options));
    /// Sequence lengths from 64 to 16,384, beside those that fill their last tile.
    pub const SWEEP: Self = Self {
        replays: true,
        care: Care::Brief,
        ..Self::new("sweep", DType::F16, Content::Comparisons(compared::sweep))
    };

    /// One or a few queries over many keys, from one sequence to many.
    pub const DECODE: Self =
        Self { replays: true, ..Self::new("decode", DType::BF16, Content::Tasks(decode)) };

    /// Gradients at the shapes of [`Suite::FORWARD`], and with grouped heads.
    pub const BACKWARD: Self = Self::new(
        "backward",
        DType::BF16,
        Content::Both(
            |dtype| operations::backward(forward(dtype), operations::GROUPS),
            |dtype| operations::grouped(dtype, operations::GROUPS),
        ),
    );
    /// Caches as inference engines have them: pages, lengths that differ, mixed batches.
    pub const SERVING: Self = Self {
        replays: true,
        ..Self::new(
            "serving",
            DType::BF16,
            Content::Both(
                |dtype| operations::SERVING.tasks(dtype),
                |dtype| operations::SERVING.comparisons(dtype),
            ),
        )
    };
    /// Mixtures of experts as models have them.
    pub const MOE: Self = Self {
        replays: true,
        ..Self::new(
            "moe",
            DType::BF16,
            Content::Tasks(|dtype| operations::experts(dtype, operations::LAYERS, operations::TOKENS)),
        )
    };
    /// [`Suite::BACKWARD`] for a CPU.
    pub const BACKWARD_CPU: Self = Self::new(
        "backward-cpu",
        DType::F32,
        Content::Both(
            |dtype| operations::backward(squares(dtype, &CPU), operations::GROUPS_ON_CPU),
            |dtype| operations::grouped(dtype, operations::GROUPS_ON_CPU),
        ),
    );
    /// [`Suite::SERVING`] for a CPU.
    pub const SERVING_CPU: Self = Self::new(
        "serving-cpu",
        DType::F32,
        Content::Both(
            |dtype| operations::SERVING_ON_CPU.tasks(dtype),
            |dtype| operations::SERVING_ON_CPU.comparisons(dtype),
        ),
    );
    /// [`Suite::MOE`] for a CPU.
    pub const MOE_CPU: Self = Self::new(
        "moe-cpu",
        DType::F32,
        Content::Tasks(|dtype| {
            operations::experts(dtype, operations::LAYERS_ON_CPU, operations::TOKENS_ON_CPU)
        }),
    );

    /// Every suite.
    pub const ALL: [Self; 13] = [
        Self::FORWARD,
        Self::SMALL,
        Self::CPU,
        Self::KINDS,
        Self::OPTIONS,
        Self::SWEEP,
        Self::DECODE,
        Self::BACKWARD,
        Self::SERVING,
        Self::MOE,
        Self::BACKWARD_CPU,
        Self::SERVING_CPU,
        Self::MOE_CPU,
    ];

    const fn new(name: &'static str, dtype: DType, content: Content) -> Self {
        Self { name, dtype, replays: false, care: Care::Usual, content }
    }

    /// The suite of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|suite| suite.name == name)
    }

    /// How it is measured unless something else is asked for: as `usual`, but for suites of many tasks.
    pub fn protocol(self, usual: Protocol) -> Protocol {
        match self.care {
            Care::Brief => {
                Protocol { mode: Mode::Interleaved, seconds: 0.05, rounds: 1, warm_up: 0.0, ..usual }
            }
            Care::Thorough => Protocol { seconds: 0.5, ..usual },
            Care::Usual => usual,
        }
    }

    /// The tasks in `dtype`.
    pub fn tasks(self, dtype: DType) -> Result<Vec<Task>, TaskError> {
        match self.content {
            Content::Tasks(tasks) | Content::Both(tasks, _) => tasks(dtype),
            Content::Comparisons(comparisons) => Ok(comparison::tasks(&comparisons(dtype)?)),
        }
    }

    /// Whether it is made of comparisons alone, so that peers are of no interest but where one is compared with.
    pub const fn compares(self) -> bool {
        matches!(self.content, Content::Comparisons(_))
    }

    /// What it compares in `dtype`; nothing where each task is for itself.
    pub fn comparisons(self, dtype: DType) -> Comparisons {
        match self.content {
            Content::Comparisons(comparisons) | Content::Both(_, comparisons) => comparisons(dtype),
            Content::Tasks(_) => Ok(Vec::new()),
        }
    }
}

/// Tokens of a batch in the forward suite.
const TOKENS: usize = 16_384;
/// Features of all heads together in the forward suite.
const FEATURES: usize = 2_048;

fn forward(dtype: DType) -> Result<Vec<Task>, TaskError> {
    let mut tasks = Vec::new();
    for dim in [128, 64, 256] {
        for mask in [Mask::NONE, Mask::CAUSAL] {
            for seq in [512, 1024, 2048, 4096, 8192, 16_384] {
                tasks.push(Task::square(dtype, [TOKENS / seq, FEATURES / dim, seq, dim], mask)?);
            }
        }
    }
    Ok(tasks)
}

/// Batch entries and tokens of each in the suite of kinds.
const KINDS: [usize; 2] = [2, 4096];

fn kinds(dtype: DType) -> Result<Vec<Task>, TaskError> {
    let ([batch, seq], mut tasks) = (KINDS, Vec::new());
    for dim in [128, 64, 256] {
        for mask in [Mask::NONE, Mask::CAUSAL] {
            let task = Task::square(dtype, [batch, FEATURES / dim, seq, dim], mask)?;
            tasks.extend(Kind::ALL.map(|kind| task.clone().of_kind(kind)));
        }
    }
    Ok(tasks)
}

const SMALL: [([usize; 4], Mask); 6] = [
    ([1, 2, 64, 64], Mask::NONE),
    ([1, 4, 128, 64], Mask::NONE),
    ([1, 8, 512, 64], Mask::NONE),
    ([2, 2, 64, 64], Mask::NONE),
    ([1, 8, 2048, 64], Mask::NONE),
    ([1, 32, 1024, 128], Mask::NONE),
];

const CPU: [([usize; 4], Mask); 4] = [
    ([1, 2, 64, 64], Mask::NONE),
    ([1, 4, 128, 64], Mask::CAUSAL),
    ([1, 8, 256, 64], Mask::NONE),
    ([1, 4, 512, 128], Mask::CAUSAL),
];

/// Batch, heads of queries and of keys, keys, and queries of each sequence.
const DECODE: [[usize; 5]; 9] = [
    [1, 32, 8, 1024, 1],
    [1, 32, 8, 8192, 1],
    [1, 32, 8, 131_072, 1],
    [8, 32, 8, 4096, 1],
    [64, 32, 8, 8192, 1],
    [128, 64, 8, 2048, 1],
    [32, 32, 32, 4096, 1],
    [16, 16, 1, 8192, 1],
    [8, 32, 8, 8192, 4],
];

fn decode(dtype: DType) -> Result<Vec<Task>, TaskError> {
    let dim = 128;
    let task = |[batch, heads_q, heads_kv, keys, queries]: [usize; 5]| {
        let layout = |heads, rows| Layout::bhsd(Dims::new(batch, heads, rows, dim));
        let kv = layout(heads_kv, keys)?;
        Task::new(Spec::new(dtype, layout(heads_q, queries)?, kv, kv).parse()?)
    };
    DECODE.into_iter().map(task).collect()
}

fn squares(dtype: DType, shapes: &[([usize; 4], Mask)]) -> Result<Vec<Task>, TaskError> {
    shapes.iter().map(|&(shape, mask)| Task::square(dtype, shape, mask)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_are_problems_that_differ() {
        for suite in Suite::ALL {
            for dtype in DType::COMMON {
                let tasks = suite.tasks(dtype).unwrap();
                let mut names: Vec<_> = tasks.iter().map(ToString::to_string).collect();
                names.sort_unstable();
                names.dedup();
                assert_eq!(names.len(), tasks.len(), "{}", suite.name);
            }
        }
    }

    #[test]
    fn forward_keeps_tokens_and_features() {
        for task in Suite::FORWARD.tasks(DType::BF16).unwrap() {
            let [batch, heads, seq, dim] = task.attention().unwrap().q;
            assert_eq!((batch * seq, heads * dim), (TOKENS, FEATURES), "{task}");
        }
    }
}
