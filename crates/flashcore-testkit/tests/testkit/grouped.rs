//! The suite of grouped products against a plain backend, right and wrong in single ways.

use flashcore_core::{Backend, BackendError, DType, Element, GroupedCall, Grouping, HostCall, Ran};
use flashcore_testkit::{Outcome, grouped, moe::plain::widened};
use half::{bf16, f16};

faults! {
    /// What no group has is not written.
    RestUnwritten,
    /// What no group has goes to the last one.
    RestToLast,
    /// Products of groups without depth are left out.
    EmptyUnwritten,
    /// Groups start where the one before was said to end, even beyond an earlier end.
    EndsAsTheyCome,
    /// The last element of depth is left out.
    ShortDepth,
    /// Every group has the first one's factor.
    FirstFactor,
    Imprecise,
    /// One element too many is written.
    Overrun,
}

struct Plain(Fault);

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only grouped products are asked for")
    }

    fn grouped(&self, call: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        match call.problem().dtype() {
            DType::F16 => self.compute::<f16>(call),
            DType::BF16 => self.compute::<bf16>(call),
            _ => self.compute::<f32>(call),
        }
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

impl Plain {
    fn compute<T: Element>(&self, call: &mut GroupedCall<'_>) {
        let (problem, inputs) = (call.problem(), *call.inputs());
        let mut ranges = inputs.offsets.map(|offsets| problem.ranges(offsets)).unwrap_or_default();
        if let Some(last) = ranges.last_mut().filter(|_| self.0 == Fault::RestToLast) {
            last.end = problem.divided();
        }
        if self.0 == Fault::EndsAsTheyCome {
            let ends = inputs
                .offsets
                .into_iter()
                .flatten()
                .map(|&end| end.clamp(0, problem.divided() as i32) as usize);
            let mut start = 0;
            ranges = ends.map(|end| std::mem::replace(&mut start, end).min(end)..end).collect();
        }
        let owner = |n: usize| ranges.iter().position(|range| range.contains(&n));
        let [a, b] = [inputs.a, inputs.b].map(widened);
        let out_layout = *problem.out();
        let out = call.out().into_slice::<T>().expect("the problem's type");
        for (matrix, row) in
            (0..out_layout.dims().batch).flat_map(|n| (0..problem.rows()).map(move |row| (n, row)))
        {
            let start = out_layout.row(matrix, 0, row);
            for column in 0..problem.columns() {
                let (left, right, depth) = match problem.grouping() {
                    Grouping::Batch => (Some(matrix), Some(matrix), 0..problem.depth()),
                    Grouping::Rows => (Some(0), owner(row), 0..problem.depth()),
                    Grouping::Columns => (owner(column), Some(0), 0..problem.depth()),
                    Grouping::Depth { .. } => (Some(0), Some(0), ranges[matrix].clone()),
                };
                let nobodys = left.is_none() || right.is_none();
                if nobodys && self.0 == Fault::RestUnwritten
                    || depth.is_empty() && self.0 == Fault::EmptyUnwritten
                {
                    continue;
                }
                let first = |n: usize| if self.0 == Fault::FirstFactor { 0 } else { n };
                let pair = left.zip(right).map(|(left, right)| (first(left), first(right)));
                let depth =
                    depth.start..depth.end - usize::from(self.0 == Fault::ShortDepth && !depth.is_empty());
                let product = |k: usize, (left, right): (usize, usize)| {
                    f64::from(a[problem.a().at(left, row, k)])
                        * f64::from(b[problem.b().at(right, k, column)])
                };
                let sum = pair.map_or(0.0, |pair| depth.map(|k| product(k, pair)).sum::<f64>());
                let sum = if self.0 == Fault::Imprecise { sum * 1.02 + 0.01 } else { sum };
                out[start + column] = T::from_f32(sum as f32);
            }
            if self.0 == Fault::Overrun {
                out[start + problem.columns()] = T::from_f32(1.0);
            }
        }
    }
}

#[test]
fn a_plain_backend_passes() {
    let failures = grouped::failures(&Plain(Fault::None), &DType::COMMON, 1);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        let found = grouped::failures(&Plain(fault), &[DType::BF16], 1);
        assert!(!found.is_empty(), "{fault:?} went unnoticed");
    }
}

#[test]
fn random_cases_are_legal() {
    for n in 0..60 {
        let case = grouped::random(1, n);
        let outcome = grouped::check(&Plain(Fault::None), &case, DType::F32, n);
        assert_eq!(outcome, Outcome::Passed, "{case}");
    }
}
