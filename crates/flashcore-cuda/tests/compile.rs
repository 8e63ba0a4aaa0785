//! PTX to machine code with the real ptxas, and a machine without a driver.

use flashcore_cuda::{
    Arch, Compiler, Cubin, Device, Driver, Error, Route,
    cache::{Cache, CacheOptions},
    disassemble,
    toolchain::{Search, Tool, ToolPath},
};
use flashcore_ptx::target::Target;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const SCALE: &str = include_str!("../examples/ptx/scale.ptx");

/// A tool from the environment, from the wheel that CI installs under `target/nv`, or from a like place.
fn find(tool: Tool) -> Option<ToolPath> {
    let mut search = Search::from_env(tool);
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nv");
    for root in [workspace, std::env::temp_dir().join("nv")] {
        search.path.push(root.join("nvidia/cu13/bin"));
        search.python_roots.push(root);
    }
    let found = search.find(tool).unwrap();
    if found.is_none() {
        println!(
            "notice: no {tool:?} found, so this check did not run; set FLASHCORE_PTXAS or install the wheel"
        );
    }
    found
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    // SAFETY: opening libcuda has no effect on this process.
    let present = unsafe { libloading::Library::new("libcuda.so.1") }.is_ok();
    match Driver::get() {
        Err(Error::NoDriver) => assert!(!present),
        other => assert!(present, "{:?}", other.err()),
    }
    if !present {
        assert_eq!(Device::new(0), Err(Error::NoDriver));
        assert!(Error::NoDriver.to_string().contains("CPU backend"));
    }
}

#[test]
fn ptxas_assembles_reports_and_the_cache_keeps_both() {
    let Some(ptxas) = find(Tool::Ptxas) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(&folder.path().join("cache"), CacheOptions::default()).unwrap();
    let compiler = Compiler::new(Some(cache), Some(ptxas.clone()));
    for target in [Target::Sm80, Target::Sm89, Target::Sm90a, Target::Sm100, Target::Sm120] {
        let built = compiler.compile_offline(SCALE, Arch::from(target)).unwrap();
        assert_eq!(built.route(), Route::Ptxas);
        let kernel = built.report().kernel("fc_scale").unwrap();
        assert!((4..64).contains(&kernel.registers) && kernel.spill_stores + kernel.stack == 0, "{kernel:?}");
        assert_eq!(built.report().compiler, format!("ptxas {}", ptxas.version().unwrap()));
        // The fastest of a few: others may have the cores now and then.
        let fastest = (0..5).map(|_| kept_in(&compiler, target, &built)).min().unwrap();
        assert!(fastest < Duration::from_millis(20), "{fastest:?}");
    }
}

/// How long it takes to find again in the cache what was built.
fn kept_in(compiler: &Compiler, target: Target, built: &Cubin) -> Duration {
    let start = Instant::now();
    let kept = compiler.compile_offline(SCALE, Arch::from(target)).unwrap();
    let taken = start.elapsed();
    assert_eq!((kept.route(), kept.bytes(), kept.report()), (Route::Cache, built.bytes(), built.report()));
    taken
}

#[test]
fn every_self_check_kernel_assembles_without_spills() {
    let Some(ptxas) = find(Tool::Ptxas) else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/ptx");
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 7);
    for file in files {
        let ptx = std::fs::read_to_string(&file).unwrap();
        let cubin =
            Compiler::new(None, Some(ptxas.clone())).compile_offline(&ptx, Arch::from(Target::Sm90)).unwrap();
        let name = format!("fc_{}", file.file_stem().unwrap().to_str().unwrap());
        let kernel =
            cubin.report().kernel(&name).unwrap_or_else(|| panic!("{name} is not in {}", file.display()));
        assert_eq!((kernel.spill_stores, kernel.stack, cubin.report().warnings.len()), (0, 0, 0), "{name}");
    }
}

#[test]
fn what_ptxas_refuses_comes_back_with_its_reasons() {
    let Some(ptxas) = find(Tool::Ptxas) else { return };
    let compiler = Compiler::new(None, Some(ptxas));
    let cases = [
        (SCALE.replace("mul.f32", "mul.f33"), "f33"),
        (SCALE.replace("7.0", "99.0"), "99.0"),
        (String::new(), ""),
    ];
    for (ptx, word) in cases {
        match compiler.compile_offline(&ptx, Arch::from(Target::Sm90)) {
            Err(Error::Compile { arch, log }) => assert!(arch == "sm_90" && log.contains(word), "{log}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_large_text_passes_through_the_pipes() {
    let Some(ptxas) = find(Tool::Ptxas) else { return };
    let body = "    mul.f32 %x, %x, %factor;\n";
    let large = SCALE.replace(body, &body.repeat(20_000));
    assert!(large.len() > 500_000);
    let mut compiler = Compiler::new(None, Some(ptxas));
    compiler.options.optimisation = 0;
    let cubin = compiler.compile_offline(&large, Arch::from(Target::Sm80)).unwrap();
    assert!(cubin.bytes().len() > 100_000, "{}", cubin.bytes().len());
}

#[test]
fn without_any_compiler_the_error_says_so() {
    match Compiler::new(None, None).compile_offline(SCALE, Arch::from(Target::Sm80)) {
        Err(Error::Compile { log, .. }) => assert!(log.contains("no GPU"), "{log}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn machine_code_can_be_read_as_text() {
    let (Some(ptxas), Some(nvdisasm)) = (find(Tool::Ptxas), find(Tool::Nvdisasm)) else { return };
    let cubin = Compiler::new(None, Some(ptxas)).compile_offline(SCALE, Arch::from(Target::Sm90)).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let text = disassemble(&nvdisasm, &cubin, scratch.path()).unwrap();
    assert!(text.contains("fc_scale") && text.contains("FMUL"), "{text}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
}
