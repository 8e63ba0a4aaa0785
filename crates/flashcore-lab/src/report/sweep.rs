//! Problems that differ in the sequence length alone belong on one curve; the rest are rows of their own.

use std::collections::BTreeMap;

use flashcore_core::Mask;

use super::run::Problem;
use crate::task::TaskSpec;

/// Lengths that make a curve.
const FEWEST: usize = 3;

/// One curve per competitor: problems in order of their sequence length.
#[derive(Debug)]
pub struct Sweep<'r> {
    /// What the problems share, in words.
    pub title: String,
    /// The mask, which a row of panels shares.
    pub mask: String,
    /// The problems, each with another length.
    pub problems: Vec<&'r Problem>,
}

/// What all problems of a sweep share; the order is that of the panels.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Shared {
    dtype: String,
    /// Full before causal before windows.
    mask: (bool, bool, String),
    dims: [usize; 2],
    heads: [usize; 2],
    /// Queries where their number is not that of the keys.
    queries: Option<usize>,
    softcap: Option<u32>,
    sinks: bool,
}

impl Shared {
    fn of(task: &TaskSpec) -> Self {
        let mask = Mask::window(task.left, task.right);
        let mask = if task.top_left { mask.top_left() } else { mask };
        Self {
            dtype: task.dtype.clone(),
            mask: (mask != Mask::NONE, mask != Mask::CAUSAL, mask.to_string()),
            dims: [task.q[3], task.dim_v],
            heads: [task.q[1], task.k[1]],
            queries: (task.q[2] != task.k[2]).then_some(task.q[2]),
            softcap: task.softcap.map(f32::to_bits),
            sinks: task.sinks,
        }
    }

    fn dim(&self) -> String {
        let [dim, dim_v] = self.dims;
        if dim == dim_v { dim.to_string() } else { format!("{dim} and {dim_v}") }
    }

    fn title(&self) -> String {
        let [heads, kv] = self.heads;
        let grouped = (heads != kv).then(|| format!("{heads} heads on {kv}"));
        let queries =
            self.queries.map(|n| if n == 1 { "1 query".to_owned() } else { format!("{n} queries") });
        let cap = self.softcap.map(|bits| format!("cap {}", f32::from_bits(bits)));
        let sinks = self.sinks.then(|| "sinks".to_owned());
        let [dim, mask] = [format!("D = {}", self.dim()), self.mask.2.clone()].map(Some);
        let shared = [dim, mask, grouped, queries, cap, sinks];
        shared.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// The length that the problems of a sweep differ in.
pub fn length(problem: &Problem) -> usize {
    problem.task.spec().k[2]
}

/// Sorts problems into curves, and those that are on none, in their order.
pub fn sweeps(problems: &[Problem]) -> (Vec<Sweep<'_>>, Vec<&Problem>) {
    let mut groups: BTreeMap<Shared, Vec<&Problem>> = BTreeMap::new();
    for problem in problems {
        groups.entry(Shared::of(problem.task.spec())).or_default().push(problem);
    }
    let (mut curves, mut rest) = (Vec::new(), Vec::new());
    for (shared, mut problems) in groups {
        problems.sort_by_key(|problem| length(problem));
        if is_curve(&problems) {
            curves.push(Sweep { title: shared.title(), mask: shared.mask.2, problems });
        } else {
            rest.extend(problems);
        }
    }
    let place = |problem: &&Problem| problems.iter().position(|p| std::ptr::eq(p, *problem));
    rest.sort_by_key(place);
    (curves, rest)
}

fn is_curve(problems: &[&Problem]) -> bool {
    let rises = problems.windows(2).all(|pair| length(pair[0]) < length(pair[1]));
    rises && problems.len() >= FEWEST && length(problems[0]) > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{suites::Suite, task::Task};
    use flashcore_core::DType;

    fn problems(tasks: Vec<Task>) -> Vec<Problem> {
        tasks.into_iter().map(|task| Problem { task, entries: Vec::new() }).collect()
    }

    #[test]
    fn the_forward_suite_is_six_curves() {
        let problems = problems(Suite::Forward.tasks(DType::BF16).unwrap());
        let (curves, rest) = sweeps(&problems);
        let titles: Vec<_> = curves.iter().map(|curve| curve.title.as_str()).collect();
        let wanted = ["D = 64, full", "D = 128, full", "D = 256, full", "D = 64, causal", "D = 128, causal"];
        assert_eq!((&titles[..5], rest.len()), (&wanted[..], 0));
        for curve in &curves {
            let lengths: Vec<_> = curve.problems.iter().map(|p| length(p)).collect();
            assert_eq!(lengths, [512, 1024, 2048, 4096, 8192, 16_384], "{}", curve.title);
        }
    }

    #[test]
    fn mixed_problems_are_rows_in_their_order() {
        for suite in [Suite::Small, Suite::Cpu] {
            let problems = problems(suite.tasks(DType::F16).unwrap());
            let (curves, rest) = sweeps(&problems);
            assert_eq!(curves.len(), 0, "{}", suite.name());
            assert!(rest.iter().zip(&problems).all(|(row, problem)| std::ptr::eq(*row, problem)));
        }
        let same = Task::square(DType::F16, [1, 1, 64, 64], Mask::NONE).unwrap();
        let empty = [0, 1, 2].map(|s| Task::square(DType::F16, [1, 1, s, 64], Mask::NONE).unwrap());
        assert_eq!(sweeps(&problems(vec![same; 4])).1.len(), 4, "one length is no curve");
        assert_eq!(sweeps(&problems(empty.to_vec())).1.len(), 3, "a length of 0 has no place on the axis");
    }
}
