//! The report of synthetic runs: what is compared, what is marked, and that nothing in a record can break the page.

use flashcore_core::{DType, Mask};
use flashcore_lab::{
    ceiling::Ceiling,
    competitor::Place,
    judge::Finding,
    protocol::{Mode, Protocol},
    record::{Measurement, Record, Stretch},
    report::{
        Report, ReportError,
        data::{Run, change},
    },
    suites::Suite,
    task::Task,
};
use flashcore_testkit::Kind;
use proptest::prelude::*;

/// A competitor that takes `times` in turn, or none.
fn measurement(task: &Task, competitor: &str, times: &[f64]) -> Measurement {
    let stretch = |times: &[f64]| Stretch { seconds: times.to_vec(), calls: 1, again: false, noise: None };
    Measurement {
        kernel: Some(format!("{competitor}-kernel")),
        finding: Some(Finding {
            max_error: 1e-4,
            relative_rms: Some(1e-4),
            tolerance: 1e-3,
            rows: 64,
            wrong: None,
        }),
        stretches: if times.is_empty() { Vec::new() } else { vec![stretch(times)] },
        ..Measurement::new(task, competitor, Place::Cpu)
    }
}

fn record(measurements: Vec<Measurement>) -> Record {
    let protocol = Protocol::new(Mode::Interleaved, 0.5);
    let mut record = Record { measurements, complete: true, ..Record::new(protocol, None) };
    record.machine.cpu = "a processor".to_owned();
    record
}

fn tasks() -> Vec<Task> {
    [64, 128, 256].map(|s| Task::square(DType::F16, [1, 2, s, 32], Mask::NONE).unwrap()).to_vec()
}

/// Ours takes a millisecond; the peer what `theirs` says for each length.
fn against(theirs: [f64; 3]) -> Record {
    let pair = |(task, time): (Task, f64)| {
        [measurement(&task, "naive", &[time; 8]), measurement(&task, "cpu", &[1e-3; 8])]
    };
    record(tasks().into_iter().zip(theirs).flat_map(pair).collect())
}

fn run(name: &str, record: Record) -> Run {
    Run::new(name.to_owned(), record).unwrap()
}

/// The page and all pictures.
fn everything(report: &Report) -> String {
    report.pictures().into_iter().fold(report.html(), |text, (file, svg)| text + &file + &svg)
}

#[test]
fn leads_are_counted_and_misses_marked() {
    let report = Report::new(vec![run("r", against([2e-3, 1e-3, 5e-4]))]).unwrap();
    let lead = &report.series()[0][0].leads()[0];
    assert_eq!((lead.peer.as_str(), lead.problems, lead.faster, lead.slower), ("naive", 3, 1, 1));
    assert!((lead.mean - 1.0).abs() < 1e-12 && lead.least == 0.5 && lead.most == 2.0, "{lead:?}");
    let page = report.html();
    for words in [">2.00<", ">≈ 1.00<", ">▼ 0.50<", "1.00 ms", "cpu-kernel", "10 %", "a processor"] {
        assert!(page.contains(words), "{words} is missing");
    }
}

#[test]
fn several_peers_are_summed_up_by_the_best_of_each_problem() {
    let mut record = against([2e-3, 1.5e-3, 1.2e-3]);
    let third = |task: &Task, time: f64| measurement(task, "other", &[time; 8]);
    record
        .measurements
        .extend(tasks().iter().zip([1.4e-3, 3e-3, 3e-3]).map(|(task, time)| third(task, time)));
    let report = Report::new(vec![run("r", record)]).unwrap();
    let leads = report.series()[0][0].leads();
    let names: Vec<_> = leads.iter().map(|lead| lead.peer.as_str()).collect();
    assert_eq!(names, ["naive", "other", "best peer"]);
    assert!((leads[2].least - 1.2).abs() < 1e-9 && (leads[2].most - 1.5).abs() < 1e-9, "{leads:?}");
    assert!(report.html().contains("Times as fast as the best peer"));
    let text = report.markdown();
    assert!(text.contains("the best of naive, other, by sequence length"), "{text}");
    assert!(text.contains("| head dim | mask | 64 | 128 | 256 |\n| --- | --- | --- | --- | --- |"), "{text}");
    assert!(text.contains("| 32 | full | 1.40 | 1.50 | 1.20 |"), "{text}");
}

