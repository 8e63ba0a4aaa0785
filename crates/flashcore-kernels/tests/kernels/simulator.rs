//! Kernels in the simulator, every check on, against the f64 oracle of the testkit.

use flashcore_core::{
    BackendError, DType, Data, Dims, E4M3, Element, HostCall, Instance, Layout, Mask, Problem, Spec, Values,
};
use flashcore_kernels::{
    Choice, Gpu, KernelConfig, Member, NarrowForm, Plan, Tile, covering_caches, covering_decode,
    covering_merges, covering_set, covering_split, forward_sm80,
    forward_sm90::{self, Order, Settles, Staging},
    plan, plan_tile,
};
use flashcore_lab::simulator::{self, Simulator};
use flashcore_testkit::{
    Answer, Outcome, Rng, Rows, Rule, append, cache, cases, merge, narrow, plain, properties, suite, values,
};
use flashcore_tile::RegisterBudget;
use half::{bf16, f16};

use super::invariant;

/// GPUs that get kernels of each family, the persistent ones included.
const GPUS: [Gpu; 3] = [Gpu::AMPERE, Gpu::HOPPER, Gpu { sms: 3, ..Gpu::HOPPER }];
/// Element types that the matrix products of a GPU take.
const fn dtypes(gpu: Gpu) -> &'static [DType] {
    if gpu.capability.0 < 8 { &[DType::F16] } else { &DType::COMMON }
}

/// The conformance suite's tiny cases on Hopper and, in turn, on one of the other families; element types alternate, and so
/// do hostile schedules. The rest is for `flashcore verify`.
#[test]
fn kernels_pass_the_conformance_suite() {
    let gpus = [GPUS[1], GPUS[0], GPUS[2], Gpu::TURING];
    let (simulators, cases) = (gpus.map(Simulator::new), cases::up_to(cases::Cost::Tiny));
    let pairs = |(n, case)| [0, 1 + n % (gpus.len() - 1)].map(|gpu| (n, gpu, case));
    let work: Vec<_> = cases.iter().enumerate().flat_map(pairs).collect();
    all_pass(&work, |(_, &(n, gpu, case))| {
        let dtypes = dtypes(gpus[gpu]);
        // One more at each third case, so that a family meets all of them.
        let dtype = dtypes[(n + n / 3) % dtypes.len()];
        let check = || suite::check_case(&simulators[gpu], case, dtype, 1);
        let report = case.dtypes.contains(&dtype).then(check)?;
        // Little shared memory, or wide elements, is the one reason not to take a case.
        let wide = (gpus[gpu] == Gpu::TURING || dtype == DType::F32) && case.q.dim.max(case.dim_v) > 256;
        let passed = report.outcome == Outcome::Passed || (wide && !report.outcome.is_failure());
        (!passed).then(|| format!("{report} on {:?}", gpus[gpu]))
    });
}

/// Every kernel of the covering set, once tamely and once under a hostile schedule.
#[test]
fn kernels_are_right_under_every_schedule() {
    let members = covering_set().unwrap();
    all_pass(&members, |(n, member)| {
        let plan = member.plan().unwrap();
        let error = match member.problem.dtype() {
            DType::F16 => wrong::<f16>(member, &plan, n),
            DType::BF16 => wrong::<bf16>(member, &plan, n),
            _ => wrong::<f32>(member, &plan, n),
        };
        error.map(|error| format!("{}: {error}", plan.kernel().name()))
    });
}

/// Every kernel of the covering set for few queries, once tamely and once under a hostile schedule.
#[test]
fn few_queries_are_right_under_every_schedule() {
    let members = covering_decode().unwrap();
    all_pass(&members, |(n, member)| {
        let plan = member.plan().unwrap();
        let name = plan.kernel().name();
        if !matches!(plan.kernel(), KernelConfig::Decode(_)) {
            return Some(format!("{name} is another kernel"));
        }
        let check = |plan: &Plan| match member.problem.dtype() {
            DType::F16 => wrong::<f16>(member, plan, n),
            _ => wrong::<bf16>(member, plan, n),
        };
        let error = check(&plan).or_else(|| invariant::variants(member, &plan).iter().find_map(check));
        error.map(|error| format!("{name}: {error}"))
    });
}

