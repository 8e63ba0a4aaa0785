//! The covering set without a GPU: small, complete, verified, unchanged. `assemble` has it assembled.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::Path,
    sync::LazyLock,
};

use flashcore_core::{DType, Dims, Layout, Mask, Scales, Spec};
use flashcore_kernels::{
    AnyProgram, Gpu, KernelConfig, Plan, covering_appends, covering_backward, covering_caches,
    covering_decode, covering_experts, covering_grouped, covering_merges, covering_quantised, covering_set,
    covering_split, plan, plan_append, plan_grouped, plan_merge, plan_moe, plan_quantise,
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// What is hashed and assembled, built once.
static PROGRAMS: LazyLock<HashMap<KernelConfig, AnyProgram>> =
    LazyLock::new(|| hashed().into_par_iter().map(|kernel| (kernel, built(&kernel))).collect());

/// The program of a kernel.
pub(crate) fn program(kernel: &KernelConfig) -> AnyProgram {
    PROGRAMS.get(kernel).cloned().unwrap_or_else(|| built(kernel))
}

fn built(kernel: &KernelConfig) -> AnyProgram {
    kernel.program().unwrap_or_else(|e| panic!("{e}"))
}

/// The kernels whose text changes only on purpose.
fn hashed() -> Vec<KernelConfig> {
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
        .chain(gradients())
        .chain(split_kernels())
        .collect()
}

/// Plans for few queries.
pub(crate) fn few() -> impl Iterator<Item = Plan> {
    covering_decode().unwrap().into_iter().map(|member| member.plan().unwrap())
}

/// Plans for caches of 8 bits.
pub(crate) fn caches() -> impl Iterator<Item = Plan> {
    covering_caches().unwrap().into_iter().map(|member| member.plan().unwrap())
}

/// Every kernel of the covering set of keys that CTAs share, once.
pub(crate) fn split_kernels() -> Vec<KernelConfig> {
    let plans: Vec<_> = covering_split().unwrap().iter().map(|member| member.plan().unwrap()).collect();
    each_kernel(&plans)
}

/// Every kernel of the covering set of gradients, once.
pub(crate) fn gradients() -> Vec<KernelConfig> {
    let members = covering_backward().unwrap().into_iter();
    let plans: Vec<_> = members.map(|member| member.plan().unwrap()).collect();
    each_kernel(&plans)
}

/// Every kernel of the plans for mixtures of experts, once.
pub(crate) fn expert_kernels() -> Vec<KernelConfig> {
    let problems = covering_experts().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_moe(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::CONSUMER)).collect::<Vec<_>>())
}

/// Every kernel of the plans for grouped products, once.
pub(crate) fn grouped_kernels() -> Vec<KernelConfig> {
    let problems = covering_grouped().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_grouped(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::CONSUMER)).collect::<Vec<_>>())
}

/// The kernels of some plans, each once.
pub(crate) fn each_kernel(plans: &[Plan]) -> Vec<KernelConfig> {
    let mut kernels: Vec<_> = plans.iter().flat_map(Plan::launches).map(|launch| *launch.kernel()).collect();
    kernels.sort_by_key(KernelConfig::name);
    kernels.dedup();
    kernels
}

/// Every kernel of some problems of 8-bit tensors, once: factors of every kind, masks, types of the result.
pub(crate) fn narrow_tensors() -> Vec<KernelConfig> {
    let blocks = Some(Scales::PerBlock { q: 64, k: 128 });
    let options = [
        (64, None, Mask::NONE, DType::BF16, None),
        (64, blocks, Mask::CAUSAL, DType::F16, None),
        (96, blocks, Mask::CAUSAL, DType::BF16, Some(20.0)),
        (128, Some(Scales::PerHead), Mask::CAUSAL, DType::BF16, None),
        (128, blocks, Mask::NONE, DType::BF16, None),
        (128, blocks, Mask::window(100, 20), DType::F32, None),
        (144, blocks, Mask::CAUSAL, DType::F16, Some(20.0)),
        (192, None, Mask::window(100, 20), DType::BF16, None),
        (256, Some(Scales::PerHead), Mask::CAUSAL, DType::BF16, None),
        (256, blocks, Mask::NONE, DType::BF16, None),
        (256, blocks, Mask::window(100, 20), DType::F32, Some(20.0)),
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
pub(crate) fn quantising() -> Vec<KernelConfig> {
    let problems = covering_quantised().unwrap();
    let on = |gpu: Gpu| problems.iter().map(move |problem| plan_quantise(problem, &gpu, 16).unwrap());
    each_kernel(&on(Gpu::HOPPER).chain(on(Gpu::AMPERE)).collect::<Vec<_>>())
}

pub(crate) fn merges() -> impl Iterator<Item = Plan> {
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
    assert!(members.len() <= 200 && gradients().len() > members.len(), "{} members", members.len());
}

/// `tests/hashes.txt` holds the hash of every program's text; `FLASHCORE_BLESS=1` writes it anew.
#[test]
fn text_changes_only_on_purpose() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hashes.txt");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let line = |kernel: &KernelConfig| {
        let program = program(kernel);
        format!("{} {}\n", hex(&Sha256::digest(program.text())), program.entry())
    };
    let lines = hashed().iter().map(line).collect::<String>();
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
