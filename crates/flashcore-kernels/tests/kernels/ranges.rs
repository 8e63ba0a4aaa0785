//! Gradients of scores that no f16 holds, on Hopper: they are kept in range, nothing but their own rows and keys hears of
//! them, and single faults in how that is done are seen.

use flashcore_core::{
    BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, DType, Dims, Element, GradientsMut,
    Instance, Layout, Mask, RowTerms, Spec, Values,
};
use flashcore_kernels::{Choice, Form, Gpu, Plan, slots::backward as slots};
use flashcore_lab::simulator::Simulator;
use flashcore_ptx::{
    inst::{Inst, Operand},
    launch::Slot,
    module::{Module, Statement},
    op::{Mod, Op},
    types::ScalarType,
};
use flashcore_sim::{Buffer, Launch, Options};
use flashcore_testkit::{Rng, Rows, plain, values::for_each_row};
use half::f16;
use rayon::prelude::*;

/// Few SMs, so that a CTA has several tiles.
const GPU: Gpu = Gpu { sms: 2, ..Gpu::HOPPER };
const HEADS: usize = 2;
const QUERIES: usize = 300;
const KEYS: usize = 300;
/// Most queries that are multiplied at once.
const STEP: usize = 128;
/// Brings gradients of scores far beyond the range.
const LARGE: f32 = 8192.0;

/// What values are multiplied by: so much of some keys that gradients of scores differ from warp to warp.
fn weight(key: usize) -> f32 {
    match key {
        0..8 => 8.0,
        40..60 | 110..130 => 100.0,
        _ => 1.0,
    }
}

/// A problem with its tensors.
struct Given {
    problem: BackwardProblem,
    plan: Plan,
    /// Q, K, V, the output and its gradient.
    tensors: [Vec<f16>; 5],
    lse: Vec<f32>,
}

impl Given {
    /// Two heads of `dim` features that share keys, and a loss that weighs row `row` of `head` by `loss(head, row)`.
    fn new(dim: usize, mask: Mask, form: Form, loss: fn(usize, usize) -> f32) -> Self {
        let layout = |heads, seq| Layout::bhsd(Dims::new(1, heads, seq, dim)).unwrap();
        let keys = layout(1, KEYS);
        let spec = Spec { mask, ..Spec::new(DType::F16, layout(HEADS, QUERIES), keys, keys) };
        let spec = BackwardSpec { grad_dtype: Some(DType::F32), ..BackwardSpec::new(spec) };
        let problem = spec.parse().unwrap();
        let plan = Choice::Gradients(form).plan_backward(&problem, &GPU, 16).unwrap();
        assert_eq!(plan.kernel().name().to_string().contains("fused"), form == Form::Fused);
        let (forward, mut rng) = (problem.forward(), Rng::new(5));
        let mut drawn = |layout: &Layout, factor: &dyn Fn(usize) -> f32| -> Vec<f16> {
            let element = |at| f16::from_f32(rng.normal() * factor(at / dim));
            (0..layout.span()).map(element).collect()
        };
        let one = |_| 1.0;
        let (q, k) = (drawn(forward.q(), &one), drawn(forward.k(), &one));
        let (v, d_out) =
            (drawn(forward.v(), &weight), drawn(problem.d_out(), &|row| loss(row / QUERIES, row % QUERIES)));
        let instance = Instance::new(forward, Values::NONE).unwrap();
        let exact = plain::reference(instance, [&q, &k, &v].map(|x| f16::erase(x)), Rows::ALL);
        let out = exact.out.iter().map(|&x| f16::from_f64(x)).collect();
        let lse = exact.lse.iter().map(|&x| x as f32).collect();
        Self { plan, tensors: [q, k, v, out, d_out], lse, problem }
    }

    /// Gradients of Q, K and V.
    fn run(&self, seed: u64) -> [Vec<f32>; 3] {
        let problem = &self.problem;
        let mut grads =
            [problem.dq(), problem.dk(), problem.dv()].map(|layout| vec![f32::NAN; layout.span()]);
        let [q, k, v, out, d_out] = self.tensors.each_ref().map(|x| f16::erase(x));
        let inputs = BackwardInputs { qkv: [q, k, v], lse: &self.lse, terms: RowTerms::Out(out), d_out };
        let qkv = grads.each_mut().map(|x| f32::erase_mut(x));
        let grads_of = GradientsMut { qkv, sinks: None };
        let mut call = BackwardCall::bind(problem, Values::NONE, inputs, grads_of).unwrap();
        Simulator::seeded(GPU, seed).launch_backward(&mut call, &self.plan).unwrap();
        grads
    }

