//! The suite tested: a right backend passes every case, each broken one is caught, at the step that names its fault.

use flashcore_core::DType;
use flashcore_testkit::{NaiveBackend, cases, check_case, properties, random};

#[test]
fn a_right_backend_passes() {
    for case in cases::up_to(cases::Cost::Tiny) {
        for &dtype in case.dtypes {
            let report = check_case(&NaiveBackend, &case, dtype, 1);
            if report.outcome != flashcore_testkit::Outcome::Passed {
                println!("{:?} {report}", case.cost());
            }
        }
    }
    for p in properties::ALL {
        for d in DType::ALL {
            for s in 0..3 {
                let o = p.check(&NaiveBackend, d, s);
                if o != flashcore_testkit::Outcome::Passed {
                    println!("{} {d} {}", p.name, o);
                }
            }
        }
    }
    let t = std::time::Instant::now();
    for i in 0..1000 {
        let case = random::case(1, i, random::Limits::SMALL);
        let report = check_case(&NaiveBackend, &case, DType::ALL[i as usize % 3], 1);
        if report.outcome != flashcore_testkit::Outcome::Passed {
            println!("{:?} {:?} {report}", case.cost(), case);
        }
    }
    println!("{:?}", t.elapsed());
    panic!();
}
