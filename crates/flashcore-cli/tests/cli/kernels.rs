//! `flashcore inspect` and `flashcore warm`, without a GPU.

use crate::workplace::{Ended, Workplace, expect};

const PTXAS: &str = "FLASHCORE_PTXAS";

fn without_tools(args: &str) -> Ended {
    Workplace::new().run_with(args, PTXAS, "off")
}

#[track_caller]
fn refused(args: &str, says: &str) {
    expect(&without_tools(args), 2, says);
}

#[test]
fn a_plan_needs_no_gpu() {
    for (gpu, target) in [
        ("sm_80", "sm_80"),
        ("sm_86", "sm_86"),
        ("sm_89", "sm_8"),
        ("sm_90", "sm_90a"),
        ("sm_100", "sm_"),
        ("sm_120", "sm_"),
    ] {
        let args = format!("inspect --shape 2x16x2048x128 --causal --gpu {gpu} --json");
        let json = without_tools(&args).json();
        assert!(json["target"].as_str().unwrap().starts_with(target), "{json}");
        assert!(!json["why"].as_str().unwrap().is_empty());
        assert_eq!(json["passed_over"].as_array().unwrap().is_empty(), gpu == "sm_90", "{json}");
        assert!(json["launch"]["grid"][0].as_u64().unwrap() > 0);
        assert!(json["parameters"].as_array().unwrap().len() > 8);
        assert!(json["not_built"].as_str().unwrap().contains("nvidia-cuda-nvcc"), "{json}");
    }
}

#[test]
fn a_kernel_can_be_asked_for() {
    let kernel = |more: &str| {
        let json = without_tools(&format!("inspect --shape 2x16x2048x128 --gpu sm_90 --json {more}")).json();
        json["kernel"].as_str().unwrap().to_owned()
    };
    assert!(
        kernel("").starts_with("fc_forward_sm_90a_") && kernel("--general").starts_with("fc_forward_sm_90_")
    );
    assert_eq!(kernel("--kernel forward_sm80"), kernel("--general"));
    assert_eq!(kernel("--kernel forward_sm90"), kernel(""));
    let few = "--seq-q 1 --kv-heads 4";
    assert!(
        !kernel(few).contains("_fixed") && kernel(&format!("{few} --batch-invariant")).contains("_fixed")
    );
    let refused = without_tools("inspect --gpu sm_86 --kernel forward_sm90");
    assert!(refused.code == 2 && refused.stderr.contains("not 8.6; the kernels are"), "{}", refused.stderr);
    let unknown = without_tools("inspect --kernel forward_sm42");
    assert!(unknown.code == 2 && unknown.stderr.contains("forward_sm90, forward_sm80"), "{}", unknown.stderr);
}

#[test]
fn people_get_the_same() {
    let ended = without_tools("inspect --gpu sm_90 --shape 4x16x4096x128 --causal");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    for words in ["4x16x4096x128 f16", "causal", "H100", "sm_90a", "grid", "p_scale", "not built"] {
        assert!(ended.stdout.contains(words), "`{words}` is missing in {}", ended.stdout);
    }
}

#[test]
fn an_empty_problem_has_no_launch() {
    let ended = without_tools("inspect --gpu sm_90 --shape 0x1x1x1");
    assert!(ended.code == 0 && ended.stdout.contains("nothing to compute"), "{}", ended.stdout);
    let json = without_tools("inspect --gpu sm_90 --shape 0x1x1x1 --json").json();
    assert!(json["kernel"].is_string() && json["launch"].is_null(), "{json}");
}

#[test]
fn ptx_is_printed_alone() {
    let ended = without_tools("inspect --gpu sm_80 --ptx");
    assert!(ended.stdout.trim_start().starts_with(".version"), "{:.200}", ended.stdout);
    assert!(ended.stdout.contains(".entry fc_forward"));
    let json = without_tools("inspect --gpu sm_80 --ptx --json").json();
    assert_eq!(json["ptx"], ended.stdout.as_str());
}

#[test]
fn kernels_of_the_covering_set_have_names() {
    let list = without_tools("inspect --list --json").json();
    let names = list["kernels"].as_array().unwrap();
    let names: Vec<&str> = names.iter().map(|name| name.as_str().unwrap()).collect();
    let once: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(once.len(), names.len(), "each has a name of its own");
    for family in ["fc_forward_sm_80_", "fc_forward_sm_90a_"] {
        let name = names.iter().find(|name| name.starts_with(family)).unwrap();
        let json = without_tools(&format!("inspect {name} --json")).json();
        assert_eq!(json["kernel"], *name);
    }
    let people = without_tools("inspect --list").stdout;
    assert!(people.lines().eq(names.iter().copied()), "one a line: {people:.300}");
    refused("inspect fc_nothing", "inspect --list");
}

