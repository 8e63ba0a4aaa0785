//! Every kernel assembled without spills, within its registers, where an assembler is found (`FLASHCORE_PTXAS`,
//! `target/nv`, the path).
//!
//! The same assembler makes the same machine code of the same text. `tests/assembled.txt` lists what it has taken already,
//! which is not assembled again; `FLASHCORE_BLESS=1` writes the list anew.

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

use flashcore_core::{
    BackwardSpec, DType, Dims, Dropout, ExpertLayout, GroupedSpec, Grouping, Index, Layout, Mask, MoeSpec,
    Routing, Spec,
};
use flashcore_kernels::{
    AnyProgram, Choice, Form, Gpu, KernelConfig, Plan, covering_set,
    moe::{Cut, product_sm90},
    plan, plan_general, plan_grouped, plan_moe, plan_moe_tiles,
};
use flashcore_ptx::{ident::Ident, target::Target};
use sha2::{Digest, Sha256};

use crate::covering::{
    caches, each_kernel, expert_kernels, few, gradients, grouped_kernels, merges, narrow_tensors, program,
    quantising, split_kernels,
};

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
    let others = narrow_heads().chain(tiles_of_every_gpu()).chain(summed_heads());
    let others = others.map(|plan| (None, *plan.kernel()));
    // Members of these sets are spread over architectures.
    let experts = expert_kernels().into_iter().chain(each_kernel(&experts_of_models()));
    let narrow = quantising().into_iter().chain(narrow_tensors());
    let spread = gradients()
        .into_iter()
        .chain(experts)
        .chain(grouped_kernels())
        .chain(each_kernel(&groups_of_models()))
        .chain(narrow)
        .chain(tiles_with_dropout())
        .chain(split_kernels())
        .map(|kernel| (None, kernel));
    let jobs = jobs(covering.chain(others).chain(spread));
    let assembled: BTreeSet<_> = jobs.iter().map(|job| job.target).collect();
    assert_eq!(assembled.len(), Target::ALL.len(), "every architecture has kernels: {assembled:?}");
    let list = List::read(version(&ptxas));
    let (known, new): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| list.has(job));
    // Of what is known the shortest for each architecture, so that no run goes without the assembler.
    let (mut tried, mut targets) = (new.iter().collect::<Vec<_>>(), BTreeSet::new());
    tried.extend(known.iter().rev().filter(|job| targets.insert(job.target)));
    assemble_all(&ptxas, &tried);
    println!("{} texts assembled, {} known", tried.len(), known.len());
    if std::env::var_os("FLASHCORE_BLESS").is_some_and(|value| value == "1") {
        list.write(known.iter().chain(&new));
    }
}

/// What must not pass does not: more registers than allowed, spills, a text that is no PTX.
#[test]
fn faults_of_machine_code_are_found() {
    let Some(ptxas) = ptxas() else { return println!("no ptxas found: nothing assembled") };
    let kernel = *few().next().unwrap().kernel();
    let (program, target) = (kernel.program().unwrap(), kernel.target());
    let fault = |text: &str, budget| assemble(&ptxas, program.entry(), text, budget, target);
    let (text, budget) = (program.text(), kernel.register_budget());
    assert_eq!(fault(text, budget), None);
    assert!(fault(text, 8).is_some(), "8 registers are too few");
    let starved = text.replacen("\n{", "\n.maxnreg 40\n{", 1);
    assert!(fault(&starved, budget).is_some_and(|said| said.contains("spill stores")), "spills are found");
    assert!(fault(&text.replacen("ret;", "return;", 1), budget).is_some(), "a mistake is found");
}

/// Kernels of layers as models have them, for few and for many tokens.
fn experts_of_models() -> Vec<Plan> {
    let layers = [[2048, 768, 128, 8], [2880, 2880, 128, 4]];
    let problem = |[hidden, intermediate, experts, top_k]: [usize; 4], tokens: usize| {
        let layouts = [[experts, 2 * intermediate, hidden], [experts, hidden, intermediate]];
        let [gate_up, down] = layouts.map(|extents| ExpertLayout::dense(extents).unwrap());
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        let x = Layout::matrix(tokens, hidden).unwrap();
        MoeSpec::new(DType::BF16, x, gate_up, down, routing).parse().unwrap()
    };
    let plan = |layer, tokens| plan_moe(&problem(layer, tokens), &Gpu::HOPPER, 16).unwrap();
    let plans =
        layers.into_iter().flat_map(|layer| [1, 16, 512, 2048, 8192].map(|tokens| plan(layer, tokens)));
    // Weights that stream past few rows, by warpgroups.
    let past = |(rows, tile_n, stages): (u32, u32, u32)| {
        let shape = product_sm90::Shape { tile_n, turns: false, stages, pair: false, rows };
        plan_moe_tiles(&problem(layers[1], 16), &Gpu::HOPPER, 16, [Cut::Sm90(shape); 2]).unwrap()
    };
    plans.chain([(16, 128, 6), (32, 128, 5), (64, 128, 4), (32, 256, 5)].map(past)).collect()
}

