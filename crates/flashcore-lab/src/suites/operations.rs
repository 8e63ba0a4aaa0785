//! Suites of gradients, of caches as in inference engines, and of mixtures of experts; each with a small form for
//! trying it on a CPU.

use flashcore_core::{DType, Dims, Layout, Mask, Spec};

use super::compared::Comparisons;
use crate::{
    comparison::Comparison,
    task::{AttentionSpec, ExpertSpec, Task, TaskError, TaskSpec, Traffic},
};

type Tasks = Result<Vec<Task>, TaskError>;

/// What grouped heads may cost of gradients, for the same work.
const GROUPED: f64 = 1.05;
/// What pages of one row, and of more, may cost beside a cache in one piece; and what batch invariance may.
const PAGES_OF_ONE: f64 = 1.15;
const PAGES: f64 = 1.05;
const INVARIANT: f64 = 1.10;

/// Gradients of the tasks of forward, and of grouped heads.
pub(super) fn backward(forward: Tasks, grouped: [[usize; 5]; 1]) -> Tasks {
    let mut tasks = forward?.iter().map(gradients).collect::<Result<Vec<_>, _>>()?;
    for pair in pairs(grouped, tasks.first().map_or(DType::BF16, Task::dtype))? {
        tasks.extend(pair);
    }
    Ok(tasks)
}

fn gradients(task: &Task) -> Result<Task, TaskError> {
    task.changed(|spec| spec.backward = true)
}

/// Gradients with as many heads of keys as of queries, and with fewer; full and causal.
fn pairs<const N: usize>(shapes: [[usize; 5]; N], dtype: DType) -> Result<Vec<[Task; 2]>, TaskError> {
    let masks = |shape| [(shape, Mask::NONE), (shape, Mask::CAUSAL)];
    let pair = |([batch, heads, kv, seq, dim], mask): ([usize; 5], Mask)| {
        let plain = gradients(&Task::square(dtype, [batch, heads, seq, dim], mask)?)?;
        let grouped = plain.changed(|spec| spec.k[1] = kv)?;
        Ok([plain, grouped])
    };
    shapes.into_iter().flat_map(masks).map(pair).collect()
}

/// Batch, heads of queries and of keys, sequence, dim.
pub(super) const GROUPS: [[usize; 5]; 1] = [[4, 32, 8, 4096, 128]];
pub(super) const GROUPS_ON_CPU: [[usize; 5]; 1] = [[1, 8, 2, 128, 64]];

pub(super) fn grouped(dtype: DType, shapes: [[usize; 5]; 1]) -> Comparisons {
    let what = "gradients with grouped heads, against as many heads of keys as of queries";
    let compare = |[plain, grouped]: [Task; 2]| Comparison::of_ours(what, grouped, plain, GROUPED);
    Ok(pairs(shapes, dtype)?.into_iter().map(compare).collect())
}

/// The contents of a serving suite.
pub(super) struct Serving {
    dim: usize,
    /// Rows of pages.
    pages: &'static [usize],
    /// Batch, heads of queries and of keys, keys: one query each, also with a page for each sequence.
    even: &'static [[usize; 4]],
    /// Likewise, with any number of keys up to that.
    random: &'static [[usize; 4]],
    /// Likewise, one sequence in ten with so many queries.
    mixed: ([usize; 4], usize),
    /// The pages with which batch invariance is compared.
    usual: usize,
}

pub(super) const SERVING: Serving = Serving {
    dim: 128,
    pages: &[1, 16, 64],
    even: &[[1, 32, 8, 8192], [64, 32, 8, 8192], [128, 64, 8, 2048]],
    random: &[[16, 32, 8, 8192], [64, 32, 8, 8192], [256, 32, 8, 8192]],
    mixed: ([64, 32, 8, 8192], 512),
    usual: 16,
};

pub(super) const SERVING_ON_CPU: Serving = Serving {
    dim: 64,
    pages: &[1, 16],
    even: &[[2, 8, 2, 256]],
    random: &[[4, 8, 2, 512]],
    mixed: ([10, 8, 2, 256], 32),
    usual: 16,
};

impl Serving {
    fn task(
        &self,
        dtype: DType,
        [batch, heads_q, heads_kv, keys]: [usize; 4],
        change: impl FnOnce(&mut AttentionSpec),
    ) -> Result<Task, TaskError> {
        let layout = |heads, rows| Layout::bhsd(Dims::new(batch, heads, rows, self.dim));
        let kv = layout(heads_kv, keys)?;
        Task::new(Spec::new(dtype, layout(heads_q, 1)?, kv, kv).parse()?)?.changed(change)
    }

    /// Sequences of one length: a page for each sequence first, then smaller ones.
    fn even(&self, dtype: DType, shape: [usize; 4]) -> Tasks {
        let sizes = std::iter::once(&shape[3]).chain(self.pages);
        sizes.map(|&rows| self.task(dtype, shape, |spec| spec.page = Some(rows))).collect()
    }

    fn random(&self, dtype: DType, shape: [usize; 4]) -> Tasks {
        let random = |rows| {
            self.task(dtype, shape, |spec| (spec.page, spec.traffic) = (Some(rows), Some(Traffic::Random)))
        };
        self.pages.iter().map(|&rows| random(rows)).collect()
    }

    fn mixed(&self, dtype: DType) -> Tasks {
        let (shape, queries) = self.mixed;
        let mixed = |rows| {
            self.task(dtype, shape, |spec| {
                (spec.page, spec.traffic) = (Some(rows), Some(Traffic::Mixed));
                (spec.q[2], spec.right) = (queries, Some(0));
            })
        };
        self.pages.iter().filter(|&&rows| rows > 1).map(|&rows| mixed(rows)).collect()
    }

