//! `flashcore sim`: PTX files on the CPU, what they find, and how they end; and how `run --backend sim` does.

use std::time::Duration;

use crate::workplace::{Workplace, expect, npy_file};

const FILE: &str = "kernels.ptx";
const SCALE: &str = "sim kernels.ptx --entry scale --grid 2 --block 64";

fn place() -> Workplace {
    let place = Workplace::new();
    place.write(FILE, include_bytes!("../data/kernels.ptx"));
    let numbers: Vec<f32> = (0..100).map(|i| i as f32).collect();
    place.write("x.npy", &array("<f4", 100, bytemuck::cast_slice(&numbers)));
    place
}

/// An npy file with one dimension.
fn array(descr: &str, len: usize, elements: &[u8]) -> Vec<u8> {
    npy_file(&format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({len},), }}\n"), elements)
}

/// The last `len` elements of a file.
fn elements(place: &Workplace, name: &str, len: usize) -> Vec<[u8; 4]> {
    let bytes = place.read(name);
    bytes[bytes.len() - 4 * len..].chunks_exact(4).map(|four| four.try_into().unwrap()).collect()
}

#[test]
fn a_clean_kernel_leaves_its_results() {
    let place = place();
    let args = "--arg in:x.npy --arg out:y.npy:f32:100 --arg u32:100 --arg f32:0.5 --json";
    let ended = place.run(&format!("{SCALE} {args}"));
    expect(&ended, 0, "");
    let json = ended.json();
    assert_eq!((&json["clean"], &json["kernel"]), (&true.into(), &"scale".into()));
    assert_eq!(json["results"][0]["first"][3], "1.5");
    assert_eq!(json["counters"]["by_class"]["store"], 4, "one for each warp: {json}");
    let halves = (0..100).map(|i| (i as f32 / 2.0).to_le_bytes());
    assert!(elements(&place, "y.npy", 100).into_iter().eq(halves));
}

#[test]
fn schedules_do_not_change_a_clean_kernel() {
    let place = place();
    for schedule in ["round-robin", "random", "producer-first", "consumer-first"] {
        let out = format!("{schedule}.npy");
        let args = format!("--arg in:x.npy --arg out:{out}:f32:100 --arg u32:100 --arg f32:3 --seed 5");
        expect(&place.run(&format!("{SCALE} {args} --schedule {schedule}")), 0, "clean");
        assert_eq!(place.read(&out), place.read("round-robin.npy"), "{schedule}");
    }
}

#[test]
fn arrays_are_changed_in_place() {
    let place = place();
    let numbers: Vec<i32> = (-8..24).collect();
    place.write("n.npy", &array("<i4", 32, bytemuck::cast_slice(&numbers)));
    let ended = place.run("sim kernels.ptx --entry increment --grid 1 --block 32 --arg inout:n.npy");
    expect(&ended, 0, "s32 32");
    assert!(elements(&place, "n.npy", 32).into_iter().eq((-7i32..25).map(i32::to_le_bytes)));
}

#[test]
fn an_input_that_is_written_is_said() {
    let place = place();
    place.write("n.npy", &array("<i4", 32, &[0; 128]));
    let ended = place.run("sim kernels.ptx --entry increment --grid 1 --block 32 --arg in:n.npy");
    expect(&ended, 1, "inout:n.npy");
    assert!(elements(&place, "n.npy", 32).into_iter().all(|bytes| bytes == [0; 4]), "it stays");
}

#[test]
fn a_race_is_found_with_its_line() {
    let place = place();
    let racy = "sim kernels.ptx --entry racy --grid 1 --block 64 --arg out:y.npy:u32:64 --force";
    expect(&place.run(racy), 1, "SharedRace");
    let json = place.run(&format!("{racy} --check race --json")).json();
    let found = &json["findings"][0];
    assert_eq!((&json["clean"], &found["kind"]), (&false.into(), &"SharedRace".into()));
    assert!(found["instruction"].as_str().unwrap().contains("shared"), "{found}");
    assert!(found["source"].as_str().unwrap().starts_with("kernels.ptx:"), "{found}");
    let both = found["message"].as_str().unwrap();
    assert!(both.contains("by warp 0") && both.contains("(kernels.ptx:"), "both sides: {found}");
    expect(&place.run(&format!("{racy} --check bounds,barrier")), 0, "clean");
    expect(&place.run(&format!("{racy} --check none --quiet")), 0, "");
}

