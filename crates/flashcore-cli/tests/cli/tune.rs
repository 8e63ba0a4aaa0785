//! `tune` and `--table` as users see them, end to end in the simulator: searched, killed, resumed, used, refused.

use serde_json::Value;

use crate::workplace::{Workplace, expect};

const PROBLEM: &str = "--gpu sm_80 --shape 1x1x64x128";
const SEARCH: &str = "tune --backend sim --gpu sm_80 --shape 1x1x64x128 --seed 2";

fn lines(place: &Workplace) -> usize {
    std::fs::read(place.path("tuned.json.log")).unwrap_or_default().iter().filter(|b| **b == b'\n').count()
}

/// Searches and returns the answer.
fn tuned(place: &Workplace, more: &str) -> Value {
    let ended = place.run(&format!("{SEARCH} {more} --json"));
    assert_eq!(ended.code, 0, "{}{}", ended.stdout, ended.stderr);
    ended.json()["results"][0].take()
}

#[test]
fn what_tune_finds_is_used_where_it_is_named() {
    let place = Workplace::new();
    let result = tuned(&place, "--candidates 30");
    assert!(result["measured"].as_u64() > Some(10) && result["unit"] == "instructions", "{result}");
    assert!(result["best"]["cost"].as_f64() < result["rules"]["cost"].as_f64(), "{result}");
    let kernel = |command: &str| place.run(&format!("{command} {PROBLEM} --json")).json()["kernel"].take();
    let run = "run --backend sim";
    assert_eq!(kernel(&format!("{run} --table tuned.json")), result["best"]["kernel"]);
    assert_eq!(kernel("inspect --table tuned.json"), result["best"]["kernel"]);
    assert_eq!(
        [kernel(run), kernel("inspect")],
        [result["rules"]["kernel"].clone(), result["rules"]["kernel"].clone()]
    );
    expect(&place.run(&format!("inspect {PROBLEM} --table tuned.json")), 0, "the simulator");
    expect(
        &place.run("inspect --gpu sm_80 --shape 1x1x65x128 --table tuned.json --json"),
        0,
        "\"row\": null",
    );
    let known = lines(&place);
    let again = tuned(&place, "--candidates 30");
    assert_eq!((&again["best"], lines(&place)), (&result["best"], known), "all from the log");
    let page = place.run(&format!("{SEARCH} --candidates 2 --strategy exhaustive --fresh"));
    expect(&page, 0, "tuned.json");
    assert!(page.stdout.lines().all(|line| line.chars().count() <= 80), "{}", page.stdout);
}

#[test]
fn a_search_that_finds_nothing_better_says_so() {
    let place = Workplace::new();
    let search = format!("{SEARCH} --candidates 1");
    expect(&place.run(&search), 0, "no table written");
    assert!(!place.path("tuned.json").exists());
    assert!(tuned(&place, "--candidates 30")["row"].is_array(), "a table");
    expect(&place.run(&format!("{search} --fresh")), 0, "tuned.json: unchanged");
}

#[test]
#[cfg(unix)]
fn stopped_it_answers_and_goes_on_later() {
    let place = Workplace::new();
    let mut started = place.start(&format!("{SEARCH} --candidates 1000 --strategy exhaustive"));
    started.wait_until(|| lines(&place) >= 6);
    expect(&started.stop(), 2, "STOPPED");
    let known = lines(&place);
    assert!(!place.path("tuned.json").exists() && known >= 6, "no final, no table");
    assert!(tuned(&place, "--candidates 4 --strategy exhaustive")["known"].as_u64() > Some(1));
}

#[test]
fn what_cannot_be_searched_or_kept_is_refused() {
    let place = Workplace::new();
    place.write("other.json", b"{}");
    place.write("mine.log", b"notes");
    for (more, words) in [
        ("--out other.json", "other.json"),
        ("--out .", "cannot"),
        ("--out no/such/t.json", "no/such"),
        ("--out mine", "mine.log is not a log"),
        ("--strategy magic", "magic"),
        ("--threads 1", "--threads"),
    ] {
        expect(&place.run(&format!("{SEARCH} --candidates 2 {more}")), 2, words);
    }
    expect(&place.run("tune --backend cpu"), 2, "--backend sim");
    expect(&place.run("tune --backend cpu --gpu sm_80"), 2, "--gpu is for the simulator");
    expect(&place.run("tune --backend sim --shape 8x16x8192x128"), 2, "make the shape smaller");
    expect(&place.run("tune --backend sim --shape 1x8x0x64"), 2, "1x8x0x64 f16 has no rows or no keys");
    assert_eq!((place.names().len(), place.read("mine.log")), (2, b"notes".to_vec()), "all is as it was");
}

#[test]
fn hostile_tables_are_refused() {
    let place = Workplace::new();
    for (text, words) in [
        (String::new(), "damaged"),
        ("[".repeat(50_000), "damaged"),
        (" ".repeat(2 << 20), "larger"),
        (r#"{"format":"flashcore-table-9","rows":{}}"#.to_owned(), "flashcore-table-3"),
    ] {
        place.write("bad.json", text.as_bytes());
        for command in ["inspect", "run", "run --backend sim", "profile"] {
            expect(&place.run(&format!("{command} --table bad.json")), 2, words);
        }
        expect(&place.run("inspect --table bad.json"), 2, "bad.json");
    }
    expect(&place.run("inspect --table missing.json"), 2, "missing.json");
}
