//! Two bundles held against each other: what makes them differ, and what does not.

use std::sync::LazyLock;

use flashcore_core::{DType, Mask};
use flashcore_lab::{
    protocol::{Mode, Protocol},
    record::{Measurement, Record, Stretch},
    repro::{
        bundle::{BENCH, DOCTOR, Parts, VERIFY},
        compare::{Comparison, compare},
        manifest::{Manifest, Settings},
    },
    task::Task,
};
use flashcore_testkit::Rng;
use serde_json::json;

/// What a run is like.
#[derive(Clone)]
struct Run {
    manifest: Manifest,
    verify: serde_json::Value,
    record: Record,
}

fn run() -> Run {
    static MANIFEST: LazyLock<Manifest> = LazyLock::new(manifest);
    let groups = json!([{ "group": "named", "passed": 5, "failed": 0 }]);
    let verify = json!({ "pass": true, "backends": [{ "backend": "cpu", "groups": groups }] });
    Run { manifest: MANIFEST.clone(), verify, record: record(1e-3, 1) }
}

fn manifest() -> Manifest {
    let settings = Settings {
        backend: "cpu".to_owned(),
        quick: true,
        checks: None,
        suite: "cpu".to_owned(),
        filter: None,
        seconds: 0.1,
        seed: 0,
    };
    Manifest::new(settings).unwrap()
}

fn record(seconds: f64, seed: u64) -> Record {
    let protocol = Protocol::new(Mode::Sustained, 0.1);
    let mut rng = Rng::new(seed);
    let times = (0..200).map(|_| seconds * (1.0 + 0.01 * f64::from(rng.normal()))).collect();
    let task = Task::square(DType::F32, [1, 2, 64, 64], Mask::NONE).unwrap();
    let mut record = Record::new(protocol, None);
    record.measurements.push(Measurement {
        task: task.spec().clone(),
        arm: "cpu".to_owned(),
        place: "cpu".to_owned(),
        kernel: None,
        finding: None,
        refused: None,
        stretches: vec![Stretch { seconds: times, calls: 1, again: false, weather: None }],
    });
    record
}

impl Run {
    fn parts(&self) -> Parts {
        let parts = [
            (DOCTOR, b"{}".to_vec()),
            (VERIFY, self.verify.to_string().into_bytes()),
            (BENCH, serde_json::to_vec(&self.record).unwrap()),
        ];
        let parts = parts.map(|(name, bytes)| (name.to_owned(), bytes));
        self.manifest.clone().seal(parts.into()).unwrap().1
    }
}

fn compared(change: impl FnOnce(&mut Run)) -> Comparison {
    let then = run();
    let mut now = then.clone();
    now.record = record(1e-3, 2);
    change(&mut now);
    compare(&then.parts(), &now.parts(), 0.05).unwrap()
}

#[track_caller]
fn differs(change: impl FnOnce(&mut Run), words: &str) {
    let found = compared(change);
    assert!(found.differences.iter().any(|text| text.contains(words)), "{words}: {found:?}");
}

#[test]
fn the_same_is_the_same() {
    let found = compared(|_| {});
    assert!(found.pass() && found.remarks.is_empty(), "{found:?}");
    assert!(found.kernels >= 36 && found.groups == 1 && found.rulings.len() == 1, "{found:?}");
}

#[test]
fn what_changed_is_named() {
    let first = |run: &Run| run.manifest.kernels.keys().next().unwrap().clone();
    differs(|run| drop(run.manifest.kernels.insert(first(run), "0".repeat(64))), "the PTX of");
    differs(|run| drop(run.manifest.kernels.remove(&first(run))), "is gone");
    differs(|run| drop(run.manifest.kernels.insert("more".to_owned(), "0".repeat(64))), "new kernel");
    differs(|run| run.verify["backends"][0]["groups"][0]["failed"] = 1.into(), "now 5 and 1");
    differs(|run| run.verify["backends"][0]["groups"][0]["passed"] = 4.into(), "now 4 and 0");
    differs(|run| run.verify["pass"] = false.into(), "failed now");
    differs(|run| run.record = record(1.2e-3, 3), "times the time of the baseline");
    differs(|run| run.record.measurements[0].arm = "abacus".to_owned(), "abacus");
    assert!(compared(|run| run.record = record(0.8e-3, 3)).pass(), "faster is no fault");
    let slow = |more: fn(&mut Run)| {
        compared(|run| {
            run.record = record(1.2e-3, 3);
            more(run);
        })
    };
    assert!(slow(|_| {}).is_slower() && !slow(|run| run.verify["pass"] = false.into()).is_slower());
    assert!(!compared(|_| {}).is_slower());
}

#[test]
fn another_machine_is_said_and_not_failed() {
    let found = compared(|run| {
        let machine = &mut run.manifest.machine;
        (machine.gpu, machine.cpu) = (Some("NVIDIA H200".to_owned()), "another".to_owned());
        run.record.machine = machine.clone();
        run.record.measurements[0].stretches[0].seconds = vec![9.0; 100];
        run.verify["backends"] = json!([
            run.verify["backends"][0],
            { "backend": "cuda", "groups": [{ "group": "named", "passed": 5, "failed": 0 }] },
        ]);
    });
    assert!(found.pass() && found.rulings.is_empty(), "{found:?}");
    let text = found.remarks.join("\n");
    assert!(
        text.contains("H200") && text.contains("times are not compared") && text.contains("cuda/named"),
        "{text}"
    );
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let (then, mut now) = (run(), run());
    now.verify = json!([]);
    assert!(compare(&then.parts(), &now.parts(), 0.05).unwrap_err().to_string().contains("verify.json"));
    let mut parts = run().parts();
    parts.remove(BENCH);
    assert!(compare(&then.parts(), &parts, 0.05).is_err());
}