#[test]
fn kinds_of_data_are_told_with_error_and_time() {
    let task = tasks()[0].clone().of_kind(Kind::Sharp);
    let mut all = [("naive", 2e-3), ("cpu", 1e-3), ("wrong", 1e-4)]
        .map(|(name, time)| measurement(&task, name, &[time; 8]));
    all[1].finding.as_mut().unwrap().relative_rms = Some(1.5e-4);
    let wrong = all[2].finding.as_mut().unwrap();
    (wrong.relative_rms, wrong.wrong) = (Some(1e-9), Some("off by 3".to_owned()));
    let report = Report::new(vec![run("r", record(all.to_vec()))]).unwrap();
    let ours = &report.series()[0][0].standings[1];
    assert_eq!(
        (ours.kind, ours.speed_of_best),
        ("sharp", Some(2.0)),
        "whoever is wrong is no measure: {ours:?}"
    );
    let row = "| 1x2x64x32 f16 | sharp | 1.50e-4 / 1.00e-4 (1.50) | 1.00e-4 / 1.00e-4 (1.00) | 2.00 |";
    assert!(report.markdown().contains(row), "{}", report.markdown());
    assert!(report.html().contains("Errors beside the best peer"));
}

#[test]
fn whoever_was_not_timed_is_said_with_the_reason() {
    let mut record = against([2e-3; 3]);
    record.measurements[0].refused = Some("too long for it".to_owned());
    record.measurements[2].finding.as_mut().unwrap().wrong = Some("off by 3".to_owned());
    [0, 2].into_iter().for_each(|n| record.measurements[n].stretches.clear());
    let report = Report::new(vec![run("r", record)]).unwrap();
    assert_eq!(report.series()[0][0].leads()[0].problems, 1);
    let page = report.html();
    assert!(page.contains("not timed: too long for it") && page.contains("not timed: off by 3"));
}

#[test]
fn runs_of_the_same_problems_make_a_history() {
    let at = |created: &str, commit: &str, ours: f64| {
        let mut record = against([2e-3; 3]);
        for m in record.measurements.iter_mut().filter(|m| m.competitor == "cpu") {
            m.stretches[0].seconds = vec![ours; 8];
        }
        (record.created, record.commit) = (created.to_owned(), Some(commit.repeat(5)));
        run(commit, record)
    };
    let other = run("other", record(vec![measurement(&tasks()[0], "cpu", &[1e-3; 4])]));
    let late = at("2026-03-02T00:00:00Z", "bbbbbbbb", 4e-3);
    let report = Report::new(vec![late, other, at("2026-03-01T00:00:00Z", "aaaaaaaa", 1e-3)]).unwrap();
    let sorted: Vec<Vec<_>> =
        report.series().iter().map(|series| series.iter().map(|run| run.name.as_str()).collect()).collect();
    assert_eq!(sorted, [vec!["aaaaaaaa", "bbbbbbbb"], vec!["other"]]);
    let series = &report.series()[0];
    let (mean, worst, _) = change(&series[0], &series[1]).unwrap();
    assert!((mean - 4.0).abs() < 1e-9 && (worst - 4.0).abs() < 1e-9, "{mean} {worst}");
    let page = report.html();
    assert!(page.contains(">History<") && page.contains(">aaaaaaa<") && page.contains(">4.00×<"));
    let files: Vec<_> = report.pictures().into_iter().map(|(file, _)| file).collect();
    let wanted =
        ["bbbbbbbb-tflops.svg", "bbbbbbbb-latency.svg", "bbbbbbbb-roofline.svg", "bbbbbbbb-history.svg"];
    assert_eq!(files[..4], wanted);
}