/// Few queries by the general kernel: the covering set, once tamely and once under a hostile schedule.
#[test]
fn split_keys_are_right_under_every_schedule() {
    let members = covering_split().unwrap();
    let several = all_pass_and_count(&members);
    assert!(several > members.len() / 3, "{several} of {} have several parts", members.len());
}

/// Checks members whose keys may be split; returns how many are.
fn all_pass_and_count(members: &[Member]) -> usize {
    let parts = |plan: &Plan| match plan.kernel() {
        KernelConfig::Sm80(cfg) => cfg.parts,
        _ => None,
    };
    all_pass(members, |(n, member)| {
        let plan = member.plan().unwrap();
        if parts(&plan).is_none() {
            return Some(format!("{plan} is another kernel"));
        }
        let error = match member.problem.dtype() {
            _ if member.problem.kv_dtype() == DType::E4M3 => {
                let simulator = Simulator::seeded(member.gpu, n as u64);
                let outcome = cache::check_problem(&simulator, &member.problem, &member.values, n as u64);
                (outcome != Outcome::Passed).then(|| outcome.to_string())
            }
            DType::F16 => wrong::<f16>(member, &plan, n),
            DType::BF16 => wrong::<bf16>(member, &plan, n),
            _ => wrong::<f32>(member, &plan, n),
        };
        error.map(|error| format!("{}: {error}", plan.kernel().name()))
    });
    let plans = members.iter().map(|member| member.plan().unwrap());
    plans.filter(|plan| parts(plan).is_some_and(|parts| parts > 1)).count()
}