/// What a finding ended has no result worth keeping.
#[test]
fn an_access_beyond_an_array_writes_no_file() {
    let place = place();
    let args = "--arg in:x.npy --arg out:y.npy:f32:128 --arg u32:101 --arg f32:1";
    let ended = place.run(&format!("{SCALE} {args}"));
    expect(&ended, 1, "OutOfBounds");
    expect(&ended, 1, "of argument 0 (in:x.npy), which has 400");
    assert!(ended.stdout.contains("not written"), "{}", ended.stdout);
    assert!(!place.names().contains(&"y.npy".to_owned()));
}

#[test]
fn an_output_is_not_an_input() {
    let ended = place().run("sim kernels.ptx --entry increment --grid 1 --block 32 --arg out:n.npy:u32:32");
    expect(&ended, 1, "UninitGlobal");
}

#[test]
fn what_cannot_run_says_why() {
    let place = place();
    place.write(
        "broken.ptx",
        b".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry k() { frob.u32 %r1; }",
    );
    place.write("c.npy", &array("<c8", 1, &[0; 8]));
    place.write(
        "newer.ptx",
        b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k() { fence.proxy.async; ret; }",
    );
    let head = ".version 7.8\n.target sm_80\n.address_size 64\n";
    let body = ".reg .b64 %p; ld.param.u64 %p, [p]; L: st.global.u32 [%p], 1; bra L;";
    place.write("endless.ptx", format!("{head}.visible .entry k(.param .u64 p) {{ {body} }}").as_bytes());
    let scale = "--arg in:x.npy --arg out:y.npy:f32:100 --arg u32:100";
    for (args, says) in [
        (
            "sim endless.ptx --grid 1 --block 1 --arg out:y.npy:u32:1 --max-steps 999".to_owned(),
            "--max-steps",
        ),
        (format!("{SCALE} {scale} --arg f32:1 --smem 170000"), "a CTA of sm_"),
        ("sim missing.ptx --grid 1 --block 1".to_owned(), "check the path"),
        ("sim c.npy --grid 1 --block 1".to_owned(), "not text"),
        ("sim newer.ptx --grid 1 --block 1".to_owned(), "sm_90"),
        ("sim broken.ptx --grid 1 --block 1".to_owned(), "unknown instruction `frob.u32`"),
        ("sim kernels.ptx --grid 1 --block 1".to_owned(), "scale, increment, racy; name one with --entry"),
        ("sim kernels.ptx --entry nobody --grid 1 --block 1".to_owned(), "name one with --entry"),
        (format!("{SCALE} {scale}"), "3 arguments for 4 parameters"),
        (format!("{SCALE} {scale} --arg u64:1"), "8 bytes for a parameter of 4"),
        (format!("{SCALE} --arg in:missing.npy"), "missing.npy"),
        (format!("{SCALE} --arg in:c.npy"), "convert it to one of: u8"),
        (format!("{SCALE} --arg in:x.npy --arg out:x.npy:f32:100"), "--force"),
        (format!("{SCALE} --arg inout:x.npy --arg inout:x.npy"), "give each its own file"),
        (format!("{SCALE} --arg out:no/y.npy:f32:1"), "create it first"),
        (format!("{SCALE} --arg out:y.npy:f32:99999999999999"), "use a smaller shape"),
        (format!("{SCALE} --arg i7:1"), "write u32:7"),
        (format!("{SCALE} --check races"), "use bounds, init, race"),
        (format!("{SCALE} --schedule chaos"), "round-robin"),
        ("sim kernels.ptx --entry increment --grid 0 --block 1 --arg u64:0".to_owned(), "cannot launch"),
        ("sim kernels.ptx --entry increment --grid 1 --block 2048 --arg u64:0".to_owned(), "cannot launch"),
        ("sim kernels.ptx --entry increment --block 1".to_owned(), "--grid"),
    ] {
        expect(&place.run(&args), 2, says);
    }
    assert!(!place.names().contains(&"y.npy".to_owned()));
}

