//! Two bundles held against each other: what makes them differ, and what does not.

use std::sync::LazyLock;

use flashcore_core::{DType, Mask};
use flashcore_lab::{
    competitor::Place,
    protocol::{Mode, Protocol},
    record::{Measurement, Record, Stretch},
    repro::{Bundle, Comparison, Manifest, compare},
    task::Task,
};
use flashcore_testkit::Rng;
use serde_json::{Value, json};

fn bundle() -> Bundle {
    static MANIFEST: LazyLock<Manifest> = LazyLock::new(|| Manifest::new(Value::Null).unwrap());
    let groups = json!([{ "group": "named", "passed": 5, "failed": 0 }]);
    let verify = json!({ "pass": true, "backends": [{ "backend": "cpu", "groups": groups }] });
    Bundle { manifest: MANIFEST.clone(), doctor: json!({}), verify, bench: record(1e-3, 1) }
}

fn record(seconds: f64, seed: u64) -> Record {
    let mut rng = Rng::new(seed);
    let times = (0..200).map(|_| seconds * (1.0 + 0.01 * f64::from(rng.normal()))).collect();
    let task = Task::square(DType::F32, [1, 2, 64, 64], Mask::NONE).unwrap();
    let mut record = Record::new(Protocol::new(Mode::Sustained, 0.1), None);
    record.measurements.push(Measurement {
        stretches: vec![Stretch { seconds: times, calls: 1, again: false, noise: None }],
        ..Measurement::new(&task, "cpu", Place::Cpu)
    });
    record
}

fn compared(change: impl FnOnce(&mut Bundle)) -> Comparison {
    let mut now = Bundle { bench: record(1e-3, 2), ..bundle() };
    change(&mut now);
    compare(&bundle(), &now, 0.05).unwrap()
}

#[track_caller]
fn differs(change: impl FnOnce(&mut Bundle), words: &str) {
    let found = compared(change);
    assert!(found.differences.iter().any(|text| text.contains(words)), "{words}: {found:?}");
}

#[test]
fn what_changed_is_named() {
    let same = compared(|_| {});
    assert!(same.pass() && same.remarks.is_empty() && !same.is_slower(), "{same:?}");
    assert!(same.kernels >= 36 && same.groups == 1 && same.rulings.len() == 1, "{same:?}");
    let kernels = |run: &mut Bundle, hash: Option<&str>| {
        let kernels = &mut run.manifest.kernels;
        let (first, _) = kernels.pop_first().unwrap();
        kernels.extend(hash.map(|hash| (first, hash.to_owned())));
    };
    differs(|run| kernels(run, Some("0")), "the PTX of");
    differs(|run| kernels(run, None), "is missing");
    differs(|run| drop(run.manifest.kernels.insert("more".to_owned(), "0".to_owned())), "was missing");
    differs(|run| run.verify["backends"][0]["groups"][0]["failed"] = 1.into(), "is 5 passed and 1 failed");
    differs(|run| run.bench = record(1.2e-3, 3), "times the time of the baseline");
    differs(|run| run.bench.measurements[0].competitor = "abacus".to_owned(), "abacus");
    assert!(compared(|run| run.bench = record(0.8e-3, 3)).pass(), "faster is no fault");
    assert!(compared(|run| run.bench = record(1.2e-3, 3)).is_slower());
}

#[test]
fn another_machine_is_said_and_not_failed() {
    let found = compared(|run| {
        run.manifest.environment.insert("GPU".to_owned(), "NVIDIA H200".to_owned());
        run.bench.machine.gpu = Some("NVIDIA H200".to_owned());
        run.bench.measurements[0].stretches[0].seconds = vec![9.0; 100];
        let group = json!({ "group": "named", "passed": 5, "failed": 0 });
        run.verify["backends"].as_array_mut().unwrap().push(json!({ "backend": "cuda", "groups": [group] }));
    });
    assert!(found.pass() && found.rulings.is_empty(), "{found:?}");
    let text = found.remarks.join("\n");
    assert!(
        ["H200", "times are not compared", "cuda/named"].iter().all(|words| text.contains(words)),
        "{text}"
    );
}

#[test]
fn answers_that_cannot_be_are_refused() {
    let error = compare(&bundle(), &Bundle { verify: json!([]), ..bundle() }, 0.05).unwrap_err();
    assert!(error.contains("verify"), "{error}");
}
