//! Few queries in every way in which CTAs can share rows; where bits must not depend on the batch, they are the same in all.

use flashcore_core::{
    DType, Dims, Layout, Lengths, Mask, PageTable, Pages, Problem, Sequences, Spec, Values,
};
use flashcore_kernels::{
    Gpu, Member, Plan, Tile,
    decode::{Copies, Order, Shape},
    plan, plan_tile, slots,
};
use flashcore_lab::simulator::Simulator;
use flashcore_sim::{Buffer, Launch, Options};
use flashcore_testkit::Rng;
use half::f16;

use super::simulator::{Launched, launched, normal_inputs};

const DIM: usize = 64;
/// Cuts of every width below 4,096 keys.
const KEYS: usize = 2_700;
const HEADS: [usize; 2] = [4, 2];

fn problem(batch: usize, queries: usize, mask: Mask, values: &Values) -> Problem {
    let q = Layout::bhsd(Dims::new(batch, HEADS[0], queries, DIM)).unwrap();
    // Heads of a key lie side by side, so that CTAs form teams.
    let k = Layout::bshd(Dims::new(batch, HEADS[1], KEYS, DIM)).unwrap();
    Spec { mask, batch_invariant: true, ..Spec::new(DType::F16, q, k, k).with(values) }.parse().unwrap()
}

/// A member's plan with work shared evenly and, where there are such, tensor copies.
pub(super) fn variants(member: &Member, plan: &Plan) -> Vec<Plan> {
    let Tile::Decode(shape) = plan.kernel().tile() else { return Vec::new() };
    let lies_together = member.problem.page_size().is_none_or(|size| size.is_multiple_of(16));
    let has_copies = member.gpu.capability >= (9, 0) && lies_together;
    let even = Shape { order: Order::Even, ..shape };
    let tensor = Shape { copies: Copies::Tensor, ..shape };
    let both = Shape { copies: Copies::Tensor, ..even };
    // Pieces that are folded leave room for one stage, and none for messages of two blocks.
    let folds = member.problem.batch_invariant();
    let stages = if folds { 1 } else { 2 };
    let cluster = Shape { order: Order::Cluster { parts: 4 }, stages, ctas_per_sm: 1, ..tensor };
    let mut some = if has_copies { vec![even, tensor, both] } else { vec![even] };
    some.extend((has_copies && !(folds && shape.blocks == 2)).then_some(cluster));
    // Few CTAs have several units each.
    let gpu = Gpu { sms: 3, ..member.gpu };
    let plan = |shape| plan_tile(&member.problem, &gpu, 16, Tile::Decode(shape));
    some.into_iter().map(|shape| plan(shape).unwrap_or_else(|error| panic!("{shape:?}: {error}"))).collect()
}

/// The shape of the plan, and the same with CTAs that share rows in every way there is.
fn shapes(problem: &Problem) -> Vec<(Gpu, Shape)> {
    let Tile::Decode(shape) = plan(problem, &Gpu::HOPPER, 16).unwrap().kernel().tile() else {
        panic!("few queries have a kernel")
    };
    let grids = [1, 2, 5, 9, 40]
        .map(|splits| (Gpu::HOPPER, Shape { order: Order::Grid, splits: Some(splits), ..shape }));
    let evens = [1, 3, 8, 100].map(|sms| (Gpu { sms, ..Gpu::HOPPER }, Shape { order: Order::Even, ..shape }));
    let clusters = [2, 4, 8].map(|parts| (Gpu::HOPPER, Shape { order: Order::Cluster { parts }, ..shape }));
    grids.into_iter().chain(evens).chain(clusters).collect()
}

fn run(
    problem: &Problem,
    values: &Values,
    (gpu, shape): (Gpu, Shape),
    inputs: &[Vec<f16>; 3],
) -> Launched<f16> {
    let stages = shape.stages.min(2);
    let plan = plan_tile(problem, &gpu, 16, Tile::Decode(Shape { stages, ..shape })).unwrap();
    launched::<f16, f16>(&Simulator::seeded(gpu, 3), (problem, values), &plan, inputs).unwrap()
}

