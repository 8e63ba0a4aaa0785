//! `repro` and `repro --check` as users see them, end to end on the CPU.

use std::{fs, path::PathBuf};

use crate::workplace::{Workplace, expect};

const REPRO: &str =
    "repro --backend cpu --checks zero-length/ --suite cpu --filter 1x2x64x64 --seconds 0.5 --out artifacts";

/// The bundle in `artifacts`.
fn bundle(place: &Workplace) -> PathBuf {
    let files = fs::read_dir(place.path("artifacts")).unwrap().map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| path.to_string_lossy().ends_with(".json.gz")).unwrap()
}

#[test]
fn a_bundle_is_packed_and_comes_out_the_same() {
    let place = Workplace::new();
    let made = place.run(&format!("{REPRO} --json"));
    let json = made.json();
    assert_eq!((made.code, &json["pass"]), (0, &true.into()), "{json}");
    let steps: Vec<_> =
        json["steps"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(steps, ["doctor", "verify", "bench"]);
    let manifest = &json["manifest"];
    assert!(manifest["kernels"].as_object().is_some_and(|kernels| kernels.len() >= 36), "{manifest}");
    let environment = &manifest["environment"];
    assert!(environment["compiler"].as_str().is_some_and(|text| text.starts_with("rustc ")), "{environment}");
    assert_eq!(environment["program"].as_str().map(str::len), Some(64), "{environment}");
    let path = bundle(&place);
    assert_eq!(
        json["bundle"].as_str(),
        Some(format!("artifacts/{}", path.file_name().unwrap().display()).as_str())
    );
    let checked = place.run(&format!("repro --check {} --margin 1000 --json", path.display()));
    let json = checked.json();
    assert_eq!((checked.code, &json["pass"]), (0, &true.into()), "{json}");
    assert!(json["kernels"].as_u64() >= Some(36) && json["groups"].as_u64() >= Some(1), "{json}");
    assert_eq!(json["rulings"].as_array().map(Vec::len), Some(1), "{json}");
    let bytes = fs::read(&path).unwrap();
    place.write("half.json.gz", &bytes[..bytes.len() / 2]);
    expect(&place.run("repro --check half.json.gz"), 2, "half.json.gz: cannot be read");
    expect(&place.run("repro --check missing.json.gz"), 2, "missing.json.gz");
    expect(&place.run("repro --check half.json.gz --full"), 2, "--full");
}

#[test]
fn what_cannot_be_run_is_said() {
    let place = Workplace::new();
    expect(&place.run("repro --backend cpu --checks no-such-check --filter 1x2x64"), 2, "no-such-check");
    expect(&place.run("repro --suite everything"), 2, "everything");
    expect(&place.run("repro --backend cpu --suite cpu --filter 9x9"), 2, "the names are 1x");
    place.write("file", b"");
    expect(&place.run("repro --backend cpu --out file/artifacts"), 2, "file/artifacts");
    expect(&place.run("repro --help"), 0, "Examples:");
    assert!(place.names().iter().all(|name| name != "artifacts"), "nothing is packed");
}
