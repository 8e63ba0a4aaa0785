//! The mutation gate: single faults in shipped kernels, each reported by a checker of the simulator or seen in the
//! results. The unchanged kernels are silent and give the same bits under every schedule. The table of mutants and
//! of what killed them is printed.

use std::collections::BTreeMap;

use flashcore_core::{DType, Dims, Layout, Mask, Problem, Spec};
use flashcore_kernels::{
    Gpu, Plan, Tile,
    forward_sm90::{Order, Shape},
    plan, plan_tile, slots,
};
use flashcore_ptx::{launch::LaunchSpec, module::Module};
use flashcore_sim::{Buffer, Launch, Options, Outcome};
use flashcore_testkit::{
    Rng,
    mutate::{Mutant, sampled},
};
use half::{bf16, f16};
use rayon::prelude::*;

/// Mutants of each fault, spread over the kernel.
const PER_FAULT: usize = 3;

/// Faults that at some places of a family change nothing an execution could show, with the reason. At other places
/// of the same kernel they must be found.
const HARMLESS: &[(&str, &str, &str)] = &[
    ("sm_80", "barrier dropped", "the last barrier guards rows that the warp alone has read"),
    ("sm_80", "cp.async wait dropped", "the last wait meets empty groups, unless a tile sees no key"),
    ("sm_80", "cp.async wait leaves one group more", "likewise"),
    ("sm_80", "cp.async commit dropped", "queries are waited for together with the first keys"),
    ("sm_90", "wgmma.fence dropped", "the fence before the other product has seen the same registers"),
    (
        "sm_90",
        "spurious failure taken as success",
        "waiting for keys already tells that the queries were read",
    ),
    ("sm_90", "phase not flipped", "the wait for a CTA's first queries falls into the first phase"),
    (
        "sm_90",
        "warp barrier dropped",
        "a lane that lags behind a stage it passes over meets the stage again after more keys than these problems have; \
         `policy` has a problem with so many",
    ),
    ("single", "wait dropped", "the first copies find their stages free"),
    ("single", "phase not flipped", "the last tile of a part falls into the same phase in every CTA"),
];

/// A kernel and a problem that makes it execute every part of itself.
struct Subject {
    gpu: Gpu,
    problem: Problem,
    plan: Plan,
    module: Module,
    spec: LaunchSpec,
    inputs: [Vec<u8>; 3],
    bytes: usize,
    rows: usize,
}

impl Subject {
    fn new(gpu: Gpu, extents: [usize; 3], mask: Mask) -> Self {
        if gpu.capability < (8, 0) {
            return Self::of(DType::F16, |x| f16::from_f32(x).to_le_bytes().to_vec(), gpu, extents, mask);
        }
        Self::of(DType::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec(), gpu, extents, mask)
    }

    /// The same with elements of another type, `bytes` of each.
    fn of(
        dtype: DType,
        bytes: fn(f32) -> Vec<u8>,
        gpu: Gpu,
        [heads, seq, dim]: [usize; 3],
        mask: Mask,
    ) -> Self {
        Self::between(dtype, bytes, gpu, [heads, seq, seq, dim], mask)
    }

    /// The same with other queries than keys.
    fn between(
        dtype: DType,
        bytes: fn(f32) -> Vec<u8>,
        gpu: Gpu,
        [heads, queries, keys, dim]: [usize; 4],
        mask: Mask,
    ) -> Self {
        let layout = |seq| Layout::bhsd(Dims { batch: 1, heads, seq, dim }).expect("a layout");
        let mut spec = Spec::new(dtype, layout(queries), layout(keys), layout(keys));
        spec.mask = mask;
        let problem: Problem = spec.parse().expect("a problem");
        let plan = plan(&problem, &gpu, 16).expect("a plan");
        let mut rng = Rng::new(11);
        // logits so far apart that rows are rescaled
        let mut tensor = |seq: usize, scale: f32| -> Vec<u8> {
            (0..heads * seq * dim).flat_map(|_| bytes(rng.normal() * scale)).collect()
        };
        let inputs = [tensor(queries, 8.0), tensor(keys, 8.0), tensor(keys, 1.0)];
        let (module, spec) = built(&plan);
        let bytes = heads * queries * dim * dtype.bytes();
        Self { gpu, problem, plan, module, spec, inputs, bytes, rows: heads * queries }
    }

