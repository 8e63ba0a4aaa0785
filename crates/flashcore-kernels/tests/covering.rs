//! The covering set without a GPU: small, complete, verified, unchanged, and assembled without spills where an
//! assembler is found (`FLASHCORE_PTXAS`, `target/nv`, the path).

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use flashcore_core::{DType, Dims, ExpertLayout, Index, Layout, Mask, MoeSpec, Routing, Scales, Spec};
use flashcore_kernels::{
    AnyProgram, Gpu, KernelConfig, Plan, covering_appends, covering_backward, covering_caches,
    covering_decode, covering_experts, covering_grouped, covering_merges, covering_quantised, covering_set,
    plan, plan_append, plan_general, plan_grouped, plan_merge, plan_moe, plan_quantise,
};
use flashcore_ptx::target::Target;
use sha2::{Digest, Sha256};

/// A kernel and its text.
type Built = (KernelConfig, AnyProgram);

fn programs() -> Vec<Built> {
    let plans = covering_set().unwrap().into_iter().map(|member| member.plan().unwrap());
    let plans = plans.chain(few()).chain(merges()).chain(appends());
    let kernels = plans.map(|plan| *plan.kernel());
    let narrow = quantising().into_iter().chain(narrow_tensors());
    let caches = caches().map(|plan| *plan.kernel());
    kernels
        .chain(expert_kernels())
        .chain(grouped_kernels())
        .chain(narrow)
        .chain(caches)
        .map(|kernel| built(&kernel))
        .collect()
}

fn built(kernel: &KernelConfig) -> Built {
    (*kernel, kernel.program().unwrap_or_else(|e| panic!("{e}")))
}

/// Plans for few queries.
fn few() -> impl Iterator<Item = Plan> {
    covering_decode().unwrap().into_iter().map(|member| member.plan().unwrap())
}

/// Plans for caches of 8 bits.
fn caches() -> impl Iterator<Item = Plan> {
    covering_caches().unwrap().into_iter().map(|member| member.plan().unwrap())
}

/// Every kernel of the covering set of gradients, once.
fn gradients() -> Vec<KernelConfig> {
    let members = covering_backward().unwrap().into_iter();
    let plans: Vec<_> = members.map(|member| member.plan().unwrap()).collect();
    each_kernel(&plans)
}

/// Every kernel of the plans for mixtures of experts, once.
fn expert_kernels() -> Vec<KernelConfig> {
    let problems = covering_experts().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_moe(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::CONSUMER)).collect::<Vec<_>>())
}

/// Every kernel of the plans for grouped products, once.
fn grouped_kernels() -> Vec<KernelConfig> {
    let problems = covering_grouped().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_grouped(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::CONSUMER)).collect::<Vec<_>>())
}

/// The kernels of some plans, each once.
fn each_kernel(plans: &[Plan]) -> Vec<KernelConfig> {
    let mut kernels: Vec<_> = plans.iter().flat_map(Plan::launches).map(|launch| *launch.kernel()).collect();
    kernels.sort_by_key(KernelConfig::name);
    kernels.dedup();
    kernels
}

/// Every kernel of some problems of 8-bit tensors, once: factors of every kind, masks, types of the result.
fn narrow_tensors() -> Vec<KernelConfig> {
    let blocks = Some(Scales::PerBlock { q: 64, k: 128 });
    let options = [
        (64, None, Mask::NONE, DType::BF16, None),
        (64, blocks, Mask::CAUSAL, DType::F16, None),
        (96, blocks, Mask::CAUSAL, DType::BF16, Some(20.0)),
        (128, Some(Scales::PerHead), Mask::CAUSAL, DType::BF16, None),
        (128, blocks, Mask::NONE, DType::BF16, None),
        (128, blocks, Mask::window(100, 20), DType::F32, None),
    ];
    let plans = options.map(|(dim, scales, mask, out, softcap)| {
        let layout = Layout::bhsd(Dims::new(2, 4, 1000, dim)).unwrap();
        let spec = Spec::new(DType::E4M3, layout, layout, layout);
        let spec = Spec { scales, mask, out_dtype: Some(out), softcap, ..spec };
        plan(&spec.parse().unwrap(), &Gpu::HOPPER, 16).unwrap()
    });
    each_kernel(&plans)
}

