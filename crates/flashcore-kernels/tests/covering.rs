//! The covering set without a GPU: small, complete, verified, unchanged, and assembled without spills where an
//! assembler is found (`FLASHCORE_PTXAS`, `target/nv`, the path).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use flashcore_core::{DType, Dims, ExpertLayout, Index, Layout, Mask, MoeSpec, Routing, Spec};
use flashcore_kernels::{
    AnyProgram, Gpu, KernelConfig, Plan, covering_experts, covering_merges, covering_set, plan, plan_general,
    plan_merge, plan_moe,
};
use flashcore_ptx::target::Target;
use sha2::{Digest, Sha256};

fn programs() -> Vec<(KernelConfig, AnyProgram)> {
    let plans = covering_set().unwrap().into_iter().map(|member| member.plan().unwrap());
    let kernels = plans.chain(merges()).map(|plan| *plan.kernel());
    kernels.chain(expert_kernels()).map(built).collect()
}

fn built(kernel: KernelConfig) -> (KernelConfig, AnyProgram) {
    (kernel, kernel.program().unwrap_or_else(|e| panic!("{e}")))
}

/// Every kernel of the plans for mixtures of experts, once.
fn expert_kernels() -> Vec<KernelConfig> {
    let problems = covering_experts().unwrap();
    let plans = problems
        .iter()
        .flat_map(|problem| [Gpu::HOPPER, Gpu::CONSUMER].map(|gpu| plan_moe(problem, &gpu, 16).unwrap()));
    let kernels = plans.flat_map(|plan| plan.launches().iter().map(|l| *l.kernel()).collect::<Vec<_>>());
    let mut seen = BTreeSet::new();
    kernels.filter(|kernel| seen.insert(kernel.name())).collect()
}

fn merges() -> impl Iterator<Item = Plan> {
    covering_merges().unwrap().into_iter().map(|problem| plan_merge(&problem, &Gpu::AMPERE, 16).unwrap())
}

#[test]
fn small_and_without_repetition() {
    let plans: Vec<_> = covering_set().unwrap().into_iter().map(|member| member.plan().unwrap()).collect();
    let names: BTreeSet<_> = plans.iter().map(|plan| plan.kernel().name()).collect();
    assert_eq!(names.len(), plans.len());
    assert!(plans.len() <= 192, "{} members", plans.len());
    let general = plans.iter().filter(|plan| matches!(plan.kernel(), KernelConfig::Sm80(_))).count();
    assert!(general >= 24 && plans.len() - general >= 12, "both families are covered");
    let names: BTreeSet<_> = merges().map(|plan| plan.kernel().name()).collect();
    // Rows of several lengths share a kernel.
    assert!(names.len() >= 16 && merges().count() <= 24, "{names:?}");
}

/// `tests/hashes.txt` holds the hash of every program's text; `FLASHCORE_BLESS=1` writes it anew.
#[test]
fn text_changes_only_on_purpose() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hashes.txt");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let lines = programs()
        .iter()
        .map(|(_, p)| format!("{} {}\n", hex(&Sha256::digest(p.text())), p.entry()))
        .collect::<String>();
    if std::env::var_os("FLASHCORE_BLESS").is_some_and(|value| value == "1") {
        fs::write(&path, &lines).unwrap();
    }
    let blessed = fs::read_to_string(&path).unwrap_or_default();
    let changed: Vec<_> = lines.lines().filter(|line| !blessed.lines().any(|old| old == *line)).collect();
    assert!(
        changed.is_empty() && blessed.len() == lines.len(),
        "the PTX of these kernels changed; if that is meant, run the test with FLASHCORE_BLESS=1 and commit \
         tests/hashes.txt:\n{}",
        changed.join("\n")
    );
}

/// The architectures that each program is assembled for.
fn architectures(target: Target) -> Vec<Target> {
    let number = target.number();
    if target.is_arch_specific() {
        return vec![target];
    }
    let newer = |t: &Target| !t.is_arch_specific() && t.number() >= number;
    Target::ALL.into_iter().filter(newer).collect()
}

#[test]
fn assembles_without_spills_on_every_architecture() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    assemble_all(&ptxas, &programs());
}

/// Kernels of layers as models have them, for few and for many tokens.
#[test]
fn experts_of_models_assemble_without_spills() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    let mut kernels = BTreeMap::new();
    for ([hidden, intermediate, experts, top_k], tokens) in [[2048, 768, 128, 8], [2880, 2880, 128, 4]]
        .into_iter()
        .flat_map(|l| [1, 16, 512, 2048, 8192].map(|t| (l, t)))
    {
        let layouts = [[experts, 2 * intermediate, hidden], [experts, hidden, intermediate]];
        let [gate_up, down] = layouts.map(|extents| ExpertLayout::dense(extents).unwrap());
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        let x = Layout::matrix(tokens, hidden).unwrap();
        let problem = MoeSpec::new(DType::BF16, x, gate_up, down, routing).parse().unwrap();
        let plan = plan_moe(&problem, &Gpu::HOPPER, 16).unwrap();
        kernels.extend(plan.launches().iter().map(|launch| (launch.kernel().name(), *launch.kernel())));
    }
    let programs: Vec<_> = kernels.into_values().map(built).collect();
    assemble_each(&ptxas, &programs, |target| vec![target]);
}

