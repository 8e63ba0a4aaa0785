//! What commands print and how they end when all is well.

use std::{
    io::Read,
    process::{Command, Stdio},
};

use crate::workplace::Workplace;

#[test]
fn run_tells_what_it_did() {
    let json = Workplace::new().run("run --shape 1x4x65x64 --kv-heads 2 --causal --json --iters 3").json();
    assert_eq!(json["backend"], "cpu");
    assert_eq!(json["shape"], serde_json::json!([1, 4, 65, 64]));
    assert_eq!(json["dtype"], "f16");
    assert_eq!(json["mask"], "causal");
    assert_eq!((&json["pass"], &json["repeatable"]), (&true.into(), &true.into()));
    assert!(json["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()));
    assert!(json["max_error"].as_f64() <= json["tolerance"].as_f64(), "{json}");
    assert!(json["max_error"].as_f64() > Some(0.0), "a computation in f16 is not exact: {json}");
    let latency = |name: &str| json["latency_us"][name].as_f64().unwrap();
    let ordered = [latency("min"), latency("p50"), latency("p90"), latency("max")];
    assert!(ordered.is_sorted() && ordered[0] > 0.0, "{ordered:?}");
    assert_eq!(json["latency_us"]["samples"], 3);
}

#[test]
fn every_type_mask_and_option_passes() {
    let place = Workplace::new();
    for options in [
        "--dtype f32 --window 8,0 --softcap 30",
        "--dtype f32 --dropout 0.17 --seed 9 --causal",
        "--backward --shape 3x6x65x32 --kv-heads 2 --dropout 0.5 --dtype bf16 --threads 2",
        "--backward --shape 3x4x65x32 --kv-heads 2 --dropout 0.3 --dtype f32 --lengths 65,7,0 --causal",
        "--dtype bf16 --seq-kv 100 --causal --top-left",
        "--dtype f16 --dim-v 32 --scale 0.3 --threads 1",
        "--shape 0x2x4x8",
        "--shape 1x2x0x8",
        "--shape 1x2x3x8 --seq-kv 0",
        "--shape 1x2x5x8 --seq-kv 2 --causal",
        "--backend cpu --seed 18446744073709551615",
        "--shape 3x4x50x16 --kv-heads 2 --seq-q 1 --page-size 8 --lengths 50,7,0 --causal",
        "--shape 2x4x50x16 --seq-q 3 --page-size 1",
        "--shape 2x4x50x16 --lengths 9,50",
        "--shape 2x2x70x64 --kv-heads 1 --seq-q 1 --page-size 16 --lengths 70,3 --backend sim --gpu sm_90",
    ] {
        let shape = if options.contains("--shape") { "" } else { "--shape 2x2x33x16" };
        let ended = place.run(&format!("run {shape} {options} --iters 1"));
        assert_eq!(ended.code, 0, "`{options}` printed {}{}", ended.stdout, ended.stderr);
        assert!(ended.stdout.contains("PASS"), "{}", ended.stdout);
    }
}

#[test]
fn where_nothing_is_computed_it_is_said() {
    let place = Workplace::new();
    for (args, nothing) in [
        ("--shape 0x2x4x8", true),
        ("--shape 1x2x0x8", true),
        ("--shape 1x2x0x64 --backend sim", true),
        ("--shape 1x2x3x8 --seq-kv 0", false),
    ] {
        let page = place.run(&format!("run {args} --iters 1")).stdout;
        assert_eq!(page.contains("nothing was computed"), nothing, "`{args}` printed {page}");
        let json = place.run(&format!("run {args} --iters 1 --json")).json();
        assert_eq!((json["rows"] == 0, &json["pass"]), (nothing, &true.into()), "{json}");
    }
}

#[test]
fn seeds_are_repeatable_and_differ() {
    let error = |seed| {
        let args = format!("run --shape 1x1x40x16 --seed {seed} --json --iters 1");
        Workplace::new().run(&args).json()["mean_error"].as_f64().unwrap()
    };
    assert_eq!(error(1), error(1));
    assert_ne!(error(1), error(2));
}

#[test]
fn long_sequences_are_checked_on_some_rows() {
    let json = Workplace::new().run("run --shape 1x1x6000x64 --json --iters 1").json();
    let (rows, checked) = (json["rows"].as_u64().unwrap(), json["checked_rows"].as_u64().unwrap());
    assert_eq!((rows, &json["pass"]), (6000, &true.into()), "{json}");
    assert!((100..6000).contains(&checked), "{checked}");
}

#[test]
fn quiet_prints_nothing() {
    let ended = Workplace::new().run("run --shape 1x1x8x8 --quiet --iters 1");
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, "", ""));
}

