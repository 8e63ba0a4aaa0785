//! `tune` and `--table` as users see them, end to end on the CPU: searched, killed, taken up, used, refused.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use serde_json::{Value, json};

use crate::workplace::{Ended, Workplace};

const PROBLEM: &str = "--shape 1x2x160x16 --dtype f32";
const SEARCH: &str = "tune --backend cpu --threads 1 --shape 1x2x160x16 --dtype f32 --seconds 0.001";

#[track_caller]
fn expect(ended: &Ended, code: i32, words: &str) {
    let text = format!("{}{}", ended.stdout, ended.stderr);
    assert!(ended.code == code && text.contains(words), "{} instead of {code}: {text}", ended.code);
}

/// A row for the problem that is not the shipped choice, whatever is faster here.
fn table(place: &Workplace) -> Value {
    let found = place.run(&format!("{SEARCH} --candidates 1 --journal probe --json")).json();
    let backend: Value = {
        let text = String::from_utf8(place.read("probe")).unwrap();
        serde_json::from_str(text.lines().next().unwrap()).unwrap()
    };
    let device = backend["backend"].as_str().unwrap().split(' ').next().unwrap().to_owned();
    assert_eq!(found["results"][0]["measured"], 1);
    json!({ "schema": "flashcore-table", "version": 2, "rows": [{
        "class": { "device": device, "units": 1, "dtype": "f32", "dim_qk": 16, "dim_v": 16, "left": false,
            "right": false, "softcap": false, "queries": [100, 200], "keys": [100, 200], "tiles": [1, 100] },
        "tile": { "cpu": { "keys": 32, "chunk": 2 } },
        "evidence": { "problem": "1x2x160x16 f32", "median_us": 1.0, "interval_us": [1.0, 1.0], "plan_us": 2.0,
            "ratio": [0.5, 0.5, 0.5], "tried": 3, "device": "a processor", "driver": null, "flashcore": "0.1.0",
            "commit": null, "created": "2026-01-01T00:00:00Z" } }] })
}

#[test]
fn tune_searches_everything_and_takes_up_where_it_was() {
    let place = Workplace::new();
    let json = place.run(&format!("{SEARCH} --json")).json();
    let result = &json["results"][0];
    assert_eq!((&result["measured"], &result["complete"]), (&30.into(), &true.into()), "{json}");
    let run = place.run(&format!("run --backend cpu --threads 1 {PROBLEM} --json")).json();
    assert_eq!(result["plan"]["kernel"], run["kernel"], "both call it the same");
    let again = place.run(&format!("{SEARCH} --json")).json();
    assert!(again["found"].as_u64() > Some(60) && again["results"][0]["measured"] == 30, "{again}");
    assert_eq!(
        again["results"][0]["best"]["tile"], result["best"]["tile"],
        "the same measurements, the same end"
    );
    let page = place.run(&format!("{SEARCH} --strategy evolve --fresh"));
    expect(&page, 0, "measurements from before");
    assert!(page.stdout.lines().all(|line| line.chars().count() <= 80), "{}", page.stdout);
    let text = String::from_utf8(place.read("tuned.json")).unwrap();
    assert!(text.starts_with("{\"schema\":\"flashcore-table\",\"version\":2"), "{text}");
    expect(&place.run(&format!("run --backend cpu --threads 1 {PROBLEM} --table tuned.json")), 0, "PASS");
    expect(&place.run("inspect --help"), 0, "rows of a table for a CPU");
}

