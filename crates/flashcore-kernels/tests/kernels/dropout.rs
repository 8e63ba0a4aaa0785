//! Kernels that leave out weights: in plans, in the simulator against the f64 oracle, and with faults that must be seen.

use flashcore_core::{
    BackwardProblem, DType, Dims, Dropout, Element, Instance, Layout, Mask, Problem, Spec, Values,
};
use flashcore_kernels::{
    Choice, Family, Form, Gpu, KernelConfig, Misfit, Plan, host_values, plan, plan_backward_by,
    plan_backward_general, plan_tile, slots,
};
use flashcore_lab::simulator::Simulator;
use flashcore_ptx::parse::parse;
use flashcore_sim::{Buffer, Launch, Options};
use flashcore_testkit::{
    Outcome,
    backward::{self, Wish},
    cases::{self, Tag},
    suite,
};
use half::f16;

use super::simulator::{all_pass, normal_inputs};

/// A GPU of each kind.
const GPUS: [Gpu; 6] =
    [Gpu::TURING, Gpu::AMPERE, Gpu::CONSUMER, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX];
const FAMILIES: [Family; 3] = Family::ALL;

/// Whether all kernels of a plan that make weights leave some out.
fn drops(plan: &Plan) -> bool {
    plan.launches().iter().all(|launch| match launch.kernel() {
        KernelConfig::Sm80(cfg) => cfg.dropout && cfg.name().as_str().contains("_drop"),
        KernelConfig::BackwardSm80(cfg) => cfg.dropout && cfg.name().as_str().contains("_drop"),
        KernelConfig::BackwardRows(_) | KernelConfig::BackwardSinks(_) => true,
        _ => false,
    })
}

/// Every plan of a problem with dropout, whoever chooses: by rules, a family, a form, or the tile of the problem without.
fn forward_plans(problem: &Problem, gpu: &Gpu) -> Vec<Plan> {
    let tile = |plan: Plan| plan_tile(problem, gpu, 16, plan.kernel().tile());
    let without: Problem = Spec { dropout: None, ..problem.spec().clone() }.parse().unwrap();
    let named = FAMILIES.map(Choice::Kernel);
    let choices = named.iter().chain([&Choice::Rules]);
    let tiles: Vec<Result<Plan, Misfit>> =
        choices.clone().filter_map(|choice| choice.plan(&without, gpu, 16).ok()).map(tile).collect();
    let plans = choices.filter_map(|choice| choice.plan(problem, gpu, 16).ok());
    plans.chain(tiles.into_iter().flatten()).collect()
}

fn backward_plans(problem: &BackwardProblem, gpu: &Gpu) -> Vec<Plan> {
    let forms = [Form::Split, Form::Fused].map(|form| plan_backward_by(problem, gpu, 16, form));
    let rules = Choice::Rules.plan_backward(problem, gpu, 16);
    let general = plan_backward_general(problem, gpu, 16);
    forms.into_iter().chain([rules, general]).flatten().collect()
}

/// No kernel takes a problem with dropout and computes another.
#[test]
fn plans_never_forget_dropout() {
    let (mut forward, mut gradients) = (0, 0);
    for case in cases::tagged(Tag::Dropout) {
        for (gpu, dtype) in GPUS.iter().flat_map(|gpu| DType::COMMON.map(|dtype| (gpu, dtype))) {
            let backward = backward::Case::new(case.clone(), Wish::Plain).problem(dtype).unwrap();
            let (of_call, of_gradients) =
                (forward_plans(&case.problem(dtype).unwrap(), gpu), backward_plans(&backward, gpu));
            forward += of_call.len();
            gradients += of_gradients.len();
            for plan in of_call.iter().chain(&of_gradients) {
                assert!(drops(plan), "{case} {dtype} on {gpu:?}: {plan}");
            }
        }
    }
    assert!(forward > 400 && gradients > 400, "{forward} plans, {gradients} of gradients");
}

#[test]
fn special_kernels_say_that_they_leave_out_nothing() {
    let layout = |seq| Layout::bhsd(Dims::new(1, 2, seq, 64)).unwrap();
    let problem = |queries| {
        let spec = Spec::new(DType::F16, layout(queries), layout(300), layout(300));
        Spec { dropout: Some(Dropout::new(0.1)), ..spec }.parse().unwrap()
    };
    for (family, queries) in [(Family::Sm90, 300), (Family::Decode, 1)] {
        let refused = Choice::Kernel(family).plan(&problem(queries), &Gpu::HOPPER, 16).unwrap_err();
        let wanted = format!("{family}: it does not support dropout");
        assert!(refused.to_string().contains(&wanted), "{refused}");
    }
    let chosen = plan(&problem(300), &Gpu::HOPPER, 16).unwrap();
    assert_eq!(chosen.passed_over(), ["forward_sm90: it does not support dropout"]);
}