/// A file may hold what the simulator does not know, as long as nothing executes it.
#[test]
fn what_is_unknown_and_not_executed_is_no_obstacle() {
    let place = Workplace::new();
    let text = ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry fine() { ret; }\n\
                .visible .entry odd(.param .u32 n) { .reg .b32 %n; .reg .pred %p; ld.param.u32 %n, [n];\n\
                setp.eq.u32 %p, %n, 0;\n@!%p frob.u32 %n, %n;\nret; }";
    place.write("gap.ptx", text.as_bytes());
    let run = |rest: &str| place.run(&format!("sim gap.ptx --grid 1 --block 1 --entry {rest}"));
    let fine = run("fine");
    expect(&fine, 0, "clean");
    assert!(!fine.stdout.contains("NotJudged"), "{}", fine.stdout);
    expect(&run("odd --arg u32:0"), 0, "NotJudged");
    expect(&run("odd --arg u32:1"), 2, "line 7: `frob.u32 %n, %n`, which `odd` executed");
    expect(&place.run("sim --explain NotJudged"), 0, "cannot execute");
}

/// What one wrong `.target` means for hundreds of instructions is one line.
#[test]
fn instructions_that_the_target_lacks_are_told_once() {
    let place = place();
    let head = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k() {\n";
    let text = format!("{head}{}ret;\n}}\n", "fence.proxy.async;\n".repeat(300));
    place.write("newer.ptx", text.as_bytes());
    let ended = place.run("sim newer.ptx --grid 1 --block 1");
    expect(&ended, 2, "newer.ptx:5: `fence.proxy.async` needs target sm_90");
    expect(&ended, 2, "(300 times, also at 6, 7, 8, 9 and 295 more)");
    assert!(ended.stderr.lines().count() <= 4, "{}", ended.stderr);
}

/// An 8 x 8 array of floats 0, 1, 2 ….
fn square(place: &Workplace) {
    let numbers: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let head = "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 8), }\n";
    place.write("square.npy", &npy_file(head, bytemuck::cast_slice(&numbers)));
    place.write("arguments.ptx", include_bytes!("../data/arguments.ptx"));
}

#[test]
fn a_tensor_map_takes_from_its_array_what_is_not_said() {
    let place = place();
    square(&place);
    let tile = "sim arguments.ptx --entry tile --grid 1 --arg out:t.npy:f32:16 --force";
    let with =
        |map: &str| place.run(&tile.replace("--arg", &format!("--arg tensormap:in:square.npy;{map} --arg")));
    expect(&with("box=4,4"), 0, "clean");
    let rows = [20u8, 28, 36, 44].map(|first| [0, 1, 2, 3].map(|i| f32::from(first + i).to_le_bytes()));
    assert_eq!(elements(&place, "t.npy", 16), rows.concat());
    expect(&with("box=4,4;dims=8,3"), 0, "clean");
    assert_eq!(elements(&place, "t.npy", 16)[4], [0; 4], "rows behind the tensor are zeros");
    expect(&with("box=4,3"), 1, "Deadlock");
    expect(&with("box=3,4"), 2, "multiple of 16 bytes");
    expect(&with("swizzle=7;box=4,4"), 2, "use 0, 32, 64 or 128");
    expect(&with("size=4"), 2, "not part of a tensor map");
}

#[test]
fn a_struct_holds_arguments_of_every_kind() {
    let place = place();
    square(&place);
    let packed = |members: &str| {
        place.run(&format!("sim arguments.ptx --entry packed --grid 1 --force --arg struct:{members}"))
    };
    expect(&packed("f32:2|tensormap:in:square.npy;box=4,4|u32:3|out:t.npy:f32:12"), 0, "clean");
    let rows = [20u8, 28, 36].map(|first| [0, 1, 2, 3].map(|i| f32::from(2 * (first + i)).to_le_bytes()));
    assert_eq!(elements(&place, "t.npy", 12), rows.concat());
    let short = packed("f32:2|tensormap:in:square.npy;box=4,4|u32:4|out:t.npy:f32:12");
    expect(&short, 1, "of argument 0 (out:t.npy), which has 48");
    expect(&packed("f32:2|u32:3|out:t.npy:f32:12"), 2, "16 bytes for a parameter of 256");
    expect(&packed("f32:2|rows:3"), 2, "`rows` is not a kind of argument");
    let script = r#"{"ptx": "arguments.ptx", "arrays": {"x": {"file": "square.npy"},
        "y": {"dtype": "f32", "shape": [12], "save": "y.npy"}}, "launches": [{"entry": "packed", "grid": [1], "args": [
        {"struct": [{"f32": 2}, {"tensormap": {"array": "x", "box": [4, 4]}}, {"u32": 3}, {"array": "y"}]}]}]}"#;
    place.write("op.json", script.as_bytes());
    expect(&place.run("sim --script op.json"), 0, "clean");
    assert_eq!(elements(&place, "y.npy", 12), rows.concat());
}

