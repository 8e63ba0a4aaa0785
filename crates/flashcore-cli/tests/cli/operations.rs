//! Gradients and mixtures of experts on the command line: run, bench and gate, end to end on the CPU and in the simulator.

use serde_json::Value;

use crate::workplace::{Workplace, expect, npy};

#[track_caller]
fn passes(args: &str, fields: &[(&str, Value)]) {
    let ended = Workplace::new().run(&format!("{args} --json"));
    let json = ended.json();
    assert_eq!((ended.code, &json["pass"]), (0, &true.into()), "{args}: {json}");
    for (name, expected) in fields {
        assert_eq!(json[name], *expected, "{args}: {json}");
    }
}

#[test]
fn gradients_run_on_cpu_and_simulator() {
    let fields = [("backward", true.into()), ("checked_rows", 80.into())];
    passes("run --backward --shape 1x2x40x16 --dtype f32 --causal --sinks --iters 2", &fields);
    passes("run --backward --shape 2x1x40x16 --lengths 40,7 --dtype bf16 --iters 1", &fields);
    passes("run --backward --shape 1x2x40x16 --backend sim --gpu sm_80", &fields);
    let page = Workplace::new().run("run --backward --shape 1x2x9x8 --iters 1");
    expect(&page, 0, "gradients");
}

#[test]
fn gradients_go_to_files_of_their_tensors_shapes() {
    let place = Workplace::with_tensors();
    place.write("do.npy", &npy("<f4", "False", &[1, 2, 5, 4], 4));
    let files = "--q q.npy --k k.npy --v v.npy --d-out do.npy --dq dq.npy --dk dk.npy --dv dv.npy";
    expect(&place.run(&format!("run --backward {files} --iters 1")), 0, "wrote");
    for (name, rows) in [("dq.npy", 5), ("dk.npy", 7), ("dv.npy", 7)] {
        let text = String::from_utf8_lossy(&place.read(name)).into_owned();
        assert!(text.contains(&format!("(1, 2, {rows}, 4,)")), "{name}: {text}");
    }
    expect(&place.run(&format!("run --backward {files}")), 2, "dq.npy");
}

#[test]
fn experts_run_on_cpu_and_simulator() {
    passes(
        "run moe --tokens 9 --hidden 32 --intermediate 24 --experts 4 --iters 2",
        &[("backend", "cpu".into())],
    );
    let sim = "run moe --tokens 5 --hidden 32 --intermediate 16 --experts 3 --backend sim --gpu sm_80";
    passes(sim, &[("backend", "sim".into()), ("checked_tokens", 5.into())]);
    let ended = Workplace::new().run("run moe --experts 2 --top-k 3");
    expect(&ended, 2, "a top-k of at most that");
}

#[test]
fn suites_of_operations_are_measured_and_compared() {
    for (suite, filter, results, comparisons) in [
        ("backward-cpu", "1x8x128x64", 4, 2),
        ("serving-cpu", "2x8x1x64", 4, 3),
        ("serving-cpu", "mixed", 2, 1),
        ("moe-cpu", "1x128x64", 1, 0),
    ] {
        let place = Workplace::new();
        let args =
            format!("bench --backend cpu --suite {suite} --filter {filter} --peers none --seconds 0.01");
        let ended = place.run(&format!("{args} --no-roofline --out r.json --json"));
        let json = ended.json();
        assert_eq!(ended.code, 0, "{json}");
        let count = |name: &str| json[name].as_array().unwrap().len();
        assert_eq!(
            (count("results"), count("comparisons")),
            (results, comparisons),
            "{suite} {filter}: {json}"
        );
        assert!(json["results"][0]["speed"]["gbps"].as_f64().unwrap() > 0.0);
        let page = place.run("report r.json --out page.html");
        expect(&page, 0, "page.html");
    }
}

#[test]
fn what_cannot_be_asked_of_operations_is_refused() {
    let place = Workplace::with_tensors();
    let check = |args: &str, words: &str| expect(&place.run(args), 2, words);
    check("run --backward --page-size 4", "--page-size");
    check("run --q q.npy --k k.npy --v v.npy", "--out");
    check("run --backward --q q.npy --k k.npy --v v.npy --out o.npy", "--out");
    check("run --q q.npy --k k.npy --v v.npy --d-out q.npy --dq a.npy --dk b.npy --dv c.npy", "--backward");
    check("run moe --backend sim --threads 2", "--threads");
    check("run moe --gpu sm_90", "--gpu is for the simulator");
    check("tune --suite moe-cpu --backend sim --out t.json", "not forward attention");
    check("profile --backward --shape 1x1x16x16", "not forward attention");
    check("gate --suite moe-cpu --backend cpu --max-ratio 1 --filter 1x128x64 --seconds 0.01", "peer");
}