#[test]
fn pages_fit_eighty_columns() {
    let place = Workplace::new();
    for args in ["run --shape 1x2x33x16 --iters 1", "doctor"] {
        let page = place.run(args).stdout;
        assert!(!page.is_empty() && page.lines().all(|line| line.chars().count() <= 80), "{page}");
        assert!(!page.contains('\u{1b}'), "colours off a terminal: {page:?}");
    }
}

#[test]
fn doctor_lists_findings() {
    let ended = Workplace::new().run("doctor --json");
    let json = ended.json();
    let findings = json["findings"].as_array().unwrap();
    let subjects: Vec<_> = findings.iter().map(|f| f["subject"].as_str().unwrap()).collect();
    for expected in
        ["flashcore", "processor", "cores", "cpu backend", "memory", "driver", "ptxas", "kernel cache"]
    {
        assert!(subjects.contains(&expected), "{subjects:?}");
    }
    let silent = findings.iter().find(|f| f["state"] != "good" && f["advice"].as_str().is_none());
    assert!(silent.is_none(), "says nothing about what to do: {silent:?}");
    assert_eq!(ended.code, 0);
}

#[test]
fn the_cache_is_listed_verified_and_cleared() {
    let place = Workplace::new();
    let run = |action: &str| place.run(&format!("cache {action} --json"));
    for action in ["ls", "verify"] {
        let ended = run(action);
        assert_eq!(
            (ended.code, ended.json()["entries"].as_array().map(Vec::len)),
            (0, Some(0)),
            "{}",
            ended.stderr
        );
    }
    std::fs::write(place.path("cache").join("0".repeat(64)), "damaged").unwrap();
    let ended = run("verify");
    assert_eq!(ended.code, 1, "{}{}", ended.stdout, ended.stderr);
    assert!(ended.json()["entries"][0]["damage"].is_string(), "{}", ended.stdout);
    assert_eq!(run("clear").json()["removed"], 1);
    assert_eq!(run("verify").code, 0);
}

#[test]
fn completions_and_help() {
    let place = Workplace::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let ended = place.run(&format!("completions {shell}"));
        assert!(ended.code == 0 && ended.stdout.contains("kv-heads"), "{shell}: {}", ended.stderr);
    }
    for args in ["--help", "run --help", "completions --help"] {
        let ended = place.run(args);
        assert!(ended.code == 0 && ended.stdout.contains("Examples:"), "{args}: {}", ended.stdout);
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for args in [&["completions", "bash"][..], &["run", "--shape", "1x1x8x8", "--iters", "1"], &["--help"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_flashcore"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

/// Highest resident memory of a run, in bytes, as seen by looking often.
#[cfg(target_os = "linux")]
fn peak_memory(args: &[&str]) -> u64 {
    let mut child =
        Command::new(env!("CARGO_BIN_EXE_flashcore")).args(args).stdout(Stdio::null()).spawn().unwrap();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak = kib.unwrap_or(0).max(peak);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
    peak * 1024
}

#[test]
#[cfg(target_os = "linux")]
fn memory_is_linear_in_the_sequence_length() {
    let args = ["run", "--shape", "1x1x16384x64", "--iters", "1", "--quiet"];
    let (peak, tensors) = (peak_memory(&args), 4 * 16384 * 64 * 2);
    assert!(peak > tensors, "{peak} bytes cannot be all");
    assert!(peak < tensors + (64 << 20), "{peak} bytes for {tensors} of tensors");
}