#[test]
fn suites_are_known_by_their_problems() {
    let all = |suite: Suite| suite.tasks(DType::F16).unwrap();
    for (tasks, wanted) in [
        (all(Suite::FORWARD), "forward, f16"),
        (all(Suite::SMALL)[..2].to_vec(), "part of small, f16"),
        (tasks(), "3 problems, f16"),
    ] {
        let measured = tasks.iter().map(|task| measurement(task, "cpu", &[1e-3; 4])).collect();
        assert_eq!(run("r", record(measured)).subject(), wanted);
    }
}

#[test]
fn text_of_a_record_never_becomes_markup() {
    let evil = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&lt;";
    let mut record = against([2e-3; 3]);
    let ceiling =
        Ceiling { place: "cpu".into(), dtype: "f16".into(), copy: 1e10, matrix: 1e11, how: evil.into() };
    record.ceilings = vec![ceiling];
    record.warnings = vec![evil.to_owned()];
    (record.commit, record.created, record.flashcore) =
        (Some(evil.to_owned()), evil.to_owned(), evil.to_owned());
    (record.machine.cpu, record.machine.peers) = (evil.to_owned(), Some(evil.to_owned()));
    for (n, m) in record.measurements.iter_mut().enumerate() {
        m.kernel = Some(evil.to_owned());
        m.refused = (n == 0).then(|| evil.to_owned());
        if m.competitor == "naive" {
            m.competitor = evil.to_owned();
        }
    }
    let report = Report::new(vec![run(evil, record.clone()), run(evil, record)]).unwrap();
    let text = everything(&report);
    assert!(!text.contains("<script") && !text.contains("<img"), "markup got through");
    assert!(text.contains("&lt;script&gt;") && text.contains("&amp;lt;"));
    let names = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    assert!(report.pictures().iter().all(|(file, _)| file.chars().all(names)));
}

#[test]
fn runs_that_cannot_be_shown_are_refused() {
    assert!(matches!(Report::new(Vec::new()), Err(ReportError::Nothing)));
    assert!(matches!(Run::new("r".into(), record(Vec::new())), Err(ReportError::Empty { .. })));
    let many = record(vec![measurement(&tasks()[0], "cpu", &[1e-3]); 4001]);
    assert!(matches!(Run::new("r".into(), many), Err(ReportError::TooMuch { count: 4001, .. })));
    let few = vec![run("r", record(vec![measurement(&tasks()[0], "cpu", &[])])); 501];
    assert!(matches!(Report::new(few), Err(ReportError::TooMany(501))));
}

/// Whatever a record may hold: any shape, any time, anybody missing.
fn any_record() -> impl Strategy<Value = Record> {
    let seq = prop::sample::select(vec![0usize, 1, 64, 128, i32::MAX as usize]);
    let time = prop::sample::select(vec![1e-300, 1e-9, 1e-3, 1.0, 1e5]);
    let competitor = prop::sample::select(vec!["cpu", "cuda", "naive", "other"]);
    let shape = (1usize..4, 1usize..4, seq, 1usize..300);
    let one = (shape, prop::collection::vec(time, 0..5), competitor, any::<bool>()).prop_map(
        |((batch, heads, seq, dim), times, competitor, causal)| {
            let mask = if causal { Mask::CAUSAL } else { Mask::NONE };
            let task = Task::square(DType::F32, [batch, heads, seq, dim], mask).unwrap();
            measurement(&task, competitor, &times)
        },
    );
    let roof = (any::<bool>(), prop::sample::select(vec![1e-300, 1.0, 1e12, 1e300]));
    (prop::collection::vec(one, 1..8), roof).prop_map(|(measurements, (roof, matrix))| {
        let (place, dtype, how) = ("cpu".to_owned(), "f32".to_owned(), "somehow".to_owned());
        let ceiling = Ceiling { place, dtype, copy: 1e9, matrix, how };
        Record { ceilings: roof.then_some(ceiling).into_iter().collect(), ..record(measurements) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_record_has_a_page(record in any_record()) {
        let report = Report::new(vec![run("a", record.clone()), run("b", record)]).unwrap();
        let text = everything(&report);
        for broken in ["NaN", "\"inf", " inf", "-inf"] {
            prop_assert!(!text.contains(broken), "{broken} in the page");
        }
    }
}
