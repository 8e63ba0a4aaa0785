//! The lab's commands as users see them: verify, bench, gate, profile, end to end on the CPU.

use std::process::Command;

use serde_json::Value;

use crate::workplace::{Workplace, expect};

const TASK: &str = "--backend cpu --shape 1x2x64x32 --dtype f32 --seconds 0.05";

fn groups(json: &Value) -> Vec<(&str, &str, u64)> {
    let backends = json["backends"].as_array().unwrap().iter();
    let groups = backends.flat_map(|b| {
        let name = b["backend"].as_str().unwrap();
        b["groups"]
            .as_array()
            .unwrap()
            .iter()
            .map(move |g| (name, g["group"].as_str().unwrap(), g["passed"].as_u64().unwrap()))
    });
    groups.collect()
}

#[test]
fn verify_passes_on_cpu_and_simulator() {
    let place = Workplace::new();
    let ended = place.run("verify --quick --filter 1x2x64x64 --json");
    let json = ended.json();
    assert_eq!((ended.code, &json["pass"]), (0, &true.into()), "{json}");
    let found = groups(&json);
    assert!(found.contains(&("cpu", "named", 3)), "{found:?}");
    assert!(found.contains(&("sim", "named", 3)), "{found:?}");
}

#[test]
fn verify_has_a_page_and_says_what_is_missing() {
    let place = Workplace::new();
    let page = place.run("verify --quick --backend cpu --filter zero-length/ --runs 3");
    expect(&page, 0, "PASS");
    assert!(page.stdout.lines().all(|line| line.chars().count() <= 80), "{}", page.stdout);
    let nothing = place.run("verify --quick --backend cpu --filter no-such-case");
    expect(&nothing, 2, "no-such-case");
    expect(&nothing, 2, "named, ");
    expect(&nothing, 2, "laws, random");
    expect(&place.run("verify --backend abacus"), 2, "abacus");
    let absent =
        place.run_with("verify --quick --backend cuda --filter named/", "CUDA_VISIBLE_DEVICES", "-1");
    expect(&absent, 2, "cuda backend is not available");
    assert_eq!(absent.stderr.matches("not available").count(), 1, "{}", absent.stderr);
}

#[test]
fn verify_tells_of_each_group_as_it_ends() {
    let place = Workplace::new();
    let mut child = place.start("verify --quick --backend cpu --seeds 3");
    let [heading, first] = [child.line(), child.line()];
    assert!(heading.contains("of tolerance") && first.contains("cpu          named"), "{heading}{first}");
    let ended = child.stop();
    assert_eq!(ended.code, 2, "it was not done yet: {}", ended.stdout);
    assert!(ended.stdout.contains("STOPPED") && !ended.stdout.contains("named"), "{}", ended.stdout);
    let json = place.run("verify --quick --backend cpu --filter gqa/ --json");
    assert!(json.stderr.contains("cpu          gqa"), "{}", json.stderr);
    assert_eq!(groups(&json.json()).len(), 1);
}

#[test]
fn verify_checks_a_kernel_by_name() {
    let place = Workplace::new();
    let verify =
        |flags: &str| place.run(&format!("verify --quick --filter 1x2x64x64 --kernel {flags} --json"));
    let general = verify("forward_sm80 --backend sim");
    let json = general.json();
    assert!(general.code == 0 && groups(&json).contains(&("sim", "named", 3)), "{json}");
    let hopper = verify("forward_sm90 --backend sim-general").json();
    assert_eq!(hopper["backends"][0]["groups"][0]["skipped"], 3, "{hopper}");
    expect(&verify("forward_sm80 --backend cpu"), 2, "--kernel is for the cuda backend");
}