/// Every case with dropout, forward and gradients, in one type on a Hopper, and every second one in f16 on a Turing, under
/// hostile schedules. An Ampere gets these cases in the conformance suites.
#[test]
fn kernels_leave_out_what_the_oracle_leaves_out() {
    let (hopper, turing) = (Simulator::new(Gpu::HOPPER), Simulator::new(Gpu::TURING));
    all_pass(&cases::tagged(Tag::Dropout), |(n, case)| {
        let dtype = DType::COMMON[n % DType::COMMON.len()];
        let gradients = backward::Case::new(case.clone(), Wish::ALL[n % Wish::ALL.len()]);
        let mut outcomes = vec![
            suite::check_case(&hopper, case, dtype, 1).outcome,
            backward::check(&hopper, &gradients, dtype, 1),
        ];
        // It has no kernels of gradients.
        outcomes.extend((n % 2 == 0).then(|| suite::check_case(&turing, case, DType::F16, 1).outcome));
        let failed: Vec<_> = outcomes.into_iter().filter(|outcome| *outcome != Outcome::Passed).collect();
        (!failed.is_empty()).then(|| format!("{case} {dtype}: {failed:?}"))
    });
}

/// A fault, what its lines contain, and what becomes of them.
type Fault<'a> = (&'static str, &'a str, fn(&str) -> String);

/// Faults in a kernel's words and conditions: each changes the result, and none the LSE, which is that of all weights.
#[test]
fn faults_in_what_is_left_out_are_seen() {
    let layout = |heads, seq| Layout::bhsd(Dims::new(2, heads, seq, 32)).unwrap();
    let spec = Spec::new(DType::F16, layout(2, 40), layout(1, 70), layout(1, 70));
    let problem: Problem =
        Spec { mask: Mask::CAUSAL, dropout: Some(Dropout::new(0.2)), ..spec }.parse().unwrap();
    let plan = plan(&problem, &Gpu::AMPERE, 16).unwrap();
    let program = plan.kernel().program().unwrap();
    let text = program.text();
    let register = |line: &str| line.split([' ', ',']).find(|word| word.starts_with('%')).unwrap().to_owned();
    let threshold = register(text.lines().find(|line| line.contains("[p_drop_threshold]")).unwrap());
    let faults: [Fault<'_>; 4] = [
        ("conditions are inverted", &format!(", {threshold};"), |l| l.replace("setp.ge", "setp.lt")),
        ("keys are numbered otherwise", "mul.lo.u32", |l| l.replace("2654435769", "2654435771")),
        ("bits are mixed otherwise", "mul.lo.u32", |l| l.replace("2146121005", "2146121007")),
        ("halves of the seed are swapped", "ld.global.v2.u32", swapped),
    ];
    let (right, lse) = ran(&plan, &problem, text);
    for (fault, on, change) in faults {
        let of_line = |line: &str| if line.contains(on) { change(line) } else { line.to_owned() };
        let changed: String = text.lines().map(|line| of_line(line) + "\n").collect();
        assert!(changed.lines().ne(text.lines()), "{fault}: nothing to change");
        let (out, same) = ran(&plan, &problem, &changed);
        assert!(out != right, "{fault}: not seen");
        assert!(same == lse, "{fault}: seen in the LSE");
    }
}

/// A load of two registers into each other.
fn swapped(line: &str) -> String {
    let (start, rest) = line.split_once('{').unwrap();
    let (pair, end) = rest.split_once('}').unwrap();
    let (first, second) = pair.split_once(", ").unwrap();
    format!("{start}{{{second}, {first}}}{end}")
}

/// The output and LSE of a kernel's text, which must be without other faults.
fn ran(plan: &Plan, problem: &Problem, text: &str) -> (Vec<u8>, Vec<u8>) {
    let values = Values { seed: Some(0x1234_5678_9ABC_DEF0), ..Values::default() };
    let spec = plan.launches()[0].spec(&plan.kernel().program().unwrap()).unwrap();
    let inputs = normal_inputs::<f16>(problem);
    let tensors = [slots::Q, slots::K, slots::V].into_iter().zip(&inputs);
    let tensors = tensors.map(|(slot, x)| Buffer::input(slot, f16::erase(x).bytes().to_vec()));
    let numbers = host_values(Instance::new(problem, &values).unwrap());
    let outputs = [(slots::OUT, problem.rows() * problem.dim_v() * 2), (slots::LSE, problem.rows() * 4)];
    let buffers = tensors
        .chain(numbers.into_iter().map(|(slot, bytes)| Buffer::input(slot, bytes)))
        .chain(outputs.map(|(slot, bytes)| Buffer::output(slot, bytes)))
        .collect();
    let module = parse(text).unwrap().module;
    let outcome =
        Launch { module: &module, provenance: None, spec: &spec, buffers }.run(&Options::new()).unwrap();
    assert!(outcome.is_clean(), "{:?}", outcome.findings);
    let bytes = |slot| outcome.bytes(slot).unwrap().to_vec();
    (bytes(slots::OUT), bytes(slots::LSE))
}
