//! Comparisons read out of synthetic records: ratios for the same work, and what is missing.

use flashcore_core::{DType, Mask};
use flashcore_lab::{
    comparison::{Comparison, tasks},
    competitor::Place,
    protocol::{Mode, Protocol},
    record::{Measurement, Record, Stretch},
    suites::Suite,
    task::Task,
};

fn task(seq: usize) -> Task {
    Task::square(DType::F16, [1, 2, seq, 32], Mask::NONE).unwrap()
}

/// A record in which competitors took these times on these tasks.
fn record(times: &[(&Task, &str, f64)]) -> Record {
    let protocol = Protocol::new(Mode::Interleaved, 0.1);
    let measured = |&(task, competitor, seconds): &(&Task, &str, f64)| Measurement {
        stretches: vec![Stretch { seconds: vec![seconds; 40], calls: 1, again: false, noise: None }],
        ..Measurement::new(task, competitor, Place::Gpu)
    };
    let measurements = times.iter().map(measured).collect();
    Record { measurements, complete: true, ..Record::new(protocol, None) }
}

#[track_caller]
fn check(comparison: &Comparison, record: &Record, ratio: Option<f64>, met: Option<bool>) {
    let compared = comparison.read(record, "cuda");
    let rounded = compared.ratio.map(|ratio| (ratio.point * 1e6).round() / 1e6);
    assert_eq!((rounded, compared.met()), (ratio, met), "{compared:?}");
}

#[test]
fn times_are_compared_for_the_same_work() {
    let (long, short) = (task(65), task(64));
    let plain = Comparison::of_ours("lengths", long.clone(), short.clone(), 1.1);
    let both = record(&[(&short, "cuda", 1e-3), (&long, "cuda", 1.2e-3)]);
    check(&plain, &both, Some(1.2), Some(false));
    check(&Comparison { work: 1.25, ..plain.clone() }, &both, Some(0.96), Some(true));
    check(&Comparison { wanted: 1.2, ..plain.clone() }, &both, Some(1.2), Some(true));
    check(&plain, &record(&[(&long, "cuda", 1e-3)]), None, None);
    check(&plain, &record(&[(&long, "cuda", 1e-3), (&short, "torch-cudnn", 1e-3)]), None, None);
}

#[test]
fn peers_are_compared_on_the_same_task() {
    let comparison =
        Comparison { peer: Some("torch-flex"), ..Comparison::of_ours("softcap", task(64), task(64), 1.0) };
    let both = record(&[(&task(64), "torch-flex", 2e-3), (&task(64), "cuda", 1e-3)]);
    check(&comparison, &both, Some(0.5), Some(true));
    let compared = comparison.read(&both, "cuda");
    assert_eq!((compared.against.as_str(), compared.against_p50_us), ("torch-flex", Some(2000.0)));
}

#[test]
fn what_is_compared_is_measured_once_and_side_by_side() {
    let pair = |a, b| Comparison::of_ours("lengths", task(a), task(b), 1.1);
    let lengths: Vec<_> = tasks(&[pair(65, 128), pair(96, 128), pair(129, 256)])
        .iter()
        .map(|t| t.attention().unwrap().q[2])
        .collect();
    assert_eq!(lengths, [128, 65, 96, 256, 129]);
    for suite in [Suite::OPTIONS, Suite::SWEEP] {
        let (all, needed) = (suite.comparisons(DType::F16).unwrap(), suite.tasks(DType::F16).unwrap());
        assert!(suite.compares() && all.iter().all(|one| needed.contains(&one.task)), "{}", suite.name);
    }
}

#[test]
fn a_record_with_sinks_is_read_again() {
    let sinks = task(64).changed(|spec| spec.sinks = true).unwrap();
    let written = record(&[(&sinks, "cuda", 1e-3), (&task(64), "cuda", 1e-3)]);
    let text = serde_json::to_vec(&written).unwrap();
    assert_eq!(Record::parse(&text).unwrap(), written);
}