/// Every kernel of the covering set of tensors to be quantised, once.
fn quantising() -> Vec<KernelConfig> {
    let problems = covering_quantised().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_quantise(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::AMPERE)).collect::<Vec<_>>())
}

fn merges() -> impl Iterator<Item = Plan> {
    covering_merges().unwrap().into_iter().map(|problem| plan_merge(&problem, &Gpu::AMPERE, 16).unwrap())
}

fn appends() -> impl Iterator<Item = Plan> {
    covering_appends().unwrap().into_iter().map(|problem| plan_append(&problem, &Gpu::AMPERE).unwrap())
}

#[test]
fn small_and_without_repetition() {
    let plans: Vec<_> = covering_set().unwrap().into_iter().map(|member| member.plan().unwrap()).collect();
    let names: BTreeSet<_> = plans.iter().map(|plan| plan.kernel().name()).collect();
    assert_eq!(names.len(), plans.len());
    assert!(plans.len() <= 290, "{} members", plans.len());
    let general = plans.iter().filter(|plan| matches!(plan.kernel(), KernelConfig::Sm80(_))).count();
    assert!(general >= 24 && plans.len() - general >= 12, "both families are covered");
    let names: BTreeSet<_> = merges().map(|plan| plan.kernel().name()).collect();
    // Rows of several lengths share a kernel.
    assert!(names.len() >= 16 && merges().count() <= 24, "{names:?}");
    let members = covering_backward().unwrap();
    assert!(members.len() <= 86 && gradients().len() > members.len(), "{} members", members.len());
}

/// `tests/hashes.txt` holds the hash of every program's text; `FLASHCORE_BLESS=1` writes it anew.
#[test]
fn text_changes_only_on_purpose() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hashes.txt");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let lines = programs()
        .iter()
        .chain(&gradients().iter().map(built).collect::<Vec<_>>())
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

/// Machine code without spills, within its registers.
#[test]
fn kernels_assemble_without_spills() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    let covering = covering_set().unwrap().into_iter().map(|member| member.plan().unwrap());
    let covering = covering
        .chain(few())
        .chain(merges())
        .chain(caches())
        .enumerate()
        .map(|(n, plan)| (Some(n), *plan.kernel()));
    let others = narrow_heads().chain(tiles_of_every_gpu()).map(|plan| (None, *plan.kernel()));
    // Members of these sets are spread over architectures.
    let experts = expert_kernels().into_iter().chain(each_kernel(&experts_of_models()));
    let narrow = quantising().into_iter().chain(narrow_tensors());
    let spread = gradients()
        .into_iter()
        .chain(experts)
        .chain(grouped_kernels())
        .chain(narrow)
        .map(|kernel| (None, kernel));
    let jobs = jobs(covering.chain(others).chain(spread));
    let assembled: BTreeSet<_> = jobs.iter().map(|job| job.target).collect();
    assert_eq!(assembled.len(), Target::ALL.len(), "every architecture has kernels: {assembled:?}");
    assemble_all(&ptxas, &jobs);
}

/// Kernels of layers as models have them, for few and for many tokens.
fn experts_of_models() -> Vec<Plan> {
    let layers = [[2048, 768, 128, 8], [2880, 2880, 128, 4]];
    let plan = |[hidden, intermediate, experts, top_k]: [usize; 4], tokens: usize| {
        let layouts = [[experts, 2 * intermediate, hidden], [experts, hidden, intermediate]];
        let [gate_up, down] = layouts.map(|extents| ExpertLayout::dense(extents).unwrap());
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        let x = Layout::matrix(tokens, hidden).unwrap();
        let problem = MoeSpec::new(DType::BF16, x, gate_up, down, routing).parse().unwrap();
        plan_moe(&problem, &Gpu::HOPPER, 16).unwrap()
    };
    layers.into_iter().flat_map(|layer| [1, 16, 512, 2048, 8192].map(|tokens| plan(layer, tokens))).collect()
}

