//! Gradients of packed sequences on Hopper, in the simulator: a sequence feels nothing of its neighbours, and offsets that
//! nobody has checked lead nowhere.

use flashcore_core::{
    BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, DType, Data, Dims, Element, GradientsMut,
    Instance, Layout, Lengths, Mask, RowTerms, Sequences, Spec, Values,
};
use flashcore_kernels::{Choice, Form, Gpu, KernelConfig, Plan, plan_backward, slots::backward as slots};
use flashcore_lab::simulator::Simulator;
use flashcore_sim::{Buffer, FindingKind, Launch, Options};
use flashcore_testkit::{
    Outcome, Rng, Rows,
    backward::{self},
    cases::{Cost, Tag},
    plain,
    values::for_each_row,
};
use half::{bf16, f16};
use rayon::prelude::*;

/// So few SMs that CTAs have several tiles each.
const GPU: Gpu = Gpu { sms: 2, ..Gpu::HOPPER };
/// Queries and keys of the sequences: more and less than a tile, odd and even starts, and none.
const SEQUENCES: [(u32, u32); 6] = [(131, 70), (0, 5), (97, 140), (17, 200), (1, 1), (33, 0)];
/// The sequences that are looked at while others hold NaN.
const WATCHED: [usize; 3] = [0, 2, 4];