#[test]
fn rows_have_their_bits_however_ctas_share_them() {
    let lengths = Values { lengths: Lengths::keys([2_603, 5, KEYS as u32]), ..Values::default() };
    let cases = [
        (1, Mask::NONE, Values::default()),
        (3, Mask::CAUSAL, lengths.clone()),
        (2, Mask::window(1_500, 0), lengths),
    ];
    for (queries, mask, values) in cases {
        let problem = problem(3, queries, mask, &values);
        let inputs = normal_inputs::<f16>(&problem);
        let mut shapes = shapes(&problem).into_iter();
        let first = run(&problem, &values, shapes.next().unwrap(), &inputs);
        for shape in shapes {
            let other = run(&problem, &values, shape, &inputs);
            assert!(
                first.out == other.out && first.lse == other.lse,
                "{queries} queries: {:?}",
                shape.1.order
            );
        }
    }
}

/// A query has its bits whether it comes alone or as one of several.
#[test]
fn queries_have_their_bits_alone_and_together() {
    const QUERIES: usize = 4;
    for mask in [Mask::CAUSAL, Mask::window(700, 0)] {
        let together = problem(1, QUERIES, mask, &Values::default());
        let [q, k, v] = normal_inputs::<f16>(&together);
        let shape = shapes(&together)[1];
        let whole = run(&together, Values::NONE, shape, &[q.clone(), k.clone(), v.clone()]);
        for query in 0..QUERIES {
            let keys = (KEYS - QUERIES + 1 + query) as u32;
            let values = Values { lengths: Lengths::keys([keys]), ..Values::default() };
            let alone = problem(1, 1, mask, &values);
            let row = |of: &[f16]| -> Vec<f16> {
                of.chunks_exact(DIM).skip(query).step_by(QUERIES).flatten().copied().collect()
            };
            let shape = shapes(&alone)[4];
            let got = run(&alone, &values, shape, &[row(&q), k.clone(), v.clone()]);
            assert_eq!(got.out, row(&whole.out), "query {query}");
        }
    }
}

/// One query over a dense cache, or over pages of 16 keys: batch, query heads, key heads and keys.
fn cell([batch, heads, heads_kv, keys]: [usize; 4], paged: bool, batch_invariant: bool) -> Problem {
    const PAGE: usize = 16;
    let q = Layout::bshd(Dims::new(batch, heads, 1, 128)).unwrap();
    let kv = match paged {
        true => Layout::bshd(Dims::new(batch * keys / PAGE, heads_kv, PAGE, 128)).unwrap(),
        false => Layout::bhsd(Dims::new(batch, heads_kv, keys, 128)).unwrap(),
    };
    let pages = Pages { longest_kv: Some(keys), ..Pages::new(keys / PAGE) };
    let sequences = if paged { Sequences::Used { q: false, kv: true } } else { Sequences::Uniform };
    let spec = Spec { sequences, pages: paged.then_some(pages), ..Spec::new(DType::BF16, q, kv, kv) };
    Spec { batch_invariant, ..spec }.parse().unwrap()
}

/// CTAs of an H200 share rows as was measured to take the least time.
#[test]
fn ctas_share_rows_as_measured() {
    let cluster = |parts| Order::Cluster { parts };
    let cases = [
        ([1, 32, 8, 1_024], false, cluster(8)),
        ([1, 32, 8, 2_048], false, cluster(8)),
        ([1, 32, 8, 8_192], false, Order::Grid),
        ([8, 32, 8, 4_096], false, cluster(2)),
        ([64, 32, 8, 8_192], false, Order::Grid),
        ([1, 32, 8, 8_192], true, Order::Grid),
        ([16, 32, 8, 8_192], true, Order::Even),
        ([64, 32, 8, 8_192], true, Order::Even),
        ([128, 64, 8, 2_048], true, Order::Even),
    ];
    let gpu = Gpu { sms: 132, ..Gpu::HOPPER };
    for (extents, paged, order) in cases {
        for batch_invariant in [false, true] {
            let plan = plan(&cell(extents, paged, batch_invariant), &gpu, 16).unwrap();
            let Tile::Decode(shape) = plan.kernel().tile() else { panic!("{plan}") };
            assert_eq!(shape.order, order, "{extents:?}, pages: {paged}, invariant: {batch_invariant}");
        }
    }
}

