//! Attention of E4M3 tensors with factors, on any backend: quantised inputs, the oracle on what was quantised, and bars.
//!
//! The oracle is f64 on the quantised numbers, so that a verdict says what the backend itself adds. The yardstick rounds
//! probabilities to E4M3 as a kernel does ([`crate::plain`]). Named shapes also have an absolute bound.

use flashcore_core::{
    Backend, DType, Data, DataMut, Dims, E4M3, Element, Factors, HostCall, Instance, Layout, Lengths, Mask,
    Operand, Problem, Scales, Spec, Values, forward_quantised, turn_values, turned_dims,
};

use crate::{
    Case, Tag,
    answer::{Answer, Rows},
    bench::{Trouble, is_used},
    cases::{self, Cost, Sinks},
    compare::Rule,
    inputs::{Inputs, Placement},
    kinds::Kind,
    plain,
    rng::Rng,
    suite::{Outcome, Step},
    values,
};

/// Largest error that the project allows on named shapes.
pub const BAR: f64 = 0.06;

/// Relative error of an LSE: tensor cores keep 13 bits of scores, cut off four times.
const LSE_BITS: f64 = 1.0 / 2048.0;

/// A case with what is particular to 8 bits.
#[derive(Clone, Debug)]
pub struct NarrowCase {
    pub case: Case,
    pub scales: Option<Scales>,
    pub out: DType,
    /// Whether the result is merged into one that is there.
    pub accumulate: bool,
}

/// A case with factors and a result of that type.
fn narrow(case: Case, scales: Option<Scales>, out: DType) -> NarrowCase {
    NarrowCase { case, scales, out, accumulate: false }
}

fn new(name: &str, shape: [usize; 5], dim: usize) -> Case {
    Case::new(Tag::Named, format!("narrow {name}"), shape, dim)
}

fn used() -> Lengths {
    Lengths::used(vec![70, 1, 33], vec![300, 128, 17])
}

/// Cases for every backend, small enough for the simulator.
pub fn cases() -> Vec<NarrowCase> {
    let (tensor, head) = (Some(Scales::PerTensor), Some(Scales::PerHead));
    let used = used();
    let mut all = vec![
        narrow(new("plain", [1, 2, 2, 64, 64], 64), None, DType::BF16),
        narrow(new("per tensor", [1, 2, 1, 65, 200], 128), tensor, DType::F16),
        narrow(new("per head, grouped", [2, 4, 2, 70, 333], 128), head, DType::BF16),
        narrow(Case { mask: Mask::CAUSAL, ..new("causal", [1, 2, 2, 200, 200], 64) }, head, DType::F32),
        narrow(
            Case { mask: Mask::window(100, 20), ..new("window", [1, 1, 1, 200, 300], 96) },
            head,
            DType::BF16,
        ),
        narrow(Case { softcap: Some(5.0), ..new("softcap", [1, 2, 2, 40, 150], 80) }, head, DType::BF16),
        narrow(
            Case { sinks: Sinks::Normal, mask: Mask::CAUSAL, ..new("sinks", [1, 4, 1, 20, 150], 32) },
            tensor,
            DType::BF16,
        ),
        narrow(
            Case { lengths: used.clone(), mask: Mask::CAUSAL, ..new("lengths", [3, 2, 1, 70, 300], 64) },
            head,
            DType::BF16,
        ),
        narrow(
            Case { lengths: used.clone(), ..new("lengths, no mask", [3, 2, 1, 70, 300], 16) },
            head,
            DType::F32,
        ),
        narrow(Case { mask: Mask::CAUSAL, ..new("empty rows", [1, 1, 1, 130, 64], 64) }, head, DType::BF16),
        narrow(Case { dim_v: 64, ..new("two dims", [1, 1, 1, 64, 160], 128) }, head, DType::BF16),
    ];
    all.extend(fine());
    all.extend(wide());
    all.push(NarrowCase {
        accumulate: true,
        ..narrow(new("accumulated", [1, 1, 1, 64, 130], 64), head, DType::F32)
    });
    let kinds = Kind::ALL.into_iter().filter(|kind| !kind.is_normal());
    all.extend(kinds.map(|kind| {
        let case = Case { inputs: Inputs::Of(kind), ..new(kind.name(), [1, 1, 1, 64, 300], 64) };
        narrow(case, head, DType::F32)
    }));
    all
}