/// Where the sequences start, and where the last ends.
fn offsets(of: fn((u32, u32)) -> u32) -> Vec<u32> {
    let ends = SEQUENCES.into_iter().scan(0, |end, pair| {
        *end += of(pair);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Features, mask, heads of queries and of keys, a cap, and the form of the kernels.
type Kind = (usize, Mask, [usize; 2], Option<f32>, Form);

fn kinds() -> [Kind; 6] {
    [
        (64, Mask::NONE, [2, 1], None, Form::Split),
        (64, Mask::CAUSAL, [1, 1], Some(20.0), Form::Split),
        (128, Mask::CAUSAL, [2, 1], None, Form::Split),
        (40, Mask::window(40, 9), [1, 1], None, Form::Split),
        (64, Mask::CAUSAL, [2, 1], None, Form::Fused),
        (128, Mask::window(100, 20), [1, 1], None, Form::Fused),
    ]
}

/// A batch of all sequences.
struct Batch<T> {
    problem: BackwardProblem,
    values: Values,
    plan: Plan,
    /// Q, K, V, the output and its gradient.
    tensors: [Vec<T>; 5],
    lse: Vec<f32>,
}

/// Gradients of Q, K and V.
type Gradients<T> = [Vec<T>; 3];

impl<T: Element> Batch<T> {
    fn new(kind: Kind) -> Self {
        Self::promising(kind, None)
    }

    /// A batch whose longest sequence may have so many queries and keys.
    fn promising((dim, mask, [heads, heads_kv], softcap, form): Kind, longest: Option<usize>) -> Self {
        let (q, kv) = (offsets(|pair| pair.0), offsets(|pair| pair.1));
        let layout = |heads, rows: &[u32]| {
            Layout::bshd(Dims::new(1, heads, rows[rows.len() - 1] as usize, dim)).unwrap()
        };
        let spec = Spec::new(T::DTYPE, layout(heads, &q), layout(heads_kv, &kv), layout(heads_kv, &kv));
        let values = Values { lengths: Lengths::ragged(q, kv), ..Values::default() };
        let (of_q, of_k) = (Some(spec.q), Some(spec.k));
        let forward = Spec { mask, softcap, out: of_q, ..spec.with(&values) };
        let all =
            |longest| Sequences::Ragged { count: SEQUENCES.len(), longest_q: longest, longest_kv: longest };
        let forward = Spec { sequences: longest.map_or(forward.sequences, all), ..forward };
        let spec = BackwardSpec { d_out: of_q, dq: of_q, dk: of_k, dv: of_k, ..BackwardSpec::new(forward) };
        let problem = spec.parse().unwrap();
        let plan = Choice::Gradients(form).plan_backward(&problem, &GPU, 16).unwrap();
        assert!(matches!(plan.kernel(), KernelConfig::BackwardSm90(_)), "{plan}");
        let (forward, mut rng) = (problem.forward(), Rng::new(3));
        let mut drawn =
            |layout: &Layout| -> Vec<T> { (0..layout.span()).map(|_| T::from_f32(rng.normal())).collect() };
        let [q, k, v, d_out] = [forward.q(), forward.k(), forward.v(), problem.d_out()].map(&mut drawn);
        let instance = Instance::new(forward, &values).unwrap();
        let exact = plain::reference(instance, [&q, &k, &v].map(|x| T::erase(x)), Rows::ALL);
        let (mut out, mut rows) = (drawn(forward.out()), exact.out.chunks(dim));
        for_each_row(forward.out(), |_, start| {
            let row = rows.next().unwrap().iter().map(|&x| T::from_f32(x as f32));
            out[start..start + dim].iter_mut().zip(row).for_each(|(to, x)| *to = x);
        });
        let lse = exact.lse.iter().map(|&x| x as f32).collect();
        Self { values, plan, tensors: [q, k, v, out, d_out], lse, problem }
    }

    fn run(&self, tensors: &[Vec<T>; 5], lse: &[f32], seed: u64) -> Gradients<T> {
        let problem = &self.problem;
        let mut grads = [problem.dq(), problem.dk(), problem.dv()]
            .map(|layout| vec![T::from_f32(f32::NAN); layout.span()]);
        let [q, k, v, out, d_out] = tensors.each_ref().map(|x| T::erase(x));
        let inputs = BackwardInputs { qkv: [q, k, v], lse, terms: RowTerms::Out(out), d_out };
        let qkv = grads.each_mut().map(|x| T::erase_mut(x));
        let mut call =
            BackwardCall::bind(problem, &self.values, inputs, GradientsMut { qkv, sinks: None }).unwrap();
        Simulator::seeded(GPU, seed)
            .launch_backward(&mut call, &self.plan)
            .unwrap_or_else(|error| panic!("{}: {error} {:?}", self.plan, std::error::Error::source(&error)));
        grads
    }

    /// Rows of a sequence in the tensors of queries and of keys.
    fn own(sequence: usize) -> [std::ops::Range<usize>; 2] {
        [offsets(|pair| pair.0), offsets(|pair| pair.1)]
            .map(|rows| rows[sequence] as usize..rows[sequence + 1] as usize)
    }

    /// Tensors and LSE with NaN in all rows but those of one sequence.
    fn alone(&self, sequence: usize) -> ([Vec<T>; 5], Vec<f32>) {
        let [q, kv] = Self::own(sequence);
        let forward = self.problem.forward();
        let rows = [&q, &kv, &kv, &q, &q];
        let layouts = [forward.q(), forward.k(), forward.v(), forward.out(), self.problem.d_out()];
        let mut tensors = self.tensors.clone();
        for ((tensor, layout), own) in tensors.iter_mut().zip(layouts).zip(rows) {
            let others = tensor.chunks_mut(layout.strides()[2]).enumerate().filter(|(n, _)| !own.contains(n));
            others.for_each(|(_, row)| row.fill(T::from_f32(f32::NAN)));
        }
        let own = |n: usize| q.contains(&(n % forward.seq_q()));
        let lse = (0..).zip(&self.lse).map(|(n, &lse)| if own(n) { lse } else { f32::NAN }).collect();
        (tensors, lse)
    }

    /// The bytes of a sequence's rows.
    fn of_sequence<'a>(&self, grads: &'a Gradients<T>, sequence: usize) -> [&'a [u8]; 3] {
        let [q, kv] = Self::own(sequence);
        let layouts = [self.problem.dq(), self.problem.dk(), self.problem.dv()];
        let rows = [&q, &kv, &kv];
        std::array::from_fn(|n| {
            let row = layouts[n].strides()[2];
            T::erase(&grads[n][rows[n].start * row..rows[n].end * row]).bytes()
        })
    }

    /// A sequence's bits are its own: NaN in all rows of all others changes none, whatever the schedule.
    fn check_neighbours(&self, kind: &Kind) {
        let together = self.run(&self.tensors, &self.lse, 0);
        for (n, grad) in together.iter().enumerate() {
            let missing = grad.iter().filter(|x| !x.to_f32().is_finite()).count();
            assert!(missing == 0, "{kind:?}: gradient {n} has {missing} holes");
        }
        for (seed, sequence) in (1..).zip(WATCHED) {
            let (tensors, lse) = self.alone(sequence);
            let alone = self.run(&tensors, &lse, seed);
            let [alone, together] = [&alone, &together].map(|grads| self.of_sequence(grads, sequence));
            assert!(alone == together, "{kind:?}: sequence {sequence} feels its neighbours");
        }
    }

    /// What launches leave in memory with these offsets, gradients being NaN before.
    fn run_with(&self, [q, kv]: [[i32; 7]; 2], overlap: bool) -> Vec<Buffer> {
        let numbers = [(slots::LENGTHS_Q, q), (slots::LENGTHS_KV, kv)]
            .map(|(slot, numbers)| Buffer::input(slot, numbers.map(i32::to_le_bytes).concat()));
        let inputs = [slots::Q, slots::K, slots::V, slots::OUT, slots::D_OUT].into_iter().zip(&self.tensors);
        let inputs = inputs.map(|(slot, data)| Buffer::input(slot, T::erase(data).bytes()));
        let lse = Buffer::input(slots::LSE, Data::F32(&self.lse).bytes());
        let [of_q, of_kv] = [0, 1].map(|n| vec![T::from_f32(f32::NAN); self.tensors[n].len()]);
        let grads = [(slots::DQ, &of_q), (slots::DK, &of_kv), (slots::DV, &of_kv)];
        let grads = grads.map(|(slot, data)| Buffer::input(slot, T::erase(data).bytes()));
        let mut buffers: Vec<_> = inputs.chain(numbers).chain(grads).chain([lse]).collect();
        for launch in self.plan.launches() {
            let program = launch.kernel().program().unwrap();
            let spec = launch.spec(&program).unwrap();
            let launch = Launch { module: program.module(), provenance: None, spec: &spec, buffers };
            let outcome = launch.run(&Options::new()).unwrap();
            // Sequences of the same rows write them both.
            let race = |kind| overlap && kind == FindingKind::GlobalRace;
            let wrong: Vec<_> = outcome.errors().filter(|finding| !race(finding.kind)).collect();
            assert!(wrong.is_empty(), "{q:?} {kv:?}: {wrong:?}");
            buffers = outcome.buffers;
        }
        buffers
    }

    /// Nothing that offsets say leads out of the tensors, and what is counted in memory is left as it was found.
    fn check_offsets(&self, offsets: [[i32; 7]; 2], overlap: bool) {
        let buffers = self.run_with(offsets, overlap);
        for slot in [slots::TILE_COUNTER, slots::TURNS, slots::DQ_SUMS] {
            let Some(left) = buffers.iter().find(|buffer| buffer.slot == slot) else { continue };
            assert!(left.bytes.iter().all(|&byte| byte == 0), "{offsets:?}: {slot:?} is not left as it was");
        }
    }

    /// Rows before the first sequence and behind the last have gradients of 0, the others numbers.
    fn check_outside(&self, offsets: [[i32; 7]; 2]) {
        let buffers = self.run_with(offsets, false);
        let [q, kv] = offsets.map(|rows| rows[0] as usize..rows[6] as usize);
        let forward = self.problem.forward();
        let gradients =
            [(slots::DQ, forward.q(), q), (slots::DK, forward.k(), kv.clone()), (slots::DV, forward.k(), kv)];
        for (slot, layout, own) in gradients {
            let left = buffers.iter().find(|buffer| buffer.slot == slot).unwrap();
            for (n, row) in left.bytes.chunks(2 * layout.strides()[2]).enumerate() {
                let mut numbers = row.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
                let right = match own.contains(&n) {
                    true => numbers.all(|bits| !bf16::from_bits(bits).is_nan()),
                    false => numbers.all(|bits| bits == 0),
                };
                assert!(right, "row {n} of {slot:?}");
            }
        }
    }
}

/// The conformance suite's packed cases, in both types and in both forms.
#[test]
fn gradients_of_packed_sequences_are_right() {
    let cases: Vec<_> = backward::cases(Cost::Tiny)
        .into_iter()
        .filter(|case| case.forward.tag == Tag::Ragged)
        .flat_map(|case| {
            let types = [DType::F16, DType::BF16];
            let by = types.into_iter().flat_map(|dtype| [Form::Split, Form::Fused].map(|form| (dtype, form)));
            by.map(move |by| (case.clone(), by))
        })
        .collect();
    assert!(cases.len() >= 28, "{} cases", cases.len());
    let wrong = cases.par_iter().filter_map(|(case, (dtype, form))| {
        let simulator = Simulator::new(GPU).choosing(Choice::Gradients(*form));
        let outcome = backward::check(&simulator, case, *dtype, 1);
        (outcome != Outcome::Passed).then(|| format!("{case} {dtype} {form:?}: {outcome}"))
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn gradients_feel_nothing_of_neighbours() {
    let kinds = kinds();
    kinds.par_iter().enumerate().for_each(|(n, kind)| match n % 2 {
        0 => Batch::<bf16>::new(*kind).check_neighbours(kind),
        _ => Batch::<f16>::new(*kind).check_neighbours(kind),
    });
    let [.., narrow, wide] = &kinds;
    Batch::<f16>::new(*narrow).check_neighbours(narrow);
    Batch::<bf16>::new(*wide).check_neighbours(wide);
}

/// Offsets that go down, lie before the first row or behind the last, or promise more rows than the problem says.
#[test]
fn offsets_of_gradients_that_nobody_has_checked_lead_nowhere() {
    let kinds = kinds();
    [kinds[0], kinds[2], kinds[4]].par_iter().for_each(|kind| {
        let batch = Batch::<bf16>::new(*kind);
        let rows = batch.problem.forward().seq_q() as i32;
        let wild =
            [[-7, 40, i32::MAX, 20, 3, i32::MIN, -9], [rows, rows, rows, rows, rows, rows, rows + 1], [0; 7]];
        let again = [0, i32::MAX, 0, i32::MAX, 0, i32::MAX, 0];
        for numbers in
            [[wild[0], [i32::MIN, 5, 77, 1 << 30, 60, -1, -3]], [wild[1], [-1; 7]], [wild[2], wild[0]]]
        {
            batch.check_offsets(numbers, false);
        }
        batch.check_offsets([again, again], true);
        batch.check_outside([[5, 131, 131, 228, 240, 241, 260], [9, 70, 75, 215, 380, 381, 381]]);
        batch.check_outside([[279; 7], [0; 7]]);
    });
}

/// The same where sequences that lie over each other have more tiles than the host knows of, and heads share those.
#[test]
fn tiles_that_nobody_promised_lead_nowhere() {
    let kind = (64, Mask::NONE, [2, 2], None, Form::Fused);
    let batch = Batch::<bf16>::promising(kind, Some(416));
    let again = [0, i32::MAX, 0, i32::MAX, 0, i32::MAX, 0];
    batch.check_offsets([again, again], true);
}

/// One kernel takes long sequences, two the others, and the general one what tensor copies cannot move.
#[test]
fn plans_of_packed_gradients() {
    let name = |dtype, dim: usize, [count, longest]: [usize; 2], gap: usize| {
        let dims = Dims::new(1, 16, 16384, dim);
        let layout = Layout::strided(dims, [0, dim, 16 * dim + gap, 1]).unwrap();
        let sequences = Sequences::Ragged { count, longest_q: longest, longest_kv: longest };
        let spec = Spec { sequences, mask: Mask::CAUSAL, ..Spec::new(dtype, layout, layout, layout) };
        let problem = BackwardSpec::new(spec).parse().unwrap();
        plan_backward(&problem, &Gpu::HOPPER, 16).unwrap().kernel().name().to_string()
    };
    for (name, wanted) in [
        (name(DType::BF16, 128, [8, 2048], 0), "fc_backward_sm_90a_fused_bf16_d128v128_"),
        (name(DType::BF16, 64, [16, 4000], 0), "fc_backward_sm_90a_fused_bf16_d64v64_"),
        (name(DType::BF16, 128, [64, 256], 0), "fc_backward_sm_90a_keys_bf16_d128v128_"),
        (name(DType::BF16, 96, [8, 2048], 0), "fc_backward_sm_90a_keys_bf16_d96v96_"),
        (name(DType::F16, 128, [8, 2048], 0), "fc_backward_sm_90a_fused_f16_d128v128_"),
        (name(DType::F16, 128, [64, 256], 0), "fc_backward_sm_90a_keys_f16_d128v128_"),
        (name(DType::BF16, 128, [8, 0], 0), "fc_backward_dkv_sm_90_"),
        (name(DType::BF16, 128, [8, 2048], 1), "fc_backward_dkv_sm_90_"),
    ] {
        assert!(name.starts_with(wanted), "{name} is not {wanted}");
    }
}
