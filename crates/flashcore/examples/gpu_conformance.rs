//! The conformance suite on GPU 0: every case, law and random problems, for each kernel family.
//!
//! `cargo run --release --example gpu_conformance [native|persistent|ampere|general|split|fused]
//! [cases|laws|random|decode|merge|append|narrow|cache|quantise|grouped|backward] [filter or number]`
//!
//! A filter is part of a case's description; a number says how many random problems there are instead of a thousand.
//! `backward` is cases, laws and random problems of gradients, `split` and `fused` are their two forms on a Hopper, in 16 bits;
//! `flashcore verify --backend cuda` checks the other operations.

use flashcore::{
    Backend, DType,
    cuda::{Choice, Cuda, Form},
};
use flashcore_testkit::{
    Case, CaseReport, Outcome, append, backward, cache,
    cases::{self, Cost},
    check_case, grouped, merge, narrow, properties, quantise, random,
};
use rayon::prelude::*;

const SEEDS: [u64; 3] = [1, 2, 3];
const HALVES: [DType; 2] = [DType::F16, DType::BF16];
/// Kernels that only 16-bit tensors have.
const OF_HALVES: [&str; 2] = ["split", "fused"];
/// Random problems that have to run, unless the command line says how many.
const RANDOM: usize = 1000;

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
        "general" => cuda.with_general_kernels(),
        "split" => cuda.choosing(Choice::Gradients(Form::Split)),
        "fused" => cuda.choosing(Choice::Gradients(Form::Fused)),
        _ => cuda,
    };
    let wanted = word(2).parse().unwrap_or(RANDOM);
    let failed = match word(1) {
        "laws" => laws(&cuda),
        "random" => random_problems(&cuda, random::Limits::SMALL, wanted),
        "decode" => random_problems(&cuda, random::Limits::DECODE, wanted),
        "merge" => merges(&cuda),
        "append" => appends(&cuda),
        "narrow" => narrows(&cuda),
        "cache" => caches(&cuda, wanted),
        "quantise" => quantised(&cuda),
        "grouped" => groups(&cuda, wanted),
        "backward" => {
            let dtypes: &[DType] = if OF_HALVES.contains(&word(0)) { &HALVES } else { &DType::COMMON };
            gradients(&cuda, dtypes, word(2), wanted)
        }
        "cases" | "" => conclude(&check(&cuda, case_work(word(2)))),
        other => {
            panic!(
                "nothing is called {other}; use cases, laws, random, decode, merge, append, narrow, cache, quantise, \
                 grouped or backward"
            )
        }
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

/// Draws until so many problems have run: the draws that the GPU's kernels refuse do not count. What is drawn depends on
/// nothing but the number of the draw.
fn random_problems(cuda: &Cuda, limits: random::Limits, wanted: usize) -> usize {
    let draw = |n: u64| (random::any(11, n, limits), HALVES[n as usize % 2], n);
    let mut reports: Vec<CaseReport> = Vec::new();
    loop {
        let ran = reports.iter().filter(|report| ran(report)).count();
        if ran == wanted || reports.len() > 10 * wanted {
            break;
        }
        let first = reports.len() as u64;
        reports.extend(check(cuda, (first..first + (wanted - ran) as u64).map(draw).collect()));
    }
    let of = |dtype| reports.iter().filter(|report| report.dtype == dtype && ran(report)).count();
    let [f16, bf16] = HALVES.map(of);
    println!("{} problems drawn; {} ran, {f16} in f16 and {bf16} in bf16", reports.len(), f16 + bf16);
    let short = usize::from(f16 + bf16 < wanted);
    conclude(&reports) + short
}

fn ran(report: &CaseReport) -> bool {
    !matches!(report.outcome, Outcome::Skipped(_))
}

fn check(cuda: &Cuda, work: Vec<Work>) -> Vec<CaseReport> {
    let one = |(case, dtype, seed): &Work| check_case(cuda as &dyn Backend, case, *dtype, *seed);
    work.par_iter().map(one).collect()
}

/// Prints the first refusals and failures and the sums; returns the number of failures.
fn conclude(reports: &[CaseReport]) -> usize {
    let of = |wanted: fn(&Outcome) -> bool| reports.iter().filter(move |report| wanted(&report.outcome));
    let refused = || of(|outcome| matches!(outcome, Outcome::Skipped(_)));
    let failed = || of(Outcome::is_failure);
    refused().take(5).chain(failed().take(25)).for_each(|report| println!("{report}"));
    let (refused, failed) = (refused().count(), failed().count());
    println!("{} passed, {refused} refused, {failed} failed", reports.len() - refused - failed);
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

/// Grouped products: every case, and so many random ones.
fn groups(cuda: &Cuda, wanted: usize) -> usize {
    let mut failures: Vec<String> =
        SEEDS.iter().flat_map(|&seed| grouped::failures(cuda, &HALVES, seed)).collect();
    let random = (0..wanted as u64).map(|n| (grouped::random(11, n), HALVES[n as usize % 2], n));
    failures.extend(random.filter_map(|(case, dtype, seed)| {
        let outcome = grouped::check(cuda, &case, dtype, seed);
        outcome.is_failure().then(|| format!("{case} in {dtype}: {outcome}"))
    }));
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!("grouped: {} failed of {}", failures.len(), grouped::cases().len() * 6 + wanted);
    failures.len()
}

fn merges(cuda: &Cuda) -> usize {
    let failures: Vec<String> = SEEDS.iter().flat_map(|&seed| merge::failures(cuda, 9, seed)).collect();
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!("merge: {} failed of {}", failures.len(), merge::cases().len() * 9 * SEEDS.len());
    failures.len()
}

fn appends(cuda: &Cuda) -> usize {
    let failures: Vec<String> =
        SEEDS.iter().flat_map(|&seed| append::failures(cuda, &DType::COMMON, seed)).collect();
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!(
        "append: {} failed of {}",
        failures.len(),
        append::cases().len() * 2 * DType::COMMON.len() * SEEDS.len()
    );
    failures.len()
}

/// Tensors rounded to 8 bits, and attention by way of them.
fn quantised(cuda: &Cuda) -> usize {
    let suite = SEEDS.iter().flat_map(|&seed| quantise::failures(cuda, &DType::COMMON, seed));
    let shapes = [([1, 4, 2, 512, 512], 64), ([1, 2, 1, 512, 2048], 128), ([2, 4, 2, 300, 4096], 128)];
    let failures: Vec<String> = suite.chain(narrow::end_to_end(cuda, &shapes)).collect();
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!("quantise: {} failed", failures.len());
    failures.len()
}

/// Tensors of 8 bits: every case, and the named shapes with their bar.
fn narrows(cuda: &Cuda) -> usize {
    let cases: Vec<_> = narrow::cases().into_iter().chain(narrow::named(Cost::Large)).collect();
    let failures: Vec<String> =
        SEEDS.par_iter().flat_map(|&seed| narrow::failures(cuda, &cases, seed)).collect();
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!("narrow: {} failed of {}", failures.len(), cases.len() * SEEDS.len());
    failures.len()
}

/// Caches of 8 bits: every case, and random problems.
fn caches(cuda: &Cuda, wanted: usize) -> usize {
    let random = (0..wanted as u64).map(|n| {
        let limits = if n % 2 == 0 { random::Limits::SMALL } else { random::Limits::DECODE };
        cache::random(5, n, limits)
    });
    let cases: Vec<_> = cache::cases(Cost::Large).into_iter().chain(random).collect();
    let failures: Vec<String> =
        cases.par_chunks(16).flat_map(|cases| cache::failures(cuda, cases, 1, false)).collect();
    failures.iter().take(25).for_each(|failure| println!("{failure}"));
    println!("cache: {} failed of {}", failures.len(), cases.len());
    failures.len()
}

/// Gradients of every case in all of these types, the laws, and random problems until so many have run.
fn gradients(cuda: &Cuda, dtypes: &[DType], filter: &str, wanted: usize) -> usize {
    let filter = if filter.parse::<usize>().is_ok() { "" } else { filter };
    let cases: Vec<_> =
        backward::cases(Cost::Large).into_iter().filter(|case| format!("{case}").contains(filter)).collect();
    let work = cases.iter().flat_map(|case| dtypes.iter().map(|&dtype| (case.clone(), dtype, 1)));
    let work = work.filter(|(case, dtype, _)| case.forward.dtypes.contains(dtype)).collect();
    let mut failed = conclude_gradients("cases", &check_gradients(cuda, work));
    if !filter.is_empty() {
        return failed;
    }
    let draw = |n: u64| (backward::random_case(11, n), dtypes[n as usize % dtypes.len()], n);
    let (mut drawn, mut reports) = (0, Vec::new());
    while reports.len() < wanted && drawn < 10 * wanted as u64 {
        let more = (wanted - reports.len()) as u64;
        let run = check_gradients(cuda, (drawn..drawn + more).map(draw).collect());
        reports.extend(run.into_iter().filter(|(_, outcome)| !matches!(outcome, Outcome::Skipped(_))));
        drawn += more;
    }
    failed += conclude_gradients("random problems", &reports) + usize::from(reports.len() < wanted);
    let laws = backward::laws::LAWS;
    for (law, dtype) in laws.iter().flat_map(|law| dtypes.iter().map(move |&dtype| (law, dtype))) {
        for outcome in
            SEEDS.map(|seed| law.check(cuda, dtype, seed)).iter().filter(|o| **o != Outcome::Passed)
        {
            println!("{} in {dtype}: {outcome}", law.name);
            failed += usize::from(outcome.is_failure());
        }
    }
    println!("gradients: {failed} failed");
    failed
}

fn check_gradients(cuda: &Cuda, work: Vec<(backward::Case, DType, u64)>) -> Vec<(String, Outcome)> {
    let one = |(case, dtype, seed): &(backward::Case, DType, u64)| {
        (format!("{case} in {dtype}, seed {seed}"), backward::check(cuda, case, *dtype, *seed))
    };
    work.par_iter().map(one).collect()
}

fn conclude_gradients(what: &str, reports: &[(String, Outcome)]) -> usize {
    let of = |wanted: fn(&Outcome) -> bool| reports.iter().filter(move |report| wanted(&report.1));
    let refused = || of(|outcome| matches!(outcome, Outcome::Skipped(_)));
    let failed = || of(Outcome::is_failure);
    refused().take(5).chain(failed().take(25)).for_each(|(what, outcome)| println!("{what}: {outcome}"));
    let (refused, failed) = (refused().count(), failed().count());
    println!("{what}: {} passed, {refused} refused, {failed} failed", reports.len() - refused - failed);
    failed
}