/// Grouped products as layers of models and their gradients have them.
fn groups_of_models() -> Vec<Plan> {
    let (rows, depth, columns) = (16384, 4096, 2048);
    let weights = [8, depth, columns];
    let plan = |grouping, dtype, a: ExpertLayout, b: ExpertLayout| {
        plan_grouped(&GroupedSpec::new(dtype, a, b, grouping).parse().unwrap(), &Gpu::HOPPER, 16).unwrap()
    };
    let dense = |extents| ExpertLayout::dense(extents).unwrap();
    let turned = |extents| ExpertLayout::transposed(extents).unwrap();
    let x = dense([1, rows, depth]);
    let of = |dtype: DType| {
        [
            plan(Grouping::Rows, dtype, x, turned(weights)),
            plan(Grouping::Rows, dtype, x, dense(weights)),
            plan(Grouping::Depth { groups: 8 }, dtype, turned([1, depth, rows]), dense([1, rows, columns])),
            plan(Grouping::Columns, dtype, dense([8, columns, depth]), turned([1, depth, rows])),
            plan(Grouping::Batch, dtype, turned([8, 512, depth]), dense(weights)),
        ]
    };
    [DType::BF16, DType::F16].into_iter().flat_map(of).collect()
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

/// Gradients whose queries are summed, for heads about the width from which slopes take the registers of scores.
fn summed_heads() -> impl Iterator<Item = Plan> {
    let dims =
        [(40, 64), (48, 64), (56, 56), (56, 64), (104, 128), (112, 128), (120, 120), (120, 128), (128, 112)];
    let kinds = [DType::F16, DType::BF16].map(|dtype| [Mask::NONE, Mask::CAUSAL].map(|mask| (dtype, mask)));
    let options =
        kinds.into_iter().flatten().flat_map(move |(dtype, mask)| dims.map(|dims| (dtype, mask, dims)));
    options.map(|(dtype, mask, (qk, v))| {
        let layout = |dim| Layout::bshd(Dims::new(1, 1, 4096, dim)).unwrap();
        let spec = Spec { mask, ..Spec::new(dtype, layout(qk), layout(qk), layout(v)) };
        let problem = BackwardSpec::new(spec).parse().unwrap();
        Choice::Gradients(Form::Fused).plan_backward(&problem, &Gpu::HOPPER, 16).unwrap()
    })
}

/// The general kernel's tile for heads of every row of its table on every kind of GPU, where there is one.
fn tiles_of_every_gpu() -> Vec<Plan> {
    let gpus = [Gpu::TURING, Gpu::AMPERE, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX];
    let mut dims =
        vec![(59, 59), (64, 64), (111, 111), (128, 128), (256, 256), (512, 512), (512, 64), (64, 512)];
    dims.push((576, 512)); // rows of latents, of 16 bits and of 8
    let mut plans = Vec::new();
    for gpu in gpus {
        for (&(qk, v), mask) in dims.iter().flat_map(|dims| [Mask::NONE, Mask::CAUSAL].map(|m| (dims, m))) {
            let layout = |dim| Layout::bshd(Dims::new(2, 8, 1000, dim)).unwrap();
            let spec = Spec { mask, ..Spec::new(DType::F16, layout(qk), layout(qk), layout(v)) };
            let narrow = (qk > 512).then(|| spec.clone().over(DType::E4M3));
            for spec in [spec].into_iter().chain(narrow) {
                plans.extend(plan_general(&spec.parse().unwrap(), &gpu, 16));
            }
        }
    }
    assert!(plans.len() >= 112, "{} tiles", plans.len());
    plans
}

/// The general kernels that leave out weights, for heads of every row of their tables on every kind of GPU.
fn tiles_with_dropout() -> Vec<KernelConfig> {
    let gpus = [Gpu::TURING, Gpu::AMPERE, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL_RTX];
    let options = [Mask::NONE, Mask::CAUSAL].into_iter().zip([DType::F16, DType::BF16]);
    let mut plans = Vec::new();
    for ((mask, dtype), dim) in options.flat_map(|option| [64, 96, 128, 256, 512].map(|dim| (option, dim))) {
        let layout = Layout::bshd(Dims::new(2, 8, 1000, dim)).unwrap();
        let spec = |dtype| Spec {
            mask,
            dropout: Some(Dropout::new(0.1)),
            ..Spec::new(dtype, layout, layout, layout)
        };
        let problem = |dtype| spec(dtype).parse().unwrap();
        let backward = |dtype| BackwardSpec::new(spec(dtype)).parse().unwrap();
        for (gpu, dtype) in gpus.iter().flat_map(|gpu| [dtype, DType::F32].map(|dtype| (gpu, dtype))) {
            plans.extend(plan(&problem(dtype), gpu, 16));
            plans.extend(Choice::Rules.plan_backward(&backward(dtype), gpu, 16));
        }
    }
    let kernels = each_kernel(&plans);
    kernels.into_iter().filter(|kernel| kernel.name().contains("_drop")).collect()
}

/// A text to be assembled.
struct Job {
    program: AnyProgram,
    /// The registers that a thread may take.
    budget: u32,
    target: Target,
}

impl Job {
    /// Its line of the list.
    fn line(&self) -> String {
        let digest = Sha256::new().chain_update(self.budget.to_le_bytes()).chain_update(self.program.text());
        let hash: String = digest.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hash} {} {}", self.target, self.program.entry())
    }
}