/// The merges of the covering set and of the merge suite.
#[test]
fn merges_are_right_under_every_schedule() {
    let problems = covering_merges().unwrap();
    all_pass(&problems, |(n, problem)| {
        let simulator = Simulator::seeded(Gpu::AMPERE, n as u64);
        let outcome = merge::check_problem(&simulator, problem, merge::Weights::SomeNothing, n as u64);
        (outcome != Outcome::Passed).then(|| format!("{problem:?}: {outcome}"))
    });
    let failures = merge::failures(&Simulator::new(Gpu::HOPPER), 2, 1);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Tensors of 8 bits, on GPUs whose CTAs have one tile and several, in turn.
#[test]
fn narrow_tensors_are_right_under_every_schedule() {
    let gpus = [GPUS[1], Gpu { sms: 1, ..Gpu::HOPPER }];
    all_pass(&narrow::cases(), |(n, case)| {
        let gpu = gpus[(n + n / 4) % gpus.len()];
        let outcome = narrow::check(&Simulator::seeded(gpu, n as u64), case, 1);
        (outcome != Outcome::Passed)
            .then(|| format!("{} {:?} {}: {outcome}", case.case, case.scales, case.out))
    });
}

/// The same cut and paced in ways that the rules do not choose.
#[test]
fn forms_for_narrow_tensors_are_right() {
    let form =
        |consumers, tile_n, settles, in_turn| NarrowForm { consumers, tile_n, stages: 2, settles, in_turn };
    let forms = [
        form(2, 128, Settles::Parts, false),
        form(2, 128, Settles::Tiles, true),
        form(3, 64, Settles::Parts, false),
    ];
    let cases: Vec<_> = narrow::cases().into_iter().filter(|case| case.case.v().dim <= 128).collect();
    let work: Vec<_> = cases.iter().enumerate().map(|(n, case)| (forms[n % forms.len()], case)).collect();
    all_pass(&work, |(n, &(form, case))| {
        let gpu = Gpu { sms: 1 + n as u32 % 2, ..Gpu::HOPPER };
        let simulator = Simulator::seeded(gpu, n as u64).choosing(Choice::Narrow(form));
        let outcome = narrow::check(&simulator, case, 1);
        (outcome != Outcome::Passed)
            .then(|| format!("{} {:?} {}, {form:?}: {outcome}", case.case, case.scales, case.out))
    });
}

/// Caches of 8 bits: the covering set, and cases of pages, mixtures and lengths on every family, several units for each CTA
/// included.
#[test]
fn caches_are_right_under_every_schedule() {
    let members = covering_caches().unwrap();
    all_pass(&members, |(n, member)| {
        let simulator = Simulator::seeded(member.gpu, n as u64);
        let outcome = cache::check_problem(&simulator, &member.problem, &member.values, n as u64);
        (outcome != Outcome::Passed).then(|| format!("{}: {outcome}", member.plan().unwrap()))
    });
    all_pass(&[GPUS[0], GPUS[2]], |(n, &gpu)| {
        let broken = cache::broken_laws(&Simulator::seeded(gpu, n as u64), 1);
        (!broken.is_empty()).then(|| broken.join("\n"))
    });
    let (cases, gpus) = (cache::tiny(), [GPUS[1], Gpu::AMPERE, Gpu::ADA, GPUS[2]]);
    let pairs = |(n, case)| [0, 1 + n % 3].map(|gpu| (gpu, case));
    let work: Vec<_> = cases.iter().enumerate().flat_map(pairs).collect();
    all_pass(&work, |(n, &(gpu, case))| {
        let dtype = [DType::BF16, DType::F16][n / 2 % 2];
        let outcome = cache::check(&Simulator::seeded(gpus[gpu], n as u64), case, dtype, 1);
        (outcome != Outcome::Passed).then(|| format!("{} {dtype} on {:?}: {outcome}", case.case, gpus[gpu]))
    });
}

/// Tensor cores cut sums of 8-bit products off: what is not added up in f32 in time is lost, here as on a GPU.
#[test]
fn sums_that_are_not_settled_drift() {
    let (dim, keys) = (16, 8192);
    let [q, kv] = [64, keys].map(|seq| Layout::bhsd(Dims::new(1, 1, seq, dim)).unwrap());
    let problem = Spec { out_dtype: Some(DType::F32), ..Spec::new(DType::E4M3, q, kv, kv) }.parse().unwrap();
    let mut rng = Rng::new(3);
    let [q, k] =
        [64, keys].map(|rows| (0..rows * dim).map(|_| E4M3::from_f32(rng.normal())).collect::<Vec<_>>());
    // Values around 1: every product pushes the sum the same way.
    let v: Vec<_> = (0..keys * dim).map(|_| E4M3::from_f32(1.0 + 0.1 * rng.normal())).collect();
    let simulator = Simulator::new(Gpu::HOPPER);
    let drift = |settles: Settles| {
        let plan = plan(&problem, &Gpu::HOPPER, 16).unwrap();
        let KernelConfig::Sm90(cfg) = *plan.kernel() else { panic!("{plan}") };
        let kernel = KernelConfig::Sm90(forward_sm90::Config { settles, ..cfg });
        let mut out = vec![0f32; 64 * dim];
        let mut call = HostCall::bind(&problem, Values::NONE, [&q[..], &k, &v], &mut out, None).unwrap();
        let outcome = simulator.launch(&mut call, &plan.by(kernel, &problem)).unwrap();
        assert!(outcome.is_some_and(|outcome| outcome.is_clean()));
        let oracle = plain::reference(call.instance(), call.inputs(), Rows::ALL);
        let [got, expected]: [f64; 2] = [out.iter().map(|&x| f64::from(x)).sum(), oracle.out.iter().sum()];
        (got / expected - 1.0).abs()
    };
    let (settled, lost) = (drift(Settles::Tiles), drift(Settles::AtEnd));
    assert!(settled < 1e-3, "{settled}");
    assert!(lost > 3.0 * settled.max(1e-3), "{lost} without, {settled} with sums in f32");
}

/// The appends of the suite; those of the covering set are built by `covering`.
#[test]
fn appends_are_right_under_every_schedule() {
    for seed in [1, 2] {
        let failures = append::failures(&Simulator::seeded(Gpu::AMPERE, seed), &DType::COMMON, seed);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// The laws of f32 outputs and of pages, on every family.
#[test]
fn kernels_obey_the_laws_of_f32_outputs_and_pages() {
    let laws: Vec<_> = properties::ALL.iter().rev().take(5).collect();
    let work: Vec<_> = (0..GPUS.len()).flat_map(|gpu| laws.iter().map(move |law| (gpu, *law))).collect();
    all_pass(&work, |(n, &(gpu, law))| {
        let outcome = law.check(&Simulator::new(GPUS[gpu]), DType::COMMON[(n + gpu) % 3], 1);
        (outcome != Outcome::Passed).then(|| format!("{} on {:?}: {outcome}", law.name, GPUS[gpu]))
    });
}

/// Tiles that no rule chooses are right too: what passes the gate may be tuned to and come from a table.
#[test]
fn tiles_that_pass_the_gate_are_right() {
    let problem = |dim: usize| {
        let layout = |heads, seq| Layout::bshd(Dims::new(1, heads, seq, dim)).unwrap();
        let spec = Spec::new(DType::F16, layout(2, 130), layout(1, 200), layout(1, 200));
        Spec { mask: Mask::CAUSAL, ..spec }.parse().unwrap()
    };
    let tiles = [
        (64, hopper(1, [176, 3, 2], [64, 2], Order::Static)),
        (128, hopper(2, [80, 3, 1], [64, 2], Order::Atomic)),
        (128, hopper(1, [48, 5, 1], [128, 1], Order::Single { parts: 4 })),
        (64, hopper(3, [96, 4, 1], [64, 1], Order::Single { parts: 1 })),
        (64, hopper(2, [112, 2, 1], [64, 1], Order::Single { parts: 8 })),
        (192, hopper(1, [64, 2, 1], [128, 1], Order::Atomic)),
        (128, general(8, [96, 48], 3, false)),
        (64, general(4, [32, 16], 4, true)),
        (32, general(4, [48, 16], 2, true)),
        (300, general(2, [16, 16], 3, true)),
    ];
    all_pass(&tiles, |(n, &(dim, tile))| {
        let member = Member {
            problem: problem(dim),
            values: Values::default(),
            gpu: Gpu { sms: 3, ..Gpu::HOPPER },
            like: None,
        };
        let plan = match plan_tile(&member.problem, &member.gpu, 16, tile) {
            Ok(plan) => plan,
            Err(misfit) => return Some(format!("{tile:?}: {misfit}")),
        };
        wrong::<f16>(&member, &plan, n).map(|error| format!("{}: {error}", plan.kernel().name()))
    });
}

/// A row that outgrows its reference makes its warp do a key tile again; the bits of the other rows stay.
#[test]
fn rows_do_not_feel_a_neighbour_that_grows() {
    let problems = [(64, Mask::NONE), (64, Mask::CAUSAL), (128, Mask::NONE), (256, Mask::NONE)];
    let work: Vec<_> = GPUS.iter().flat_map(|gpu| problems.map(|problem| (*gpu, problem))).collect();
    all_pass(&work, |(_, &(gpu, (dim, mask)))| {
        let layout = Layout::bhsd(Dims::new(1, 1, 300, dim)).unwrap();
        let problem: Problem =
            Spec { mask, ..Spec::new(DType::F16, layout, layout, layout) }.parse().unwrap();
        let plan = plan(&problem, &gpu, 16).unwrap();
        let calm = normal_inputs::<f16>(&problem);
        let both = [&calm, &with_growing_row(&calm, dim)].map(|inputs| {
            launched::<f16, f16>(&Simulator::seeded(gpu, 1), (&problem, Values::NONE), &plan, inputs)
        });
        let [Ok(calm), Ok(grown)] = both else { return Some(format!("{dim} features: a run fails")) };
        let unnoticed = mask == Mask::NONE && grown.instructions <= calm.instructions;
        let row = |run: &Launched<f16>, row: usize| {
            (run.out[row * dim..(row + 1) * dim].to_vec(), run.lse[row].to_bits())
        };
        let felt: Vec<_> = (0..300).filter(|&n| n != GROWING && row(&calm, n) != row(&grown, n)).collect();
        (unnoticed || !felt.is_empty())
            .then(|| format!("{dim} features: unnoticed {unnoticed}, felt by {felt:?}"))
    });
}

/// Scores that grow from key tile to key tile move references again and again: a CTA's later tiles then look for maxima
/// before they take exponentials, where one that has a single tile does key tiles again. Both give the same bits.
#[test]
fn tiles_that_adapt_keep_their_bits() {
    let (rows, dim) = (640, 64);
    let layout = Layout::bhsd(Dims::new(1, 1, rows, dim)).unwrap();
    let problem: Problem = Spec::new(DType::F16, layout, layout, layout).parse().unwrap();
    let mut inputs = normal_inputs::<f16>(&problem);
    for (n, value) in inputs[1].iter_mut().enumerate() {
        let height = 7.0 * (rows - n / dim) as f32 / rows as f32;
        *value = f16::from_f32(0.1 * value.to_f32() + height);
    }
    inputs[0].iter_mut().for_each(|value| *value = f16::from_f32(0.1 * value.to_f32() + 1.0));
    let [alone, together] = [5, 1].map(|sms| {
        let gpu = Gpu { sms, ..Gpu::HOPPER };
        let plan = plan_tile(&problem, &gpu, 16, hopper(2, [64, 2, 2], [64, 1], Order::Static)).unwrap();
        launched::<f16, f16>(&Simulator::seeded(gpu, 1), (&problem, Values::NONE), &plan, &inputs).unwrap()
    });
    assert!(together.instructions < alone.instructions, "nothing was done once instead of twice");
    assert_eq!(alone.out, together.out);
    assert_eq!(alone.lse, together.lse);
}

/// The row that grows.
const GROWING: usize = 5;

/// The same with one query that is the first key, enlarged: key tiles come from the last to the first, so that its row
/// meets its maximum late.
fn with_growing_row(inputs: &[Vec<f16>; 3], dim: usize) -> [Vec<f16>; 3] {
    let mut inputs = inputs.clone();
    for col in 0..dim {
        inputs[0][GROWING * dim + col] = f16::from_f32(64.0 * inputs[1][col].to_f32());
    }
    inputs
}

fn hopper(consumers: u32, [tile_n, stages, q_stages]: [u32; 3], staging: [u32; 2], order: Order) -> Tile {
    let budget = match consumers {
        1 => None,
        2 => Some(RegisterBudget { producer: 40, consumer: 232 }),
        _ => Some(RegisterBudget { producer: 32, consumer: 160 }),
    };
    let [cols, places] = staging;
    let staging = Staging { cols, places };
    Tile::Sm90(forward_sm90::Shape {
        consumers,
        tile_n,
        stages,
        q_stages,
        staging,
        budget,
        order,
        ctas_per_sm: 1,
        turn: 2,
    })
}

fn general(warps: u32, [tile_n, step_n]: [u32; 2], stages: u32, q_in_registers: bool) -> Tile {
    let shape =
        forward_sm80::Shape { warps, blocks: 1, tile_n, step_n, stages, ctas_per_sm: 1, q_in_registers };
    Tile::Sm80(shape)
}

/// Checks everything, on all cores, and reports all failures together.
pub(crate) fn all_pass<T: Sync>(items: &[T], check: impl Fn((usize, &T)) -> Option<String> + Sync + Send) {
    use rayon::prelude::*;
    let failures: Vec<_> = items.par_iter().enumerate().filter_map(check).collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), items.len(), failures.join("\n"));
}

/// What is wrong with a plan's result, if anything.
fn wrong<T: Element>(member: &Member, plan: &Plan, seed: usize) -> Option<String> {
    match member.problem.out_dtype() {
        DType::F32 => wrong_in::<T, f32>(member, plan, seed),
        _ => wrong_in::<T, T>(member, plan, seed),
    }
}

fn wrong_in<T: Element, O: Element>(member: &Member, plan: &Plan, seed: usize) -> Option<String> {
    let (problem, inputs) = (&member.problem, normal_inputs::<T>(&member.problem));
    let simulator = Simulator::seeded(member.gpu, seed as u64);
    let run = || launched::<T, O>(&simulator, (problem, &member.values), plan, &inputs);
    let (first, again) = match run().and_then(|first| Ok((first, run()?))) {
        Ok(both) => both,
        Err(error) => return Some(error),
    };
    if first.bytes() != again.bytes() {
        return Some("results depend on the schedule".to_owned());
    }
    let slices = inputs.each_ref().map(|tensor| T::erase(tensor));
    let instance = Instance::new(problem, &member.values).ok()?;
    let mut expected = [plain::reference, plain::yardstick].map(|plain| plain(instance, slices, Rows::ALL));
    let answer =
        |held: &Launched<O>| Answer::gather(problem, O::erase(&held.out), Some(&held.lse), Rows::ALL);
    if problem.accumulate() {
        let old = answer(&held::<O>(problem));
        expected = expected.map(|answer| answer.onto(&old, instance));
    }
    let verdict = Rule::of(problem).judge(&answer(&first), &expected[0], &expected[1]);
    verdict.reason.map(|reason| reason.to_string())
}

/// What outputs hold before a launch: NaN, but where it is accumulated, something in every second row.
fn held<O: Element>(problem: &Problem) -> Launched<O> {
    let (mut rng, mut row) = (Rng::new(8), 0);
    let (mut out, mut lse) = (tensor::<O>(problem.out(), || f32::NAN), vec![f32::NAN; problem.rows()]);
    if problem.accumulate() {
        lse.fill(f32::NEG_INFINITY);
        values::for_each_row(problem.out(), |_, start| {
            if row % 2 == 1 {
                lse[row] = 2.0 + 2.0 * rng.normal();
                out[start..start + problem.dim_v()].fill_with(|| O::from_f32(rng.normal()));
            }
            row += 1;
        });
    }
    Launched { out, lse, instructions: 0 }
}

/// What a launch wrote, and how many instructions it took.
pub(super) struct Launched<T> {
    pub(super) out: Vec<T>,
    pub(super) lse: Vec<f32>,
    instructions: u64,
}

impl<T: Element> Launched<T> {
    fn bytes(&self) -> (&[u8], &[u8]) {
        (T::erase(&self.out).bytes(), Data::F32(&self.lse).bytes())
    }
}

/// Runs a plan, every check on.
pub(super) fn launched<T: Element, O: Element>(
    simulator: &Simulator,
    (problem, values): (&Problem, &Values),
    plan: &Plan,
    inputs: &[Vec<T>; 3],
) -> Result<Launched<O>, String> {
    let run = || -> Result<Launched<O>, BackendError> {
        let Launched { mut out, mut lse, .. } = held::<O>(problem);
        let mut call =
            HostCall::bind(problem, values, inputs.each_ref().map(Vec::as_slice), &mut out, Some(&mut lse))?;
        let outcome = simulator.launch(&mut call, plan)?;
        outcome.as_ref().map_or(Ok(()), simulator::judge)?;
        let instructions = outcome.map_or(0, |outcome| outcome.counters.total_instructions());
        Ok(Launched { out, lse, instructions })
    };
    run().map_err(|error| {
        let cause = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
        format!("{error}: {cause}")
    })
}

/// Q, K and V of standard normal numbers.
pub(super) fn normal_inputs<T: Element>(problem: &Problem) -> [Vec<T>; 3] {
    let mut rng = Rng::new(7);
    [problem.q(), problem.k(), problem.v()].map(|layout| tensor::<T>(layout, || rng.normal()))
}

/// A tensor whose rows hold `value`s and whose gaps hold NaN.
fn tensor<T: Element>(layout: &Layout, mut value: impl FnMut() -> f32) -> Vec<T> {
    let mut elements = vec![T::from_f32(f32::NAN); layout.span()];
    values::for_each_row(layout, |_, start| {
        elements[start..start + layout.dims().dim].fill_with(|| T::from_f32(value()));
    });
    elements
}