#[test]
fn a_script_runs_several_launches_on_the_same_arrays() {
    let place = place();
    square(&place);
    let script = |expect: &str| {
        let launch =
            r#"{"entry": "affine", "grid": [1], "args": [{"array": "x"}, {"bytes": "000000400000803f"}]}"#;
        let x = r#"{"dtype": "f32", "shape": [33], "fill": 0, "save": "y.npy", "expect": "want.npy", "rtol": 1e-6}"#;
        format!(
            r#"{{"ptx": "arguments.ptx", "arrays": {{"x": {x}}}, "launches": [{launch}, {launch}{expect}]}}"#
        )
    };
    // 0 -> 1 -> 3 by x * 2 + 1; the second launch is the second call.
    let wanted: Vec<f32> = (0..33).map(|i| if i == 32 { 2.0 } else { 3.0 }).collect();
    place.write("want.npy", &array("<f4", 33, bytemuck::cast_slice(&wanted)));
    place.write("op.json", script("").as_bytes());
    let ended = place.run("sim --script op.json --stats --json");
    expect(&ended, 0, "");
    let json = ended.json();
    assert_eq!((&json["clean"], &json["comparisons"][0]["equal"]), (&true.into(), &true.into()), "{json}");
    assert!(json["launches"][1]["stats"]["instructions_per_second"].as_f64().unwrap() > 0.0);
    assert!(elements(&place, "y.npy", 33).into_iter().eq(wanted.iter().map(|x| x.to_le_bytes())));
    place.write(
        "op.json",
        script(&format!(", {}", r#"{"entry": "affine", "grid": [1], "args": []}"#)).as_bytes(),
    );
    expect(&place.run("sim --script op.json --force"), 2, "0 arguments for 2 parameters");
    let more = r#", {"entry": "affine", "grid": [1], "args": [{"array": "x"}, {"array": "z"}]}"#;
    place.write("op.json", script(more).as_bytes());
    expect(&place.run("sim --script op.json --force"), 2, "argument 1: there is no array `z`");
    place.write("op.json", b"{\"ptx\": 1}");
    expect(&place.run("sim --script op.json"), 2, "op.json: invalid type");
}

#[test]
fn results_are_compared_with_tolerances() {
    let place = place();
    let numbers: Vec<f32> = (0..100).map(|i| i as f32 * 0.5 + 0.001).collect();
    place.write("want.npy", &array("<f4", 100, bytemuck::cast_slice(&numbers)));
    let run = |more: &str| {
        let args = "--arg in:x.npy --arg out:y.npy:f32:100 --arg u32:100 --arg f32:0.5 --force --compare y.npy=want.npy";
        place.run(&format!("{SCALE} {args} {more}"))
    };
    expect(&run("--atol 0.01"), 0, "100 elements as expected");
    expect(&run("--rtol 0.01"), 1, "1 of 100 differ, most at 0: 0 instead of");
    expect(&run("--compare no.npy=want.npy"), 2, "no argument writes");
}

#[test]
fn kinds_of_findings_are_explained() {
    let place = place();
    expect(&place.run("sim --explain sharedrace"), 0, "__syncthreads()");
    let all = place.run("sim --explain all --json").json();
    let filled = |kind: &serde_json::Value| {
        ["meaning", "cure"].iter().all(|part| !kind[part].as_str().unwrap_or_default().is_empty())
    };
    assert!(all.as_array().unwrap().iter().all(filled), "{all}");
    expect(&place.run("sim --explain nothing"), 2, "the kinds are OutOfBounds");
}

/// Attention on a GPU that is not there: the kernel that it would run, judged like any backend.
#[test]
fn attention_runs_in_the_simulator() {
    let place = Workplace::new();
    for (gpu, kernel) in [("sm_90", "sm_90a"), ("sm_80", "sm_80")] {
        let args = format!("run --backend sim --gpu {gpu} --shape 1x2x70x64 --causal --iters 2 --json");
        let ended = place.run(&args);
        expect(&ended, 0, "");
        let json = ended.json();
        assert!(json["kernel"].as_str().unwrap().contains(kernel), "{json}");
        let simulation = &json["simulation"];
        assert_eq!((&json["pass"], &json["repeatable"]), (&true.into(), &true.into()));
        assert_eq!((&simulation["runs"], &simulation["clean"]), (&3.into(), &true.into()));
        assert!(simulation["counters"]["tensor_macs"].as_u64().unwrap() > 0, "{json}");
        assert!(json.get("latency_us").is_none(), "its time says nothing: {json}");
    }
    expect(&place.run("run --backend sim --shape 1x1x8x16 --gpu sm_80"), 0, "hostile");
    expect(&place.run("run --backend sim --shape 1x1x8x16 --gpu sm_80 --dtype f32"), 0, "hostile");
    for general in ["--general", "--kernel forward_sm80"] {
        let run = place.run(&format!("run --backend sim --shape 1x1x8x16 --gpu sm_90 {general} --json"));
        let kernel = run.json()["kernel"].as_str().map(str::to_owned);
        assert!(kernel.is_some_and(|name| name.starts_with("fc_forward_sm_90_")), "{}", run.stdout);
    }
}

#[test]
fn what_the_simulator_cannot_do_is_said() {
    let place = Workplace::new();
    expect(&place.run("run --backend sim --shape 8x32x8192x128"), 2, "make the shape smaller");
    expect(&place.run("run --backend sim --threads 2"), 2, "cpu backend");
    let hopper = "run --backend sim --shape 1x1x8x16 --kernel forward_sm90 --gpu";
    expect(
        &place.run(&format!("{hopper} sm_80")),
        2,
        "forward_sm90: it runs on compute capability 9.0, not 8.0",
    );
    expect(&place.run(&format!("{hopper} sm_80")), 2, "the kernels are decode, forward_sm90, forward_sm80");
    expect(&place.run("run --gpu sm_80"), 2, "--backend sim");
    expect(&place.run("bench --backend sim"), 2, "cannot be timed");
}

/// A launch cannot be asked to stop, so that Ctrl-C is left to do what it does by itself.
#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_ends_a_simulated_run_at_once() {
    let place = Workplace::new();
    let catches = |args: &str, seconds| place.start(args).catches_ctrl_c(Duration::from_secs(seconds));
    assert!(!catches("run --backend sim --gpu sm_90 --shape 1x8x2048x128", 2));
    assert!(catches("bench --backend cpu --peers none --seconds 600", 300), "others do it themselves");
}
