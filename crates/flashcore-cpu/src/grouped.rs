//! Grouped products, all groups at once. Called by `cpu`; calls `matmul`.

use std::ops::Range;

use flashcore_core::{DType, ExpertLayout, GroupedCall, GroupedProblem, Grouping};
use half::{bf16, f16};

use crate::{
    crew::Crew,
    factors::Matrix,
    matmul::{Extents, Task, multiply},
    output::{Emit, Shared},
    simd::{Lane, panel::COLUMNS, runner::Runner},
};

/// Computes on all threads; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn grouped(call: &mut GroupedCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    match call.problem().dtype() {
        DType::F32 => compute::<f32>(call, with),
        DType::F16 => compute::<f16>(call, with),
        DType::BF16 => compute::<bf16>(call, with),
        _ => None,
    }
}

/// One group: its factors' matrices, and what it has of rows, columns and depth.
struct Group {
    a: usize,
    b: usize,
    out: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
}

impl Group {
    fn new(problem: &GroupedProblem, n: usize, own: Option<Range<usize>>) -> Self {
        let [rows, columns, depth] = [problem.rows(), problem.columns(), problem.depth()].map(|end| 0..end);
        let all = Self { a: 0, b: 0, out: 0, rows, columns, depth };
        let own = own.unwrap_or(0..0);
        match problem.grouping() {
            Grouping::Batch => Self { a: n, b: n, out: n, ..all },
            Grouping::Rows => Self { b: n, rows: own, ..all },
            Grouping::Columns => Self { a: n, columns: own, ..all },
            Grouping::Depth { .. } => Self { out: n, depth: own, ..all },
        }
    }

    /// What no group has: products without depth.
    fn rest(problem: &GroupedProblem, end: usize) -> Option<Self> {
        let own = Some(end..problem.divided());
        let rest = Self { depth: 0..0, ..Self::new(problem, 0, own) };
        matches!(problem.grouping(), Grouping::Rows | Grouping::Columns).then_some(rest)
    }
}

fn compute<T: Lane>(call: &mut GroupedCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    let (problem, inputs) = (call.problem(), *call.inputs());
    let (a, b) = (inputs.a.slice::<T>()?, inputs.b.slice::<T>()?);
    let ranges = inputs.offsets.map(|offsets| problem.ranges(offsets));
    let end = ranges.as_ref().and_then(|ranges| ranges.last()).map_or(0, |range| range.end);
    let own = |n: usize| ranges.as_ref().map(|ranges| ranges[n].clone());
    let out = Shared::new(call.out().into_slice::<T>()?);
    let groups = (0..problem.groups()).map(|n| Group::new(problem, n, own(n)));
    let groups: Vec<Group> = groups.chain(Group::rest(problem, end)).collect();
    let factor = |data, layout: &ExpertLayout, [n, row, column]: [usize; 3]| {
        let [_, rows, columns] = layout.strides();
        let data: &[T] = data;
        Matrix::new(&data[layout.at(n, row, column).min(data.len())..], [rows, columns])
    };
    let task = |group: &Group| {
        let Group { rows, columns, depth, .. } = group;
        let extents = Extents { rows: rows.len(), columns: columns.len(), depth: depth.len() };
        let a = factor(a, problem.a(), [group.a, rows.start, depth.start]);
        Task { extents, a, b: factor(b, problem.b(), [group.b, depth.start, columns.start]) }
    };
    let tasks: Vec<_> = groups.iter().map(task).collect();
    multiply(&tasks, false, with, |block, values| {
        let group = &groups[block.task];
        let [row, column] = [group.rows.start + block.rows.start, group.columns.start + block.columns.start];
        // Blocks of a group are disjoint, and so are groups and the positions of an output (`GroupedSpec::parse`).
        let start = |n: usize| problem.out().row(group.out, 0, row + n) + column;
        with.0.run(Emit { from: (&*values, COLUMNS), len: block.columns.len(), to: &out, start });
    });
    Some("grouped")
}