#[test]
fn f32_has_a_kernel_on_every_gpu() {
    for gpu in ["sm_80", "sm_90", "sm_120"] {
        let json = without_tools(&format!("inspect --dtype f32 --gpu {gpu} --json")).json();
        let kernel = json["kernel"].as_str().unwrap();
        assert!(kernel.starts_with(&format!("fc_forward_{gpu}_f32_")), "{kernel}");
    }
}

#[test]
fn problems_without_a_kernel_say_what_there_is() {
    refused("inspect --shape 1x1x64x520 --gpu sm_90", "head dims up to 576 (q, k) and 512 (v)");
    refused("inspect --dtype bf16 --gpu sm_75", "7.5 supports f16");
    refused("inspect --shape 1x3x64x64 --kv-heads 2", "");
    refused("inspect --gpu sm_70", "sm_75");
    refused("inspect --gpu sm_90 --sass", "nvidia-cuda-nvcc");
    refused("warm --gpu sm_90", "nvidia-cuda-nvcc");
    refused("warm --dtype f32 --gpu sm_90", "nvidia-cuda-nvcc");
    refused("warm --all --shape 1x1x1x8", "cannot be used with");
}

/// A ptxas that assembles nothing but says what ptxas would.
#[cfg(unix)]
const FAKE: &str = include_str!("../data/ptxas.sh");

#[cfg(unix)]
fn with_ptxas(place: &Workplace, args: &str) -> Ended {
    install(place, FAKE);
    again(place, args)
}

#[cfg(unix)]
#[test]
fn kernels_are_compiled_once() {
    let place = Workplace::new();
    let warm = "warm --gpu sm_90 --shape 2x16x2048x128 --dtype bf16 --json";
    // The folder keeps the assembler's date, which is part of a kernel's key: it is written once.
    let routes = [with_ptxas(&place, warm), again(&place, warm)]
        .map(|ended| ended.json()["kernels"][0]["route"].clone());
    assert_eq!(routes, ["ptxas", "cache"]);
    let inspect = again(&place, "inspect --gpu sm_90 --shape 2x16x2048x128 --dtype bf16 --json").json();
    let build = &inspect["build"];
    assert_eq!(
        (&build["route"], &build["registers"]),
        (&"cache".into(), &168.into()),
        "what was warmed is used"
    );
    assert_eq!((&build["spill_store_bytes"], &build["stack_bytes"]), (&24.into(), &16.into()));
    assert_eq!(build["ctas_per_sm"], 1);
    let text = again(&place, "inspect --gpu sm_90 --shape 2x16x2048x128 --dtype bf16").stdout;
    assert!(text.contains("24 bytes stored") && text.contains("168 of 168"), "{text}");
}

#[cfg(unix)]
fn again(place: &Workplace, args: &str) -> Ended {
    place.run_with(args, PTXAS, place.path("ptxas").to_str().unwrap())
}

/// A command line that compiles with a script instead of ptxas.
#[cfg(unix)]
fn install(place: &Workplace, script: &str) {
    use std::os::unix::fs::PermissionsExt;
    place.write("ptxas", script.as_bytes());
    std::fs::set_permissions(place.path("ptxas"), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[test]
fn warming_that_is_stopped_says_what_is_ready() {
    let place = Workplace::new();
    let script = FAKE.replacen("name=", "touch begun; sleep 0.3\nname=", 1);
    install(&place, &script);
    // Few at a time, so that some are left.
    let variables = [(PTXAS, place.path("ptxas")), ("RAYON_NUM_THREADS", "2".into())];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.to_str().unwrap()));
    let mut child = place.start_with("warm --all --gpu sm_90 --json", &variables);
    child.wait_until(|| place.path("begun").exists());
    let ended = child.stop();
    let json = ended.json();
    let (ready, asked) = (json["kernels"].as_array().unwrap(), json["asked"].as_u64().unwrap());
    assert_eq!((ended.code, &json["stopped"]), (2, &true.into()), "{json}");
    assert!(!ready.is_empty() && (ready.len() as u64) < asked, "{} of {asked}", ready.len());
    assert!(ready.iter().all(|kernel| kernel["route"] == "ptxas"), "what had begun was finished: {json}");
}

#[cfg(unix)]
#[test]
fn a_kernel_that_does_not_compile_fails() {
    let place = Workplace::new();
    install(&place, "#!/bin/sh\ncat > /dev/null\necho 'ptxas fatal : no' >&2\nexit 1\n");
    expect(&again(&place, "warm --gpu sm_80"), 1, "ptxas fatal");
}