    /// Rows of dQ of each head, as bits.
    fn rows(&self, grads: &[Vec<f32>; 3], counts: impl Fn(usize, usize) -> bool) -> Vec<Vec<u32>> {
        let (layout, mut rows) = (self.problem.dq(), Vec::new());
        for_each_row(layout, |_, start| {
            let row = start / layout.dims().dim;
            if counts(row / QUERIES, row % QUERIES) {
                rows.push(grads[0][start..][..layout.dims().dim].iter().map(|x| x.to_bits()).collect());
            }
        });
        rows
    }

    /// Runs the launches with `module` in place of the one that multiplies.
    fn launch(&self, module: &Module, options: &Options) -> Result<Ran, String> {
        let inputs = [slots::Q, slots::K, slots::V, slots::OUT, slots::D_OUT].into_iter().zip(&self.tensors);
        let inputs = inputs.map(|(slot, data)| Buffer::input(slot, f16::erase(data).bytes()));
        let lse = Buffer::input(slots::LSE, f32::erase(&self.lse).bytes());
        let layouts = [self.problem.dq(), self.problem.dk(), self.problem.dv()];
        let grads = GRADIENTS.into_iter().zip(layouts);
        let grads = grads.map(|(slot, layout)| Buffer::output(slot, layout.span() * 4));
        let mut buffers: Vec<_> = inputs.chain([lse]).chain(grads).collect();
        let mut executions = Vec::new();
        for launch in self.plan.launches() {
            let main = launch.kernel() == self.plan.kernel();
            let program = launch.kernel().program().unwrap();
            let spec = launch.spec(&program).unwrap();
            let module = if main { module } else { program.module() };
            let launch = Launch { module, provenance: None, spec: &spec, buffers };
            let outcome = launch.run(options).map_err(|error| error.to_string())?;
            if let Some(found) = outcome.errors().next() {
                return Err(format!("{:?}", found.kind));
            }
            if main {
                executions = outcome.executions;
            }
            buffers = outcome.buffers;
        }
        let grads = buffers.into_iter().filter(|buffer| GRADIENTS.contains(&buffer.slot));
        Ok(Ran { grads: grads.map(|buffer| buffer.bytes).collect(), executions })
    }
}

const GRADIENTS: [Slot; 3] = [slots::DQ, slots::DK, slots::DV];

/// What launches leave.
struct Ran {
    grads: Vec<Vec<u8>>,
    /// How often each statement of the main kernel was executed.
    executions: Vec<u64>,
}

/// What is looked at: features, a mask, and a form.
const KINDS: [(usize, Mask, Form); 5] = [
    (64, Mask::NONE, Form::Fused),
    (64, Mask::CAUSAL, Form::Fused),
    (128, Mask::CAUSAL, Form::Fused),
    (128, Mask::NONE, Form::Split),
    (64, Mask::CAUSAL, Form::Split),
];

/// Rows of one head whose loss is scaled.
const WEIGHED: std::ops::Range<usize> = 140..150;

/// Where rows weigh a lot, dQ of all that are not multiplied together with them is what it is without: not only as exact,
/// but the same bits, under every schedule.
#[test]
fn large_rows_leave_others_alone() {
    KINDS.par_iter().for_each(|&(dim, mask, form)| {
        let quiet = Given::new(dim, mask, form, |_, _| 1.0);
        let loud = Given::new(dim, mask, form, |head, row| match head == 0 && WEIGHED.contains(&row) {
            true => LARGE,
            false => 1.0,
        });
        let apart = |head: usize, row: usize| head != 0 || row / STEP != WEIGHED.start / STEP;
        let expected = quiet.run(0);
        for seed in [1, 2] {
            let got = loud.run(seed);
            assert!(
                got.iter().flatten().all(|x| x.is_finite()),
                "{dim} {mask} {form:?}: not all are numbers"
            );
            let [got, expected] = [&got, &expected].map(|grads| loud.rows(grads, apart));
            assert!(got == expected, "{dim} {mask} {form:?}: rows feel others");
        }
    });
}