#[test]
fn bench_measures_everybody_and_keeps_raw_times() {
    let place = Workplace::new();
    let ended = place.run(&format!("bench {TASK} --peers naive --out run.json --json"));
    let json = ended.json();
    assert_eq!((ended.code, &json["complete"]), (0, &true.into()), "{json}");
    let results = json["results"].as_array().unwrap();
    let competitors: Vec<_> = results.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    assert_eq!(competitors, ["naive", "cpu"]);
    for row in results {
        let speed = |name: &str| row["speed"][name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        let ordered = ["min_us", "p50_us", "p90_us", "max_us"].map(speed);
        assert!(ordered.is_sorted() && ordered[0] > 0.0, "{row}");
        assert!(speed("low_us") <= speed("high_us") && speed("tflops") > 0.0 && speed("gbps") > 0.0, "{row}");
        assert!(speed("roofline_percent") > 0.0, "{row}");
        assert!(row["max_error"].as_f64() <= row["tolerance"].as_f64(), "{row}");
    }
    assert!(results[1]["speed"]["ratio"]["point"].as_f64() > Some(0.0));
    let raw: Value = serde_json::from_slice(&place.read("run.json")).unwrap();
    assert_eq!((&raw["schema"], &raw["version"]), (&"flashcore-bench".into(), &1.into()));
    assert!(raw["measurements"][0]["stretches"][0]["seconds"].as_array().is_some_and(|s| s.len() >= 4));
}

#[test]
fn result_files_are_never_replaced_unasked() {
    let place = Workplace::new();
    place.write("run.json", b"mine");
    for command in ["bench --peers none --no-roofline", "gate --rounds 3 --max-ratio 1000 --peer naive"] {
        let run = |flags: &str| place.run(&format!("{command} {TASK} {flags}"));
        expect(&run("--out run.json"), 2, "--force");
        assert_eq!(place.read("run.json"), b"mine", "{command}");
        expect(&run("--out no/such/run.json"), 2, "create it first");
        expect(&run("--force"), 2, "--out");
        expect(&run("--out run.json --force --quiet"), 0, "");
        assert!(place.read("run.json").starts_with(b"{\"schema\":\"flashcore-bench\""), "{command}");
        place.write("run.json", b"mine");
    }
}

/// The commit of these sources, wherever the program runs.
fn built_from() -> Option<String> {
    let run =
        Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"]).output().ok()?;
    run.status.success().then(|| String::from_utf8(run.stdout).unwrap().trim().to_owned())
}

#[test]
fn bench_says_that_there_is_nothing_to_compute() {
    let place = Workplace::new();
    for (shape, empty) in [("1x4x0x64", true), ("1x4x8x64", false)] {
        let flags = "--backend cpu --peers naive --no-roofline --seconds 0.01 --json";
        let json = place.run(&format!("bench --shape {shape} {flags}")).json();
        let warned = json["warnings"].as_array().unwrap().iter().filter_map(Value::as_str);
        let about = warned.filter(|text| text.contains("has nothing to compute")).count();
        assert_eq!(about, usize::from(empty), "{json}");
    }
}

#[test]
fn bench_has_modes_suites_and_a_page() {
    let place = Workplace::new();
    let modes = ["--mode interleaved --rounds 3", "--cold", "--threads 1 --graph --causal"];
    for mode in modes {
        let ended = place.run(&format!("bench {TASK} --peers none --no-roofline {mode}"));
        expect(&ended, 0, "TFLOP/s");
        assert!(ended.stdout.lines().all(|line| line.chars().count() <= 80), "{}", ended.stdout);
    }
    let suite =
        place.run("bench --backend cpu --suite cpu --filter 1x2x64x64 --seconds 0.01 --out c.json --json");
    let tasks = suite.json()["results"].as_array().map(Vec::len);
    assert_eq!((suite.code, tasks), (0, Some(2)), "{}{}", suite.stdout, suite.stderr);
    let kept: Value = serde_json::from_slice(&place.read("c.json")).unwrap();
    assert_eq!(kept["commit"].as_str().map(str::to_owned), built_from(), "the program's, wherever it runs");
    expect(&place.run("bench --suite cpu --filter 9x9x9x9"), 2, "containing `9x9x9x9`; the names are 1x");
    expect(&place.run("bench --suite options --filter nothing"), 2, "containing `nothing`; the names are ");
    expect(&place.run("bench --shape 1x1x8x8 --top-left"), 2, "--causal");
    expect(&place.run(&format!("bench {TASK} --peers torch-abacus")), 2, "torch-abacus");
    expect(&place.run("bench --suite forward --shape 1x1x1x8"), 2, "--shape");
}

#[test]
fn bench_compares_what_a_suite_compares() {
    let place = Workplace::new();
    let sweep = "bench --backend cpu --suite sweep --filter 1x16x65x128 --seconds 0.01";
    let page = place.run(sweep);
    expect(&page, 0, "1x16xSx128 causal, against S rounded up to 128; target: at most 1.1");
    expect(&page, 0, "of 2");
    let json = place.run(&format!("{sweep} --json")).json();
    let comparisons = json["comparisons"].as_array().unwrap();
    assert_eq!((comparisons.len(), json["results"].as_array().map(Vec::len)), (2, Some(4)), "{json}");
    assert_eq!(comparisons[0]["against"], "1x16x128x128 f16");
    assert!(comparisons[0]["ratio"]["point"].as_f64() > Some(0.0), "{json}");
}

#[test]
fn sinks_are_measured_and_drawn_from_the_seed() {
    let place = Workplace::new();
    let bench = place.run(&format!("bench {TASK} --sinks --peers naive --no-roofline --json"));
    let json = bench.json();
    assert_eq!((bench.code, &json["results"][1]["task"]), (0, &"1x2x64x32 f32 sinks".into()), "{json}");
    let run = |flags: &str| {
        let ended = place.run(&format!("run --backend cpu --shape 1x2x64x32 --iters 1 --json {flags}"));
        assert_eq!(ended.code, 0, "{}{}", ended.stdout, ended.stderr);
        ended.json()
    };
    assert_eq!((&run("")["sinks"], &run("--sinks --seed 3")["sinks"]), (&false.into(), &true.into()));
    expect(
        &place.run("run --backend cpu --shape 1x99999999x1x8 --sinks"),
        2,
        "sinks for 99999999 query heads",
    );
}

#[test]
fn bench_that_is_stopped_leaves_a_valid_file() {
    let place = Workplace::new();
    let bench = "bench --backend cpu --suite cpu --peers none --no-roofline --seconds 2 --out part.json";
    let mut child = place.start(bench);
    child.wait_until(|| place.path("part.json").exists());
    assert_eq!(child.stop().code, 2);
    let part: Value = serde_json::from_slice(&place.read("part.json")).unwrap();
    let measured = part["measurements"].as_array().unwrap().len();
    assert_eq!(
        (&part["complete"], (1..4).contains(&measured)),
        (&false.into(), true),
        "{measured} measurements"
    );
    expect(
        &place.run(
            "gate --backend cpu --suite cpu --filter 1x2x64 --seconds 0.05 --baseline part.json --margin 99",
        ),
        0,
        "PASS",
    );
}

#[test]
fn the_gate_opens_and_shuts() {
    let place = Workplace::new();
    expect(&place.run(&format!("gate {TASK} --rounds 5 --max-ratio 1000 --peer naive")), 0, "PASS");
    expect(&place.run(&format!("gate {TASK} --rounds 5 --max-ratio 0.000001 --peer naive")), 1, "FAIL");
    expect(&place.run(&format!("gate {TASK}")), 2, "--max-ratio");
    expect(&place.run(&format!("gate {TASK} --max-ratio 1 --peer nobody")), 2, "nobody");
    let json = place.run(&format!("gate {TASK} --rounds 5 --max-ratio 1000 --peer naive --json")).json();
    let ratio = &json["rulings"][0]["ratio"];
    let ends = ["low", "point", "high"].map(|end| ratio[end].as_f64().unwrap());
    assert!(json["pass"] == true && ends.is_sorted() && ends[0] > 0.0, "{json}");
}

#[test]
fn a_gate_that_is_stopped_gives_no_verdict() {
    let place = Workplace::new();
    let gate = "gate --backend cpu --suite cpu --peer naive --max-ratio 1000 --rounds 4 --seconds 0.5";
    for (style, words) in [("--json", "\"stopped\": true"), ("", "STOPPED")] {
        let mut child = place.start(&format!("{gate} --out part.json --force {style}"));
        child.wait_until(|| place.path("part.json").exists());
        let ended = child.stop();
        expect(&ended, 2, words);
        assert!(
            !["PASS", "FAIL", "\"pass\": true"].iter().any(|word| ended.stdout.contains(word)),
            "{}",
            ended.stdout
        );
        let part: Value = serde_json::from_slice(&place.read("part.json")).unwrap();
        let measured = part["measurements"].as_array().unwrap().len();
        assert!(part["complete"] == false && measured >= 2, "{measured} measurements");
        std::fs::remove_file(place.path("part.json")).unwrap();
    }
}

#[test]
fn a_baseline_is_compared_with_or_refused() {
    let place = Workplace::new();
    let gate = |file: &str| place.run(&format!("gate {TASK} --rounds 5 --baseline {file} --margin 0.5"));
    expect(&place.run(&format!("bench {TASK} --peers none --no-roofline --out base.json")), 0, "TFLOP/s");
    let text = String::from_utf8(place.read("base.json")).unwrap();
    let mut faster: Value = serde_json::from_str(&text).unwrap();
    for stretch in faster["measurements"][0]["stretches"].as_array_mut().unwrap() {
        for seconds in stretch["seconds"].as_array_mut().unwrap() {
            *seconds = (seconds.as_f64().unwrap() / 1000.0).into();
        }
    }
    place.write("faster.json", faster.to_string().as_bytes());
    expect(&gate("faster.json"), 1, "FAIL");
    place.write("truncated.json", &text.as_bytes()[..text.len() / 2]);
    expect(&gate("truncated.json"), 2, "damaged");
    place.write("other.json", b"{\"schema\": \"x\", \"version\": 1}");
    expect(&gate("other.json"), 2, "not a result");
    expect(&gate("missing.json"), 2, "missing.json");
    let elsewhere = text.replace("\"cores\":", "\"cores\":9");
    place.write("elsewhere.json", elsewhere.as_bytes());
    expect(&gate("elsewhere.json"), 2, "processor");
    let another = place.run("gate --backend cpu --shape 1x1x8x8 --baseline base.json --seconds 0.01");
    expect(&another, 2, "no time of cpu");
    let onto = "gate --backend cpu --shape 1x1x8x8 --baseline base.json --out ./base.json --force";
    expect(&place.run(onto), 2, "name another file");
}

#[test]
fn profile_reads_the_build_without_a_gpu() {
    let place = Workplace::new();
    let ended = place.run("profile --backend cpu --shape 1x16x4096x128 --dtype bf16 --json");
    let json = ended.json();
    let kernel = &json["profiles"][0]["kernel"];
    assert!(ended.code == 0 && kernel["kernel"].as_str().is_some_and(|name| name.contains("bf16")), "{json}");
    let launch = &kernel["launch"];
    assert!(launch["block"][0].as_u64() > Some(0) && launch["shared_bytes"].as_u64() > Some(0), "{json}");
    assert!(json["profiles"][0]["note"].as_str().is_some_and(|note| note.contains("too large")), "{json}");
    let small = place.run("profile --backend cpu --shape 1x1x192x64 --causal --json").json();
    let counters = &small["profiles"][0]["counters"];
    let count = |name: &str| counters[name].as_u64().unwrap();
    assert!(count("instructions") > 1000 && count("tensor_macs") > 0, "{small}");
    assert!(count("global_sectors") > 0 && count("shared_wavefronts") > 0, "{small}");
    let page = place.run("profile --backend cpu").stdout;
    assert!(page.contains("grid") && page.lines().all(|line| line.chars().count() <= 80), "{page}");
    expect(&place.run("profile --backend cpu --shape 1x1x64x64 --dtype f32"), 0, "grid");
}

#[test]
fn peers_without_torch_are_named_and_left_out() {
    let place = Workplace::new();
    let bench = format!("bench {TASK} --no-roofline --json");
    let json = place.run_with(&bench, "FLASHCORE_PYTHON", "/no/such/python").json();
    assert!(json["warnings"][0].as_str().is_some_and(|w| w.contains("/no/such/python")), "{json}");
    assert_eq!(json["results"][0]["arm"], "naive");
}

#[test]
fn quiet_and_help() {
    let place = Workplace::new();
    for args in [
        format!("bench {TASK} --peers none --no-roofline --quiet"),
        format!("gate {TASK} --rounds 3 --max-ratio 1000 --quiet"),
        "verify --quick --backend cpu --filter zero-length/ --quiet".to_owned(),
        "profile --backend cpu --quiet".to_owned(),
    ] {
        let ended = place.run(&args);
        assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, "", ""), "{args}");
    }
    for command in ["verify", "bench", "gate", "profile"] {
        expect(&place.run(&format!("{command} --help")), 0, "Examples:");
    }
    assert!(!place.run("--help").stdout.contains("verify-group"), "hidden commands are hidden");
}

