//! Packed sequences on Hopper, in the simulator: a sequence feels nothing of its neighbours, and offsets that nobody has
//! checked lead nowhere.

use std::ops::Range;

use flashcore_core::{
    DType, Data, Dims, Element, HostCall, Instance, Layout, Lengths, Mask, Problem, Spec, Values,
};
use flashcore_kernels::{Gpu, KernelConfig, Plan, plan, slots};
use flashcore_lab::simulator::{self, Simulator};
use flashcore_sim::{Buffer, Launch, Options};
use flashcore_testkit::{Answer, Rng, Rows, Rule, plain};
use half::bf16;
use rayon::prelude::*;

/// So few SMs that CTAs have several tiles each.
const GPU: Gpu = Gpu { sms: 2, ..Gpu::HOPPER };
/// Queries and keys of the sequences: more and less than a tile, and none.
const SEQUENCES: [(u32, u32); 6] = [(130, 70), (0, 5), (200, 200), (17, 300), (1, 1), (33, 0)];
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

/// Features, mask, and heads of queries.
type Kind = (usize, Mask, usize);

/// A batch of all sequences.
struct Batch {
    problem: Problem,
    values: Values,
    plan: Plan,
    /// Q, K and V.
    inputs: [Vec<bf16>; 3],
}

/// Output and LSE.
type Computed = (Vec<bf16>, Vec<f32>);

impl Batch {
    fn new((dim, mask, heads): Kind) -> Self {
        let (q, kv) = (offsets(|pair| pair.0), offsets(|pair| pair.1));
        let layout = |heads, rows: &[u32]| {
            Layout::bshd(Dims::new(1, heads, rows[rows.len() - 1] as usize, dim)).unwrap()
        };
        let spec = Spec::new(DType::BF16, layout(heads, &q), layout(1, &kv), layout(1, &kv));
        let values = Values { lengths: Lengths::ragged(q, kv), ..Values::default() };
        let problem = Spec { mask, ..spec.with(&values) }.parse().unwrap();
        let mut rng = Rng::new(3);
        let inputs = [problem.q(), problem.k(), problem.v()]
            .map(|layout| (0..layout.span()).map(|_| bf16::from_f32(rng.normal())).collect());
        let plan = plan(&problem, &GPU, 16).unwrap();
        assert!(matches!(plan.kernel(), KernelConfig::Sm90(_)), "{plan}");
        Self { problem, values, plan, inputs }
    }

    fn run(&self, inputs: &[Vec<bf16>; 3], seed: u64) -> Computed {
        let mut out = vec![bf16::NAN; self.problem.out().span()];
        let mut lse = vec![f32::NAN; self.problem.rows()];
        let slices = inputs.each_ref().map(Vec::as_slice);
        let mut call = HostCall::bind(&self.problem, &self.values, slices, &mut out, Some(&mut lse)).unwrap();
        let outcome = Simulator::seeded(GPU, seed).launch(&mut call, &self.plan).unwrap().unwrap();
        simulator::judge(&outcome).unwrap_or_else(|e| panic!("{}: {e:?}", self.plan));
        (out, lse)
    }

    /// Whether a result is as right as the tensors' type allows.
    fn judge(&self, (out, lse): &Computed) {
        let instance = Instance::new(&self.problem, &self.values).unwrap();
        let inputs = self.inputs.each_ref().map(|tensor| bf16::erase(tensor));
        let [exact, rounded] =
            [plain::reference, plain::yardstick].map(|plain| plain(instance, inputs, Rows::ALL));
        let answer = Answer::gather(&self.problem, bf16::erase(out), Some(lse), Rows::ALL);
        let verdict = Rule::of(&self.problem).judge(&answer, &exact, &rounded);
        assert!(verdict.reason.is_none(), "{}: {:?}", self.plan, verdict.reason);
    }

    /// The inputs with NaN in all rows but those of one sequence.
    fn alone(&self, sequence: usize) -> [Vec<bf16>; 3] {
        let (q, kv) = (offsets(|pair| pair.0), offsets(|pair| pair.1));
        let own = |rows: &[u32]| rows[sequence] as usize..rows[sequence + 1] as usize;
        let tensors =
            [(self.problem.q(), own(&q)), (self.problem.k(), own(&kv)), (self.problem.v(), own(&kv))];
        let mut inputs = self.inputs.clone();
        for (tensor, (layout, own)) in inputs.iter_mut().zip(tensors) {
            let row = layout.strides()[2];
            let others = tensor.chunks_mut(row).enumerate().filter(|(n, _)| !own.contains(n));
            others.for_each(|(_, row)| row.fill(bf16::NAN));
        }
        inputs
    }