    /// The same problem with another tile.
    fn with_tile(self, tile: Tile) -> Self {
        let plan = plan_tile(&self.problem, &self.gpu, 16, tile).expect("a plan");
        let (module, spec) = built(&plan);
        Self { plan, module, spec, ..self }
    }

    fn run(&self, module: &Module, options: &Options) -> Result<Outcome, String> {
        let [q, k, v] = self.inputs.clone();
        let buffers = vec![
            Buffer::input(slots::Q, q),
            Buffer::input(slots::K, k),
            Buffer::input(slots::V, v),
            Buffer::output(slots::OUT, self.bytes),
            Buffer::output(slots::LSE, self.rows * 4),
        ];
        let launch = Launch { module, provenance: None, spec: &self.spec, buffers };
        launch.run(options).map_err(|e| e.to_string())
    }

    /// What is wrong with a run, compared with the right one.
    fn fault(&self, module: &Module, options: &Options, right: &Outcome) -> Option<String> {
        let outcome = match self.run(module, options) {
            Ok(outcome) => outcome,
            Err(_) => return Some("does not end".into()),
        };
        let first = outcome.errors().next().map(|finding| format!("{:?}", finding.kind));
        let differs = [slots::OUT, slots::LSE].into_iter().any(|s| outcome.bytes(s) != right.bytes(s));
        first.or(differs.then(|| "wrong result".into()))
    }
}

fn built(plan: &Plan) -> (Module, LaunchSpec) {
    let program = plan.kernel().program().expect("a program");
    let spec = plan.launches()[0].spec(&program).expect("something to compute");
    (program.module().clone(), spec)
}

fn ways(right: &Outcome) -> Vec<Options> {
    let mut ways: Vec<_> = [Options::new()].into_iter().chain(Options::gauntlet(5)).collect();
    let limit = right.counters.total_instructions() * 4 + 100_000;
    ways.iter_mut().for_each(|options| options.step_limit = limit);
    ways
}

fn check(subject: &Subject) {
    let name = subject.plan.kernel().name();
    let right = subject.run(&subject.module, &Options::new()).expect("a launch");
    for options in ways(&right) {
        let fault = subject.fault(&subject.module, &options, &right);
        assert_eq!(fault, None, "{name} unchanged, {:?} {:?}", options.schedule, options.timing);
    }
    let mutants = sampled(&subject.module, &right.executions, PER_FAULT);
    let judged: Vec<(&Mutant, Option<String>)> = mutants
        .par_iter()
        .map(|m| (m, ways(&right).iter().find_map(|way| subject.fault(&m.module, way, &right))))
        .collect();
    let mut table: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (mutant, killer) in &judged {
        *table.entry((mutant.fault, killer.as_deref().unwrap_or("SURVIVES"))).or_default() += 1;
    }
    println!("{name}: {} mutants", judged.len());
    table.iter().for_each(|((fault, killer), count)| println!("  {fault:40} {killer:24} {count}"));
    let killed = |fault: &str| judged.iter().any(|(m, killer)| m.fault == fault && killer.is_some());
    let listed = |fault: &str| HARMLESS.iter().any(|(family, f, _)| name.contains(family) && *f == fault);
    let alive = judged.iter().filter(|(_, killer)| killer.is_none());
    let alive = alive.filter(|(m, _)| !(listed(m.fault) && killed(m.fault)));
    let alive: Vec<_> = alive.map(|(m, _)| format!("{} at {}: {}", m.fault, m.site.0, m.site.1)).collect();
    assert!(alive.is_empty(), "{name}: {} mutants survive:\n{}", alive.len(), alive.join("\n"));
}