/// Cases whose blocks of rows have factors of their own.
fn fine() -> Vec<NarrowCase> {
    let blocks = Some(Scales::PerBlock { q: 64, k: 128 });
    vec![
        narrow(new("blocks", [1, 2, 1, 200, 333], 64), blocks, DType::BF16),
        narrow(
            Case { mask: Mask::CAUSAL, ..new("causal blocks", [2, 4, 2, 150, 300], 128) },
            blocks,
            DType::F32,
        ),
        narrow(
            Case { softcap: Some(5.0), ..new("capped blocks", [1, 2, 2, 40, 150], 80) },
            blocks,
            DType::F16,
        ),
        narrow(
            new("one block", [1, 2, 2, 40, 100], 32),
            Some(Scales::PerBlock { q: 40, k: 100 }),
            DType::BF16,
        ),
        narrow(
            Case { lengths: used(), mask: Mask::CAUSAL, ..new("blocks, lengths", [3, 2, 1, 70, 300], 64) },
            Some(Scales::PerBlock { q: 128, k: 256 }),
            DType::BF16,
        ),
        NarrowCase {
            accumulate: true,
            ..narrow(
                Case { inputs: Inputs::Of(Kind::Drift), ..new("accumulated blocks", [1, 1, 1, 64, 300], 64) },
                blocks,
                DType::F32,
            )
        },
    ]
}

/// Cases of more than 128 features, of which some are multiplied at a time.
fn wide() -> Vec<NarrowCase> {
    let head = Some(Scales::PerHead);
    vec![
        narrow(new("256 features", [1, 2, 1, 130, 300], 256), head, DType::BF16),
        narrow(
            Case { mask: Mask::CAUSAL, ..new("256 features, causal", [1, 2, 2, 200, 260], 256) },
            Some(Scales::PerBlock { q: 64, k: 128 }),
            DType::F16,
        ),
        narrow(
            Case { mask: Mask::window(100, 20), ..new("144 features, window", [1, 1, 1, 200, 300], 144) },
            head,
            DType::F32,
        ),
        narrow(
            Case {
                lengths: used(),
                mask: Mask::CAUSAL,
                ..new("192 features, lengths", [3, 2, 1, 70, 300], 192)
            },
            head,
            DType::BF16,
        ),
        narrow(
            Case {
                softcap: Some(5.0),
                sinks: Sinks::Normal,
                dim_v: 128,
                ..new("192 and 128 features", [1, 2, 1, 40, 150], 192)
            },
            None,
            DType::BF16,
        ),
        narrow(
            Case {
                dim_v: 240,
                inputs: Inputs::Of(Kind::Drift),
                ..new("64 and 240 features", [1, 1, 1, 64, 400], 64)
            },
            head,
            DType::F32,
        ),
    ]
}

/// The project's named shapes that cost at most `cost`.
pub fn named(cost: Cost) -> Vec<NarrowCase> {
    let named = cases::tagged(Tag::Named).into_iter().filter(|case| case.cost() <= cost);
    let kinds = [Scales::PerHead, Scales::PerBlock { q: 64, k: 128 }];
    let with =
        |(n, case)| NarrowCase { case, scales: Some(kinds[n % 2]), out: DType::F32, accumulate: false };
    named.enumerate().map(with).collect()
}

/// Runs cases on a backend and says what failed.
pub fn failures(backend: &dyn Backend, cases: &[NarrowCase], seed: u64) -> Vec<String> {
    let failed = cases.iter().filter_map(|case| {
        let outcome = check(backend, case, seed);
        (outcome != Outcome::Passed)
            .then(|| format!("{} {:?} {}: {outcome}", case.case, case.scales, case.out))
    });
    failed.collect()
}

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &NarrowCase, seed: u64) -> Outcome {
    match case.out {
        DType::F16 => judged::<half::f16>(backend, case, seed),
        DType::BF16 => judged::<half::bf16>(backend, case, seed),
        _ => judged::<f32>(backend, case, seed),
    }
    .err()
    .unwrap_or(Outcome::Passed)
}