/// A sequence with more keys than was promised loses some: nothing is written where no part has room.
#[test]
fn keys_that_nobody_promised_lead_nowhere() {
    const ROWS: usize = 4_000;
    let q = Layout::bshd(Dims::new(1, HEADS[0], 2, DIM)).unwrap();
    let k = Layout::bshd(Dims::new(1, HEADS[1], ROWS, DIM)).unwrap();
    for longest_kv in [64, 700] {
        let sequences = Sequences::Ragged { count: 2, longest_q: 1, longest_kv };
        let spec = Spec { sequences, batch_invariant: true, ..Spec::new(DType::F16, q, k, k) };
        let problem = spec.parse().unwrap();
        for (gpu, shape) in shapes(&problem) {
            let shape = Shape { stages: shape.stages.min(2), ..shape };
            let plan = plan_tile(&problem, &gpu, 16, Tile::Decode(shape)).unwrap();
            let program = plan.kernel().program().unwrap();
            let spec = plan.launches()[0].spec(&program).unwrap();
            let zeros = |slot, elements: usize| Buffer::input(slot, vec![0u8; 2 * elements]);
            let offsets = [(slots::LENGTHS_Q, [0u32, 1, 2]), (slots::LENGTHS_KV, [0, 150, ROWS as u32])]
                .map(|(slot, numbers)| Buffer::input(slot, numbers.map(u32::to_le_bytes).concat()));
            let tensors = [(slots::Q, q), (slots::K, k), (slots::V, k), (slots::OUT, q)]
                .map(|(slot, layout)| zeros(slot, layout.span()));
            let lse = zeros(slots::LSE, 2 * problem.rows());
            let buffers = offsets.into_iter().chain(tensors).chain([lse]).collect();
            let launch = Launch { module: program.module(), provenance: None, spec: &spec, buffers };
            let outcome = launch.run(&Options::new()).unwrap();
            assert!(outcome.is_clean(), "{longest_kv} {:?}: {:?}", shape.order, outcome.findings);
        }
    }
}

/// How warps share keys, and so a query's bits, is the same however many queries come with it.
#[test]
fn queries_of_others_do_not_change_tiles() {
    let gpus = [Gpu::HOPPER, Gpu::AMPERE, Gpu::CONSUMER, Gpu::ADA, Gpu::BLACKWELL];
    let kinds = [(DType::BF16, DType::BF16), (DType::BF16, DType::E4M3)];
    for (gpu, (dtype, kv_dtype), dim, group) in gpus.into_iter().flat_map(|gpu| {
        kinds.into_iter().flat_map(move |kind| {
            [64, 96, 128, 192, 256]
                .into_iter()
                .flat_map(move |dim| [1, 4, 8, 16].map(move |group| (gpu, kind, dim, group)))
        })
    }) {
        let tiles = [1, 2, 3, 4, 8, 16].into_iter().filter_map(|queries| {
            let q = Layout::bshd(Dims::new(4, group, queries, dim)).unwrap();
            let k = Layout::bshd(Dims::new(4, 1, 4_096, dim)).unwrap();
            let spec = Spec { kv_dtype: Some(kv_dtype), batch_invariant: true, ..Spec::new(dtype, q, k, k) };
            let plan = plan(&spec.parse().unwrap(), &gpu, 16).ok()?;
            let Tile::Decode(shape) = plan.kernel().tile() else { return None };
            Some((shape.warps, shape.tile_n))
        });
        let tiles: std::collections::BTreeSet<_> = tiles.collect();
        assert!(tiles.len() <= 1, "{:?} {kv_dtype} {dim} features, {group} heads: {tiles:?}", gpu.capability);
    }
}

/// Queries, and keys, of a prompt that is cut into chunks: whole pages.
const PROMPT: usize = 416;
const PAGE: usize = 16;

/// How a chunk comes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    Alone,
    /// Behind another sequence of this many rows.
    Packed(usize),
    /// Over pages, which hold keys beyond those of the chunk as well.
    Paged,
}

