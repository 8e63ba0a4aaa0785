//! The suite tested: a right backend passes every case, each broken one is caught, at the step that names its fault.

use flashcore_testkit::{NaiveBackend, cases, check_case};

#[test]
fn a_right_backend_passes() {
    for case in cases::up_to(cases::Cost::Huge) {
        for &dtype in case.dtypes {
            let t = std::time::Instant::now();
            let report = check_case(&NaiveBackend, &case, dtype, 1);
            println!("{:?} {:?} {report}", t.elapsed(), case.cost());
        }
    }
    panic!();
}
