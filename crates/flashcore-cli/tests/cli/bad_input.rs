//! Bad input never panics, loses nothing, and is answered by exit code 2 and a message that says what to do.

use crate::workplace::{Workplace, npy, npy_file};

const FILES: &str = "--q q.npy --k k.npy --v v.npy --out o.npy";

/// Runs in a folder with good tensors and expects exit code 2 with all of `words`; nothing may appear or change.
#[track_caller]
fn check(args: &str, words: &[&str]) {
    check_in(&Workplace::with_tensors(), args, words);
}

#[track_caller]
fn check_in(place: &Workplace, args: &str, words: &[&str]) {
    let contents = || place.names().into_iter().map(|name| (place.read(&name), name)).collect::<Vec<_>>();
    let before = contents();
    let ended = place.run(args);
    assert_eq!(ended.code, 2, "`{args}` printed {}{}", ended.stdout, ended.stderr);
    let missing: Vec<_> = words.iter().filter(|word| !ended.stderr.contains(**word)).collect();
    assert!(missing.is_empty(), "`{args}` does not say {missing:?} but {}", ended.stderr);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    assert_eq!(before, contents(), "`{args}` left files behind");
}

/// A good folder with one file replaced.
#[track_caller]
fn check_file(name: &str, bytes: &[u8], words: &[&str]) {
    let place = Workplace::with_tensors();
    place.write(name, bytes);
    check_in(&place, &format!("run {FILES}"), words);
}

#[test]
fn command_lines_that_cannot_be_run() {
    let lines = include_str!("../data/refused.txt").lines();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (args, words) = line.split_once(" => ").unwrap();
        check(args, &words.split(" | ").collect::<Vec<_>>());
    }
}

#[test]
fn the_general_kernel_is_for_gpus() {
    for command in ["run", "bench", "gate --max-ratio 1", "tune"] {
        let general = format!("{command} --general");
        check(&format!("{general} --backend cpu"), &["--general is for the cuda backend"]);
        check(&format!("{general} --threads 2"), &["--general", "cannot be used with", "--threads"]);
        check(
            &format!("{command} --kernel forward_sm80 --backend cpu"),
            &["--kernel is for the cuda backend"],
        );
        check(&format!("{general} --kernel forward_sm80"), &["--general", "cannot be used with", "--kernel"]);
        check(&format!("{general} --table t.json"), &["--general", "cannot be used with", "--table"]);
    }
}

#[test]
fn files_that_do_not_belong_together() {
    let f32s = |shape: &[usize]| npy("<f4", "False", shape, 4);
    check_file("k.npy", &f32s(&[1, 2, 7, 8]), &["k has dim 8 but 4 is needed"]);
    check_file("k.npy", &f32s(&[3, 2, 7, 4]), &["k has batch 3 but 1 is needed"]);
    check_file("v.npy", &f32s(&[1, 2, 6, 4]), &["v has sequence 6 but 7 is needed"]);
    check_file("v.npy", &f32s(&[1, 1, 7, 4]), &["v has heads 1 but 2 is needed"]);
    check_file("q.npy", &f32s(&[1, 3, 5, 4]), &["3 query heads", "2 key heads"]);
    check_file("q.npy", &f32s(&[1, 1, 2, 5, 4]), &["5 dimensions", "batch x heads x sequence x dim"]);
    check_file("v.npy", &npy("<f2", "False", &[1, 2, 7, 4], 2), &["v is f16 but q is f32", "convert"]);
    check(&format!("run {FILES} --dtype f16"), &["q.npy holds f32 but --dtype says f16"]);
}