/// What an assembler has taken without a fault: its version, then a line for each text, its registers and an architecture.
struct List {
    version: String,
    lines: BTreeSet<String>,
}

impl List {
    /// What this version has taken, which is nothing where another wrote the list.
    fn read(version: String) -> Self {
        let text = fs::read_to_string(Self::path()).unwrap_or_default();
        let mut lines = text.lines().map(str::to_owned);
        let same = lines.next().is_some_and(|first| first == version);
        Self { version, lines: if same { lines.collect() } else { BTreeSet::new() } }
    }

    fn has(&self, job: &Job) -> bool {
        self.lines.contains(&job.line())
    }

    fn write<'a>(&self, jobs: impl Iterator<Item = &'a Job>) {
        let mut lines: Vec<_> = jobs.map(Job::line).collect();
        lines.sort_by_cached_key(|line| line.split(' ').skip(1).map(str::to_owned).collect::<Vec<_>>());
        fs::write(Self::path(), format!("{}\n{}\n", self.version, lines.join("\n"))).unwrap();
    }

    fn path() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assembled.txt")
    }
}

/// The build of an assembler.
fn version(ptxas: &Path) -> String {
    let output = Command::new(ptxas).arg("--version").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.lines().last().expect("a version").to_owned()
}

/// What there is to assemble, each kernel once for an architecture, the longest texts first, so that no core is left
/// with one of them at the end. A kernel with a number is assembled for another architecture than its own too.
fn jobs(kernels: impl Iterator<Item = (Option<usize>, KernelConfig)>) -> Vec<Job> {
    let (mut jobs, mut known) = (Vec::new(), BTreeSet::new());
    for (number, kernel) in kernels {
        let newer = number.and_then(|n| one_newer(kernel.target(), n));
        for target in [kernel.target()].into_iter().chain(newer) {
            if known.insert((kernel.name(), target)) {
                jobs.push(Job { program: program(&kernel), budget: kernel.register_budget(), target });
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
fn assemble_all(ptxas: &Path, jobs: &[&Job]) {
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(Job { program, budget, target }) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(fault) = assemble(ptxas, program.entry(), program.text(), *budget, *target) {
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
fn assemble(ptxas: &Path, entry: &Ident, text: &str, budget: u32, target: Target) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("kernel.ptx");
    fs::write(&source, text).unwrap();
    let arguments = ["-v", "-o", "/dev/null", "-arch", &target.to_string()];
    let output = Command::new(ptxas).args(arguments).arg(&source).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let registers = number_before(&said, " registers").unwrap_or(0);
    let bad = !output.status.success()
        || said.contains("C75")
        || said.contains("warning")
        || !said.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
        || registers == 0
        || registers > budget;
    bad.then(|| format!("{entry} for {target}:\n{said}"))
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
