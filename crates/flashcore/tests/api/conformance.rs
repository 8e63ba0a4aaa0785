//! The CPU backend against every case, every law and random problems; the same suite that other backends run.

use flashcore::{BackendKind, DType, backend};
use flashcore_testkit::{Case, CaseReport, Outcome, backward, cases, check_case, merge, properties, random};
use rayon::prelude::*;

/// Another than `flashcore-cpu`'s own tests have, which run the same suite with each SIMD level.
const SEED: u64 = 2;

/// Runs every (case, element type, seed) in parallel and lists all that did not pass.
fn check_all(work: Vec<(Case, DType, u64)>) {
    let cpu = backend(BackendKind::Cpu).expect("the CPU is always there");
    let run = |(case, dtype, seed): &(Case, DType, u64)| check_case(&*cpu, case, *dtype, *seed);
    let reports: Vec<CaseReport> = work.par_iter().map(run).collect();
    let wrong: Vec<String> =
        reports.iter().filter(|report| !acceptable(report)).map(ToString::to_string).collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), reports.len(), wrong.join("\n"));
}

/// The CPU takes every problem; only a machine without the address space may skip one.
fn acceptable(report: &CaseReport) -> bool {
    match &report.outcome {
        Outcome::Passed => true,
        Outcome::Skipped(reason) => reason.contains("cannot allocate"),
        Outcome::Failed { .. } => false,
    }
}

#[test]
fn every_case_in_every_type() {
    let of_case = |case: Case| case.dtypes.iter().map(move |&dtype| (case.clone(), dtype, SEED));
    check_all(cases::all().into_iter().flat_map(of_case).collect());
}

#[test]
fn every_law() {
    let cpu = backend(BackendKind::Cpu).expect("the CPU is always there");
    for property in properties::ALL {
        for dtype in DType::COMMON {
            let outcome = property.check(&*cpu, dtype, SEED);
            assert_eq!(outcome, Outcome::Passed, "{} in {dtype}", property.name);
        }
    }
}

#[test]
fn a_thousand_random_problems() {
    let draw =
        |index: u64| (random::any(7, index, random::Limits::SMALL), DType::COMMON[index as usize % 3], index);
    check_all((0..1000).map(draw).collect());
}

#[test]
fn every_merge_in_every_type() {
    let cpu = backend(BackendKind::Cpu).expect("the CPU is always there");
    let failures = merge::failures(&*cpu, 9, SEED);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn gradients_of_a_thousand_random_problems() {
    let cpu = backend(BackendKind::Cpu).expect("the CPU is always there");
    let failures: Vec<String> = (0..1000u64)
        .into_par_iter()
        .filter_map(|n| {
            let (case, dtype) = (backward::random_case(7, n), DType::COMMON[n as usize % 3]);
            let outcome = backward::check(&*cpu, &case, dtype, n);
            (outcome != Outcome::Passed).then(|| format!("{case} {dtype}: {outcome}"))
        })
        .collect();
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}