/// A row that holds no numbers has none, and takes no other row's.
#[test]
fn rows_without_numbers_leave_others_alone() {
    KINDS.par_iter().for_each(|&(dim, mask, form)| {
        let quiet = Given::new(dim, mask, form, |_, _| 1.0);
        let apart = |head: usize, row: usize| (head, row) != (0, WEIGHED.start);
        let expected = quiet.rows(&quiet.run(0), apart);
        for factor in [f32::INFINITY, f32::NAN] {
            let mut given = Given::new(dim, mask, form, |_, _| 1.0);
            let row = &mut given.tensors[4][WEIGHED.start * dim..][..dim];
            row.iter_mut().for_each(|x| *x = f16::from_f32(x.to_f32() * factor));
            let got = given.rows(&given.run(1), apart);
            assert!(got == expected, "{dim} {mask} {form:?}: rows feel one times {factor}");
        }
    });
}

/// A fault, where it can be made, and the operand that is another then.
type Fault = (&'static str, fn(&Inst) -> bool, usize, fn(&Inst) -> Operand);

/// The largest gradient of a score that is not multiplied, squared.
const LIMIT: f32 = 32768.0 * 32768.0;
/// An exponent of 127, and twice that: what inverses of powers of two are subtracted from.
const ONE: i64 = 0x3f80_0000;
const INVERSE: i64 = 0x7f00_0000;

fn faults() -> [Fault; 5] {
    let one: fn(&Inst) -> Operand = |_| Operand::f32(1.0);
    [
        (
            "large numbers are not noticed",
            |i| holds(i, Op::Setp, 2, Operand::f32(LIMIT)),
            2,
            |_| Operand::f32(f32::INFINITY),
        ),
        ("dS are left as they are", |i| holds(i, Op::Selp, 2, Operand::f32(1.0)), 1, one),
        ("an inverse is left out", |i| holds(i, Op::Sub, 1, Operand::int(INVERSE)), 2, |_| Operand::int(ONE)),
        ("a factor is not handed over", is_store_of_one, 1, one),
        (
            "the mover does not look",
            |i| holds(i, Op::Setp, 2, Operand::int(ONE)),
            2,
            |i| i.operands[1].clone(),
        ),
    ]
}

fn holds(inst: &Inst, op: Op, index: usize, operand: Operand) -> bool {
    inst.op == op && inst.operands.get(index) == Some(&operand)
}

/// A store of one f32 to shared memory.
fn is_store_of_one(inst: &Inst) -> bool {
    let vector = [Mod::V2, Mod::V4].into_iter().any(|vector| inst.has(vector));
    inst.op == Op::St && inst.has(Mod::Shared) && inst.ty(0) == Some(ScalarType::F32) && !vector
}

/// The places at which a fault can be made that a run has executed, and the module with it.
fn mutants(module: &Module, executions: &[u64], (_, fits, index, other): Fault) -> Vec<(usize, Module)> {
    let sites = module.kernels[0].instructions().filter(|&(at, inst)| executions[at] > 0 && fits(inst));
    sites
        .map(|(at, inst)| {
            let mut copy = module.clone();
            let mut inst = inst.clone();
            inst.operands[index] = other(&inst);
            copy.kernels[0].body[at] = Statement::Inst(inst);
            (at, copy)
        })
        .collect()
}

/// Every single fault in how ranges are kept and handed over is seen in the results.
#[test]
fn faults_of_ranges_are_seen() {
    // The last pair of the first keys has the first rows of the second head. Before it, the largest values alone lead out of
    // range: some warps have a factor of 1 then, and others not.
    let loss = |head: usize, row: usize| match (head, row) {
        (0, 0..STEP) => LARGE / 8.0,
        (0, _) => LARGE,
        (_, 0..40) => 1.5 * LARGE,
        _ => 1.0,
    };
    [64, 128].par_iter().for_each(|&dim| {
        let given = Given::new(dim, Mask::CAUSAL, Form::Fused, loss);
        let program = given.plan.kernel().program().unwrap();
        let right = given.launch(program.module(), &Options::new()).unwrap();
        for fault in faults() {
            let mutants = mutants(program.module(), &right.executions, fault);
            assert!(!mutants.is_empty(), "{}: there is no place for it", fault.0);
            mutants.par_iter().for_each(|(at, module)| {
                let ran = given.launch(module, &Options::new());
                let seen = ran.map_or(true, |ran| ran.grads != right.grads);
                assert!(seen, "{dim} features: {} at {at}, and nobody sees it", fault.0);
            });
        }
    });
}