#[test]
fn files_that_are_damaged_or_hostile() {
    let header = |text: &str| npy_file(text, &[]);
    let good = npy("<f4", "False", &[1, 2, 5, 4], 4);
    check_file("q.npy", b"", &["q.npy", "not an npy file"]);
    check_file("q.npy", b"1", &["q.npy", "not an npy file"]);
    check_file("q.npy", &good[..good.len() - 1], &["damaged"]);
    check_file("q.npy", &good[..20], &["cut short"]);
    check_file("q.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", &["header claims 2147483647 bytes"]);
    let claims = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1152921504606846976, 1), }";
    check_file("q.npy", &header(claims), &["needs 4611686018427387904 bytes", "damaged"]);
    let overflows = "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4, 4), }";
    check_file("q.npy", &header(overflows), &["more elements than can be addressed"]);
    check_file("q.npy", &npy("<f4", "True", &[1, 2, 5, 4], 4), &["Fortran order", "ascontiguousarray"]);
    check_file("q.npy", &npy(">f4", "False", &[1, 2, 5, 4], 4), &["big-endian", "newbyteorder"]);
    check_file("q.npy", &npy("<i4", "False", &[1, 2, 5, 4], 4), &["`<i4`", "convert to float16"]);
    check_file("q.npy", &npy("|V2", "False", &[1, 2, 5, 4], 2), &["--dtype bf16", "safetensors"]);
}

#[test]
fn hostile_safetensors() {
    let cases: [(&[u8], &str); 5] = [
        (b"1", "cut short"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "header claims"),
        (b"\x02\0\0\0\0\0\0\0{}", "no tensor is called `q`"),
        (b"\x02\0\0\0\0\0\0\0{]", "not valid safetensors"),
        (b"\x09\0\0\0\0\0\0\0{}", "cut short"),
    ];
    for (bytes, words) in cases {
        let place = Workplace::with_tensors();
        place.write("x.safetensors", bytes);
        check_in(&place, "run --q x.safetensors --k k.npy --v v.npy --out o.npy", &["x.safetensors", words]);
    }
}

#[test]
fn files_that_are_not_there() {
    let place = Workplace::with_tensors();
    check_in(&place, "run --q /dev/null.npy --k k.npy --v v.npy --out o.npy", &["cannot read"]);
}

#[test]
fn a_folder_is_no_file() {
    let place = Workplace::with_tensors();
    std::fs::create_dir(place.path("d.npy")).unwrap();
    for args in
        ["--q d.npy --k k.npy --v v.npy --out o.npy", "--q q.npy --k k.npy --v v.npy --out d.npy --force"]
    {
        let ended = place.run(&format!("run {args}"));
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(ended.stderr.contains("d.npy"), "{}", ended.stderr);
    }
}

#[test]
#[cfg(unix)]
fn a_pipe_is_not_waited_for() {
    let place = Workplace::with_tensors();
    let made = std::process::Command::new("mkfifo").arg(place.path("p.npy")).status();
    if made.is_ok_and(|status| status.success()) {
        let ended = place.run("run --q p.npy --k k.npy --v v.npy --out o.npy");
        assert!(ended.code == 2 && ended.stderr.contains("not a regular file"), "{}", ended.stderr);
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    if cfg!(target_os = "linux") {
        check(
            "run --q q.npy --k k.npy --v v.npy --out /proc/o.npy",
            &["cannot write /proc/o.npy", "choose a folder"],
        );
    }
}

#[test]
fn bf16_does_not_fit_npy() {
    let place = Workplace::new();
    for (name, seq) in [("q.npy", 5), ("k.npy", 7), ("v.npy", 7)] {
        place.write(name, &npy("|V2", "False", &[1, 2, seq, 4], 2));
    }
    check_in(&place, &format!("run {FILES} --dtype bf16"), &["o.npy cannot hold bf16", ".safetensors"]);
}

#[test]
fn json_errors_are_objects_too() {
    let ended = Workplace::new().run("run --json --shape 1x8x512x64 --kv-heads 3");
    assert_eq!((ended.code, ended.json()["exit_code"].as_i64()), (2, Some(2)));
    assert!(ended.json()["error"].as_str().unwrap().contains("multiple"), "{}", ended.stdout);
    assert!(ended.stderr.contains("multiple"), "{}", ended.stderr);
}
