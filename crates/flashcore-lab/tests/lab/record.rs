//! Result files: what was written is read back, and whatever is not a result file is refused in plain words.

use flashcore_core::{DType, Mask};
use flashcore_lab::{
    ceiling::Ceiling,
    competitor::Place,
    protocol::{Mode, Protocol},
    record::{Measurement, Record, Stretch},
    task::Task,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn record() -> Record {
    let protocol = Protocol::new(Mode::Sustained, 0.5);
    let task = Task::square(DType::F16, [1, 2, 64, 64], Mask::CAUSAL).unwrap();
    let stretch = Stretch { seconds: vec![1e-3, 2e-3, 1.5e-3], calls: 1, again: false, noise: None };
    let kernel = Some("prefill".to_owned());
    let measurement =
        Measurement { kernel, stretches: vec![stretch], ..Measurement::new(&task, "cpu", Place::Cpu) };
    Record { measurements: vec![measurement], complete: true, ..Record::new(protocol, None) }
}

fn text() -> String {
    serde_json::to_string(&record()).unwrap()
}

#[test]
fn what_is_saved_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let record = record();
    record.save(&path).unwrap();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    let [mode, usual] = [&path, &plain].map(|path| path.metadata().unwrap().permissions());
    assert_eq!(mode, usual, "others may read it too");
    std::fs::remove_file(plain).unwrap();
    record.save(&path).unwrap();
    assert_eq!(Record::load(&path).unwrap(), record);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary files are left");
    let summary = record.measurements[0].summary(&record.protocol).unwrap();
    assert_eq!((summary.samples, summary.min, summary.max), (2, 1.5e-3, 2e-3), "the second half counts");
    assert!(record.save(&folder.path().join("no/such/folder.json")).is_err());
    assert!(Record::load(&folder.path().join("missing.json")).is_err());
}

#[test]
fn more_than_a_device_can_do_is_doubted() {
    let flops = Task::square(DType::F16, [1, 2, 64, 64], Mask::CAUSAL).unwrap().flops();
    let doubts = |least_seconds: f64| {
        let (place, dtype, how) = ("cpu".to_owned(), "f16".to_owned(), String::new());
        let ceiling = Ceiling { place, dtype, how, copy: f64::MAX, matrix: flops / least_seconds };
        Record { ceilings: vec![ceiling], ..record() }.doubts()
    };
    assert!(matches!(&doubts(1e-2)[..], [doubt] if doubt.contains("of the roof on 1x2x64x64 f16 causal")));
    assert_eq!(doubts(1e-3), Vec::<String>::new());
}

/// The page on the lab names every field.
#[test]
fn the_format_is_documented() {
    let (_, page) = include_str!("../../../../docs/lab.md").split_once("## The result file").unwrap();
    let json = serde_json::to_value(record()).unwrap();
    let parts = ["", "/machine", "/protocol", "/measurements/0", "/measurements/0/stretches/0"];
    for field in parts.iter().flat_map(|part| json.pointer(part).unwrap().as_object().unwrap().keys()) {
        assert!(page.contains(&format!("`{field}`")) || page.contains(&format!("`{field}[]`")), "{field}");
    }
}

/// Changes one place of a good file, by JSON pointer; a new key is added.
fn with(pointer: &str, value: Value) -> String {
    let mut json: Value = serde_json::from_str(&text()).unwrap();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match json.pointer_mut(parent).unwrap() {
        Value::Object(object) => drop(object.insert(key.to_owned(), value)),
        Value::Array(array) => array[key.parse::<usize>().unwrap()] = value,
        other => panic!("{other} has no parts"),
    }
    json.to_string()
}

#[track_caller]
fn refused(text: &str, words: &str) {
    let message = Record::parse(text.as_bytes()).unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
}

#[test]
fn hostile_files_are_refused_in_plain_words() {
    refused("", "damaged");
    refused("[]", "damaged");
    refused("{}", "damaged");
    refused(&"[".repeat(100_000), "damaged");
    refused(&format!("{{\"schema\":{}", "{\"a\":".repeat(100_000)), "damaged");
    refused(&with("/schema", json!("something-else")), "not a result");
    refused(&with("/version", json!(2)), "version 2");
    refused(&with("/version", json!(-1)), "damaged");
    refused(&with("/surprise", json!(1)), "surprise");
    refused(&with("/measurements/0/surprise", json!(1)), "surprise");
    refused(&with("/machine/cpu", json!("\u{1b}[2J")), "control characters");
    refused(&with("/measurements/0/arm", json!("x".repeat(5000))), "too long");
    let time = "/measurements/0/stretches/0/seconds/1";
    for bad in [json!(0.0), json!(-1e-3), json!(1e9), json!(null), json!("fast"), json!([])] {
        refused(&with(time, bad), "damaged");
    }
    refused(&with("/measurements/0/task/q", json!([1, 0, 64, 64])), "damaged");
    refused(&with("/measurements/0/task/dtype", json!("f13")), "f13");
    refused(&with("/measurements/0/task/q", json!([u64::MAX, 1, 1, 1])), "damaged");
    refused(&with("/protocol/seconds", json!(-1)), "damaged");
    refused(&with("/protocol/mode", json!("eternal")), "damaged");
}

#[test]
fn every_truncation_is_refused() {
    let text = text();
    for end in 0..text.len() {
        assert!(Record::parse(&text.as_bytes()[..end]).is_err(), "{end} of {} bytes", text.len());
    }
    assert!(Record::parse(text.as_bytes()).is_ok());
}

#[test]
fn a_file_too_large_is_not_parsed() {
    let bytes = vec![b' '; (64 << 20) + 1];
    assert!(Record::parse(&bytes).unwrap_err().to_string().contains("64 MiB"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_is_an_error_or_harmless(at in 0usize..10_000, byte in any::<u8>()) {
        let mut bytes = text().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(record) = Record::parse(&bytes) {
            let summary = record.measurements.first().and_then(|m| m.summary(&record.protocol));
            prop_assert!(summary.is_none_or(|s| s.p50 > 0.0 && s.p50.is_finite()));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Record::parse(&bytes).is_err());
    }
}