fn start(place: &Workplace, args: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(args.split_whitespace()).current_dir(place.path(""));
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn lines(place: &Workplace) -> Vec<String> {
    let text = fs::read(place.path("j")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    // Whether the last line is whole, nobody knows.
    let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
    whole.lines().map(str::to_owned).collect()
}

#[test]
fn killed_at_any_moment_it_loses_nothing() {
    let place = Workplace::new();
    let search = format!("{SEARCH} --seed 3 --journal j --out t.json");
    let mut kept: Vec<String> = Vec::new();
    for moment in [0, 1, 2, 9, 30, 55] {
        let mut child = start(&place, &search);
        while lines(&place).len() < moment && child.try_wait().unwrap().is_none() {
            sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let now = lines(&place);
        assert!(now.starts_with(&kept), "killed at {moment}: measurements are lost");
        kept = now;
    }
    expect(&place.run(&format!("{search} --json")), 0, "\"complete\": true");
    let all = lines(&place);
    assert!(
        all.starts_with(&kept) && kept.len() > 30 && all.len() > kept.len(),
        "{} {}",
        kept.len(),
        all.len()
    );
    let measured = all.iter().filter(|line| !line.contains("started"));
    let mut measured: Vec<&str> = measured.map(|line| line.split("\"times\"").next().unwrap()).collect();
    measured.sort_unstable();
    let count = measured.len();
    measured.dedup();
    assert_eq!(measured.len(), count, "something was measured twice");
}

#[test]
#[cfg(unix)]
fn stopped_it_answers_and_goes_on_later() {
    let place = Workplace::new();
    // Turns so long that it does not end by itself first.
    let search =
        format!("tune --backend cpu --threads 1 {PROBLEM} --seconds 0.01 --candidates 8 --journal j");
    let child = start(&place, &search);
    while lines(&place).len() < 4 {
        sleep(Duration::from_millis(1));
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(2));
    let kept = lines(&place);
    assert!(!place.path("tuned.json").exists(), "no final, no table");
    expect(&place.run(&format!("{search} --json")), 0, "\"stopped\": false");
    assert!(lines(&place).starts_with(&kept) && kept.len() >= 4);
}

#[test]
fn what_cannot_be_kept_is_not_searched_for() {
    let place = Workplace::new();
    place.write("other.json", b"{}");
    for (out, words) in [
        ("other.json", "other.json"),
        (".", "cannot"),
        ("no/such/t.json", "no/such"),
        ("./j", "give each its own file"),
    ] {
        expect(&place.run(&format!("{SEARCH} --journal j --out {out}")), 2, words);
        assert!(!place.path("j").exists(), "a journal was begun for {out}");
    }
}

#[test]
fn a_journal_of_something_else_is_refused() {
    let place = Workplace::new();
    let search = |more: &str| place.run(&format!("{SEARCH} --journal j --candidates 2 {more}"));
    expect(&search(""), 0, "tuned.json");
    expect(&search("--seed 9"), 2, "--fresh");
    let text = String::from_utf8(place.read("j")).unwrap();
    place.write("j", text.replacen("\"cores\":", "\"cores\":9", 1).as_bytes());
    expect(&search(""), 2, "machine");
    for other in [&b"{\"schema\":\"x\"}\n"[..], b"notes"] {
        place.write("j", other);
        expect(&search(""), 2, "damaged");
        assert_eq!(place.read("j"), other, "nobody asked to lose it");
    }
    expect(&search("--fresh"), 0, "tuned.json");
    expect(&search("--strategy magic"), 2, "magic");
    expect(&place.run("tune --backend cuda --shape 1x1x64x64 --candidates 1 --threads 1"), 2, "--threads");
}

#[test]
fn a_table_is_used_where_it_is_named() {
    let place = Workplace::new();
    place.write("t.json", table(&place).to_string().as_bytes());
    let run = |shape: &str, table: &str| {
        let run =
            place.run(&format!("run --backend cpu --threads 1 --shape {shape} --dtype f32 {table} --json"));
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        run.json()["kernel"].as_str().unwrap().to_owned()
    };
    assert!(run("1x2x160x16", "--table t.json").ends_with("k32x2"));
    assert!(!run("1x2x160x16", "").contains("k32"), "not named, not used");
    assert!(!run("1x2x160x32", "--table t.json").contains("k32"), "another class");
    let bench =
        format!("bench --backend cpu --threads 1 {PROBLEM} --table t.json --peers none --seconds 0.01");
    let bench = place.run(&format!("{bench} --no-roofline --json")).json();
    assert!(bench["results"][0]["kernel"].as_str().is_some_and(|name| name.ends_with("k32x2")), "{bench}");
}

/// A row for 160 queries on an H200 that is not the shipped choice.
fn gpu_table(place: &Workplace) -> Value {
    let mut rows = table(place);
    let row = &mut rows["rows"][0];
    row["class"]["device"] = "sm_90".into();
    (row["class"]["units"], row["class"]["dtype"]) = (132.into(), "f16".into());
    (row["class"]["dim_qk"], row["class"]["dim_v"]) = (128.into(), 128.into());
    row["tile"] = json!({ "forward_sm90": { "consumers": 1, "tile_n": 48, "stages": 3, "q_stages": 1,
        "staging": { "cols": 128, "places": 1 }, "registers": null, "order": { "single": { "parts": 1 } },
        "ctas_per_sm": 1, "turn": 1 } });
    rows
}

#[test]
fn inspect_says_when_a_row_decides() {
    let place = Workplace::new();
    place.write("t.json", gpu_table(&place).to_string().as_bytes());
    let inspect = "inspect --gpu sm_90 --shape 1x2x160x128 --table t.json";
    let json = place.run(&format!("{inspect} --json")).json();
    assert!(json["kernel"].as_str().is_some_and(|name| name.contains("g1n48s3")), "{json}");
    assert!(json["row"].as_str().is_some_and(|row| row.contains("a processor")), "{json}");
    expect(&place.run(inspect), 0, "row 0 of the table");
    let shipped = place.run("inspect --gpu sm_90 --shape 1x2x160x128 --json").json();
    assert_eq!(shipped["row"], Value::Null);
}

#[test]
fn the_simulator_asks_the_table_too() {
    let place = Workplace::new();
    place.write("t.json", gpu_table(&place).to_string().as_bytes());
    let run = |table: &str| {
        let run = place.run(&format!("run --backend sim --gpu sm_90 --shape 1x1x100x128 {table} --json"));
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        run.json()["kernel"].as_str().unwrap().to_owned()
    };
    assert!(run("--table t.json").contains("g1n48s3"));
    assert!(!run("").contains("g1n48s3"), "not named, not used");
    let profile = |table: &str| {
        let shape = "--backend cpu --shape 1x1x100x128";
        let profiled = place.run(&format!("profile {shape} {table} --json")).json()["profiles"][0].take();
        assert!(profiled["counters"]["instructions"].as_u64() > Some(0), "{profiled}");
        profiled["counters"].clone()
    };
    assert_ne!(profile("--table t.json"), profile(""), "counts are those of the kernel that was built");
    expect(&place.run("run --backend sim --shape 1x1x8x64 --table missing.json"), 2, "missing.json");
}

#[test]
fn hostile_tables_are_refused() {
    let place = Workplace::new();
    let good = table(&place).to_string();
    for (text, words) in [
        (String::new(), "damaged"),
        ("[".repeat(50_000), "damaged"),
        (" ".repeat(2 << 20), "larger"),
        (good.replace("\"keys\":32", "\"keys\":4294967295"), "keys"),
        (good.replace("\"chunk\"", "\"code\""), "damaged"),
        (good.replace("\"version\":2", "\"version\":7"), "version 7"),
        (good.replace("a processor", "a\\u001bprocessor"), "control"),
    ] {
        place.write("bad.json", text.as_bytes());
        let inspect = place.run("inspect --table bad.json");
        expect(&inspect, 2, words);
        assert!(inspect.stderr.contains("bad.json"), "{}", inspect.stderr);
    }
    expect(&place.run("run --backend cpu --table missing.json"), 2, "missing.json");
    place.write("bad.json", b"{}");
    expect(&place.run(&format!("{SEARCH} --candidates 1 --out bad.json")), 2, "bad.json");
}

#[test]
fn a_problem_without_work_is_refused() {
    let place = Workplace::new();
    let answer = place.run("tune --backend cpu --shape 1x8x0x64 --dtype f32 --out t.json");
    expect(&answer, 2, "1x8x0x64 f32 has no rows or no keys");
    assert!(!place.path("t.json").exists());
}