impl Form {
    /// The problem of the prompt's queries `from..to` and the keys before `to`, with its numbers.
    fn problem(self, dim: usize, (from, to): (usize, usize)) -> (Problem, Values) {
        let layout = |rows| Layout::bshd(Dims::new(1, 1, self.before() + rows, dim)).unwrap();
        let (q, k) = (layout(to - from), layout(to));
        let pages = Layout::bshd(Dims::new(PROMPT / PAGE, 1, PAGE, dim)).unwrap();
        let offsets = |rows| [0, self.before() as u32, (self.before() + rows) as u32];
        let (lengths, k) = match self {
            Self::Alone => (Lengths::Uniform, k),
            Self::Packed(_) => (Lengths::ragged(offsets(to - from), offsets(to)), k),
            Self::Paged => (Lengths::keys([to as u32]), pages),
        };
        let all = PROMPT / PAGE;
        let table = (self == Self::Paged).then(|| PageTable::new((0..all as i32).collect::<Vec<_>>(), all));
        let values = Values { lengths, table, ..Values::default() };
        let spec = Spec::new(DType::F16, q, k, k).with(&values);
        (Spec { mask: Mask::CAUSAL, batch_invariant: true, ..spec }.parse().unwrap(), values)
    }

    const fn before(self) -> usize {
        if let Self::Packed(rows) = self { rows } else { 0 }
    }

    /// Output and LSE of these queries, whose numbers are those of `prompt`.
    fn run(self, gpu: Gpu, prompt: &[Vec<f16>; 3], (from, to): (usize, usize)) -> (Vec<f16>, Vec<f32>) {
        let dim = prompt[0].len() / PROMPT;
        let (problem, values) = self.problem(dim, (from, to));
        let rows = |of: &[f16], from: usize, to: usize| {
            let others = std::iter::repeat_n(f16::ONE, self.before() * dim);
            others.chain(of[from * dim..to * dim].iter().copied()).collect::<Vec<_>>()
        };
        let keys = if self == Self::Paged { PROMPT } else { to };
        let [q, k, v] = prompt;
        let inputs = [rows(q, from, to), rows(k, 0, keys), rows(v, 0, keys)];
        let plan = plan(&problem, &gpu, 16).unwrap();
        let simulator = Simulator::seeded(gpu, 3);
        let got = launched::<f16, f16>(&simulator, (&problem, &values), &plan, &inputs).unwrap();
        (got.out[self.before() * dim..].to_vec(), got.lse[self.before()..].to_vec())
    }
}

/// A prompt has the same bits in one piece and in chunks of many queries, wherever they are cut.
#[test]
fn prompts_have_their_bits_in_chunks_and_whole() {
    // Scores that stay, that one key decides, and that grow from key to key.
    let kinds: [fn(usize) -> f32; 3] = [|_| 1.0, |_| 10.0, |row| row as f32 / 50.0];
    for (gpu, dim, form) in [
        (Gpu::HOPPER, 128, Form::Alone),
        (Gpu::HOPPER, 64, Form::Packed(50)),
        (Gpu::HOPPER, 128, Form::Packed(50)),
        (Gpu::HOPPER, 128, Form::Paged),
        (Gpu::AMPERE, 128, Form::Alone),
        (Gpu::AMPERE, 64, Form::Packed(50)),
        (Gpu::AMPERE, 64, Form::Paged),
    ] {
        for (kind, factor) in kinds.into_iter().enumerate() {
            let mut rng = Rng::new(5);
            let mut tensor = |factor: fn(usize) -> f32| -> Vec<f16> {
                (0..PROMPT * dim).map(|n| f16::from_f32(rng.normal() * factor(n / dim))).collect()
            };
            let prompt = [tensor(|_| 1.0), tensor(factor), tensor(|_| 1.0)];
            let whole = form.run(gpu, &prompt, (0, PROMPT));
            for (from, to) in [(0, 130), (130, 217), (217, PROMPT)] {
                let (out, lse) = form.run(gpu, &prompt, (from, to));
                let same = out == whole.0[from * dim..to * dim] && lse == whole.1[from..to];
                assert!(same, "kind {kind}, {dim} features, {form:?}, {from}..{to}");
            }
        }
    }
}