/// Heads of every width up to 64 features, in tiles for few and for many of them, and masks of every kind.
fn narrow_heads() -> impl Iterator<Item = Plan> {
    let shapes = [[1, 8, 512], [1, 8, 2048], [1, 16, 1024], [4, 32, 1024], [4, 32, 4096]];
    let masks = [Mask::NONE, Mask::CAUSAL, Mask::window(127, 0)];
    let problems = (8..=64).step_by(8).flat_map(move |dim| shapes.map(|shape| (dim, shape)));
    problems.flat_map(move |(dim, [batch, heads, seq])| {
        let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
        masks.map(|mask| {
            let spec = Spec { mask, ..Spec::new(DType::F16, layout, layout, layout) };
            plan(&spec.parse().unwrap(), &Gpu::HOPPER, 16).unwrap()
        })
    })
}

/// The general kernel's tile for heads of every row of its table on every kind of GPU, where there is one.
fn tiles_of_every_gpu() -> Vec<Plan> {
    let gpus = [Gpu::TURING, Gpu::AMPERE, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX];
    let dims = [(59, 59), (64, 64), (111, 111), (128, 128), (256, 256), (512, 512), (512, 64), (64, 512)];
    let mut plans = Vec::new();
    for gpu in gpus {
        for ((qk, v), mask) in dims.into_iter().flat_map(|dims| [Mask::NONE, Mask::CAUSAL].map(|m| (dims, m)))
        {
            let layout = |dim| Layout::bshd(Dims::new(2, 8, 1000, dim)).unwrap();
            let spec = Spec { mask, ..Spec::new(DType::F16, layout(qk), layout(qk), layout(v)) };
            plans.extend(plan_general(&spec.parse().unwrap(), &gpu, 16));
        }
    }
    assert!(plans.len() >= 92, "{} tiles", plans.len());
    plans
}

/// A text to be assembled.
struct Job {
    program: AnyProgram,
    /// The registers that a thread may take.
    budget: u32,
    target: Target,
}

/// What there is to assemble, each kernel once for an architecture, the longest texts first, so that no core is left
/// with one of them at the end. A kernel with a number is assembled for another architecture than its own too.
fn jobs(kernels: impl Iterator<Item = (Option<usize>, KernelConfig)>) -> Vec<Job> {
    let (mut jobs, mut known) = (Vec::new(), BTreeSet::new());
    for (number, kernel) in kernels {
        let program = kernel.program().unwrap_or_else(|e| panic!("{e}"));
        let newer = number.and_then(|n| one_newer(kernel.target(), n));
        for target in [kernel.target()].into_iter().chain(newer) {
            if known.insert((program.entry().to_string(), target)) {
                jobs.push(Job { program: program.clone(), budget: kernel.register_budget(), target });
            }
        }
    }
    jobs.sort_by_key(|job| Reverse(job.program.text().len()));
    jobs
}

/// In turn one of the newer architectures that the driver would build a text for, if it runs there.
fn one_newer(own: Target, turn: usize) -> Option<Target> {
    let newer = |t: &Target| !t.is_arch_specific() && !own.is_arch_specific() && t.number() > own.number();
    let newer: Vec<_> = Target::ALL.into_iter().filter(newer).collect();
    newer.get(turn % newer.len().max(1)).copied()
}

/// Assembles on all cores and reports all faults together.
fn assemble_all(ptxas: &Path, jobs: &[Job]) {
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(fault) = assemble(ptxas, job) {
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

/// What is wrong with the machine code of a text, if anything.
fn assemble(ptxas: &Path, Job { program, budget, target }: &Job) -> Option<String> {
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
        || registers > *budget;
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
