//! The conformance suite, the laws and random problems, with each SIMD level forced in turn.

use flashcore_core::DType;
use flashcore_cpu::{Cpu, SimdLevel};
use flashcore_testkit::{
    append, cache,
    cases::{self, Cost},
    check_case, grouped, merge, moe, narrow, properties, quantise, random,
};

/// Runs everything on `level`; says so where the machine lacks it.
fn check(level: SimdLevel) {
    let Ok(cpu) = Cpu::with_threads(2).unwrap().with_simd(level) else {
        println!("this machine has no {level}: nothing checked");
        return;
    };
    let mut failures = Vec::new();
    // The level that users get is checked on larger cases and in every type, too, except in an emulator, which takes its
    // time and gets every second case. Elsewhere element types take turns.
    let emulated = std::env::var_os("QEMU_LD_PREFIX").is_some();
    let most = level == SimdLevel::detect() && !emulated;
    let cost = if most { Cost::Small } else { Cost::Tiny };
    // One more at each third, so that each of a family's masks meets all types.
    let types = |n: usize, all: &'static [DType]| {
        all.iter().copied().cycle().skip(n + n / 3).take(if most { all.len() } else { 1 })
    };
    for (n, case) in cases::up_to(cost).iter().enumerate().step_by(1 + usize::from(emulated)) {
        for dtype in types(n, case.dtypes) {
            let report = check_case(&cpu, case, dtype, 1);
            failures.extend(report.outcome.is_failure().then(|| report.to_string()));
        }
    }
    let [randoms, fewer, merges] = if emulated { [15, 6, 3] } else { [60, 20, 9] };
    for n in 0..randoms {
        let case = random::any(7, n, random::Limits::SMALL);
        let report = check_case(&cpu, &case, DType::COMMON[n as usize % 3], n);
        failures.extend(report.outcome.is_failure().then(|| report.to_string()));
    }
    for (n, law) in properties::ALL.iter().enumerate() {
        for dtype in types(n, &DType::COMMON) {
            let outcome = law.check(&cpu, dtype, 1);
            failures.extend(outcome.is_failure().then(|| format!("{} ({dtype}): {outcome}", law.name)));
        }
    }
    failures.extend(merge::failures(&cpu, merges as usize, 1));
    failures.extend(append::failures(&cpu, &DType::COMMON, 1));
    failures.extend(quantise::failures(&cpu, &DType::COMMON, 1));
    failures.extend(narrow::failures(&cpu, &narrow::cases(), 1));
    failures.extend(narrow::failures(&cpu, &narrow::named(cost), 1));
    failures.extend(cache::failures(&cpu, &cache::cases(cost), 1, true));
    failures.extend(cache::broken_laws(&cpu, 1));
    let random: Vec<_> = (0..fewer).map(|n| cache::random(3, n, random::Limits::SMALL)).collect();
    failures.extend(cache::failures(&cpu, &random, 1, true));
    if cost == Cost::Small {
        let shapes = [([1, 2, 1, 512, 512], 64), ([1, 1, 1, 512, 2048], 128), ([2, 4, 2, 33, 77], 80)];
        failures.extend(narrow::end_to_end(&cpu, &shapes));
    }
    let dtypes = if cost == Cost::Small { &DType::COMMON[..] } else { &[DType::BF16] };
    failures.extend(moe::failures(&cpu, dtypes, 1));
    failures.extend(moe::gradient_failures(&cpu, dtypes, 1));
    failures.extend(grouped::failures(&cpu, dtypes, 1));
    for n in 0..fewer {
        let case = grouped::random(3, n);
        let outcome = grouped::check(&cpu, &case, dtypes[n as usize % dtypes.len()], n);
        failures.extend(outcome.is_failure().then(|| format!("{case}: {outcome}")));
    }
    assert!(failures.is_empty(), "{level}: {} failures\n{}", failures.len(), failures.join("\n"));
}

at_every_level!(check);

/// Gradients of experts have the same bits whatever the number of threads.
#[test]
fn gradients_of_experts_do_not_depend_on_threads() {
    let [one, three] = [1, 3].map(|threads| Cpu::with_threads(threads).unwrap());
    for case in moe::gradient_cases() {
        let [first, second] = [&one, &three].map(|cpu| moe::gradient_bits(cpu, &case, 5).unwrap());
        assert_eq!(first, second, "{case}");
    }
}