    /// The bits of a sequence's rows.
    fn of_sequence(&self, (out, lse): &Computed, sequence: usize) -> (Vec<u16>, Vec<u32>) {
        let q = offsets(|pair| pair.0);
        let (row, rows) = (self.problem.out().strides()[2], self.problem.seq_q());
        let own: Range<usize> = q[sequence] as usize..q[sequence + 1] as usize;
        let lse = (0..self.problem.heads_q()).flat_map(|head| &lse[head * rows..][own.clone()]);
        let out = &out[own.start * row..own.end * row];
        (out.iter().map(|x| x.to_bits()).collect(), lse.map(|x| x.to_bits()).collect())
    }
}

/// Results are right, whatever the schedule, and a sequence's bits are its own: NaN in all rows of all others changes none.
#[test]
fn sequences_feel_nothing_of_their_neighbours() {
    let kinds: [Kind; 6] = [
        (64, Mask::NONE, 2),
        (64, Mask::CAUSAL, 1),
        (128, Mask::CAUSAL, 2),
        (128, Mask::window(40, 9), 1),
        (256, Mask::NONE, 1),
        (256, Mask::CAUSAL, 2),
    ];
    kinds.par_iter().for_each(|&kind| {
        let batch = Batch::new(kind);
        let together = batch.run(&batch.inputs, 0);
        batch.judge(&together);
        for (seed, sequence) in (1..).zip(WATCHED) {
            let alone = batch.run(&batch.alone(sequence), seed);
            let [alone, together] = [&alone, &together].map(|result| batch.of_sequence(result, sequence));
            assert!(alone == together, "{kind:?}: sequence {sequence} feels its neighbours");
        }
    });
}

/// Offsets that go down, lie before the first row or behind the last, or promise more rows than the problem says: nothing is
/// read or written outside of the tensors, and the counter of tiles is left as it was found.
#[test]
fn offsets_that_nobody_has_checked_lead_nowhere() {
    for (mask, dim) in [(Mask::CAUSAL, 64), (Mask::NONE, 128)] {
        let batch = Batch::new((dim, mask, 2));
        let rows = batch.problem.seq_q() as i32;
        let wild =
            [[-7, 40, i32::MAX, 20, 3, i32::MIN, -9], [rows, rows, rows, rows, rows, rows, rows + 1], [0; 7]];
        for (q, kv) in wild.into_iter().zip([[i32::MIN, 1 << 30, 5, -1, 77, 60, 0], [-1; 7], wild[0]]) {
            let numbers = [(slots::LENGTHS_Q, q), (slots::LENGTHS_KV, kv)]
                .map(|(slot, numbers)| Buffer::input(slot, numbers.map(i32::to_le_bytes).concat()));
            let inputs = [slots::Q, slots::K, slots::V].into_iter().zip(&batch.inputs);
            let inputs = inputs.map(|(slot, data)| Buffer::input(slot, bf16::erase(data).bytes()));
            let (out, lse) = (vec![bf16::ZERO; batch.problem.out().span()], vec![0f32; batch.problem.rows()]);
            let outputs = [
                Buffer::input(slots::OUT, bf16::erase(&out).bytes()),
                Buffer::input(slots::LSE, Data::F32(&lse).bytes()),
            ];
            let program = batch.plan.kernel().program().unwrap();
            let spec = batch.plan.launches()[0].spec(&program).unwrap();
            let buffers = inputs.chain(numbers).chain(outputs).collect();
            let launch = Launch { module: program.module(), provenance: None, spec: &spec, buffers };
            let outcome = launch.run(&Options::new()).unwrap();
            assert!(outcome.is_clean(), "{q:?} {kv:?}: {:?}", outcome.findings);
            let counter = outcome.bytes(slots::TILE_COUNTER).unwrap();
            assert!(counter.iter().all(|&byte| byte == 0), "{q:?}: {counter:?}");
        }
    }
}