fn judged<O: Element>(backend: &dyn Backend, case: &NarrowCase, seed: u64) -> Result<(), Outcome> {
    let bench = Bench::new(case, seed)?;
    let first = bench.run::<O>(backend)?;
    let got = Answer::gather(&bench.problem, O::erase(&first.0), Some(&first.1), Rows::ALL);
    let (oracle, yardstick) = bench.expected();
    let factor = if case.case.softcap.is_some() { 3.0 } else { 2.0 };
    let verdict = Rule::new(O::DTYPE, factor).with_lse(LSE_BITS).judge(&got, &oracle, &yardstick);
    if let Some(reason) = verdict.reason {
        return Err(Outcome::failed(Step::Correctness, reason));
    }
    if case.case.f16_bar.is_some() && verdict.max_error > BAR {
        return Err(Outcome::failed(Step::Correctness, format!("{} is above {BAR}", verdict.max_error)));
    }
    // Values that are turned already give the same.
    let again = bench.turned()?.as_ref().unwrap_or(&bench).run::<O>(backend)?;
    if bytemuck::cast_slice::<O, u8>(&first.0) != bytemuck::cast_slice::<O, u8>(&again.0) {
        return Err(Outcome::failed(Step::Determinism, "two runs differ, the second over turned values"));
    }
    Ok(())
}

/// A case in memory.
struct Bench {
    problem: Problem,
    values: Values,
    qkv: [Vec<E4M3>; 3],
}

impl Bench {
    fn new(case: &NarrowCase, seed: u64) -> Result<Self, Trouble> {
        let NarrowCase { case: plain, scales, out, accumulate } = case;
        let placed = Case { placement: Placement::Dense, ..plain.clone() };
        let wide = placed.problem(DType::F32)?;
        let numbers = plain.inputs.values([plain.q, plain.k, plain.v()], &mut Rng::new(seed));
        let layouts = [*wide.q(), *wide.k(), *wide.v()];
        let factors = scales.map(|scales| factors(scales, &numbers, layouts.map(|layout| layout.dims())));
        let values = Values { factors, ..placed.values(seed) };
        let spec = Spec {
            dtype: DType::E4M3,
            out_dtype: Some(*out),
            accumulate: *accumulate,
            ..wide.spec().clone()
        };
        let problem = spec.with(&values).parse()?;
        let instance = Instance::new(&problem, &values)?;
        let qkv = [0, 1, 2].map(|n| quantised(instance, n, &numbers[n], &layouts[n]));
        Ok(Self { problem, values, qkv })
    }

    /// The same with transposed values, if supported.
    fn turned(&self) -> Result<Option<Self>, Trouble> {
        let Self { problem, values, qkv } = self;
        let v = problem.v();
        if !v.dims().dim.is_multiple_of(16) {
            return Ok(None);
        }
        let turned = Layout::bhsd(turned_dims(v.dims()))?;
        let mut qkv = qkv.clone();
        let mut to = vec![E4M3::from_f32(f32::NAN); turned.span()];
        let rows =
            |batch| (0..v.dims().seq).take_while(|&seq| is_used(self.instance(), 2, batch, seq)).count();
        turn_values((v, &qkv[2]), (&turned, &mut to), rows);
        qkv[2] = to;
        let spec = Spec { turned: true, v: turned, ..problem.spec().clone() };
        Ok(Some(Self { problem: spec.parse()?, values: values.clone(), qkv }))
    }

