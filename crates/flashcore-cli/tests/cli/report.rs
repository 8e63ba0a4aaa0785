//! `flashcore report` as users see it: kept runs and a CPU run become pages and pictures; bad input becomes an error.

use std::path::Path;

use serde_json::Value;

use crate::workplace::{Workplace, expect};

/// Runs that are kept in the repository.
const KEPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/runs");
const BENCH: &str = "bench --backend cpu --shape 1x2x64x32 --dtype f32 --seconds 0.02 --peers naive --out";

fn text(place: &Workplace, name: &str) -> String {
    String::from_utf8(place.read(name)).unwrap()
}

/// A page or picture that asks for nothing from elsewhere.
#[track_caller]
fn self_contained(text: &str) {
    let plain = text.replace("http://www.w3.org/2000/svg", "");
    for foreign in ["http:", "https:", "<script", "<link", "@import", "url(", "src="] {
        assert!(!plain.contains(foreign), "{foreign} in the page");
    }
}

#[test]
fn kept_runs_become_a_page_and_pictures() {
    let place = Workplace::new();
    let json = place.run(&format!("report --dir {KEPT} --out r.html --svg figures --json")).json();
    let series = json["series"].as_array().unwrap();
    let forward = series.iter().find(|s| s["runs"][0] == "2026-11-15-h200-forward").unwrap();
    assert_eq!(
        (&forward["title"], &forward["device"]),
        (&"forward, bf16, sm_90a".into(), &"NVIDIA H200".into())
    );
    let lead = &forward["leads"][0];
    assert_eq!(
        (&lead["peer"], &lead["problems"], &lead["slower"]),
        (&"torch-cudnn".into(), &36.into(), &0.into())
    );
    assert!(lead["mean"].as_f64().is_some_and(|mean| (1.175..1.225).contains(&mean)), "{lead}");
    assert_eq!(json["left_out"], Value::Array(Vec::new()), "all that is kept can be shown");
    let page = text(&place, "r.html");
    self_contained(&page);
    for words in ["cuDNN", "FlashAttention-2", "Roofline", "D = 128, causal", "▼ ", "580.159.04", "<caption>"]
    {
        assert!(page.contains(words), "{words} is missing");
    }
    assert!(page.len() < 1 << 20, "{} bytes", page.len());
    for wrote in json["wrote"].as_array().unwrap().iter().filter_map(Value::as_str).skip(1) {
        let picture = text(&place, wrote);
        self_contained(&picture);
        assert!(picture.starts_with("<svg") && picture.contains("prefers-color-scheme"), "{wrote}");
        assert!(picture.len() < 64 << 10, "{wrote}: {} bytes", picture.len());
    }
    assert!(place.path("figures/2026-11-16-h200-forward-fa3-tflops.svg").exists());
}

#[test]
fn the_pictures_of_the_documents_are_those_of_their_run() {
    let place = Workplace::new();
    let figures = Path::new(KEPT).join("../../docs/figures");
    place.run(&format!("report {KEPT}/2026-11-16-h200-forward-fa3.json --svg ."));
    for entry in std::fs::read_dir(figures).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(
            std::fs::read(path).unwrap() == place.read(&name),
            "{name}: make it again, docs/lab.md says how"
        );
    }
}

#[test]
fn runs_on_this_machine_become_a_history() {
    let place = Workplace::new();
    for name in ["a.json", "b.json"] {
        expect(&place.run_with(&format!("{BENCH} {name}"), "FLASHCORE_COMMIT", "0123abc"), 0, "TFLOP/s");
    }
    let ended = place.run("report a.json b.json --out r.html --svg . --markdown t.md");
    expect(&ended, 0, "naive");
    assert!(ended.stdout.lines().all(|line| line.chars().count() <= 80), "{}", ended.stdout);
    let page = text(&place, "r.html");
    for words in ["History", "0123abc", "1x2x64x32 f32", "of its tolerance"] {
        assert!(page.contains(words), "{words} is missing");
    }
    assert!(text(&place, "t.md").starts_with("### 1 problem, f32"), "{}", text(&place, "t.md"));
    let pictures = ["b-history.svg", "b-problems.svg", "b-roofline.svg"];
    assert!(pictures.iter().all(|name| place.path(name).exists()), "{:?}", place.names());
}

#[test]
fn files_are_never_replaced_unasked() {
    let place = Workplace::new();
    expect(&place.run(&format!("{BENCH} a.json")), 0, "TFLOP/s");
    place.write("r.html", b"mine");
    place.write("a-problems.svg", b"mine");
    expect(&place.run("report a.json --out r.html"), 2, "--force");
    expect(&place.run("report a.json --out new.html --svg ."), 2, "--force");
    assert_eq!((place.read("r.html"), place.read("a-problems.svg")), (b"mine".to_vec(), b"mine".to_vec()));
    assert!(!place.path("new.html").exists(), "all or nothing");
    let before = place.names().len();
    expect(&place.run("report a.json --out r.html --svg . --force --quiet"), 0, "");
    assert!(text(&place, "r.html").starts_with("<!doctype html>") && place.names().len() == before + 1);
    expect(&place.run("report a.json --out no/such/r.html"), 2, "create it first");
    let raw = place.read("a.json");
    expect(&place.run("report a.json --out ./a.json --force"), 2, "name another file");
    expect(&place.run("report --dir . --out a.json --force"), 2, "name another file");
    expect(&place.run("report a.json --markdown a.json --force"), 2, "name another file");
    assert_eq!(place.read("a.json"), raw, "raw times stay");
}

#[test]
fn what_is_no_run_is_an_error_or_named() {
    let place = Workplace::new();
    expect(&place.run(&format!("{BENCH} good.json")), 0, "TFLOP/s");
    let good = text(&place, "good.json");
    let version = good.replace("\"version\":1,", "\"version\":7,");
    let empty =
        format!("{}\"measurements\":[],\"warnings\":[]}}\n", &good[..good.find("\"measurements\"").unwrap()]);
    let cases = [
        ("cut.json", &good[..good.len() / 2], "damaged"),
        ("other.json", "{\"schema\": \"x\", \"version\": 1}", "not a result"),
        ("version.json", &version, "version 7"),
        ("empty.json", &empty, "no measurement"),
        ("control.json", &good.replacen("\"cpu\":\"", "\"cpu\":\"\\u001b[2J", 1), "control characters"),
    ];
    for (name, bytes, words) in cases {
        place.write(name, bytes.as_bytes());
        expect(&place.run(&format!("report {name} --out r.html")), 2, words);
    }
    expect(&place.run("report missing.json --out r.html"), 2, "missing.json");
    expect(&place.run("report good.json"), 2, "--out");
    expect(&place.run("report --dir no-such --out r.html"), 2, "no-such");
    let nowhere = place.run("report --out r.html");
    expect(&nowhere, 2, "bench/runs");
    expect(&nowhere, 2, "--dir FOLDER");
    assert!(!Path::new(&place.path("r.html")).exists());
    std::fs::create_dir(place.path("runs")).unwrap();
    expect(&place.run("report --dir runs --out r.html"), 2, "no run");
    place.write("runs/cut.json", &good.as_bytes()[..99]);
    place.write("runs/good.json", good.as_bytes());
    expect(&place.run("report --dir runs --out r.html"), 0, "skipped");
    expect(&place.run("report --help"), 0, "Examples:");
}
