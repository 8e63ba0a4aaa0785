//! Grouped products: group after group, each on all threads. Called by `cpu`; calls `matmul`.

use std::ops::Range;

use flashcore_core::{DType, GroupedCall, GroupedProblem, Grouping};
use half::{bf16, f16};

use crate::{
    crew::Crew,
    matmul::{Extents, Matrix, multiply},
    output::Shared,
    simd::{Lane, convert::Narrow, runner::Runner},
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
    for Group { a: left, b: right, out: to, rows, columns, depth } in groups.chain(Group::rest(problem, end))
    {
        let extents = Extents { rows: rows.len(), columns: columns.len(), depth: depth.len() };
        let factor = |data: &'_ [T], layout: &flashcore_core::ExpertLayout, [n, row, column]: [usize; 3]| {
            let [_, rows, columns] = layout.strides();
            let start = layout.at(n, row, column).min(data.len());
            ([rows, columns], start)
        };
        let (steps, start) = factor(a, problem.a(), [left, rows.start, depth.start]);
        let a = Matrix::new(&a[start..], steps);
        let (steps, start) = factor(b, problem.b(), [right, depth.start, columns.start]);
        let b = Matrix::new(&b[start..], steps);
        multiply(extents, (a, b), with, |row, some, values| {
            let start = problem.out().row(to, 0, rows.start + row) + columns.start + some.start;
            // SAFETY: groups come one after another, blocks of a group are disjoint, and so are the positions of an
            // output (`GroupedSpec::parse`).
            let to = unsafe { out.range(start, some.len()) };
            with.0.run(Narrow { from: values, factor: 1.0, to });
        });
    }
    Some("grouped")
}
