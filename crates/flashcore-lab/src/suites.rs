//! Named sets of tasks: what `bench --suite` and `gate --suite` measure.
//!
//! Some suites are made of comparisons: their tasks are what those need, and `bench` says how each came out.

mod options;
mod sweep;

use flashcore_core::{DType, Mask};

use crate::{
    comparison::{self, Comparison},
    judge::Care,
    protocol::{Mode, Protocol},
    task::{Task, TaskError},
};

/// Comparisons, or why they cannot be made.
type Comparisons = Result<Vec<Comparison>, TaskError>;

/// A set of tasks that go together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Suite {
    /// Long and short sequences at 16,384 tokens and 2,048 features, as the field reports them.
    Forward,
    /// Shapes of a few microseconds, where launching costs as much as computing.
    Small,
    /// Shapes that a CPU computes in milliseconds.
    Cpu,
    /// Grouped heads, sinks, windows and limits of scores, beside the plain kernel or a peer.
    Options,
    /// Sequence lengths from 64 to 16,384, beside those that fill their last tile.
    Sweep,
}

impl Suite {
    /// Every suite.
    pub const ALL: [Self; 5] = [Self::Forward, Self::Small, Self::Cpu, Self::Options, Self::Sweep];

    /// The name used on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Small => "small",
            Self::Cpu => "cpu",
            Self::Options => "options",
            Self::Sweep => "sweep",
        }
    }

    /// Whether calls are so short that they must be replayed from a graph to see the kernel alone.
    pub const fn replays(self) -> bool {
        matches!(self, Self::Small | Self::Sweep)
    }

    /// How it is measured unless something else is asked for: as `usual`, but for the many tasks of a sweep.
    pub const fn protocol(self, usual: Protocol) -> Protocol {
        match self {
            Self::Sweep => {
                Protocol { mode: Mode::Interleaved, seconds: 0.05, rounds: 1, warm_up: 0.0, ..usual }
            }
            _ => usual,
        }
    }

    /// How much of each task is judged.
    pub const fn care(self) -> Care {
        if matches!(self, Self::Sweep) { Care::Brief } else { Care::Usual }
    }

    /// The element type unless another is asked for.
    pub const fn usual_dtype(self) -> DType {
        match self {
            Self::Forward => DType::BF16,
            Self::Small | Self::Options | Self::Sweep => DType::F16,
            Self::Cpu => DType::F32,
        }
    }

    /// The tasks in `dtype`.
    pub fn tasks(self, dtype: DType) -> Result<Vec<Task>, TaskError> {
        match self {
            Self::Forward => forward(dtype),
            Self::Small => squares(dtype, &SMALL),
            Self::Cpu => squares(dtype, &CPU),
            Self::Options | Self::Sweep => Ok(comparison::tasks(&self.comparisons(dtype)?)),
        }
    }

    /// Whether it is made of comparisons.
    pub const fn compares(self) -> bool {
        matches!(self, Self::Options | Self::Sweep)
    }

    /// What it compares in `dtype`; nothing where tasks stand for themselves.
    pub fn comparisons(self, dtype: DType) -> Comparisons {
        match self {
            Self::Options => options::comparisons(dtype),
            Self::Sweep => sweep::comparisons(dtype),
            Self::Forward | Self::Small | Self::Cpu => Ok(Vec::new()),
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

fn squares(dtype: DType, shapes: &[([usize; 4], Mask)]) -> Result<Vec<Task>, TaskError> {
    shapes.iter().map(|&(shape, mask)| Task::square(dtype, shape, mask)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_are_problems_that_differ() {
        for suite in Suite::ALL {
            for dtype in DType::ALL {
                let tasks = suite.tasks(dtype).unwrap();
                let mut names: Vec<_> = tasks.iter().map(ToString::to_string).collect();
                names.sort_unstable();
                names.dedup();
                assert_eq!(names.len(), tasks.len(), "{}", suite.name());
            }
        }
    }

    #[test]
    fn forward_keeps_tokens_and_features() {
        for task in Suite::Forward.tasks(DType::BF16).unwrap() {
            let [batch, heads, seq, dim] = task.spec().q;
            assert_eq!((batch * seq, heads * dim), (TOKENS, FEATURES), "{task}");
        }
    }
}