#[test]
fn kinds_of_data_are_measured_beside_the_best_peer() {
    let place = Workplace::new();
    let shape = "--backend cpu --shape 1x2x96x32 --dtype f32";
    let bench =
        place.run(&format!("bench {shape} --kind sharp --seconds 0.02 --peers naive --no-roofline --json"));
    let json = bench.json();
    assert_eq!((bench.code, &json["results"][1]["task"]), (0, &"1x2x96x32 f32 sharp".into()), "{json}");
    let ours = &json["standings"][1];
    assert_eq!((&ours["kind"], &ours["problem"]), (&"sharp".into(), &"1x2x96x32 f32".into()), "{json}");
    for ratio in ["rms_of_best", "max_of_best", "speed_of_best"] {
        assert!(ours[ratio].as_f64() > Some(0.0), "{ratio} in {json}");
    }
    let page = place.run("bench --suite kinds --filter x9999");
    expect(&page, 2, "2x16x4096x128 bf16 causal outliers");
    expect(&place.run("bench --suite kinds --kind sharp"), 2, "--kind");
    expect(&place.run("bench --kind dull"), 2, "outliers");
    let run = place.run(&format!("run {shape} --iters 1 --kind drift --json"));
    assert_eq!((run.code, &run.json()["kind"]), (0, &"drift".into()), "{}", run.stderr);
    assert!(run.json()["relative_rms"].as_f64() > Some(0.0));
    let verify = place.run("verify --quick --backend cpu --filter kinds/ --json").json();
    assert_eq!(groups(&verify), [("cpu", "kinds", 30)], "{verify}");
}

#[test]
fn filters_choose_by_words_and_add_up() {
    let place = Workplace::new();
    let bench = |filters: &[&str]| {
        let mut args =
            vec!["bench --backend cpu --suite cpu --peers none --no-roofline --seconds 0.01 --json"];
        args.extend(filters);
        let json = place.run(&args.join(" ")).json();
        json["results"].as_array().unwrap().iter().map(|row| row["task"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(bench(&["--filter x128", "--filter 1x2x64"]).len(), 3);
    assert_eq!(bench(&["--filter causal"]).len(), 2);
    assert_eq!(
        bench(&["--filter full", "--filter 1x2x64"]).len(),
        2,
        "what a name leaves out can be asked for"
    );
}

#[test]
fn flash_attention_3_needs_a_gpu_and_its_library() {
    let place = Workplace::new();
    expect(&place.run(&format!("bench {TASK} --fa3 .")), 2, "fa3 cannot be used here: it runs on a GPU");
}