    /// Every task with nothing special about it.
    fn plain(&self, dtype: DType) -> Tasks {
        let mut tasks = Vec::new();
        for &shape in self.even {
            tasks.extend(self.even(dtype, shape)?);
        }
        for &shape in self.random {
            tasks.extend(self.random(dtype, shape)?);
        }
        tasks.extend(self.mixed(dtype)?);
        Ok(tasks)
    }

    /// Pages beside one page for each sequence, and batch invariance beside none.
    pub(super) fn comparisons(&self, dtype: DType) -> Comparisons {
        let mut all = Vec::new();
        for &shape in self.even {
            let mut tasks = self.even(dtype, shape)?.into_iter();
            let Some(whole) = tasks.next() else { continue };
            for (task, &rows) in tasks.zip(self.pages) {
                let (what, wanted) = match rows {
                    1 => ("pages of one row, against a page for each sequence", PAGES_OF_ONE),
                    _ => ("pages, against a page for each sequence", PAGES),
                };
                all.push(Comparison::of_ours(what, task, whole.clone(), wanted));
            }
        }
        let usual = |task: &Task| task.attention().is_some_and(|spec| spec.page == Some(self.usual));
        for task in self.plain(dtype)?.into_iter().filter(usual) {
            let invariant = task.changed(|spec| spec.invariant = true)?;
            all.push(Comparison::of_ours("batch-invariant, against the default", invariant, task, INVARIANT));
        }
        Ok(all)
    }

    /// The tasks, each next to what it is compared with.
    pub(super) fn tasks(&self, dtype: DType) -> Tasks {
        let usual = |task: &Task| task.attention().is_some_and(|spec| spec.page == Some(self.usual));
        let mut tasks = Vec::new();
        for task in self.plain(dtype)? {
            let invariant = usual(&task).then(|| task.changed(|spec| spec.invariant = true));
            tasks.push(task);
            tasks.extend(invariant.transpose()?);
        }
        Ok(tasks)
    }
}

/// Hidden, intermediate, experts and experts of a token: Qwen3-30B-A3B, Mixtral 8x7B, a slice of DeepSeek-V3,
/// gpt-oss-120b.
pub(super) const LAYERS: &[[usize; 4]] =
    &[[2048, 768, 128, 8], [4096, 14_336, 8, 2], [7168, 2048, 32, 8], [2880, 2880, 128, 4]];
pub(super) const TOKENS: &[usize] = &[1, 16, 128, 1024, 8192];
pub(super) const LAYERS_ON_CPU: &[[usize; 4]] = &[[128, 64, 16, 4], [256, 128, 4, 2]];
pub(super) const TOKENS_ON_CPU: &[usize] = &[1, 16, 128];

/// Every layer with every number of tokens.
pub(super) fn experts(dtype: DType, layers: &[[usize; 4]], tokens: &[usize]) -> Tasks {
    let pairs = layers.iter().flat_map(|layer| tokens.iter().map(move |&tokens| (*layer, tokens)));
    let task = |([hidden, intermediate, experts, top_k], tokens): ([usize; 4], usize)| {
        let dtype = dtype.name().to_owned();
        Task::parse(TaskSpec::Experts(ExpertSpec { dtype, tokens, hidden, intermediate, experts, top_k }))
    };
    pairs.map(task).collect()
}

#[cfg(test)]
mod tests {
    use flashcore_kernels::{ALLOCATED_ALIGNMENT, Choice, Gpu, plan_moe};

    use crate::{suites::Suite, task::Operation};

    /// What is compared is measured: every side of a comparison is a task of its suite.
    #[test]
    fn comparisons_are_between_tasks() {
        for suite in Suite::ALL {
            let tasks = suite.tasks(suite.dtype).unwrap();
            for one in suite.comparisons(suite.dtype).unwrap() {
                assert!(tasks.contains(&one.task) && tasks.contains(&one.other), "{}: {one:?}", suite.name);
            }
        }
    }

    #[test]
    fn suites_hold_what_their_tables_ask_for() {
        let names = |suite: Suite| -> Vec<String> {
            suite.tasks(suite.dtype).unwrap().iter().map(ToString::to_string).collect()
        };
        for (suite, count, some) in [
            (Suite::BACKWARD, 40, "4x32x4096x128 bf16 kv8 causal backward"),
            (Suite::SERVING, 30, "256x32x1x128 bf16 kv8 keys8192 page64 random"),
            (Suite::SERVING, 30, "64x32x512x128 bf16 kv8 keys8192 causal page16 mixed invariant"),
            (Suite::MOE, 20, "moe 8192x7168x2048 bf16 experts32 top8"),
        ] {
            let names = names(suite);
            assert!(names.len() == count && names.contains(&some.to_owned()), "{}: {names:#?}", suite.name);
        }
    }

    /// What a GPU is there for it computes: no task of these suites is refused by its plan.
    #[test]
    fn a_hopper_takes_every_task() {
        let (gpu, alignment) = (Gpu::HOPPER, ALLOCATED_ALIGNMENT);
        for suite in [Suite::DECODE, Suite::BACKWARD, Suite::SERVING, Suite::MOE] {
            for task in suite.tasks(suite.dtype).unwrap() {
                let plan = match task.operation() {
                    Operation::Forward(problem) => Choice::Rules.plan(problem, &gpu, alignment),
                    Operation::Backward(problem) => Choice::Rules.plan_backward(problem, &gpu, alignment),
                    Operation::Experts(problem) => plan_moe(problem, &gpu, alignment),
                };
                assert!(plan.is_ok_and(|plan| !plan.launches().is_empty()), "{task}");
            }
        }
    }
}