    fn instance(&self) -> Instance<'_> {
        Instance::new(&self.problem, &self.values).expect("checked when the bench was made")
    }

    fn run<O: Element>(&self, backend: &dyn Backend) -> Result<(Vec<O>, Vec<f32>), Trouble> {
        let held = if self.problem.accumulate() { OLD } else { f32::NAN };
        let mut out = vec![O::from_f32(held); self.problem.out().span()];
        let mut lse = vec![if self.problem.accumulate() { OLD_LSE } else { f32::NAN }; self.problem.rows()];
        let [q, k, v] = self.qkv.each_ref().map(|data| Data::E4M3(data));
        let into: DataMut<'_> = O::erase_mut(&mut out);
        let mut call = HostCall::bind_erased(&self.problem, &self.values, [q, k, v], into, Some(&mut lse))?;
        backend.forward(&mut call)?;
        Ok((out, lse))
    }

    /// The expected result, and the yardstick's.
    fn expected(&self) -> (Answer, Answer) {
        let inputs = self.qkv.each_ref().map(|data| Data::E4M3(data));
        let both = [plain::reference, plain::yardstick].map(|plain| {
            let answer = plain(self.instance(), inputs, Rows::ALL);
            if !self.problem.accumulate() {
                return answer;
            }
            let count = answer.out.len();
            let old = Answer { out: vec![OLD.into(); count], ..answer.clone() };
            let old = Answer { lse: vec![OLD_LSE.into(); answer.lse.len()], ..old };
            answer.onto(&old, self.instance())
        });
        let [oracle, yardstick] = both;
        (oracle, yardstick)
    }
}

/// What an output that is added to holds, and its LSE.
const OLD: f32 = 0.5;
const OLD_LSE: f32 = 1.0;

/// Factors that bring the largest number of each share of a tensor to the largest of E4M3.
fn factors(scales: Scales, numbers: &[Vec<f32>; 3], dims: [Dims; 3]) -> Factors {
    let of = |n: usize| {
        let Dims { batch, heads, seq, dim } = dims[n];
        let blocks = |rows: usize| seq.div_ceil(rows);
        let (shares, each) = match (scales, n) {
            (Scales::PerTensor, _) => (1, 1),
            (Scales::PerHead | Scales::Strided(_), _) => (batch * dims[1].heads, 1),
            (Scales::PerBlock { q, .. }, 0) => (batch * heads, blocks(q)),
            (Scales::PerBlock { k, .. }, 1) => (batch * heads, blocks(k)),
            (Scales::PerBlock { .. }, _) => (batch * heads, dim),
        };
        let mut largest = vec![1e-6f32; shares * each];
        for (at, x) in numbers[n].iter().enumerate().filter(|(_, x)| x.is_finite()) {
            let (feature, row, plane) = (at % dim, at / dim % seq, at / dim / seq);
            let share = if shares == batch * heads { plane } else { plane / (batch * heads / shares).max(1) };
            let share = share * each
                + match (scales, n) {
                    (Scales::PerBlock { q, .. }, 0) => row / q,
                    (Scales::PerBlock { k, .. }, 1) => row / k,
                    (Scales::PerBlock { .. }, _) => feature,
                    _ => 0,
                };
            largest[share] = largest[share].max(x.abs());
        }
        largest.into_iter().map(|largest| largest / E4M3::MAX).collect::<Vec<f32>>()
    };
    let all = [0, 1, 2].map(of);
    match scales {
        Scales::PerTensor => Factors::per_tensor(all.map(|factors| factors[0])),
        Scales::PerBlock { q, k } => Factors::per_block([q, k], all.map(Into::into)),
        _ => Factors::per_head(all.map(Into::into)),
    }
}

/// A tensor divided by its factors and rounded; NaN beyond what is used.
fn quantised(problem: Instance<'_>, n: usize, numbers: &[f32], layout: &Layout) -> Vec<E4M3> {
    let operand = [Operand::Q, Operand::K, Operand::V][n];
    let mut to = vec![E4M3::from_f32(f32::NAN); layout.span()];
    let mut rows = numbers.chunks_exact(layout.dims().dim);
    values::for_each_row(layout, |[batch, head, seq], start| {
        let row = rows.next().unwrap_or(&[]);
        if is_used(problem, n, batch, seq) {
            for (feature, (to, x)) in to[start..].iter_mut().zip(row).enumerate() {
                let index = if n == 2 { feature } else { seq };
                *to = E4M3::from_f32(x / problem.factor(operand, [batch, head], index));
            }
        }
    });
    to
}