/// Rings that go round, and CTAs that share the keys of a row.
#[test]
fn kernel_for_few_queries() {
    let bytes = |x: f32| bf16::from_f32(x).to_le_bytes().to_vec();
    let subject = Subject::between(DType::BF16, bytes, Gpu::AMPERE, [1, 3, 600, 64], Mask::CAUSAL);
    assert!(matches!(subject.plan.kernel().tile(), Tile::Decode(_)));
    check(&subject);
}

/// A Hopper with one multiprocessor, so that a CTA computes several tiles.
const ONE_SM: Gpu = Gpu { sms: 1, ..Gpu::HOPPER };

#[test]
fn general_kernel_of_64_features() {
    check(&Subject::new(Gpu::AMPERE, [1, 256, 64], Mask::CAUSAL));
}

#[test]
fn general_kernel_of_128_features() {
    check(&Subject::new(Gpu::AMPERE, [1, 192, 128], Mask::NONE));
}

/// Two warps have the same rows, and rows end inside a chunk.
#[test]
fn general_kernel_of_300_features() {
    check(&Subject::new(Gpu::AMPERE, [1, 72, 300], Mask::NONE));
}

/// Tiles pass through registers; the last rows see one key tile only.
#[test]
fn general_kernel_of_64_features_on_turing() {
    check(&Subject::new(Gpu::TURING, [1, 160, 64], Mask::window(0, None)));
}

#[test]
fn general_kernel_of_f32() {
    let bytes = |x: f32| x.to_le_bytes().to_vec();
    check(&Subject::of(DType::F32, bytes, Gpu::AMPERE, [1, 256, 64], Mask::CAUSAL));
}

#[test]
fn hopper_kernel_of_128_features() {
    // An odd number of key tiles, so that phases differ from tile to tile, and two turns of two steps after the first.
    let short = Subject::new(ONE_SM, [1, 512, 128], Mask::NONE).plan.kernel().tile();
    let Tile::Sm90(shape) = short else { panic!("a plan of the Hopper kernel") };
    let shape = Shape { tile_n: 64, turn: 2, ..shape };
    check(&Subject::new(ONE_SM, [1, 320, 128], Mask::NONE).with_tile(Tile::Sm90(shape)));
}

#[test]
fn hopper_kernel_of_128_features_with_a_causal_mask() {
    check(&Subject::new(ONE_SM, [1, 512, 128], Mask::CAUSAL));
}

/// Key tiles so small that a CTA of a cluster has several of them, and its ring goes round.
#[test]
fn hopper_kernel_whose_clusters_share_keys() {
    let subject = Subject::new(Gpu::HOPPER, [1, 400, 64], Mask::NONE);
    let Tile::Sm90(shape) = subject.plan.kernel().tile() else { panic!("a plan of the Hopper kernel") };
    let order = Order::Single { parts: 2 };
    check(&subject.with_tile(Tile::Sm90(Shape { tile_n: 64, stages: 2, order, ..shape })));
}

/// Consumers of narrow heads, which take turns and pass over some.
#[test]
fn hopper_kernel_whose_consumers_multiply_in_turn() {
    let short = Subject::new(ONE_SM, [1, 320, 64], Mask::CAUSAL);
    let Tile::Sm90(shape) = short.plan.kernel().tile() else { panic!("a plan of the Hopper kernel") };
    check(&short.with_tile(Tile::Sm90(Shape { tile_n: 64, stages: 2, ..shape })));
}

/// More rows than keys in a tile, so that one consumer passes over what only the other sees.
#[test]
fn hopper_kernel_whose_consumers_pass_over_keys() {
    check(&Subject::new(ONE_SM, [1, 320, 256], Mask::CAUSAL));
}
