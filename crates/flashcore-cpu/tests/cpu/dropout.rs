//! Dropout with each SIMD level forced in turn: every case, forward and backward, and bits that do not depend on threads.

use flashcore_core::{Element, Mask};
use flashcore_cpu::{Cpu, SimdLevel};
use flashcore_testkit::{
    Case, Outcome, Tag,
    backward::{self, Wish},
    bench::Bench,
    cases, check_case,
};
use half::bf16;

/// Runs every case on `level`, types and wishes in turn; says so where the machine lacks it. The suites of the level that users
/// get have them in every type.
fn check(level: SimdLevel) {
    let Ok(cpu) = Cpu::with_threads(2).unwrap().with_simd(level) else {
        println!("this machine has no {level}: nothing checked");
        return;
    };
    let mut failures = Vec::new();
    for (n, case) in cases::tagged(Tag::Dropout).iter().enumerate() {
        let dtype = case.dtypes[n % case.dtypes.len()];
        let report = check_case(&cpu, case, dtype, 1);
        failures.extend((report.outcome != Outcome::Passed).then(|| report.to_string()));
        let gradients = backward::Case::new(case.clone(), [Wish::Plain, Wish::GivenSums][n / 2 % 2]);
        let outcome = backward::check(&cpu, &gradients, dtype, 1);
        failures.extend((outcome != Outcome::Passed).then(|| format!("{gradients} {dtype}: {outcome}")));
    }
    assert!(failures.is_empty(), "{level}: {} failures\n{}", failures.len(), failures.join("\n"));
}

at_every_level!(check);

/// Tiles, rows by themselves over split keys, and few heads of many key blocks, so that threads meet in one head.
fn bits_follow_no_threads<T: Element>() {
    let case = |shape, dim| Case {
        dropout: Some(0.17),
        mask: Mask::CAUSAL,
        ..Case::new(Tag::Dropout, "threads", shape, dim)
    };
    for case in [case([1, 3, 1, 200, 300], 64), case([2, 8, 2, 1, 3000], 48), case([1, 1, 1, 200, 900], 40)] {
        let forward = Bench::<T>::new(&case, 1).unwrap();
        let gradients = backward::Case::new(case.clone(), Wish::Plain);
        let gradients = backward::bench::Bench::<T>::new(&gradients, 1).unwrap();
        for level in SimdLevel::ALL.into_iter().filter(|level| level.is_available()) {
            let on = |threads| Cpu::with_threads(threads).unwrap().with_simd(level).unwrap();
            let run = |threads| (forward.run(&on(threads), true), gradients.run::<T>(&on(threads)));
            let ((one, grads), what) = (run(1), format!("{} {case} {level}", T::DTYPE));
            let (one, grads) = (one.unwrap(), grads.unwrap());
            for threads in [2, 3, 8] {
                let (other, others) = run(threads);
                assert_eq!(one.first_difference(&other.unwrap()), None, "{what}, {threads} threads");
                assert_eq!(grads.difference(&others.unwrap()), None, "{what}, {threads} threads");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    bits_follow_no_threads::<f32>();
    bits_follow_no_threads::<bf16>();
}