/// Smallest cosine between attention over tensors of 16 bits and the same by way of E4M3, over all elements.
pub const COSINE: f64 = 0.994;

/// Keys from which on the bar of [`BAR`] holds end to end: where there are few, a single value weighs much.
const MANY: usize = 512;
/// How far an LSE may be off, as a share of itself and one more: large scores are off by a share of themselves.
const LSE_SHARE: f64 = 0.15;

/// Attention over bf16 tensors that are quantised on the way, against the oracle on the tensors as they were: normal ones,
/// ones with outliers and ones with sinks; says what lies too far away. Normal ones with many keys have the bar of [`BAR`].
pub fn end_to_end(backend: &dyn Backend, shapes: &[([usize; 5], usize)]) -> Vec<String> {
    let kinds = [Kind::Normal, Kind::Outliers, Kind::Sink];
    let all = shapes.iter().flat_map(|&shape| kinds.map(|kind| (shape, kind)));
    let failed = all.filter_map(|((shape, dim), kind)| {
        let case = Case::new(Tag::Named, "quantised", shape, dim);
        let case = Case { inputs: Inputs::Of(kind), placement: Placement::Dense, ..case };
        let barred = kind.is_normal() && case.k.seq >= MANY;
        let failed = match far_off(backend, &case) {
            Ok([cosine, lse, error]) => {
                let near = cosine >= COSINE && lse <= LSE_SHARE && (!barred || error <= BAR);
                (!near)
                    .then(|| format!("cosine {cosine}, LSE off by a share of {lse}, largest error {error}"))
            }
            Err(trouble) => Some(Outcome::from(trouble).to_string()),
        };
        failed.map(|failed| format!("{shape:?} {dim} {}: {failed}", kind.name()))
    });
    failed.collect()
}

/// Cosine, largest share by which an LSE is off, and largest error of attention by way of E4M3.
fn far_off(backend: &dyn Backend, case: &Case) -> Result<[f64; 3], Trouble> {
    let problem = case.problem(DType::BF16)?;
    let numbers = case.inputs.values([case.q, case.k, case.v()], &mut Rng::new(11));
    // Keys with a common part: what their mean is for.
    let dim = problem.dim_qk();
    let shifted = |n: usize, at: usize| if n == 1 { [0.0, 2.0, -1.0][at % dim % 3] } else { 0.0 };
    let qkv: Vec<Vec<half::bf16>> = (numbers.iter().enumerate())
        .map(|(n, x)| x.iter().enumerate().map(|(at, x)| half::bf16::from_f32(x + shifted(n, at))).collect())
        .collect();
    let (mut out, mut lse) = (vec![half::bf16::NAN; problem.out().span()], vec![f32::NAN; problem.rows()]);
    let inputs = [&qkv[0][..], &qkv[1], &qkv[2]];
    let mut call = HostCall::bind(&problem, Values::NONE, inputs, &mut out, Some(&mut lse))?;
    forward_quantised(backend, &mut call)?;
    let instance = Instance::new(&problem, Values::NONE)?;
    let oracle = plain::reference(instance, inputs.map(half::bf16::erase), Rows::ALL);
    let got = Answer::gather(&problem, Data::BF16(&out), Some(&lse), Rows::ALL);
    let pairs = || got.out.iter().copied().zip(oracle.out.iter().copied());
    let dot = |of: fn((f64, f64)) -> f64| pairs().map(of).sum::<f64>();
    let cosine = dot(|(x, y)| x * y) / (dot(|(x, _)| x * x) * dot(|(_, y)| y * y)).sqrt();
    let lse =
        got.lse.iter().zip(&oracle.lse).map(|(x, y)| (x - y).abs() / (1.0 + y.abs())).fold(0.0, f64::max);
    Ok([cosine, lse, pairs().map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)])
}
