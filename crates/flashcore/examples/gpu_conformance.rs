//! The conformance suite on GPU 0: every case, law and random problems, for each kernel family.
//!
//! `cargo run --release --example gpu_conformance [native|persistent|ampere] [cases|laws|random] [filter]`

use flashcore::{Backend, DType, cuda::Cuda};
use flashcore_testkit::{
    Case, Outcome,
    cases::{self, Cost},
    check_case, properties, random,
};
use rayon::prelude::*;

const SEEDS: [u64; 3] = [1, 2, 3];
const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let word = |n: usize| args.get(n).map_or("", String::as_str);
    let cuda = Cuda::open(0).expect("a GPU");
    let cuda = match word(0) {
        "persistent" => {
            let gpu = flashcore_kernels::Gpu { sms: 3, ..cuda.gpu() };
            cuda.planning_for(gpu)
        }
        "ampere" => cuda.planning_for(flashcore_kernels::Gpu::AMPERE),
        _ => cuda,
    };
    let failed = match word(1) {
        "laws" => laws(&cuda),
        "random" => report(&cuda, random_work()),
        _ => report(&cuda, case_work(word(2))),
    };
    std::process::exit(i32::from(failed > 0));
}

type Work = (Case, DType, u64);

fn case_work(filter: &str) -> Vec<Work> {
    let mut work = Vec::new();
    for case in cases::all().into_iter().filter(|case| format!("{case:?}").contains(filter)) {
        let seeds = if case.cost() == Cost::Huge { &SEEDS[..1] } else { &SEEDS[..] };
        for &seed in seeds {
            for dtype in HALVES.into_iter().filter(|d| case.dtypes.contains(d)) {
                work.push((case.clone(), dtype, seed));
            }
        }
    }
    work
}

fn random_work() -> Vec<Work> {
    (0..1000).map(|i| (random::case(11, i, random::Limits::SMALL), HALVES[i as usize % 2], i)).collect()
}

fn report(cuda: &Cuda, work: Vec<Work>) -> usize {
    let reports: Vec<_> = work
        .par_iter()
        .map(|(case, dtype, seed)| check_case(cuda as &dyn Backend, case, *dtype, *seed))
        .collect();
    let (mut passed, mut skipped, mut failed) = (0, 0, 0);
    for report in &reports {
        match &report.outcome {
            Outcome::Passed => passed += 1,
            Outcome::Skipped(_) => {
                skipped += 1;
                if skipped < 6 {
                    println!("{report}");
                }
            }
            Outcome::Failed { .. } => {
                failed += 1;
                if failed < 25 {
                    println!("{report}");
                }
            }
        }
    }
    println!("{passed} passed, {skipped} skipped, {failed} failed");
    failed
}

fn laws(cuda: &Cuda) -> usize {
    let mut failed = 0;
    for property in properties::ALL {
        for dtype in HALVES {
            for seed in SEEDS {
                let outcome = property.check(cuda, dtype, seed);
                if outcome != Outcome::Passed {
                    println!("{} in {dtype}, seed {seed}: {outcome:?}", property.name);
                    failed += usize::from(outcome.is_failure());
                }
            }
        }
    }
    println!("laws: {failed} failed");
    failed
}