/// Heads of every width up to 64 features, in tiles for few and for many of them, and masks of every kind.
#[test]
fn narrow_heads_assemble_without_spills() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    let shapes = [[1, 8, 512], [1, 8, 2048], [1, 16, 1024], [4, 32, 1024], [4, 32, 4096]];
    let masks = [Mask::NONE, Mask::CAUSAL, Mask::window(127, 0)];
    let mut programs = Vec::new();
    for dim in (8..=64).step_by(8) {
        for [batch, heads, seq] in shapes {
            let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
            for mask in masks {
                let spec = Spec { mask, ..Spec::new(DType::F16, layout, layout, layout) };
                let plan = plan(&spec.parse().unwrap(), &Gpu::HOPPER, 16).unwrap();
                programs.push(built(*plan.kernel()));
            }
        }
    }
    programs.sort_by_key(|(kernel, _)| kernel.name());
    programs.dedup_by_key(|(kernel, _)| kernel.name());
    assemble_all(&ptxas, &programs);
}

/// The general kernel's tile for heads of every row of its table on every kind of GPU, where there is one.
#[test]
fn tiles_of_every_gpu_assemble_without_spills() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    let gpus = [Gpu::TURING, Gpu::AMPERE, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX];
    let dims = [(59, 59), (64, 64), (111, 111), (128, 128), (256, 256), (512, 512), (512, 64), (64, 512)];
    let mut programs = Vec::new();
    for gpu in gpus {
        for ((qk, v), mask) in dims.into_iter().flat_map(|dims| [Mask::NONE, Mask::CAUSAL].map(|m| (dims, m)))
        {
            let layout = |dim| Layout::bshd(Dims::new(2, 8, 1000, dim)).unwrap();
            let spec = Spec { mask, ..Spec::new(DType::F16, layout(qk), layout(qk), layout(v)) };
            let Ok(plan) = plan_general(&spec.parse().unwrap(), &gpu, 16) else { continue };
            programs.push(built(*plan.kernel()));
        }
    }
    assert!(programs.len() >= 92, "{} tiles", programs.len());
    assemble_each(&ptxas, &programs, |target| vec![target]);
}

fn assemble_all(ptxas: &Path, programs: &[(KernelConfig, AnyProgram)]) {
    assemble_each(ptxas, programs, architectures);
}

/// Assembles each program for the architectures of its target.
fn assemble_each(
    ptxas: &Path,
    programs: &[(KernelConfig, AnyProgram)],
    architectures: impl Fn(Target) -> Vec<Target>,
) {
    let jobs: Vec<_> = programs
        .iter()
        .flat_map(|(kernel, program)| {
            architectures(kernel.target()).into_iter().map(move |t| (kernel, program, t))
        })
        .collect();
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((kernel, program, target)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(fault) = assemble(ptxas, kernel, program, *target) {
                faults.lock().unwrap().push(fault);
            }
        }
    };
    thread::scope(|scope| {
        (0..thread::available_parallelism().map_or(2, usize::from)).for_each(|_| drop(scope.spawn(work)))
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{} of {} builds:\n{}", faults.len(), jobs.len(), faults.join("\n"));
}

/// What is wrong with the machine code of a program, if anything.
fn assemble(ptxas: &Path, kernel: &KernelConfig, program: &AnyProgram, target: Target) -> Option<String> {
    let source =
        std::env::temp_dir().join(format!("{}-{}-{target}.ptx", program.entry(), std::process::id()));
    fs::write(&source, program.text()).unwrap();
    let output = Command::new(ptxas)
        .args(["-v", "-o", "/dev/null", "-arch", &target.to_string()])
        .arg(&source)
        .output();
    fs::remove_file(&source).unwrap();
    let output = output.unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let registers = number_before(&said, " registers").unwrap_or(0);
    let bad = !output.status.success()
        || said.contains("C75")
        || said.contains("warning")
        || !said.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
        || registers == 0
        || registers > kernel.register_budget();
    bad.then(|| format!("{} for {target}:\n{said}", program.entry()))
}

/// The number that stands before `what`.
fn number_before(text: &str, what: &str) -> Option<u32> {
    let end = text.find(what)?;
    text[..end].rsplit(' ').next()?.parse().ok()
}

fn ptxas() -> Option<PathBuf> {
    let wheel = |root: &str| {
        let lib = Path::new(root).join("lib");
        let versions = fs::read_dir(lib).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let bins = versions.flat_map(|v| {
            ["cu13", "cuda_nvcc"].map(|p| v.join("site-packages/nvidia").join(p).join("bin/ptxas"))
        });
        bins.into_iter().find(|path| path.is_file())
    };
    let named = std::env::var_os("FLASHCORE_PTXAS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    named
        .or_else(|| wheel(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/nv")))
        .or_else(|| wheel("/tmp/nv"))
        .or_else(|| std::env::split_paths(&path).map(|dir| dir.join("ptxas")).find(|path| path.is_file()))
}
