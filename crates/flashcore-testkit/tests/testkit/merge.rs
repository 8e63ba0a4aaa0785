//! The merge suite against a plain backend, right and wrong in single ways.

use flashcore_core::{Backend, BackendError, DType, HostCall, MergeCall, Parts, Ran};
use flashcore_testkit::{Outcome, merge};

faults! {
    /// Weights do not come from the LSE.
    Average,
    /// Rows of parts that saw nothing are multiplied by 0.
    NanTimesZero,
    /// The LSE of the largest part instead of all.
    LargestLse,
    /// The last part is left out.
    LastPart,
    /// Sums are rounded to bf16.
    Imprecise,
    /// A row that nobody saw has an LSE of 0.
    EmptyLse,
}

/// f32 parts to an f32 output, plainly.
struct Plain(Fault);

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only merges are asked for")
    }

    fn merge(&self, call: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        let (problem, dims) = (call.problem(), call.problem().dims());
        for row in 0..problem.rows() {
            let plane = row / dims.seq;
            let place = (plane / dims.heads, plane % dims.heads, row % dims.seq);
            let (values, lse) = self.row(call, row, problem.part().row(place.0, place.1, place.2));
            let start = problem.out().row(place.0, place.1, place.2);
            let (out, lses) = call.outputs();
            let out = out.into_slice::<f32>().unwrap();
            out[start..start + dims.dim].copy_from_slice(&values);
            lses.into_iter().for_each(|lses| lses[row] = lse);
        }
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

impl Plain {
    fn row(&self, call: &MergeCall<'_>, row: usize, start: usize) -> (Vec<f32>, f32) {
        let (problem, fault) = (call.problem(), self.0);
        let count = problem.parts().count() - usize::from(fault == Fault::LastPart);
        let parts: Vec<(f64, &[f32])> = (0..count)
            .map(|n| {
                let (tensor, skip) = if let Parts::Listed(_) = problem.parts() { (n, 0) } else { (0, n) };
                let values = call.parts()[tensor].slice::<f32>().unwrap();
                let lse = call.lses()[tensor][skip * problem.rows() + row];
                (f64::from(lse), &values[skip * problem.stride() + start..][..problem.dims().dim])
            })
            .collect();
        let top = parts.iter().fold(f64::NEG_INFINITY, |top, part| top.max(part.0));
        let safe = if top.is_finite() { top } else { 0.0 };
        let total: f64 = parts.iter().map(|part| (part.0 - safe).exp()).sum();
        let mut values = vec![0f64; problem.dims().dim];
        for (lse, part) in parts.iter().filter(|part| fault == Fault::NanTimesZero || part.0.is_finite()) {
            let weight =
                if fault == Fault::Average { 1.0 / count as f64 } else { (lse - safe).exp() / total };
            values.iter_mut().zip(*part).for_each(|(sum, x)| *sum += weight * f64::from(*x));
        }
        let round = |x: f64| if fault == Fault::Imprecise { DType::BF16.round(x) } else { x };
        let lse = match fault {
            Fault::LargestLse => top,
            Fault::EmptyLse if total == 0.0 => 0.0,
            _ => safe + total.ln(),
        };
        (values.into_iter().map(|x| round(x) as f32).collect(), lse as f32)
    }
}

fn failures(fault: Fault) -> usize {
    let check = |case: &merge::Case| merge::check(&Plain(fault), case, [DType::F32; 2], 1);
    merge::cases().iter().map(check).filter(Outcome::is_failure).count()
}

#[test]
fn a_plain_merge_passes() {
    for case in merge::cases() {
        assert_eq!(merge::check(&Plain(Fault::None), &case, [DType::F32; 2], 1), Outcome::Passed, "{case}");
    }
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        assert!(failures(fault) > 0, "{fault:?} passes");
    }
}

#[test]
fn a_backend_without_merge_is_no_failure() {
    struct Without;
    impl Backend for Without {
        fn name(&self) -> &'static str {
            "without"
        }
        fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            unreachable!("only merges are asked for")
        }
    }
    let outcome = merge::check(&Without, &merge::cases()[0], [DType::F32; 2], 1);
    assert!(matches!(outcome, Outcome::Skipped(_)), "{outcome}");
}
